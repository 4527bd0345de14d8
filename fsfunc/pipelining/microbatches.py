"""A batch in microbatches, and their results as one, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a gradient call.

    Args:
        call: the gradient call on it; arguments that are not cut are whole in it.
        share: the weight of its mean: its rows, over those of an average microbatch.
        cut: the program of the loss for its shapes, in stages, once that is known.
    """

    call: GradientCall
    share: float
    cut: Any = None


def cut_batch(
    call: GradientCall, n: int, chosen: BatchArgnums | None
) -> list[Microbatch]:
    """``n`` microbatches along dim 0, as even as can be, the smaller ones last.

    Args:
        chosen: ``batch_argnums`` of ``pipeline``, if given.

    Raises:
        ValueError: batch leaves that differ in dim 0, or fewer rows than parts; several
            arguments that may be the batch; a batch that is differentiated.
    """
    cut = Microbatches(call, n, chosen, "pipeline")
    for i in call.argnums:
        if cut.is_cut(i):
            raise ValueError(_ROWS.format(i))
    return [Microbatch(cut.part(m), cut.share(m)) for m in range(n)]


_ROWS = (
    "argument {} is differentiated, and is part of the batch: a pipeline takes what it "
    "differentiates for parameters, and does not cut it. Gradients by rows come from "
    "ff.accumulate(ff.pipeline(f, ..., n_microbatches=1), n, batch_argnums=...)"
)


def folded(parts: Sequence[Microbatch]) -> tuple[list[Microbatch], int]:
    """The parts, their mean folded into their shares, and the divisor that is left.

    To divide by a power of two is exact at any time: better one scalar now than all
    gradients later.
    """
    n = len(parts)
    if n & (n - 1):
        return list(parts), n
    return [replace(part, share=part.share / n) for part in parts], 1


Result = tuple[Tensor, Tensor | None, Any]  # total, weight, aux


def blank(outputs: Outputs) -> Any:
    """A tree of zeros that looks like what a loss returned."""
    leaves = [x.zeros() if isinstance(x, Spec) else x for x in outputs.leaves]
    return tree.unflatten(outputs.treedef, leaves)


def combined(results: Sequence[Result], shares: Sequence[float]) -> Result:
    """The sums over microbatches, each mean counted by its share of the rows."""
    totals, weights, others = zip(*results, strict=True)
    parts = zip(totals, weights, shares, strict=True)
    scaled = [t * share if weight is None else t for t, weight, share in parts]
    return (
        functools.reduce(torch.add, scaled),
        functools.reduce(add_weights, weights),
        functools.reduce(add_aux, map(_scaled, others, shares)),
    )


def forwarded(returned: Sequence[Any], shares: Sequence[float]) -> Any:
    """The results of a forward pass alone: means, sums, and rows joined."""
    if isinstance(returned[0], Weighted):
        totals, weights = zip(*returned, strict=True)
        return Weighted(torch.stack(totals).sum(), sum(weights))
    if isinstance(returned[0], tuple) and isinstance(returned[0][0], Weighted):
        losses, others = [x[0] for x in returned], [x[1:] for x in returned]
        return forwarded(losses, shares), *forwarded(others, shares)
    return joined(returned, shares)


