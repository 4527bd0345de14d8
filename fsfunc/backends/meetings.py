"""Where simulated ranks meet: all of a group in a collective, or two in a transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fsfunc.backends.calls import Call, table
from fsfunc.moves import combine

__all__ = ["Meeting", "Transfer"]


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
        if len({c.said for c in self.calls.values()}) == 1:
            return None
        return self._table("simulated ranks call different collectives")

    def _table(self, title: str) -> str:
        return table(title, {r: self.calls[r] for r in self.ranks})

    def complete(self) -> None:
        op = self.calls[self.ranks[0]].said[0]
        inputs = [self.inputs[r] for r in self.ranks]
        self.results = combine(op, inputs, **self.how)
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
        if sent.said[2:] == wanted.said[2:]:
            return None
        return self._table("simulated ranks send one thing and receive another")

    def complete(self) -> None:
        x, y = (self.inputs[r] for r in self.ranks)
        y.copy_(x)
        self.inputs.clear()
        self.over = True
