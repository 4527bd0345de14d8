"""Checks of arguments, and the values of functions that ranks compare."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.comparison import Lines
from fsfunc.comm.descriptions import Ask, stated
from fsfunc.optim.leaves import Tree
from fsfunc.sharded.leaf import is_sharded


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


_COUNTS = (0, 1, 2, 3, 10, 100, 1000, 10_000, 100_000)
_RATES = {"learning_rate", "lr"}
_BY_LEAF = {"mask", "trust_mask", "labels"}


def answers(params: Tree) -> Ask:
    """Asks schedules for their first rates, and masks about each leaf.

    By the names of arguments: a function of another name is known by its own alone.

    >>> import torch
    >>> from fsfunc.comm.descriptions import told
    >>> from fsfunc.optim import scale
    >>> halving = scale(1.0).known_as("sgd", {"learning_rate": lambda n: 0.5**n})
    >>> told("sgd", halving, answers(torch.ones(2)))[2:4]
    [('sgd/learning_rate at count 0', '1.0'), ('sgd/learning_rate at count 1', '0.5')]
    """
    paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
    named = zip(paths, leaves, strict=True)
    known = [(p, x) for p, x in named if is_sharded(x) or isinstance(x, Tensor)]

    def ask(name: str, fn: Callable[..., Any]) -> Lines:
        if name in _RATES:
            return [(f"at count {n}", _said(fn, n)) for n in _COUNTS]
        if name in _BY_LEAF:
            return [(f"of {path!r}", _said(fn, path, x)) for path, x in known]
        return ()

    return ask


def _said(fn: Callable[..., Any], *args: Any) -> str:
    try:
        return stated(fn(*args))
    except Exception as error:  # of a table of rates, beyond its end
        return f"raises {type(error).__name__}"
