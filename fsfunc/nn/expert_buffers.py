"""The buffers in which tokens travel to experts: what lies where, and back again.

A choice that is kept has a slot, a row of its rank's buffer. Rows are copied there and
read from there, each by an index: forward and backward alike.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.collectives import all_gather, all_to_all
from fsfunc.comm.groups import axis_index, axis_size, group
from fsfunc.nn.routing import Routing

__all__ = ["check_rows", "dropless", "placed", "weighed"]

Loads = list[list[int]]  # rows, by rank and expert


def placed(x: Tensor, slots: Tensor, kept: Tensor, size: int) -> Tensor:
    """[size, d]: each token at the slots of its choices that are kept, else zeros.

    >>> slots, kept = torch.tensor([[2, 0], [1, 1]]), torch.tensor([[True, True]] * 2)
    >>> kept[1, 1] = False
    >>> placed(torch.tensor([[5.0], [7.0]]), slots, kept, 3).flatten().tolist()
    [5.0, 7.0, 5.0]
    """
    rows = x.unsqueeze(1).expand(*slots.shape, x.shape[-1]).flatten(0, 1)
    to = torch.where(kept, slots, size).flatten()  # a last row for those without room
    return x.new_zeros(size + 1, x.shape[-1]).index_copy(0, to, rows)[:size]


def weighed(y: Tensor, slots: Tensor, routing: Routing) -> Tensor:
    """[T, d']: each token's sum of the rows at its slots, by its weights."""
    if not len(y):  # nobody goes anywhere, and each reads a row all the same
        y = F.pad(y, (0, 0, 0, 1))
    # Modulo, so that those of dropped choices are anywhere, and not all in one place.
    found = y.index_select(0, slots.flatten() % len(y))
    found = found.unflatten(0, slots.shape)
    found = torch.where(routing.kept.unsqueeze(-1), found, 0)
    return (found * routing.weights.unsqueeze(-1)).sum(1).to(y.dtype)


def dropless(
    x: Tensor,
    routing: Routing,
    axis: str | None,
    here: int,
    ragged: Callable[[Tensor, list[int]], Tensor],
) -> Tensor:
    """The layer where experts take all that come.

    An all-to-all moves equal parts, so each is as long as the largest load of one rank
    on another; experts compute on the rows that are in use.

    Args:
        x: [T, d], this rank's tokens.
        here: how many experts a rank has.
        ragged: experts' results on (rows, how many each of them has, in order).

    Returns:
        [T, d'].
    """
    sent, got, room = _loads(routing, axis, here)

    def starts(loads: Loads) -> Loads:
        """First rows, by the rank at the other end and its expert, or ours."""
        runs = enumerate(loads)
        return [list(accumulate(run[:-1], initial=i * room)) for i, run in runs]

    at = torch.tensor(list(chain(*starts(sent)))).to(x.device)
    slots = at[routing.indices] + routing.positions
    rows = placed(x, slots, routing.kept, len(sent) * room)
    if axis is None:  # one rank's queues are in order already
        y = ragged(rows, sent[0])
        check_rows(y, len(rows))
        return weighed(y, slots, routing)
    rows = all_to_all(rows, axis, split_dim=0, concat_dim=0)
    by_expert = list(zip(*got, strict=True))
    runs = zip(chain(*zip(*starts(got), strict=True)), chain(*by_expert), strict=True)
    order = torch.cat([torch.arange(i, i + m) for i, m in runs]).to(x.device)
    y = ragged(rows.index_select(0, order), [sum(run) for run in by_expert])
    check_rows(y, len(order))
    if not len(order):  # as a function of what came: so all meet in the backward
        y = y + 0 * rows.sum()
    y = y.new_zeros(len(got) * room, y.shape[1]).index_copy(0, order, y)
    y = all_to_all(y, axis, split_dim=0, concat_dim=0)
    return weighed(y, slots, routing)


def _loads(routing: Routing, axis: str | None, here: int) -> tuple[Loads, Loads, int]:
    """Rows this rank sends to each rank's experts, those each sends to its own, and the
    largest load of one rank on another: plain numbers, for which the host waits."""
    n = 1 if axis is None else axis_size(axis)
    mine = counts = routing.counts[None]
    if axis is not None:
        counts = all_gather(mine, axis)
        if not group(axis).link.moves:  # a recording on data: no one else is heard of
            counts = mine.expand(n, -1)
    if _torch.mapped_at(counts):
        raise RuntimeError(
            "a layer without a capacity asks how many tokens its experts have, which "
            "differs under vmap, by each that is mapped: gate with capacity_factor="
        )
    if isinstance(_torch.unwrapped(counts), _torch.FakeTensor) or _torch.fake_active():
        # Nobody knows before it runs: plans and recordings take the load for even.
        even = -(-routing.indices.numel() // (n * here))
        return [[even] * here] * n, [[even] * here] * n, even * here
    me = 0 if axis is None else axis_index(axis)
    sizes = [
        [row[i : i + here] for i in range(0, n * here, here)] for row in counts.tolist()
    ]
    room = max(sum(run) for loads in sizes for run in loads)
    return sizes[me], [loads[me] for loads in sizes], room


def check_rows(y: Tensor, count: int) -> None:
    """Raises where an expert function did not make one row of each."""
    if y.ndim != 2 or len(y) != count:
        raise ValueError(
            f"expert_layer: expert_fn made shape {tuple(y.shape)} of {count} rows; a "
            "row of [m, d] becomes a row of [m, d']"
        )
