"""Ring attention by its schedule: keys and values are sent, and blocks are combined.

Gradients of keys and values are sent straight to their owner from each rank that used
them: so no partial sums are sent, and half dtypes are sent as they are.

Under plain autograd a ring is one Function, whose backward sends keys and values again,
and recomputes each block's probabilities from the sum of the exponentials. For higher
derivatives it is made of plain operators and collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.async_collectives import launch
from fsfunc.comm.attribution import current_label, internal, label
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.core.frames import composable
from fsfunc.nn.attention_blocks import (
    Attended,
    Heads,
    attend,
    attend_in_place,
    joined,
    pull,
    settled,
)
from fsfunc.nn.attention_masks import Masks
from fsfunc.nn.numerics import wide, without_autocast
from fsfunc.nn.sequence_order import (
    Block,
    SequenceCut,
    ring_blocks,
    ring_moves,
    ring_slots,
)

Flight = Callable[[], Tensor] | None  # None: nothing comes


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, this one's index, and what it computes.

    Args:
        where: None is one device; ``index``: on a vmap mesh, a tensor.
        cut: how the sequence lies on them, and how far a query sees.
    """

    where: RankGroup | None
    index: Any
    cut: SequenceCut
    scale: float

    @property
    def parts(self) -> int:
        """Into how many parts a rank's positions are cut."""
        return self.cut.parts

    def steps(self) -> list[int]:
        """The first, and those before which anything moves."""
        steps = range(self.cut.size)
        return [s for s in steps if not s or any(ring_moves(s, self.cut))]

    def moves(self, step: int) -> list[LinearMap | None]:
        """For each part, the map that takes it to the ranks that need it, if any do."""
        kind = "M" if self.where is not None and self.where.loss_is_mean else "V"
        return [
            LinearMap("ppermute", kind, kind, pairs=pairs) if pairs else None
            for pairs in ring_moves(step, self.cut)
        ]

    def launch(self, x: Tensor | None, how: LinearMap | None) -> Flight:
        """The transfer of a part that is to come, if there is one."""
        if x is None or how is None:
            return None
        assert self.where is not None, "one device has no second step"
        return launch(x, how, self.where)

    def mine(self, values: tuple[Any, ...], q: Tensor) -> Any:
        """This rank's of a value for each: a tensor, unless it is one for all."""
        if len(set(values)) == 1:
            return values[0]
        if isinstance(self.index, int):
            return torch.as_tensor(values[self.index], device=q.device)
        table = torch.tensor(values, device=q.device)
        return table.index_select(0, self.index.reshape(1)).squeeze(0)


def attention(x: Heads, masks: Masks, ring: Ring, recompute: bool = True) -> Tensor:
    """This rank's queries' attention to the keys of all ranks, in the dtype of q."""
    learnt = masks.mask is not None and masks.mask.requires_grad
    with without_autocast(x.q):
        masks = masks.ready(ring.index, ring.cut)
        if recompute and not composable() and not learnt:
            return _Ring.apply(*x, *masks, ring)[0]
        return _composed(x, masks, ring)


def _travelled(x: Heads, ring: Ring) -> Iterator[tuple[int, list[Any]]]:
    """Each step, with the keys and values that it brings; the next are under way.

    A part that goes nowhere in a step is None.
    """
    mine = list(zip(*(y.chunk(ring.parts, 2) for y in x[1:]), strict=True))
    steps, waits = ring.steps(), []
    packed = [_pack(*part) for part in mine] if len(steps) > 1 else []
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        moves = [] if after is None else ring.moves(after)
        now, waits = waits, list(map(ring.launch, packed, moves))
        come = [None if wait is None else _unpack(wait(), *mine[0]) for wait in now]
        yield step, come if step else mine


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """One message, all keys first; ranks compare its shape, and by it theirs."""
    flat = torch.cat([k.flatten(), v.flatten()])
    return flat.view(*k.shape[:3], k.shape[3] + v.shape[3])


