"""The copies that turn the parts of any layout into those of any other.

A plan is data, counted in elements of the flattened local parts; `apply_plan` is its
plain executor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.layout import Key, Layout, every_coordinate
from fsfunc.pieces import Locals, by_key, first_or_empty, runs


@dataclass(frozen=True, eq=False)
class Move:
    """What one rank of the source gives one rank of the target.

    `copies` is int64 [k, 3]: (start in the source's local part, start in the target's,
    length), in elements of the flattened parts; `source` and `target` are keys.
    """

    source: Key
    target: Key
    copies: Tensor

    @property
    def numel(self) -> int:
        return int(self.copies[:, 2].sum())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Move)
            and (self.source, self.target) == (other.source, other.target)
            and torch.equal(self.copies, other.copies)
        )

    def __hash__(self) -> int:
        return hash((self.source, self.target, len(self.copies)))


@dataclass(frozen=True)
class ReshardPlan:
    """The copies that turn the parts of one layout into those of another.

    Pairs of ranks with nothing to exchange have no move. Keys are coordinates over
    each layout's own axes; which processes those are is for the caller to say.
    """

    source: Layout
    target: Layout
    moves: tuple[Move, ...]

    @property
    def numel(self) -> int:
        """Elements copied: the tensor's, since each is read and written once."""
        return sum(move.numel for move in self.moves)

    def __str__(self) -> str:
        lines = [f"reshard {self.source}", f"     to {self.target}"]
        for move in self.moves:
            source = _say_key(move.source, self.source, "any rank")
            target = _say_key(move.target, self.target, "every rank")
            ranges = [
                f"{a}:{a + n} to {b}:{b + n}" for a, b, n in move.copies[:3].tolist()
            ]
            more = len(move.copies) - len(ranges)
            ranges += [f"{more} more"] if more else []
            lines.append(f"  {source} -> {target}: {', '.join(ranges)}")
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """The plan as JSON-able data; `from_data` is the inverse."""
        return {
            "source": self.source.to_data(),
            "target": self.target.to_data(),
            "moves": [
                {"source": m.source, "target": m.target, "copies": m.copies.tolist()}
                for m in self.moves
            ],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> ReshardPlan:
        """The plan of which `to_data` made this, also after a way through JSON."""
        moves = tuple(
            Move(
                tuple(move["source"]),
                tuple(move["target"]),
                torch.tensor(move["copies"], dtype=torch.int64).view(-1, 3),
            )
            for move in data["moves"]
        )
        source, target = map(Layout.from_data, (data["source"], data["target"]))
        return ReshardPlan(source, target, moves)


def reshard_plan(source: Layout, target: Layout) -> ReshardPlan:
    """The plan from one layout to another of the same shape.

    Each element is read once, from the one point of the source's axes that holds it,
    and written once. Dtypes may differ: a plan counts elements and converts nothing.

    Raises:
        ValueError: different shapes.

    Cost: O(k log k) for k runs in both layouts together; nothing is sent.

    >>> from fsfunc.layout import Split
    >>> by_row = Layout((4,), torch.float32, (Split("data", 2, 0),), "b")
    >>> print(reshard_plan(by_row, Layout((4,), torch.float32, (), "b")))
    reshard b f32[4] split over data=2 along dim 0
         to b f32[4] whole
      data=0 -> every rank: 0:2 to 0:2
      data=1 -> every rank: 0:2 to 2:4
    """
    if source.shape != target.shape:
        raise ValueError(
            f"cannot reshard {source.subject} to {target.subject}: a plan keeps the "
            "shape; reshape the full tensor instead"
        )
    if source.numel == 0:
        return ReshardPlan(source, target, ())
    froms, tos = _all_runs(source), _all_runs(target)
    # Between two neighbouring bounds of either side lies one piece, in one run of each.
    bounds = torch.unique(torch.cat([froms[:, 0], tos[:, 0]]))
    end = torch.tensor([source.numel], device="cpu")
    length = torch.cat([bounds, end]).diff()
    give, get = _locate(bounds, froms), _locate(bounds, tos)
    columns = torch.stack([give[0], get[0], give[1], get[1], length], dim=1)
    pair = columns[:, 0] * math.prod(target.sizes.values()) + columns[:, 1]
    columns = columns[torch.argsort(pair, stable=True)]
    joined = _join(columns)
    source_keys = [source.key(at) for at in every_coordinate(source)]
    target_keys = [target.key(at) for at in every_coordinate(target)]
    pairs, counts = joined[:, :2].unique_consecutive(dim=0, return_counts=True)
    groups = joined[:, 2:].split(counts.tolist())
    moves = (
        Move(source_keys[a], target_keys[b], copies)
        for (a, b), copies in zip(pairs.tolist(), groups, strict=True)
    )
    return ReshardPlan(source, target, tuple(moves))


def apply_plan(plan: ReshardPlan, source_locals: Locals) -> dict[Key, Tensor]:
    """The target's local part for each of its keys, made from the source's parts.

    Args:
        plan: what `reshard_plan` gave.
        source_locals: the source's parts; those that hold no element may be left out.

    Raises:
        ValueError: a part of another shape, or missing.

    Cost: one copy of the tensor. Of a move in many short copies the element indices
    are made, 16 bytes for each element.

    >>> from fsfunc.layout import Owned, Split
    >>> rows = Layout((4,), torch.float32, (Split("data", 2, 0),))
    >>> plan = reshard_plan(rows, Layout((4,), torch.float32, (Owned("pipe", 2, 1),)))
    >>> apply_plan(plan, {(0,): torch.tensor([1, 2]), (1,): torch.tensor([3, 4])})
    {(0,): tensor([], dtype=torch.int64), (1,): tensor([1, 2, 3, 4])}
    """
    held = by_key(source_locals, plan.source)
    like = first_or_empty(held, plan.source)
    made = {
        plan.target.key(at): like.new_empty(plan.target.local_shape(at))
        for at in every_coordinate(plan.target)
    }
    for move in plan.moves:
        if move.source not in held:
            at = dict(zip(plan.source.axes, move.source, strict=True))
            raise ValueError(
                f"cannot reshard {plan.source.subject}: the part at {at} is missing; "
                "pass every part that holds elements"
            )
        give, get = held[move.source].reshape(-1), made[move.target].view(-1)
        if len(move.copies) <= 8 or move.numel >= 32 * len(move.copies):
            for a, b, n in move.copies.tolist():
                get[b : b + n] = give[a : a + n]
        else:
            a, b = _elements(move.copies, give.device)
            get[b] = give[a]
    return made


def _say_key(key: Key, layout: Layout, whole: str) -> str:
    pairs = zip(layout.axes, key, strict=True)
    return ",".join(f"{axis}={at}" for axis, at in pairs) or whole


def _all_runs(layout: Layout) -> Tensor:
    """Every rank's runs: int64 [k, 3] of (global start, rank, local start)."""
    table = []
    for rank, coordinates in enumerate(every_coordinate(layout)):
        start, length = runs(layout, coordinates).unbind(1)
        local = length.cumsum(0) - length
        table.append(torch.stack([start, torch.full_like(start, rank), local], dim=1))
    found = torch.cat(table)
    return found[torch.argsort(found[:, 0])]


def _locate(bounds: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The rank and the local position of each global position in a table of runs."""
    row = table[torch.searchsorted(table[:, 0].contiguous(), bounds, right=True) - 1]
    return row[:, 1], row[:, 2] + bounds - row[:, 0]


def _join(columns: Tensor) -> Tensor:
    """Rows of (from, to, give, get, length) with those joined that go on seamlessly."""
    ends = columns[:-1].clone()
    ends[:, 2:4] += ends[:, 4:]
    fresh = (columns[1:, :4] != ends[:, :4]).any(dim=1)
    fresh = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), fresh])
    joined = columns[fresh]
    joined[:, 4] = 0
    joined[:, 4].index_add_(0, fresh.cumsum(0) - 1, columns[:, 4])
    return joined


def _elements(copies: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The element indices in the source's and in the target's part, one by one."""
    length = copies[:, 2]
    within = torch.arange(int(length.sum()), device="cpu")
    within -= (length.cumsum(0) - length).repeat_interleave(length)
    give = copies[:, 0].repeat_interleave(length) + within
    get = copies[:, 1].repeat_interleave(length) + within
    return give.to(device), get.to(device)
