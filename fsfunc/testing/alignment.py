"""Values of one unit call, seen in parts of the batch, beside those of other parts.

A value is the same on all parts, or its rows lie in the parts one after another, or it
is a mean, sum or maximum over them. Which of these it is nobody says: any that holds
makes the values agree, and where none can be formed they are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc.testing.observed_runs import Part, RunLog, Slot

Near = Callable[[Tensor, Tensor], bool]
Values = Sequence[dict[int, Tensor]]  # by part, then by the rank that had it


@dataclass
class Verdict:
    """Whether two runs agree on a value.

    Args:
        agrees: None if it could not be compared.
        wrong: where they do not: (part, rank); empty if it is not known.
        of_mean: whether each part's own contribution is to be asked for.
    """

    agrees: bool | None = True
    wrong: list[tuple[Part, int]] = field(default_factory=list)
    of_mean: bool = False


def compared(slot: Slot, ours: RunLog, theirs: RunLog, near: Near) -> Verdict:
    """Compares a value of ``theirs`` with that of ``ours``; blames parts of theirs."""
    mine, others = _complete(slot, ours), _complete(slot, theirs)
    if mine is None or others is None:
        return Verdict(None)
    (_, xs), (parts, ys) = mine, others
    groups = math.gcd(len(xs), len(ys))
    is_mean = theirs.takes_mean(slot)
    verdicts = [Verdict()]
    for n in dict.fromkeys((groups, 1)):  # uneven parts fit as a whole alone
        size, other = len(xs) // n, len(ys) // n
        each = [
            _Group(slot, near, is_mean, xs[i * size :][:size], ys[i * other :][:other])
            for i in range(n)
        ]
        verdicts = [g.verdict(parts[i * other :][:other]) for i, g in enumerate(each)]
        if all(v.agrees for v in verdicts):
            return Verdict()
        if n == groups:
            by_rows = verdicts
    disagreeing = [v for v in by_rows if v.agrees is False]
    if not disagreeing or any(v.agrees is None for v in by_rows):
        return Verdict(None)
    if not all(v.wrong for v in disagreeing):
        return Verdict(False, of_mean=any(v.of_mean for v in disagreeing))
    return Verdict(False, [w for v in disagreeing for w in v.wrong])


def _complete(slot: Slot, of: RunLog) -> tuple[list[Part], Values] | None:
    """The parts in order, with their values; None where some are missing."""
    parts = sorted(by_part := of.values[slot])
    if len(parts) != parts[0].count or {p.count for p in parts} != {len(parts)}:
        return None
    values = [
        {r: of.contributed(slot, seen) for r, seen in sorted(by_part[part].items())}
        for part in parts
    ]
    return parts, values


@dataclass
class _Group:
    """Parts of two runs that have the same rows.

    Args:
        is_mean: whether transforms take the value for a mean over parts.
    """

    slot: Slot
    near: Near
    is_mean: bool
    ours: Values
    theirs: Values

    def verdict(self, parts: Sequence[Part]) -> Verdict:
        ours, fits = [*self._wholes(self.ours)], False
        for other, y in self._wholes(self.theirs):
            for name, x in ours:
                # What is assembled in both runs is so in one way.
                alike = name == other or "one" in (name, other)
                if alike and x.shape == y.shape:
                    fits = True
                    if self.near(x, y):
                        return Verdict()
        return self._blamed(parts, fits)

    def _wholes(self, values: Values) -> Iterator[tuple[str, Tensor]]:
        """The values that parts may make together, by how they do."""
        ways = [self._of_ranks([*by_rank.values()]) for by_rank in values]
        for way in ways[0]:
            if all(way in others for others in ways):
                yield from self._of_parts([others[way] for others in ways])

    def _of_ranks(self, values: list[Tensor]) -> dict[str, Tensor]:
        """What the ranks that had one part make together, by how they do."""
        first = values[0]
        alike = all(x.shape == first.shape and self.near(first, x) for x in values)
        ways = {"one": first} if alike else {}
        if len(values) == 1 or alike and not self.slot.backward:
            return ways
        if all(x.shape == first.shape for x in values) and first.is_floating_point():
            ways["sum"] = _sum(values)
        if not alike:
            for dim in range(first.ndim):
                if all(_fit(first, x, dim) for x in values):
                    ways[f"cat{dim}"] = torch.cat(values, dim)
        return ways

    def _of_parts(self, values: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        first, backward = values[0], self.slot.backward
        if len(values) == 1:
            yield "one", first
            return
        even = all(x.shape == first.shape for x in values)
        if not backward and even and all(self.near(first, x) for x in values):
            yield "one", first
        if not backward and self.slot.kind == "parameter":
            return
        if first.ndim and all(_fit(first, x, 0) for x in values):
            yield "cat", torch.cat(values)
        if even and first.is_floating_point():
            total = _sum(values)
            if not self.is_mean:
                yield "sum", total
            if not backward:
                yield "mean", total / len(values)
                yield "max", (stack := torch.stack(values)).amax(0)
                yield "min", stack.amin(0)

    def _blamed(self, parts: Sequence[Part], fits: bool) -> Verdict:
        """Says which of their parts differ, if ours are one value."""
        if len(self.ours) > 1 or len(ours := [*self._wholes(self.ours)]) != 1:
            return Verdict(False if fits else None)
        whole = ours[0][1]
        flat = [
            (p, r, x)
            for p, by_rank in zip(parts, self.theirs, strict=True)
            for r, x in by_rank.items()
        ]
        apart = any(
            not self.near(x, by_rank[min(by_rank)])
            for by_rank in self.theirs
            for x in by_rank.values()
        )
        if all(x.shape == whole.shape for *_, x in flat):
            wrong = [(p, r) for p, r, x in flat if not self.near(whole, x)]
            right = len(wrong) < len(flat)
            if self.slot.backward and len(parts) > 1 or not right and apart:
                # Contributions, of which each part has its own.
                return Verdict(None) if apart else Verdict(False, of_mean=True)
            alone = len(parts) == 1 or self.slot.kind == "parameter"
            if right or alone:
                return Verdict(False, wrong)
            return Verdict(False, of_mean=True)
        lengths = [next(iter(v.values())).shape for v in self.theirs]
        if not fits or apart or not all(len(n) for n in lengths):
            return Verdict(None)
        if sum(n[0] for n in lengths) != len(whole):
            return Verdict(None)
        rows = dict(zip(parts, whole.split([n[0] for n in lengths]), strict=True))
        wrong = [(p, r) for p, r, x in flat if not self.near(rows[p], x)]
        return Verdict(False, wrong)


def _fit(x: Tensor, y: Tensor, dim: int) -> bool:
    """True if two tensors can be concatenated along a dim."""
    sizes, others = [*x.shape], [*y.shape]
    return len(sizes) == len(others) and (
        sizes[:dim] + sizes[dim + 1 :] == others[:dim] + others[dim + 1 :]
    )


def _sum(values: Sequence[Any]) -> Tensor:
    return torch.stack([*values]).sum(0)
