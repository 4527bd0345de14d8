"""Ring attention by its schedule: keys and values are sent, and blocks are joined.

``context_parallel.py`` calls ``attention``, after its checks. In each step a rank joins
the blocks of its queries with the keys that it has (``sequence_order.py`` says which),
while the next keys are under way. Gradients of keys and values are sent straight to
their owner from each rank that used them: so no partial sums are sent, and half dtypes
are sent as they are.

There are two forms of the same ring. Under plain autograd it is one Function, whose
backward sends keys and values again, and recomputes each block's probabilities from the
sum of the exponentials. For all other derivatives it is composed of plain operators and
collectives.
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
    attend_by_tiles,
    join_blocks,
    pull_back,
    zero_unseen,
)
from fsfunc.nn.attention_masks import Masks
from fsfunc.nn.numerics import sum_dtype, without_autocast
from fsfunc.nn.sequence_order import (
    Block,
    SequenceCut,
    ring_blocks,
    ring_moves,
    ring_slots,
)

Arrival = Callable[[], Tensor] | None
"""Waits for a tensor under way, and returns it. None: nothing comes."""

KeysAndValues = Sequence[Tensor]  # keys and values of one part


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, this one's index, and what it computes.

    Args:
        group: the ranks; None: one device.
        index: this rank's; on a mesh made of ``vmap`` a tensor.
        cut: how the sequence lies on them, and how far a query sees.
        scale: the factor of the scores.
    """

    group: RankGroup | None
    index: Any
    cut: SequenceCut
    scale: float

    @property
    def parts(self) -> int:
        """The number of parts of a rank."""
        return self.cut.parts

    def steps(self) -> list[int]:
        """Returns the first step, and those before which anything moves."""
        steps = range(self.cut.size)
        return [s for s in steps if not s or any(ring_moves(s, self.cut))]

    def moves(self, step: int) -> list[LinearMap | None]:
        """Returns, for each part, the map that takes it to the ranks that see it.

        None where no rank does.
        """
        # Over an axis of ``shard`` losses are averaged (kind M), else summed (V).
        kind = "M" if self.group is not None and self.group.loss_is_mean else "V"
        return [
            LinearMap("ppermute", kind, kind, pairs=pairs) if pairs else None
            for pairs in ring_moves(step, self.cut)
        ]

    def launch(self, x: Tensor | None, move: LinearMap | None) -> Arrival:
        """Starts the transfer of a part; returns what waits for the part to come."""
        if x is None or move is None:
            return None
        assert self.group is not None, "one device has no second step"
        return launch(x, move, self.group)

    def value_of_rank(
        self, values: tuple[int | None, ...], q: Tensor
    ) -> int | Tensor | None:
        """Returns this rank's value as a tensor, or the one that all ranks share.

        A tensor even where the index is a number: then the graph of operators is the
        same on all ranks.
        """
        if len(set(values)) == 1:
            return values[0]
        if isinstance(self.index, int):
            return torch.as_tensor(values[self.index], device=q.device)
        table = torch.tensor(values, device=q.device)
        return table.index_select(0, self.index.reshape(1)).squeeze(0)


def attention(x: Heads, masks: Masks, ring: Ring, recompute: bool = True) -> Tensor:
    """Computes the attention of this rank's queries to the keys of all ranks.

    Returns:
        [batch, heads, n, value_dim], in the dtype of q.
    """
    # ``_Ring`` gives a mask no gradient, and has no rule for forward mode or ``vmap``.
    mask_has_gradient = masks.mask is not None and masks.mask.requires_grad
    with without_autocast(x.q):
        masks = masks.shift_mask(ring.index, ring.cut)
        if recompute and not composable() and not mask_has_gradient:
            return _Ring.apply(*x, *masks, ring)[0]
        return _compose_ring(x, masks, ring)


