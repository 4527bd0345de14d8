"""Checks of the arguments of optimizers."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor

__all__ = ["check_fractions", "check_not_negative", "check_numbers"]
__all__ += ["check_params_given", "check_rate"]


def check_numbers(**values: Any) -> None:
    """Raise TypeError where one of ``values`` is neither a number nor a tensor."""
    for name, value in values.items():
        if not isinstance(value, (Real, Tensor)):
            said = f"float({value!r})" if isinstance(value, str) else "a float"
            raise TypeError(
                f"{name} is {value!r}, a {type(value).__name__}: it must be a number; "
                f"give {said}"
            )


def check_not_negative(**values: float) -> None:
    """Raise ValueError where one of ``values`` is negative, TypeError if no number."""
    check_numbers(**values)
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}: it must be 0 or more")


def check_rate(learning_rate: Any) -> None:
    """Raise where a learning rate is neither a schedule nor a number of 0 or more."""
    if not callable(learning_rate):
        check_not_negative(learning_rate=learning_rate)


def check_fractions(**values: float) -> None:
    """Raise ValueError where one of ``values`` is not in [0, 1)."""
    check_numbers(**values)
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 0 and below 1")


def check_params_given(params: Any, what: str) -> None:
    """Raise ValueError where an update that reads the parameters has none."""
    if params is None:
        raise ValueError(
            f"{what} reads the parameters, so it needs them: call "
            "update(grads, state, params)"
        )
