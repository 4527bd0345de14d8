"""Ring attention: which keys go to which rank, and what each rank computes.

That is data: moves and blocks. At step s each rank has the keys and values of the rank
s before it, sent by that rank itself, and their gradients go straight home; so nothing
that is still added to is sent, and half dtypes travel as they are.

Under plain autograd a ring is one Function, whose backward has keys and values sent
again and computes each block's probabilities again from the sum of the exponentials.
Where more than that derivative is asked for, it is plain operators and collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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
    attend,
    attend_in_place,
    joined,
    pull,
)
from fsfunc.nn.numerics import wide, without_autocast

Pairs = tuple[tuple[int, int], ...]


class Block(NamedTuple):
    """Queries of part ``rows`` meet keys of part ``part`` of those received."""

    rows: int
    part: int
    diagonal: bool  # the same positions: query i sees keys 0 to i


@lru_cache(maxsize=1 << 10)
def ring_moves(step: int, size: int, zigzag: bool) -> tuple[Pairs, ...]:
    """For each part of keys, who sends it to whom before this step.

    In zig-zag order all see a rank's first half, and those before it the second.

    >>> ring_moves(2, 3, True)
    (((0, 2), (1, 0), (2, 1)), ((1, 0), (2, 1)))
    """
    hops = tuple((j, (j + step) % size) for j in range(size))
    back = tuple((j, t) for j, t in hops if t < j)
    return (hops, back) if zigzag else (hops,)


def ring_blocks(step: int, index: int, causal: bool, parts: int) -> list[Block]:
    """Blocks of the rank at ``index``: as many as any other's in this step.

    >>> [len(ring_blocks(1, index, True, 2)) for index in range(4)]
    [2, 2, 2, 2]
    """
    if parts == 1:
        return [Block(0, 0, causal)]
    if step == 0:
        return [Block(0, 0, True), Block(1, 0, False), Block(1, 1, True)]
    if index >= step:  # they come from a rank before
        return [Block(0, 0, False), Block(1, 0, False)]
    return [Block(1, 0, False), Block(1, 1, False)]


@dataclass(frozen=True)
class Ring:
    """Over which ranks, this one's index, and what it computes.

    Args:
        where: None is one device; ``index``: on a vmap mesh, a tensor.
        causal: in zig-zag order, where there are several ranks.
    """

    where: RankGroup | None
    index: Any
    causal: bool
    scale: float

    @property
    def parts(self) -> int:
        """Into how many parts a rank's positions are cut."""
        return 2 if self.causal and self.where is not None else 1

    @property
    def steps(self) -> int:
        return 1 if self.where is None else self.where.size

    def moves(self, step: int) -> list[LinearMap]:
        """For each part, the map that takes it to the ranks that need it."""
        kind = "M" if self.where is not None and self.where.mean else "V"
        each = ring_moves(step, self.steps, self.causal)
        return [LinearMap("ppermute", kind, kind, pairs=pairs) for pairs in each]

    def launch(self, x: Tensor, how: LinearMap) -> Callable[[], Tensor]:
        assert self.where is not None, "one device has no second step"
        return launch(x, how, self.where)


def attention(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring, recompute: bool = True
) -> Tensor:
    """This rank's queries' attention to the keys of all ranks, in the dtype of q."""
    with without_autocast(q):
        if recompute and not composable():
            return _Ring.apply(q, k, v, ring)[0]
        return _composed(q, k, v, ring)


def _travelled(
    k: Tensor, v: Tensor, ring: Ring
) -> Iterator[tuple[int, list[tuple[Tensor, Tensor]]]]:
    """Each step, with the keys and values that it brings; the next are under way."""
    mine = list(zip(k.chunk(ring.parts, 2), v.chunk(ring.parts, 2), strict=True))
    packed = [_pack(*part) for part in mine] if ring.steps > 1 else []
    waits: list[Callable[[], Tensor]] = []
    for step in range(ring.steps):
        after = ring.moves(step + 1) if step + 1 < ring.steps else []
        now, waits = waits, list(map(ring.launch, packed, after))
        yield step, [_unpack(wait(), *mine[0]) for wait in now] if step else mine


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """One message, all keys first; ranks compare its shape, and by it theirs."""
    flat = torch.cat([k.flatten(), v.flatten()])
    return flat.view(*k.shape[:3], k.shape[3] + v.shape[3])


