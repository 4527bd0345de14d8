"""Comparison of a value that two runs have in parts of the batch, cut differently.

One run may have four microbatches on each of two ranks, the other the whole batch. The
parts of a run make the value of the whole batch in one of several ways: all parts have
the same value, or each has its rows, or the whole is their sum, mean, maximum or
minimum. Nothing says which of these holds for a value. So all ways are tried: if one
gives the other run's value, the runs agree; if none has its shape, the value is not
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsfunc.testing.observed_runs import BatchPart, RunLog, ValueKey

Near = Callable[[Tensor, Tensor], bool]
Values = Sequence[dict[int, Tensor]]  # for each part, by the rank that had it


@dataclass
class Verdict:
    """Whether two runs agree on a value.

    Args:
        agrees: None if it could not be compared.
        wrong: the (part, rank) where they do not; empty if it is not known.
        needs_parts: whether the parts must be compared one by one, each with a run on
            its rows alone, to know which is wrong.
    """

    agrees: bool | None = True
    wrong: list[tuple[BatchPart, int]] = field(default_factory=list)
    needs_parts: bool = False


def compare_values(key: ValueKey, ours: RunLog, theirs: RunLog, near: Near) -> Verdict:
    """Compares a value of two runs; names the parts of ``theirs`` that are wrong."""
    our_values = _values_in_order(key, ours)
    their_values = _values_in_order(key, theirs)
    if our_values is None or their_values is None:
        return Verdict(None)
    (_, xs), (parts, ys) = our_values, their_values
    common = math.gcd(len(xs), len(ys))
    is_mean = theirs.takes_mean(key)
    verdicts = [Verdict()]
    # Groups of parts with the same rows are compared one by one. Uneven parts have the
    # same rows only as a whole.
    for count in dict.fromkeys((common, 1)):
        our_size, their_size = len(xs) // count, len(ys) // count
        aligned = [
            _AlignedParts(
                key,
                near,
                is_mean,
                xs[i * our_size :][:our_size],
                ys[i * their_size :][:their_size],
            )
            for i in range(count)
        ]
        verdicts = [
            group.verdict(parts[i * their_size :][:their_size])
            for i, group in enumerate(aligned)
        ]
        if all(verdict.agrees for verdict in verdicts):
            return Verdict()
        if count == common:
            verdicts_by_rows = verdicts
    disagreeing = [verdict for verdict in verdicts_by_rows if verdict.agrees is False]
    if not disagreeing or any(verdict.agrees is None for verdict in verdicts_by_rows):
        return Verdict(None)
    if not all(verdict.wrong for verdict in disagreeing):
        return Verdict(
            False, needs_parts=any(verdict.needs_parts for verdict in disagreeing)
        )
    return Verdict(False, [w for verdict in disagreeing for w in verdict.wrong])


def _values_in_order(
    key: ValueKey, log: RunLog
) -> tuple[list[BatchPart], Values] | None:
    """Returns the parts in order, with their values; None if some are missing."""
    parts = sorted(by_part := log.values[key])
    if len(parts) != parts[0].count or {p.count for p in parts} != {len(parts)}:
        return None
    values = [
        {
            r: log.contribution(key, observed)
            for r, observed in sorted(by_part[part].items())
        }
        for part in parts
    ]
    return parts, values


@dataclass
class _AlignedParts:
    """The values that parts of two runs, with the same rows together, have.

    Args:
        is_near: whether two values are equal up to rounding.
        is_mean: whether transforms average the value over parts.
    """

    key: ValueKey
    is_near: Near
    is_mean: bool
    ours: Values
    theirs: Values

    def verdict(self, parts: Sequence[BatchPart]) -> Verdict:
        """Compares all candidates of both runs; ``parts`` are those of theirs."""
        our_candidates, shapes_fit = [*self._candidates(self.ours)], False
        for their_way, y in self._candidates(self.theirs):
            for our_way, x in our_candidates:
                # Both runs assemble a value from parts in the same way, if both do:
                # "one" is a value that was not assembled.
                same_way = our_way == their_way or "one" in (our_way, their_way)
                if same_way and x.shape == y.shape:
                    shapes_fit = True
                    if self.is_near(x, y):
                        return Verdict()
        return self._find_wrong(parts, shapes_fit)

    def _candidates(self, values: Values) -> Iterator[tuple[str, Tensor]]:
        """Yields (way, value) for each way in which the parts may make one value."""
        by_way = [self._join_ranks([*by_rank.values()]) for by_rank in values]
        for way in by_way[0]:
            if all(way in others for others in by_way):
                yield from self._join_parts([others[way] for others in by_way])

    def _join_ranks(self, values: list[Tensor]) -> dict[str, Tensor]:
        """Returns the values that the ranks of one part may make together, by way."""
        first = values[0]
        are_equal = all(
            x.shape == first.shape and self.is_near(first, x) for x in values
        )
        by_way = {"one": first} if are_equal else {}
        if len(values) == 1 or are_equal and not self.key.is_cotangent:
            return by_way
        if all(x.shape == first.shape for x in values) and first.is_floating_point():
            by_way["sum"] = _sum(values)
        if not are_equal:
            for dim in range(first.ndim):
                if all(_can_concatenate(first, x, dim) for x in values):
                    by_way[f"cat{dim}"] = torch.cat(values, dim)
        return by_way

    def _join_parts(self, values: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields (way, value) for each way in which values of parts may make one."""
        first, is_cotangent = values[0], self.key.is_cotangent
        if len(values) == 1:
            yield "one", first
            return
        same_shape = all(x.shape == first.shape for x in values)
        # Equal cotangents of parts still add up, as equal values do not.
        if (
            not is_cotangent
            and same_shape
            and all(self.is_near(first, x) for x in values)
        ):
            yield "one", first
        if not is_cotangent and self.key.kind == "parameter":
            return
        if first.ndim and all(_can_concatenate(first, x, 0) for x in values):
            yield "cat", torch.cat(values)
        if same_shape and first.is_floating_point():
            total = _sum(values)
            if not self.is_mean:
                yield "sum", total
            if not is_cotangent:
                yield "mean", total / len(values)
                yield "max", (stack := torch.stack(values)).amax(0)
                yield "min", stack.amin(0)

    def _find_wrong(self, parts: Sequence[BatchPart], shapes_fit: bool) -> Verdict:
        """Finds which of their parts are wrong, if our value is a single one."""
        if len(self.ours) > 1 or len(ours := [*self._candidates(self.ours)]) != 1:
            return Verdict(False if shapes_fit else None)
        our_value = ours[0][1]
        rank_values = [
            (part, rank, x)
            for part, by_rank in zip(parts, self.theirs, strict=True)
            for rank, x in by_rank.items()
        ]
        ranks_differ = any(
            not self.is_near(x, by_rank[min(by_rank)])
            for by_rank in self.theirs
            for x in by_rank.values()
        )
        if all(x.shape == our_value.shape for *_, x in rank_values):
            wrong = [
                (part, rank)
                for part, rank, x in rank_values
                if not self.is_near(our_value, x)
            ]
            some_right = len(wrong) < len(rank_values)
            if (
                self.key.is_cotangent
                and len(parts) > 1
                or not some_right
                and ranks_differ
            ):
                # Each part has its own contribution to a mean: none equals the whole.
                return (
                    Verdict(None) if ranks_differ else Verdict(False, needs_parts=True)
                )
            is_whole = len(parts) == 1 or self.key.kind == "parameter"
            if some_right or is_whole:
                return Verdict(False, wrong)
            return Verdict(False, needs_parts=True)
        shapes = [next(iter(v.values())).shape for v in self.theirs]
        if not shapes_fit or ranks_differ or not all(len(n) for n in shapes):
            return Verdict(None)
        if sum(n[0] for n in shapes) != len(our_value):
            return Verdict(None)
        rows = dict(zip(parts, our_value.split([n[0] for n in shapes]), strict=True))
        wrong = [
            (part, rank)
            for part, rank, x in rank_values
            if not self.is_near(rows[part], x)
        ]
        return Verdict(False, wrong)


def _can_concatenate(x: Tensor, y: Tensor, dim: int) -> bool:
    """Returns whether two tensors can be concatenated along a dim."""
    shape, other_shape = [*x.shape], [*y.shape]
    return len(shape) == len(other_shape) and (
        shape[:dim] + shape[dim + 1 :] == other_shape[:dim] + other_shape[dim + 1 :]
    )


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([*values]).sum(0)
