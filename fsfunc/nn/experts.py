"""A mixture of experts that are spread over the ranks of an axis (expert parallelism).

    routing = top_2_gating(x @ gate)          which experts each token goes to
    y = expert_layer(x, routing, f, params, "expert")
      = combine(f(params, dispatch(x, routing)), routing)      with a capacity

Experts are along dim 0 of their parameters: of E, over an axis of n ranks, rank i has
those from i E/n up to (i+1) E/n. Each rank has tokens of its own. One all-to-all sends
them to their experts and one brings results back, and their gradients take two more:
four a layer and step (GShard, sections 3.1 and 3.2). A choice's place in the buffers
follows from its `Routing`, so rows are copied, never multiplied by masks.

Over the axis a rank's tokens, result and loss are its own, and the derivative by an
expert is that of the sum of all ranks' losses (of their mean, if a `shard` averages
over the axis): gradients of other ranks' tokens come back with them. Tokens that are
one value on all ranks, as those of a model axis are, would count n times: each rank
gives its share of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.collectives import all_to_all
from fsfunc.comm.folding import axis_text
from fsfunc.comm.groups import axis_size
from fsfunc.comm.mesh import Axis
from fsfunc.nn.routing import (
    Routing,
    check_rows,
    place_rows,
    run_without_capacity,
    sum_weighted_rows,
)
from fsfunc.nn.tensor_parallel import local_part
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import PyTree


def expert_layer(
    x: Tensor,
    routing: Routing,
    expert_fn: Callable[..., Tensor],
    params: PyTree,
    axis: Axis | None = None,
    *,
    grouped: bool = False,
) -> Tensor:
    """Sums, over each token's experts, weight times ``expert_fn`` of the token.

    With a capacity, experts compute on [places of all ranks' tokens, d], with zeros in
    empty places: an expert and its derivative must be finite there too. Without one
    (dropless), they compute on their tokens alone.

    Args:
        x: [..., d], this rank's tokens; the same number on every rank where there is a
            capacity, any number without.
        routing: of these tokens among all E experts, by ``top_2_gating`` or another.
        expert_fn: ``(params of one expert, [m, d]) -> [m, d']``, row by row. With
            ``grouped``, ``(params, rows [N, d], ends [e] int32) -> [N, d']`` for this
            rank's e experts at once: rows lie expert after expert, those of expert i up
            to ``ends[i]``, as ``torch.nn.functional.grouped_mm`` has it.
        params: a tree whose tensors have this rank's E/n experts along dim 0; or leaves
            that ``ff.place`` has split along dim 0, read in a unit.
        axis: the mesh axis that the experts are spread over; by default that of the
            leaves in ``params``, and with plain tensors none: all experts are here.
            Over an axis that no ``shard`` averages over, first cut tokens that are
            equal on its ranks:
            ``ff.pcast(x, axis, to="V").chunk(n)[ff.axis_index(axis)]``. Then join the
            results: ``ff.all_gather(y, axis, to="I")``. Pass the gate's weight through
            ``ff.pcast`` too. Over an axis of a folded view (see ``ff.make_mesh``) do so
            along those axes of its ranks alone that no ``shard`` averages over.
        grouped: see ``expert_fn``. Without it, one expert's function runs under
            ``torch.func.vmap`` over experts (with a capacity), or expert by expert.

    Returns:
        [..., d'], of experts' dtype; zeros for a token that all its experts dropped,
        and for padding.

    Raises:
        ValueError: experts that the axis does not divide; parameters of another number
            of experts, or split otherwise; a routing of other tokens.
        LawError: in the check of a sharded step, tokens that are one value on all ranks
            of an axis that no ``shard`` averages over.
        RuntimeError: no capacity, under vmap.

    Cost: with a capacity C, over n ranks, one all-to-all of E C d elements each way,
    and as many backward: each sends (n-1)/n of those; memory likewise. Dropless, first
    an all-gather of E int64, which the host waits for; then all-to-alls of n P d, where
    P is the most choices that one rank sends to another: T k/n where the load is even,
    T k where all go to one rank. A plan of it takes the load for even.

    Source: Lepikhin et al. (GShard), 2020; Gale et al. (MegaBlocks), 2022, for the
    experts' ragged groups.

    >>> from fsfunc.nn.gating import top_1_gating
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> routing = top_1_gating(torch.tensor([[9.0, -9.0], [-9.0, 9.0]]))
    >>> scales = torch.tensor([1.0, 10.0])
    >>> expert_layer(x, routing, lambda scale, x: scale * x, scales).round().tolist()
    [[1.0, 2.0], [30.0, 40.0]]
    """
    leaves, treedef = tree.flatten(params, is_sharded)
    for i, leaf in enumerate(leaves):
        if is_sharded(leaf):  # it knows its axis: one program on one device and on many
            leaves[i], axis = local_part("expert_layer", leaf, (0,), axis=axis)
    tokens = x.reshape(-1, x.shape[-1])
    experts_per_rank = _check_tokens("expert_layer", tokens, routing, axis)
    claim_rank_local(tokens, axis, "expert_layer")
    for i, leaf in enumerate(leaves):
        if (
            not isinstance(leaf, Tensor)
            or not leaf.ndim
            or len(leaf) != experts_per_rank
        ):
            path = tree.paths(params, is_sharded)[i]
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
            raise ValueError(
                f"expert_layer: params{path and f' at {path!r}'} is of {shape}: give "
                f"this rank's {experts_per_rank} of {len(routing.counts)} experts "
                "along dim 0"
            )

    def run_one_expert(parts: list[Any], rows: Tensor) -> Tensor:
        return expert_fn(tree.unflatten(treedef, parts), rows)

    def run_experts(rows: Tensor, sizes: list[int]) -> Tensor:
        """Runs the experts on rows that lie expert after expert."""
        if grouped:
            # Summed on the CPU, where ``sizes`` are: one small copy to the device.
            ends = (
                torch.tensor(sizes, device="cpu").cumsum(0).to(rows.device, torch.int32)
            )
            return expert_fn(tree.unflatten(treedef, leaves), rows, ends)
        unbound = [leaf.unbind(0) for leaf in leaves]
        groups = enumerate(rows.split(sizes))
        return torch.cat(
            [run_one_expert([u[i] for u in unbound], part) for i, part in groups]
        )

    if routing.capacity is None:
        y = run_without_capacity(tokens, routing, axis, experts_per_rank, run_experts)
    else:
        places = dispatch(tokens, routing, axis)
        if grouped:
            m = places.shape[1]
            outputs = run_experts(places.flatten(0, 1), [m] * experts_per_rank)
            check_rows(outputs, experts_per_rank * m)
            outputs = outputs.unflatten(0, (experts_per_rank, m))
        else:
            # "different": dropout, for one, draws for each expert anew.
            outputs = torch.func.vmap(run_one_expert, randomness="different")(
                leaves, places
            )
        y = combine(outputs, routing, axis)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def dispatch(x: Tensor, routing: Routing, axis: Axis | None = None) -> Tensor:
    """Sends tokens to their experts' ranks; returns those for this rank's experts.

    Args:
        x: [T, d], this rank's tokens.
        routing: theirs, with a capacity C, which is the same on every rank.
        axis: the mesh axis that the E experts are spread over; None: all are here.

    Returns:
        [E/n, n C, d]: expert by expert, C places for each rank in axis order, with
        zeros in empty places.

    Raises:
        ValueError: experts that the axis does not divide; a routing of other tokens, or
            without a capacity.

    Transpose: :func:`combine` with weights of 1.

    Cost: one all-to-all of E C d elements, of which (n-1)/n are sent; as much backward.

    >>> from fsfunc.nn.routing import route
    >>> ones = torch.ones(2, 1, dtype=torch.int64)
    >>> routing = route(ones, torch.ones(2, 1), 2, capacity_factor=2)
    >>> dispatch(torch.tensor([[3.0], [4.0]]), routing).tolist()
    [[[0.0], [0.0]], [[3.0], [4.0]]]
    """
    _check_tokens("dispatch", x, routing, axis)
    claim_rank_local(x, axis, "dispatch")
    capacity = _capacity("dispatch", routing)
    experts = len(routing.counts)
    slots = routing.indices * capacity + routing.positions
    buffer = place_rows(x, slots, routing.kept, experts * capacity)
    buffer = buffer.unflatten(0, (experts, capacity))
    if axis is None:
        return buffer
    return all_to_all(buffer, axis, split_dim=0, concat_dim=1)


def combine(y: Tensor, routing: Routing, axis: Axis | None = None) -> Tensor:
    """Sends experts' results back; returns each token's weighted sum of them.

    Args:
        y: [E/n, n C, d'], one row for each that :func:`dispatch` gave.
        routing, axis: those of the :func:`dispatch`.

    Returns:
        [T, d'], of the dtype of ``y``; the sum is taken in that of the weights.

    Raises:
        ValueError: another number of experts or places.

    Transpose: :func:`dispatch`, with weights.

    Cost: one all-to-all of E C d' elements, (n-1)/n of them sent; as much backward.

    >>> from fsfunc.nn.routing import route
    >>> ones = torch.ones(2, 1, dtype=torch.int64)
    >>> routing = route(ones, torch.ones(2, 1), 2, capacity_factor=1)
    >>> combine(torch.tensor([[[3.0]], [[4.0]]]), routing).tolist()
    [[4.0], [0.0]]
    """
    capacity = _capacity("combine", routing)
    experts = len(routing.counts)
    n, experts_per_rank = _experts_per_rank("combine", experts, axis)
    if y.ndim != 3 or y.shape[:2] != (experts_per_rank, n * capacity):
        raise ValueError(
            f"combine: y of shape {tuple(y.shape)} for {experts_per_rank} experts with "
            f"{n} x {capacity} places: give [{experts_per_rank}, {n * capacity}, "
            "features]"
        )
    if axis is not None:
        y = all_to_all(y, axis, split_dim=1, concat_dim=0)
    slots = routing.indices * capacity + routing.positions
    return sum_weighted_rows(y.flatten(0, 1), slots, routing)


def _experts_per_rank(caller: str, experts: int, axis: Axis | None) -> tuple[int, int]:
    """Returns the number of ranks, and the number of experts on each."""
    if axis is None:
        return 1, experts
    n = axis_size(axis)
    if experts % n:
        raise ValueError(
            f"{caller}: {experts} experts over axis {axis_text(axis)} of size {n}: "
            f"{experts} is not a multiple of {n}"
        )
    return n, experts // n


def _check_tokens(caller: str, x: Tensor, routing: Routing, axis: Axis | None) -> int:
    """Returns the number of experts on a rank; checks that the routing is of ``x``."""
    if x.ndim != 2 or len(x) != len(routing.indices):
        raise ValueError(
            f"{caller}: tokens of shape {tuple(x.shape)}, but the routing is of "
            f"{len(routing.indices)}: give [tokens, features], as they were gated"
        )
    return _experts_per_rank(caller, len(routing.counts), axis)[1]


def _capacity(caller: str, routing: Routing) -> int:
    """Returns the routing's capacity; raises ValueError if it has none."""
    if routing.capacity is None:
        raise ValueError(
            f"{caller}: a routing without a capacity: gate with capacity_factor=, or "
            "call expert_layer, which takes all tokens"
        )
    return routing.capacity
