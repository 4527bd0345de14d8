"""The pass that runs now: forward, backward or recompute.

A `Frame` says where a unit was called, and is bound by the call. What depends on *when*
the call runs stands here, in a context variable of its own: a recompute runs the same
call, with the same frame, but in the backward pass. ``autodiff`` sets it around the
forward pass of a loss, ``remat`` around the second run of a unit; the transforms of
units read it by `running`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.runtime.scopes import Scoped


@dataclass(frozen=True)
class Running:
    """State that depends on when a call runs, not on where it was made.

    Args:
        token: orders the unit calls of one gradient call; None outside of one, or where
            no transform needs the order.
        recompute: whether this is the second run of a call, in a backward pass.
        saves_nothing: whether a second run will follow, so that this one need not save
            anything for the backward pass.
        run_unit_fn: runs the function ``fn`` of the outermost unit, as
            ``run_unit_fn(fn, *args, **keywords)``; None: it is called.
    """

    token: UnitToken | None = None
    recompute: bool = False
    saves_nothing: bool = False
    run_unit_fn: Callable[..., Any] | None = None


class UnitToken:
    """A token that orders the units of one gradient call (as JAX orders effects).

    A scalar zero that is threaded through the units: each one takes the token of the
    unit before it as an input, and returns a new one. The loss depends on the last::

        start -> unit 1 -> unit 2 -> ... -> latest -> loss

    So autograd runs the backward of every unit, on every rank, in the reverse order of
    the calls, and of units too whose output the loss does not use. Without it a rank
    could reduce its gradients in another order than the others, or leave one out, and
    all would wait for each other.

    Attributes:
        start: the token that the first unit takes.
        latest: the one that the latest unit returned.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.start: Tensor = torch.zeros((), device=device, requires_grad=True)
        self.latest: Tensor = self.start


_RUNNING: ContextVar[Running | None] = ContextVar("fsfunc_running", default=None)
_OUTSIDE_PASSES = Running()


def running() -> Running:
    """Returns the state of the pass that runs now."""
    return _RUNNING.get() or _OUTSIDE_PASSES


def run_as(value: Running) -> Scoped:
    """Returns a context manager within which ``value`` is the state of the pass."""
    return Scoped(_RUNNING, value)