def _unpack(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of these shapes."""
    keys, values = packed.flatten().split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


def _composed(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Plain operators and collectives: it has all derivatives, and keeps all blocks.

    It is one graph for all ranks, of whatever order: so they meet in every collective
    of every derivative. Where their work differs, they pick what they work on.
    """
    found: list[Any] = [None] * ring.parts
    qs, scale = q.chunk(ring.parts, 2), ring.scale
    for step, parts in _travelled(k, v, ring):
        if ring.parts == 1 or step == 0:
            for a, b, diagonal in ring_blocks(step, 0, ring.causal, ring.parts):
                found[a] = joined(found[a], attend(qs[a], *parts[b], diagonal, scale))
            continue
        earlier = torch.as_tensor(ring.index >= step, device=q.device)
        low, high = found
        high = joined(high, attend(qs[1], *parts[0], False, scale))
        rows = torch.where(earlier, qs[0], qs[1])
        keys, values = (torch.where(earlier, *x) for x in zip(*parts, strict=True))
        other = attend(rows, keys, values, False, scale)
        found = [
            _either(earlier, joined(low, other), low),
            _either(earlier, high, joined(high, other)),
        ]
    return torch.cat([x.out for x in found], 2).to(q.dtype)


def _either(which: Tensor, one: Attended, other: Attended) -> Attended:
    both = zip(one, other, strict=True)
    return Attended(*(torch.where(which, a, b) for a, b in both))


# Without a graph


class _Ring(torch.autograd.Function):
    """The whole ring; between its passes it keeps q, k, v, its output and one number
    a query."""

    @staticmethod
    def forward(q, k, v, ring):  # type: ignore[override]
        qs, found = q.chunk(ring.parts, 2), [None] * ring.parts
        for step, parts in _travelled(k, v, ring):
            for a, b, diagonal in ring_blocks(step, ring.index, ring.causal, len(qs)):
                new = attend_in_place(qs[a], *parts[b], diagonal, ring.scale)
                found[a] = joined(found[a], new)
        outs, sums = zip(*found, strict=True)
        return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, ctx.ring = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.unit = current_label()[0]

    @staticmethod
    def backward(ctx, g, _):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        with label(ctx.unit, "backward"), without_autocast(q), internal():
            if torch.is_grad_enabled() or _torch.functorch_active():
                grads = _pulled_twice(g, (q, k, v), ctx.needs_input_grad, ctx.ring)
            else:
                grads = _pulled(g, q, k, v, Attended(out, lse), ctx.ring)
        return *grads, None


def _pulled_twice(
    g: Tensor, xs: Sequence[Tensor], needs: Sequence[bool], ring: Ring
) -> list[Tensor | None]:
    """The gradients, as a function that may be differentiated or mapped again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        q, k, v = xs = [x.view_as(x) for x in xs]  # one may be made of another
        out = _composed(q, k, v, ring)
    wanted = [x for x, need in zip(xs, needs, strict=False) if need]
    found = iter(torch.autograd.grad(out, wanted, g, create_graph=create_graph))
    return [next(found) if need else None for need in needs[:3]]


def _pulled(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, ring: Ring
) -> list[Tensor]:
    """The gradients: keys and values travel again, and theirs come home."""
    n = ring.parts
    mine = list(zip(*(x.chunk(n, 2) for x in (g, q, *whole)), strict=True))
    dqs: list[Any] = [None] * n
    home: list[Any] = [None] * n  # what this rank's own keys and values get
    waits: list[Callable[[], Tensor]] = []
    for step, parts in _travelled(k, v, ring):
        given = _pulled_at(step, mine, parts, dqs, ring)
        if step == 0:
            home = given
            continue
        back = [how.transpose() for how in ring.moves(step)]
        sent = [x.to(k.dtype) for x in given]
        _land(waits, home)
        waits = list(map(ring.launch, sent, back))
    _land(waits, home)
    like = k.chunk(n, 2)[0], v.chunk(n, 2)[0]
    dks, dvs = zip(*(_unpack(x, *like) for x in home), strict=True)
    grads = zip((dqs, dks, dvs), (q, k, v), strict=True)
    return [torch.cat(parts, 2).to(x.dtype) for parts, x in grads]


def _pulled_at(
    step: int,
    mine: list[tuple[Tensor, ...]],
    parts: list[tuple[Tensor, Tensor]],
    dqs: list[Any],
    ring: Ring,
) -> list[Tensor]:
    """Gradients of each part of the keys and values in one step; adds those of dqs."""
    given: list[Any] = [None] * len(parts)
    for a, b, diagonal in ring_blocks(step, ring.index, ring.causal, ring.parts):
        g, q, out, lse = mine[a]
        of = Attended(out, lse)
        dq, dk, dv = pull(g, q, *parts[b], of, diagonal, ring.scale)
        dqs[a] = _added(dqs[a], dq)
        given[b] = _added(given[b], _pack(dk, dv))
    for i, (keys, values) in enumerate(parts):
        if given[i] is None:  # nobody here has seen it, so nothing is sent of it
            given[i] = _pack(torch.zeros_like(keys), torch.zeros_like(values))
    return given


def _land(waits: Sequence[Callable[[], Tensor]], home: list[Tensor]) -> None:
    for i, wait in enumerate(waits):
        home[i] = home[i].add_(wait())


def _added(total: Tensor | None, x: Tensor) -> Tensor:
    """The sum, in fp32 at least."""
    return x.to(wide(x)) if total is None else total.add_(x)
