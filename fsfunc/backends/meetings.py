"""Where simulated ranks meet: all of a group in a collective, or two in a transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc.accounting import current_label, source_line
from fsfunc.moves import combine

__all__ = ["Call", "CollectiveMismatch", "Meeting", "Transfer"]


class CollectiveMismatch(RuntimeError):
    """Simulated ranks met in one group with different collectives."""


@dataclass
class Call:
    """What one rank said when it came to a collective or a transfer."""

    op: str
    how: tuple[Any, ...]
    axis: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    phase: str
    where: str

    @classmethod
    def now(cls, op: str, how: dict[str, Any], axis: tuple[str, ...], x: Tensor):
        """The call that is being made, with its label and source line."""
        said = tuple(how.values())
        return cls(
            op, said, axis, tuple(x.shape), x.dtype, *current_label(), source_line()
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.op, self.how, self.axis, self.shape, self.dtype

    def __str__(self) -> str:
        unit = f" of {self.unit} ({self.phase})" if self.unit else ""
        dtype = str(self.dtype).removeprefix("torch.")
        axis = ", ".join(self.axis)
        return (
            f'{self.op} over "{axis}", {dtype}{list(self.shape)}{unit} at {self.where}'
        )


@dataclass
class Meeting:
    """One collective of one group: complete when every member has come."""

    ranks: tuple[int, ...]
    how: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    results: list[Tensor] | None = None
    over: bool = False

    @property
    def missing(self) -> list[int]:
        """Who has not come yet."""
        return [r for r in self.ranks if r not in self.calls]

    def come(self, rank: int, call: Call, x: Tensor) -> None:
        self.calls[rank], self.inputs[rank] = call, x

    def mismatch(self) -> str | None:
        """What is wrong where the members came to different collectives."""
        if len({c.signature for c in self.calls.values()}) == 1:
            return None
        return f"simulated ranks call different collectives:\n{self._rows()}"

    def _rows(self) -> str:
        return "\n".join(f"  rank {r} {self.calls[r]}" for r in self.ranks)

    def complete(self) -> None:
        first = self.calls[self.ranks[0]]
        inputs = [self.inputs[r] for r in self.ranks]
        self.results = combine(first.op, inputs, **self.how)
        self.inputs.clear()
        self.over = True

    def take(self, rank: int, out: Tensor | None) -> Tensor:
        """This rank's own copy: what another rank writes must not reach it."""
        if self.results is None:
            raise RuntimeError("taken before it was complete")
        result = self.results[self.ranks.index(rank)]
        return result.clone() if out is None else out.copy_(result)


class Transfer(Meeting):
    """One tensor's way from ``ranks[0]`` to ``ranks[1]``: over when both have come.

    The receiver brings the memory, so that a tensor on its way is there once, and
    whoever comes last copies.
    """

    def mismatch(self) -> str | None:
        sent, wanted = (self.calls[r] for r in self.ranks)
        if sent.signature[2:] == wanted.signature[2:]:
            return None
        return f"simulated ranks send one thing and receive another:\n{self._rows()}"

    def complete(self) -> None:
        x, y = (self.inputs[r] for r in self.ranks)
        y.copy_(x)
        self.inputs.clear()
        self.over = True