def _unpack(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of these shapes."""
    keys, values = packed.flatten().split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


def _composed(x: Heads, masks: Masks, ring: Ring) -> Tensor:
    """The ring by plain operators and collectives: it has all derivatives.

    All blocks are kept. The graph is the same on all ranks, so that they call the same
    collectives in every derivative; where their work differs they select its operands.
    """
    found: list[Any] = [None] * ring.parts
    qs = x.q.chunk(ring.parts, 2)
    for step, parts in _travelled(x, ring):
        for slot in ring_slots(step, ring.cut):
            block = Block(*(ring.mine(values, x.q) for values in slot))
            seen = masks.seen(block, step, ring.index, ring.cut)
            rows, keys = _picked(block.rows, qs), _picked(block.part, parts)
            new = attend(Heads(rows, *keys), seen, ring.scale)
            for a, old in enumerate(found):
                if isinstance(block.rows, Tensor):
                    here = block.rows == a
                    both = zip(joined(old, new), old, strict=True)
                    found[a] = Attended(*(torch.where(here, *xs) for xs in both))
                elif block.rows == a:
                    found[a] = joined(old, new)
    if masks.mask is not None:
        found = [settled(one) for one in found]
    return torch.cat([one.out for one in found], 2).to(x.q.dtype)


def _picked(which: Any, xs: Sequence[Any]) -> Any:
    """One of two, by a number that may be a tensor."""
    if isinstance(which, int):
        return xs[which]
    one, other = xs
    if isinstance(one, Tensor):
        return torch.where(which == 0, one, other)
    return [torch.where(which == 0, *both) for both in zip(one, other, strict=True)]


# Without a graph


class _Ring(torch.autograd.Function):
    """The whole ring; between its passes it keeps q, k, v, its output and one number
    a query."""

    @staticmethod
    def forward(q, k, v, documents, mask, ring):  # type: ignore[override]
        qs, found = q.chunk(ring.parts, 2), [None] * ring.parts
        masks = Masks(documents, mask)
        for step, parts in _travelled(Heads(q, k, v), ring):
            for block in ring_blocks(step, ring.index, ring.cut):
                seen, a = masks.seen(block, step, ring.index, ring.cut), block.rows
                new = Heads(qs[a], *parts[block.part])
                new = attend_in_place(new, seen, ring.scale)
                found[a] = joined(found[a], new)
        if mask is not None:
            found = [settled(x) for x in found]
        outs, sums = zip(*found, strict=True)
        return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *xs, ctx.ring = inputs
        ctx.save_for_backward(*xs, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.unit = current_label()[0]

    @staticmethod
    def backward(ctx, g, _):  # type: ignore[override]
        q, k, v, documents, mask, out, lse = ctx.saved_tensors
        x, masks, ring = Heads(q, k, v), Masks(documents, mask), ctx.ring
        with label(ctx.unit, "backward"), without_autocast(q), internal():
            if torch.is_grad_enabled() or _torch.functorch_active():
                needs = ctx.needs_input_grad[:3]
                grads = _pulled_twice(g, x, needs, masks, ring)
            else:
                grads = _pulled(g, x, Attended(out, lse), masks, ring)
        return *grads, None, None, None


def _pulled_twice(
    g: Tensor, x: Heads, needs: Sequence[bool], masks: Masks, ring: Ring
) -> list[Tensor | None]:
    """The gradients, as a function that may be differentiated or mapped again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        x = Heads(*(y.view_as(y) for y in x))  # one may be made of another
        out = _composed(x, masks, ring)
    wanted = [y for y, need in zip(x, needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, g, create_graph=create_graph))
    return [next(found) if need else None for need in needs]


def _pulled(
    g: Tensor, x: Heads, whole: Attended, masks: Masks, ring: Ring
) -> list[Tensor]:
    """The gradients: keys and values travel again, and theirs come home."""
    n, (q, k, v) = ring.parts, x
    mine = list(zip(*(y.chunk(n, 2) for y in (g, q, *whole)), strict=True))
    dqs: list[Any] = [None] * n
    home: list[Any] = [None] * n  # what this rank's own keys and values get
    waits: list[Flight] = []
    for step, parts in _travelled(x, ring):
        given = _pulled_at(step, mine, parts, dqs, masks, ring)
        if step == 0:
            home = given
            continue
        back = [how and how.transpose() for how in ring.moves(step)]
        sent = [y if y is None else y.to(k.dtype) for y in given]
        _land(waits, home)
        waits = list(map(ring.launch, sent, back))
    _land(waits, home)
    like = k.chunk(n, 2)[0], v.chunk(n, 2)[0]
    dks, dvs = zip(*(_unpack(y, *like) for y in home), strict=True)
    grads = zip((dqs, dks, dvs), x, strict=True)
    return [torch.cat(parts, 2).to(y.dtype) for parts, y in grads]


def _pulled_at(
    step: int,
    mine: list[tuple[Tensor, ...]],
    parts: list[Any],
    dqs: list[Any],
    masks: Masks,
    ring: Ring,
) -> list[Tensor | None]:
    """Gradients of each part of the keys and values in one step; adds those of dqs."""
    given: list[Any] = [None] * len(parts)
    for block in ring_blocks(step, ring.index, ring.cut):
        a, b, *_ = block
        g, q, *of = mine[a]
        seen = masks.seen(block, step, ring.index, ring.cut)
        x = Heads(q, *parts[b])
        dq, dk, dv = pull(g, x, Attended(*of), seen, ring.scale)
        dqs[a] = _added(dqs[a], dq)
        given[b] = _added(given[b], _pack(dk, dv))
    for i, part in enumerate(parts):
        if given[i] is None and part is not None:  # no query here sees it: not sent
            given[i] = _pack(*map(torch.zeros_like, part))
    return given


def _land(waits: Sequence[Flight], home: list[Tensor]) -> None:
    for i, wait in enumerate(waits):
        if wait is not None:
            home[i] = home[i].add_(wait())


def _added(total: Tensor | None, x: Tensor) -> Tensor:
    """The sum, in fp32 at least."""
    return x.to(wide(x)) if total is None else total.add_(x)