def _steps_with_keys(
    x: Heads, ring: Ring
) -> Iterator[tuple[int, Sequence[KeysAndValues | None]]]:
    """Yields each step with the parts of keys and values that this rank then has.

    The next step's are under way meanwhile. A part that comes to no rank is None.
    """
    local_parts = list(zip(*(y.chunk(ring.parts, 2) for y in x[1:]), strict=True))
    steps = ring.steps()
    next_arrivals: list[Arrival] = []
    # Each rank sends its own part in every step: the same buffers each time.
    packed = [_pack(*part) for part in local_parts] if len(steps) > 1 else []
    for step, next_step in zip(steps, [*steps[1:], None], strict=True):
        moves = [] if next_step is None else ring.moves(next_step)
        arrivals, next_arrivals = next_arrivals, list(map(ring.launch, packed, moves))
        received = [
            None if arrival is None else _unpack(arrival(), *local_parts[0])
            for arrival in arrivals
        ]
        yield step, received if step else local_parts


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Packs keys and values into one message, all keys first.

    Ranks compare the shapes of messages. Viewed as [..., key dim + value dim], this one
    also tells whether keys and values have one shape on all ranks.
    """
    flat = torch.cat([k.flatten(), v.flatten()])
    return flat.view(*k.shape[:3], k.shape[3] + v.shape[3])


def _unpack(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values as views of the message, with the shapes of k and v."""
    keys, values = packed.flatten().split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


def _compose_ring(x: Heads, masks: Masks, ring: Ring) -> Tensor:
    """Computes the ring by plain operators and collectives: it has all derivatives.

    Autograd saves all blocks. The graph is the same on all ranks, so that they call the
    same collectives in every derivative. Where their work differs, ``torch.where``
    selects its operands.
    """
    attended: list[Any] = [None] * ring.parts
    qs = x.q.chunk(ring.parts, 2)
    for step, parts in _steps_with_keys(x, ring):
        for slot in ring_slots(step, ring.cut):
            block = Block(*(ring.value_of_rank(values, x.q) for values in slot))
            visible = masks.visible(block, step, ring.index, ring.cut)
            rows, keys = _select_part(block.rows, qs), _select_part(block.part, parts)
            new = attend(Heads(rows, *keys), visible, ring.scale)
            # Where the part of the queries differs by rank, every part goes through the
            # same operators, and ``where`` lets through the one that is meant.
            for i, old in enumerate(attended):
                if isinstance(block.rows, Tensor):
                    is_target = block.rows == i
                    joined_and_old = zip(join_blocks(old, new), old, strict=True)
                    attended[i] = Attended(
                        *(
                            torch.where(is_target, *choices)
                            for choices in joined_and_old
                        )
                    )
                elif block.rows == i:
                    attended[i] = join_blocks(old, new)
    if masks.mask is not None:
        attended = [zero_unseen(part) for part in attended]
    return torch.cat([part.out for part in attended], 2).to(x.q.dtype)


def _select_part(index: int | Tensor, parts: Sequence[Any]) -> Any:
    """Returns part 0 or 1 of the queries, or of the keys and values."""
    if isinstance(index, int):
        return parts[index]
    first, second = parts
    if isinstance(first, Tensor):
        return torch.where(index == 0, first, second)
    return [torch.where(index == 0, *pair) for pair in zip(first, second, strict=True)]


# Without a graph


