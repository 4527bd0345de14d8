"""State of the pass that runs: forward, backward or recompute."""

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
        thread: see :class:`UnitToken`; none where nobody ties it to a loss.
        recompute: whether a backward pass runs the call a second time; ``forgotten``:
            whether it will, so that this run saves nothing.
        around: calls the function of the outermost unit, as ``around(fn, ...)``.
    """

    thread: UnitToken | None = None
    recompute: bool = False
    forgotten: bool = False
    around: Callable[..., Any] | None = None


class UnitToken:
    """A token that orders the units of one gradient call (as JAX orders effects).

    A scalar zero. Each unit has it as an input and an output, and the loss depends on
    the last one: so autograd runs the backward of every unit on every rank, in reverse
    call order, even of units whose output the loss does not use.
    """

    def __init__(self, device: Any = None) -> None:
        self.start = torch.zeros((), device=device, requires_grad=True)
        self.token: Tensor = self.start


_RUNNING: ContextVar[Running | None] = ContextVar("fsfunc_running", default=None)
_ALONE = Running()


def running() -> Running:
    """The state of the pass that runs now."""
    return _RUNNING.get() or _ALONE


def run_as(value: Running) -> Scoped:
    """Makes ``value`` hold for the calls within."""
    return Scoped(_RUNNING, value)
