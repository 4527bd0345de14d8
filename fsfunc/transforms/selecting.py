"""``remat_calls``: recompute some unit calls of a loss, and keep the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsfunc.core.frames import Interpretation, transformed
from fsfunc.core.units import Call
from fsfunc.transforms.policies import Policy
from fsfunc.transforms.rematerialization import remat


def remat_calls(
    f: Callable[..., Any], calls: Iterable[int], policy: Policy | str | None = None
) -> Callable[..., Any]:
    """``f`` with these of its loss's unit calls recomputed in the backward.

    ``remat`` recomputes every unit; this one the calls of the given numbers, counted
    from 0 in the order in which the loss makes them, as ``program`` lists them. What a
    recomputed unit calls itself is part of it, and not recomputed once more.

    Args:
        f: a loss, or a train step.
        calls: such as ``recompute_points(...).calls``.
        policy: as of ``remat``, for the calls that are recomputed.

    Raises:
        ValueError: a number that is negative or not whole.
        TypeError: another policy.

    Cost: as of ``remat``, of these calls alone. A number that the loss does not reach
    costs nothing and is not told.

    >>> import torch, fsfunc as ff
    >>> ran = []
    >>> @ff.unit
    ... def layer(p, x):
    ...     ran.append(x.item())
    ...     return x * p
    >>> loss = lambda p: layer(p, layer(p, torch.tensor(1.0)))
    >>> step = remat_calls(ff.value_and_grad(loss), [1])
    >>> step(torch.tensor(3.0))[1].item(), ran
    (6.0, [1.0, 3.0, 3.0])
    """
    numbers = frozenset(calls)
    for n in numbers:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"calls has {n!r}: unit calls are numbered from 0")
    return transformed(f, _Some(numbers, policy))


class _Some(Interpretation):
    called = "remat_calls"

    def __init__(self, calls: frozenset[int], policy: Policy | str | None):
        self.calls = calls
        (self.remat,) = remat(_nothing, policy).interpretations  # type: ignore

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (("calls", sorted(self.calls)), *self.remat.configuration)

    def recorded(self, recorder: Any) -> Interpretation:
        return Interpretation()

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if call.frame.path or call.number not in self.calls:
            return run
        return self.remat.unit(run, call)


def _nothing() -> None:
    """A function for ``remat`` to be applied to."""
