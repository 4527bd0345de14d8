"""Experts of a module, spread over ranks.

They run the module's own forward, on the tokens that were sent to a rank's experts,
each for one of them, with a weight of 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsfunc.comm.collectives import all_gather
from fsfunc.comm.groups import axis_index, group
from fsfunc.comm.typed_maps import pcast
from fsfunc.nn.experts import expert_layer
from fsfunc.nn.routing import route
from fsfunc.sharded.leaf import is_sharded

_TAKES = ["self", "hidden_states", "top_k_index", "top_k_weights"]


class SplitExperts(nn.Module):
    """Base that sends tokens to the ranks of their experts, and back."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Any):
        x, index, weights = hidden_states, top_k_index, top_k_weights
        leaves: dict[str, Any] = dict(self.named_parameters(recurse=False))
        leaf, forward = next(iter(leaves.values())), super().forward
        if not (is_sharded(leaf) and leaf.layout.splits):
            return forward(x, index, weights)

        def ours(parts: dict[str, Tensor], rows: Tensor, ends: Tensor) -> Tensor:
            at = torch.arange(len(rows), dtype=ends.dtype, device=rows.device)
            one = torch.searchsorted(ends, at, right=True)
            with _having(self, parts | {"num_experts": len(ends)}):
                return forward(rows, one[:, None], weights.new_ones(len(rows), 1))

        def layer(x: Tensor, index: Tensor, weights: Tensor, used: Any) -> Tensor:
            routing = route(index, weights, leaf.layout.shape[0], used_token=used)
            return expert_layer(x, routing, ours, leaves, grouped=True)

        where = group(leaf.layout.splits[0].axis)
        if where.mean:  # each rank has tokens of its own
            return layer(x, index, weights, None)
        # All have the same: each sends its share, and gets what was made of all.
        axis, count = where.axis, len(x)
        share = -(-count // where.size)
        start, padding = axis_index(axis) * share, where.size * share - count

        def mine(rows: Tensor) -> Tensor:
            return F.pad(rows, (0, 0, 0, padding)).narrow(0, start, share)

        x, weights = pcast((x, weights), axis, to="V")
        used = start + torch.arange(share, device=x.device) < count
        y = layer(mine(x), mine(index), mine(weights), used)
        return all_gather(y, axis, dim=0, to="I")[:count]


@cache
def kind_of(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that runs in the place of a class of experts."""
    return type(f"Split{cls.__name__}", (SplitExperts, cls), {})


def are_experts(m: nn.Module) -> bool:
    """Returns whether a module is a stack of experts, by what its forward takes."""
    return list(inspect.signature(type(m).forward).parameters) == _TAKES


def check_experts(name: str, m: nn.Module) -> None:
    """Raises unless a module is a stack of experts, as far as it shows."""
    what = f'plan: {name!r} is "expert"'
    if not are_experts(m):
        takes = [*inspect.signature(type(m).forward).parameters][1:]
        raise TypeError(
            f"{what}, and its forward takes {', '.join(takes)}: it "
            f"must take {', '.join(_TAKES[1:])}, as experts of transformers do, and "
            "return the sum over a token's experts of weight times what each makes of "
            "it; in other modules call ff.nn.expert_layer"
        )
    shapes = {n: tuple(p.shape) for n, p in m.named_parameters(recurse=False)}
    if len({shape[:1] or None for shape in shapes.values()} | {None}) != 2:
        said = ", ".join(f"{n} {shape}" for n, shape in shapes.items()) or "none"
        raise TypeError(
            f"{what}, with one of each parameter along dim 0; it has {said}"
        )
    held = dict(m.named_parameters()) | dict(m.named_buffers())
    if others := held.keys() - shapes.keys():
        raise TypeError(
            f"{what}, and holds {min(others)!r}, of which a rank's experts would not "
            "take their own part: leave it out of the plan"
        )


@contextmanager
def _having(m: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """A module, for a while with other attributes, which stand before parameters."""
    own = vars(m)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)