class _Ring(torch.autograd.Function):
    """The whole ring, which saves q, k, v, its output and one number a query."""

    @staticmethod
    def forward(  # type: ignore[override]
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        mask: Tensor | None,
        ring: Ring,
    ) -> tuple[Tensor, Tensor]:
        qs = q.chunk(ring.parts, 2)
        attended: list[Any] = [None] * ring.parts
        masks = Masks(documents, mask)
        for step, parts in _steps_with_keys(Heads(q, k, v), ring):
            for block in ring_blocks(step, ring.index, ring.cut):
                rows = block.rows
                visible = masks.visible(block, step, ring.index, ring.cut)
                new = Heads(qs[rows], *parts[block.part])
                new = attend_by_tiles(new, visible, ring.scale)
                attended[rows] = join_blocks(attended[rows], new)
        if mask is not None:  # else every query sees its own position at least
            attended = [zero_unseen(x) for x in attended]
        outs, sums = zip(*attended, strict=True)
        return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        *xs, ctx.ring = inputs
        ctx.save_for_backward(*xs, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.unit = current_label()[0]  # collectives of the backward bear its name too

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, documents, mask, out, lse = ctx.saved_tensors
        x, masks, ring = Heads(q, k, v), Masks(documents, mask), ctx.ring
        with label(ctx.unit, "backward"), without_autocast(q), internal():
            if torch.is_grad_enabled() or _torch.functorch_active():
                needs = ctx.needs_input_grad[:3]
                grads = _pull_back_differentiably(g, x, needs, masks, ring)
            else:
                grads = _pull_back_ring(g, x, Attended(out, lse), masks, ring)
        return *grads, None, None, None


def _pull_back_differentiably(
    g: Tensor, x: Heads, needs: Sequence[bool], masks: Masks, ring: Ring
) -> list[Tensor | None]:
    """Computes the gradients so that they may be differentiated or mapped again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Gradients by nodes of their own: if k was computed from q, the gradient by q
        # would else have that of k in it.
        x = Heads(*(y.view_as(y) for y in x))
        out = _compose_ring(x, masks, ring)
    inputs = [y for y, need in zip(x, needs, strict=True) if need]
    gradients = iter(torch.autograd.grad(out, inputs, g, create_graph=create_graph))
    return [next(gradients) if need else None for need in needs]


def _pull_back_ring(
    g: Tensor, x: Heads, whole: Attended, masks: Masks, ring: Ring
) -> list[Tensor]:
    """Computes the gradients of q, k and v: keys travel again, and theirs come back.

    Those of keys are sent back in the step after, while the next block is computed.
    """
    n, (q, k, v) = ring.parts, x
    query_parts = list(zip(*(y.chunk(n, 2) for y in (g, q, *whole)), strict=True))
    dqs: list[Any] = [None] * n
    local_gradients: list[Any] = [None] * n  # of this rank's own keys and values
    arrivals: list[Arrival] = []
    for step, parts in _steps_with_keys(x, ring):
        step_gradients = _pull_back_step(step, query_parts, parts, dqs, masks, ring)
        if step == 0:
            local_gradients = step_gradients
            continue
        return_moves = [move and move.transpose() for move in ring.moves(step)]
        outgoing = [y if y is None else y.to(k.dtype) for y in step_gradients]
        # One step's gradients are awaited before the next are sent: at most one set of
        # messages is in memory.
        _add_arrivals(arrivals, local_gradients)
        arrivals = list(map(ring.launch, outgoing, return_moves))
    _add_arrivals(arrivals, local_gradients)
    shapes = k.chunk(n, 2)[0], v.chunk(n, 2)[0]
    dks, dvs = zip(*(_unpack(y, *shapes) for y in local_gradients), strict=True)
    grads = zip((dqs, dks, dvs), x, strict=True)
    return [torch.cat(parts, 2).to(y.dtype) for parts, y in grads]


def _pull_back_step(
    step: int,
    query_parts: list[tuple[Tensor, ...]],
    parts: Sequence[KeysAndValues | None],
    dqs: list[Tensor | None],
    masks: Masks,
    ring: Ring,
) -> list[Tensor | None]:
    """Computes one step of the backward pass.

    Adds the queries' gradients to ``dqs``. Returns, for each part of keys that came,
    the packed gradients of keys and values.
    """
    key_gradients: list[Tensor | None] = [None] * len(parts)
    for block in ring_blocks(step, ring.index, ring.cut):
        rows, source, *_ = block
        g, q, *whole = query_parts[rows]
        visible = masks.visible(block, step, ring.index, ring.cut)
        x = Heads(q, *parts[source])
        dq, dk, dv = pull_back(g, x, Attended(*whole), visible, ring.scale)
        dqs[rows] = _add_wide(dqs[rows], dq)
        key_gradients[source] = _add_wide(key_gradients[source], _pack(dk, dv))
    for i, part in enumerate(parts):
        # A part may have come that no query here sees: its owner adds zeros.
        if key_gradients[i] is None and part is not None:
            key_gradients[i] = _pack(*map(torch.zeros_like, part))
    return key_gradients


def _add_arrivals(arrivals: Sequence[Arrival], local_gradients: list[Tensor]) -> None:
    """Waits for the gradients under way, and adds them to this rank's own."""
    for i, arrival in enumerate(arrivals):
        if arrival is not None:
            local_gradients[i] = local_gradients[i].add_(arrival())


def _add_wide(total: Tensor | None, x: Tensor) -> Tensor:
    """Adds ``x`` to ``total`` in place, in fp32 at least."""
    return x.to(sum_dtype(x)) if total is None else total.add_(x)
