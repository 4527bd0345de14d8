"""A batch cut into microbatches, and their results joined into one, on every rank.

`handler` calls these around a `runtime.Worker`: before it `cut_batch`, after it
`combine_results` (of a gradient call) or `join_forwards` (of a forward pass), then
`broadcast_results`. For a mean loss L over rows, cut into M microbatches,

    L = sum over m of share_m * L_m / M,    share_m = M * rows_m / rows

and a `Weighted` loss is the sum of the microbatches' totals over that of their weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import typed_like
from fsfunc.comm.groups import RankGroup
from fsfunc.core.frames import Frame
from fsfunc.core.losses import (
    Weighted,
    add_aux,
    add_weights,
    counts_as_leaf,
    divide_aux,
    is_averaged,
)
from fsfunc.core.outcomes import BatchArgnums, GradientCall, Leaves
from fsfunc.optim.leaves import stored_dtype
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.layout import Owned
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.packing import as_packed_tree
from fsfunc.tracing.programs import Outputs, Spec
from fsfunc.transforms.microbatches import Microbatches, warn_narrow
from fsfunc.tree.types import Leaf, PyTree

if TYPE_CHECKING:
    from fsfunc.pipelining.stage_plans import Cut

_T = TypeVar("_T")


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a gradient call.

    Args:
        call: the gradient call on it; arguments that are not cut are whole in it.
        share: the weight of its mean: its rows, over those of an average microbatch.
        cut: the program of the loss for its shapes, in stages; `handler` fills it in.
    """

    call: GradientCall
    share: float
    cut: Cut = None  # type: ignore[assignment]


def cut_batch(
    call: GradientCall, n: int, chosen: BatchArgnums | None
) -> list[Microbatch]:
    """Returns ``n`` microbatches along dim 0, as even as can be, the smaller ones last.

    Args:
        chosen: ``batch_argnums`` of ``pipeline``, if given.

    Raises:
        ValueError: batch leaves that differ in dim 0, or fewer rows than parts; several
            arguments that may be the batch; a batch that is differentiated.
    """
    cut = Microbatches(call, n, chosen, "pipeline")
    # What is differentiated are the parameters, which every microbatch reads whole.
    for i in call.argnums:
        if cut.is_cut(i):
            raise ValueError(_ROWS.format(i))
    return [Microbatch(cut.part(m), cut.share(m)) for m in range(n)]


_ROWS = (
    "argument {} is differentiated, and is part of the batch: a pipeline takes what it "
    "differentiates for parameters, and does not cut it. Gradients by rows come from "
    "ff.accumulate(ff.pipeline(f, ..., n_microbatches=1), n, batch_argnums=...)"
)


def fold_mean(microbatches: Sequence[Microbatch]) -> tuple[list[Microbatch], int]:
    """Returns microbatches whose shares are divided by their number, and 1.

    If their number is no power of two it returns them as they are, and the number. To
    divide by a power of two is exact at any time, so the loss's cotangent is divided
    now instead of all gradients later.
    """
    n = len(microbatches)
    if n & (n - 1):
        return list(microbatches), n
    return [replace(part, share=part.share / n) for part in microbatches], 1


Result = tuple[Tensor, Tensor | None, PyTree]  # total, weight, aux


def blank(outputs: Outputs) -> PyTree:
    """Returns a tree of zeros of the shapes that a loss returned when recorded."""
    leaves = [x.zeros() if isinstance(x, Spec) else x for x in outputs.leaves]
    return tree.unflatten(outputs.treedef, leaves)


def combine_results(results: Sequence[Result], shares: Sequence[float]) -> Result:
    """Returns sums over microbatches, in which means count by their shares of rows."""
    totals, weights, auxes = zip(*results, strict=True)
    # A weight of None: a mean, which counts by its rows. A `Weighted` total is a sum.
    weighted_totals = zip(totals, weights, shares, strict=True)
    scaled = [
        t * share if weight is None else t for t, weight, share in weighted_totals
    ]
    return (
        functools.reduce(torch.add, scaled),
        functools.reduce(add_weights, weights),
        functools.reduce(add_aux, map(_scaled, auxes, shares)),
    )


def join_forwards(returned: Sequence[PyTree], shares: Sequence[float]) -> PyTree:
    """Returns what a forward pass over the whole batch would: means, sums and rows."""
    if isinstance(returned[0], Weighted):
        totals, weights = zip(*returned, strict=True)
        return Weighted(torch.stack(totals).sum(), sum(weights))
    if isinstance(returned[0], tuple) and isinstance(returned[0][0], Weighted):
        losses, auxes = [x[0] for x in returned], [x[1:] for x in returned]
        return join_forwards(losses, shares), *join_forwards(auxes, shares)
    return join_values(returned, shares)


def join_values(values: Sequence[PyTree], shares: Sequence[float]) -> PyTree:
    """Returns what microbatches return beside a loss as one tree: means, sums, rows."""
    scaled = [_scaled(x, share) for x, share in zip(values, shares, strict=True)]
    return divide_aux(functools.reduce(add_aux, scaled), len(scaled))


def _scaled(aux: PyTree, share: float) -> PyTree:
    if share == 1:
        return aux
    return tree.map(
        lambda x: x * share if is_averaged(x) else x, aux, is_leaf=counts_as_leaf
    )


