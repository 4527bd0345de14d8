"""State of the pass that runs: forward, backward or recompute."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.runtime.scopes import Scoped

__all__ = ["Running", "Thread", "run_as", "running"]


@dataclass(frozen=True)
class Running:
    """State that depends on when a call runs, not on where it was made.

    Args:
        thread: see :class:`Thread`; none where nobody ties it to a loss.
        recompute: whether a backward pass runs the call a second time.
        forgets: whether nobody keeps the graph of what runs: it will run again.
        adds_to: where its graph is pulled back at once, the leaves (by id) to whose
            gradients products are added in place; None where a pipeline's stage may
            take input gradients first.
    """

    thread: Thread | None = None
    recompute: bool = False
    forgets: bool = False
    adds_to: frozenset[int] | None = None


class Thread:
    """A zero that runs through the units of one gradient call, in call order.

    Each unit takes it and hands it on, and the loss is tied to its end, so every unit's
    backward runs on every rank, in reverse call order, whatever the loss made of the
    unit's output.
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