def joined(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """What microbatches return beside a loss as one tree: means, sums and rows."""
    trees = [_scaled(x, share) for x, share in zip(values, shares, strict=True)]
    return divide_aux(functools.reduce(add_aux, trees), len(trees))


def _scaled(aux: Any, share: float) -> Any:
    if share == 1:
        return aux
    return tree.map(
        lambda x: x * share if is_averaged(x) else x, aux, is_leaf=counts_as_leaf
    )


def everywhere(value: Any, where: RankGroup, source: int) -> Any:
    """``value`` of the rank at index ``source``, on every rank of the pipeline.

    Args:
        value: of one structure and the same shapes on every rank.

    Cost: one broadcast of all floating scalars together, one of all Python numbers, one
    for each other tensor.
    """
    if where.size == 1:
        return value
    leaves, treedef = tree.flatten(value)
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    numbers = [i for i, x in enumerate(leaves) if x.__class__ in (bool, int, float)]
    packed = [i for i in tensors if is_averaged(leaves[i])]
    device = leaves[tensors[0]].device if tensors else None

    def sent(x: Tensor) -> Tensor:
        return where.start("pbroadcast", x, source=source).wait()

    with label("", "loss"):
        if packed:
            dtypes = [leaves[i].dtype for i in packed]
            wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
            found = sent(torch.stack([leaves[i].to(wide) for i in packed]))
            for i, x in zip(packed, found, strict=True):
                leaves[i] = x.to(leaves[i].dtype)
        for i in tensors:
            if i not in packed:
                leaves[i] = sent(leaves[i].contiguous())
        if numbers:  # those here may be as old as the program
            mine = [_in_two(leaves[i]) for i in numbers]
            found = sent(torch.tensor(mine, dtype=torch.float64, device=device))
            if where.link.moves_data and where.index != source:
                for i, (x, rest) in zip(numbers, found.tolist(), strict=True):
                    whole = x.is_integer() and not isinstance(leaves[i], float)
                    leaves[i] = type(leaves[i])(int(x) + int(rest)) if whole else x
    return tree.unflatten(treedef, leaves)


def _in_two(x: float) -> tuple[float, float]:
    """A number as a float64, and what that leaves of an integer past its 53 bits.

    Raises:
        ValueError: an integer that two float64 do not hold.
    """
    near = float(x)
    rest = float(x - int(near)) if isinstance(x, int) else 0.0
    if isinstance(x, int) and int(near) + int(rest) != x:
        raise ValueError(
            f"a pipelined loss returns {x} beside its value, which ranks are sent "
            "as two float64, and these do not hold it: return it in several numbers"
        )
    return near, rest


def summed(x: Tensor, n: int) -> Tensor | None:
    """The gradient of ``x``, a sum over ``n`` microbatches; warns if it is narrow."""
    if x.grad is not None:
        warn_narrow(x.grad, n)
    return x.grad


def sum_shared(f: Frame, where: RankGroup, of: Leaves, grads: Any) -> Any:
    """``grads``, of leaves that several stages hold the sum over the stages.

    Each rank has the part of the gradient that its own stages make. A leaf that one
    rank owns has all of it there; the others are summed. All are in the dtype that
    every rank knows: under a shard the ``gradients`` of the `precision` of the call's
    frame ``f``, else that of the leaves ``of`` which they are. A `precision` around a
    unit alone, of which other stages do not know, rounds.

    Cost: one psum for each dtype of such leaves; none where every leaf is owned.
    """
    if where.size == 1:
        return grads
    buffers = as_packed_tree(grads)
    tensors = list(buffers.tensors)
    given = f.casts.gradients if f.casts is not None and f.runtimes else None
    found = zip(of.leaves, of.treedef.flatten_up_to(grads), strict=True)
    params = [x for x, g in found if g is not None]
    chosen: dict[torch.dtype, list[int]] = {}
    for i, (positions, _) in enumerate(buffers.groups):
        x, leaf = tensors[i], buffers.leaves[positions[0]]
        own = stored_dtype(params[positions[0]])
        dtype = own if given is None or own.is_complex else given
        if isinstance(x, Tensor) and is_sharded(leaf) and x.dtype != dtype:
            tensors[i] = x = space_of(x).put(x, dtype)
        if isinstance(x, Tensor) and not _is_owned(leaf, where.axis):
            tensors[i] = x.to_dense()  # sparse here, perhaps not on other ranks
            chosen.setdefault(x.dtype, []).append(i)
    for positions in chosen.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in positions])
        with label("", "shared gradients"):
            flat = where.start("psum", flat).wait()
        parts = flat.split([tensors[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            tensors[i] = typed_like(part.view(tensors[i].shape), tensors[i])
    return buffers.rebuild(tensors)


def _is_owned(leaf: Any, axis: tuple[str, ...]) -> bool:
    parts: tuple[Owned, ...] = leaf.layout.owners if is_sharded(leaf) else ()
    return any(part.axis in axis for part in parts)