def broadcast_results(results: _T, rank_group: RankGroup, source: int) -> _T:
    """Returns the results of the rank at index ``source``, on every rank.

    Args:
        results: a tree of one structure and the same shapes on every rank.

    Cost: one broadcast of all floating scalars together, one of all Python numbers, one
    for each other tensor.
    """
    if rank_group.size == 1:
        return results
    leaves, treedef = tree.flatten(results)
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    numbers = [i for i, x in enumerate(leaves) if x.__class__ in (bool, int, float)]
    packed = [i for i in tensors if is_averaged(leaves[i])]
    device = leaves[tensors[0]].device if tensors else None

    def broadcast(x: Tensor) -> Tensor:
        return rank_group.start("pbroadcast", x, source=source).wait()

    with label("", "loss"):
        # One message for all floating scalars, in a dtype that holds each exactly.
        if packed:
            dtypes = [leaves[i].dtype for i in packed]
            wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
            received = broadcast(torch.stack([leaves[i].to(wide) for i in packed]))
            for i, x in zip(packed, received, strict=True):
                leaves[i] = x.to(leaves[i].dtype)
        for i in tensors:
            if i not in packed:
                leaves[i] = broadcast(leaves[i].contiguous())
        # Python numbers here may be as old as the recording, from which blanks are
        # made. They travel as float64 pairs, which hold integers past 53 bits.
        if numbers:
            halves = [_split_number(leaves[i]) for i in numbers]
            received = broadcast(
                torch.tensor(halves, dtype=torch.float64, device=device)
            )
            # On paper nothing moves: there the recording's numbers stay.
            if rank_group.link.moves_data and rank_group.index != source:
                for i, (x, remainder) in zip(numbers, received.tolist(), strict=True):
                    is_integer = x.is_integer() and not isinstance(leaves[i], float)
                    leaves[i] = (
                        type(leaves[i])(int(x) + int(remainder)) if is_integer else x
                    )
    return tree.unflatten(treedef, leaves)


def _split_number(x: float) -> tuple[float, float]:
    """Returns a number as float64, and what that leaves of an integer past 53 bits.

    Raises:
        ValueError: an integer that two float64 do not hold.
    """
    near = float(x)
    remainder = float(x - int(near)) if isinstance(x, int) else 0.0
    if isinstance(x, int) and int(near) + int(remainder) != x:
        raise ValueError(
            f"a pipelined loss returns {x} beside its value, which ranks are sent "
            "as two float64, and these do not hold it: return it in several numbers"
        )
    return near, remainder


def summed_grad(x: Tensor, n: int) -> Tensor | None:
    """Returns the gradient of ``x``, summed over ``n`` microbatches.

    Warns where so many sums in a narrow dtype lose small gradients.
    """
    if x.grad is not None:
        warn_narrow(x.grad, n)
    return x.grad


def sum_shared(
    f: Frame, rank_group: RankGroup, leaves: Leaves, grads: PyTree
) -> PyTree:
    """Returns gradients in which leaves that several ranks use are summed over them.

    Each rank has the part of a gradient that its own stages make. A leaf that lies on
    one rank has all of it there; the others are summed. The dtype is one that every
    rank knows: under a shard the ``gradients`` of the call's `precision`, else the
    leaf's own. A `precision` around a unit alone is unknown to other stages, and its
    gradients are rounded.

    Args:
        f: the frame of the gradient call.
        leaves: what the call differentiates.
        grads: trees of the gradients.

    Cost: one psum for each dtype of such leaves; none if each leaf lies on one rank.
    """
    if rank_group.size == 1:
        return grads
    buffers = as_packed_tree(grads)
    tensors = list(buffers.tensors)
    precision_dtype = f.casts.gradients if f.casts is not None and f.runtimes else None
    leaf_grads = zip(leaves.leaves, leaves.treedef.flatten_up_to(grads), strict=True)
    params = [x for x, g in leaf_grads if g is not None]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, (positions, _) in enumerate(buffers.groups):
        x, leaf = tensors[i], buffers.leaves[positions[0]]
        leaf_dtype = stored_dtype(params[positions[0]])
        dtype = (
            leaf_dtype
            if precision_dtype is None or leaf_dtype.is_complex
            else precision_dtype
        )
        # Ranks whose stages cast differently would else sum unlike dtypes.
        if isinstance(x, Tensor) and is_sharded(leaf) and x.dtype != dtype:
            tensors[i] = x = space_of(x).put(x, dtype)
        if isinstance(x, Tensor) and not _is_stage_owned(leaf, rank_group.axis):
            tensors[i] = x.to_dense()  # sparse here, perhaps not on other ranks
            by_dtype.setdefault(x.dtype, []).append(i)
    # One message for each dtype: a psum for each leaf would cost its latency.
    for positions in by_dtype.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in positions])
        with label("", "shared gradients"):
            flat = rank_group.start("psum", flat).wait()
        parts = flat.split([tensors[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            tensors[i] = typed_like(part.view(tensors[i].shape), tensors[i])
    return buffers.rebuild(tensors)


def _is_stage_owned(leaf: Leaf, axis: tuple[str, ...]) -> bool:
    """Returns whether a leaf lies on one rank of the pipeline alone."""
    stage_parts: tuple[Owned, ...] = leaf.layout.owners if is_sharded(leaf) else ()
    return any(part.axis in axis for part in stage_parts)
