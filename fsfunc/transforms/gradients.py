"""The tree of gradients of a sharded gradient call; checks of derivatives of units.

`Sharding` runs the gradient call, in which `gradient_sums` sums the gradients of packed
buffers, and autograd computes the others. Then, here, the sums are divided into means
and put into the tree, and the gradients of replicated leaves are averaged over ranks::

    gradient of a leaf = mean over the ranks of the gradient of each rank's own loss

A parameter's derivative is one of that mean: so a unit refuses derivatives of
``torch.func`` that are taken sample by sample, or inside an enclosing unit.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from itertools import filterfalse

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.groups import RankGroup, get_group, to_strided
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import Here
from fsfunc.comm.typed_maps import MEAN, LawError, check_samples
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import frame
from fsfunc.core.losses import is_averaged, is_reduced
from fsfunc.core.outcomes import Outcome
from fsfunc.core.reduction_hooks import UNSEEN, GradientSteps
from fsfunc.core.units import Call, inside_unit
from fsfunc.sharded.leaf import PENDING, FlatShard, PendingGradient, Sharded, is_sharded
from fsfunc.sharded.packing import complete_shards
from fsfunc.transforms.shard_options import ShardOptions
from fsfunc.transforms.shard_runtime import ShardRuntime
from fsfunc.tree.types import Leaf, PyTree


def buffers_to_sum(
    differentiated: PyTree, options: ShardOptions
) -> tuple[dict[int, FlatShard], int]:
    """Returns, by id, the buffers whose gradients the runtime sums.

    They are those of this ``shard`` of which all leaves are differentiated. Returns
    also the number of differentiated leaves that are plain tensors.
    """
    leaves = tree.leaves(differentiated, is_leaf=is_sharded)
    summed: dict[int, FlatShard] = {}
    for _, shard in complete_shards(leaves):
        # One that requires grad is a part of an enclosing graph, which autograd sums.
        is_summed = differentiable(shard.flat) and not shard.flat.requires_grad
        if is_summed and options.gathers(shard.members[0]):
            summed[id(shard)] = shard
    plain = [x for x in filterfalse(is_sharded, leaves) if isinstance(x, Tensor)]
    return summed, len(plain)


class Gradients:
    """The gradients of a sharded gradient call, leaf by leaf.

    Args:
        differentiated: the arguments; ``grads``: a tree for each.
        runtime: that of the gradient call.

    Raises:
        RuntimeError: an inner transform replaced gradients that the runtime sums.
    """

    leaves: list[Leaf]
    treedef: tree.TreeDef

    def __init__(
        self, differentiated: Sequence[PyTree], grads: PyTree, runtime: ShardRuntime
    ):
        self.runtime = runtime
        arguments = tuple(differentiated)
        self.leaves, self.treedef = tree.flatten(arguments, is_leaf=is_sharded)
        # By the leaves of the arguments: a gradient may be None, which is no leaf.
        self.grads: list[Leaf] = self.treedef.flatten_up_to(grads)  # type: ignore
        pending = [g for g in self.grads if isinstance(g, PendingGradient)]
        expected = [len(shard.members) for shard in runtime.summed.values()]
        # A transform that computes with a pending gradient is refused as it reads it.
        # One that puts another in its place would be overruled by the sum, silently.
        if len(pending) < sum(expected):
            raise RuntimeError(f"a transform within shard changes gradients: {PENDING}")

    def trees(self) -> tuple[PyTree, ...]:
        """Returns the trees of gradients."""
        return tree.unflatten(self.treedef, self.grads)

    def _summed_positions(self) -> list[int]:
        """Returns the positions of leaves whose gradients the runtime sums."""
        summed = self.runtime.summed
        leaves = enumerate(self.leaves)
        return [i for i, x in leaves if is_sharded(x) and id(x.packed) in summed]

    def take_parts(self) -> None:
        """Puts gradients of parts that were read outside units into the tree."""
        for i in self._summed_positions() if self.runtime.parts else ():
            x = self.leaves[i]
            part = self.runtime.parts.get((id(x.packed), id(x.layout)))
            # None: the loss has read the part, and does not depend on it.
            if part is not None and part.grad is not None:
                self.grads[i] = x.with_local(part.grad)

    def check_observed(self) -> None:
        """Raises if some of this rank's gradient was shown to no observer.

        Raises:
            LawError: gradients of parts that the loss read outside units, or of leaves
                that ranks of the mean have other blocks of.
        """
        # The gradient of an expert's block counts the rows of all ranks that sent it
        # any: it is no rank's own.
        for shard in self.runtime.summed.values():
            if set(shard.split_axes) & set(self.runtime.options.axes):
                reason = f"{shard.name} is owned by ranks of the data"
                raise LawError(UNSEEN.format(reason))
        for i in self._summed_positions():
            if (g := self.grads[i]) is not None and g._local is not None:
                raise LawError(UNSEEN.format(f"{g.name!r} is read outside units"))

    def take_sums(self) -> None:
        """Puts the sums of the runtime into the tree, as means."""
        shards, runtime = {}, self.runtime
        steps = runtime.sums.steps
        updated = {} if steps is None else steps.done
        for key, shard in runtime.summed.items():
            if key in updated:  # in the backward, which has used up its gradient
                continue
            grad = runtime.sums.grads.get(key)
            shards[key] = shard.like(_zero_gradient(shard) if grad is None else grad)
        # What `GradientSums._store_sum` stored as a sum: see the table there.
        sums, half = [], torch.float16
        for key, s in shards.items():
            if key in runtime.sums.began_as_means:  # divided before it was added
                continue
            if half != s.flat.dtype == runtime.summed[key].flat.dtype:
                sums.append(s.flat)
        # In one kernel for all buffers.
        if sums and runtime.groups.mean_size > 1:
            torch._foreach_div_(sums, runtime.groups.mean_size)
        # By layout, as the same leaf may occur in the arguments several times.
        leaves = {}
        for key, shard in shards.items():
            by_layout = zip(map(id, shard.members), shard.leaves(), strict=True)
            leaves[key] = dict(by_layout)
        for i in self._summed_positions():
            x, direct = self.leaves[i], self.grads[i]
            if id(x.packed) in updated:  # a leaf that raises comes by `mark_updated`
                self.grads[i] = None
                continue
            mean = self.grads[i] = leaves[id(x.packed)][id(x.layout)]
            if direct is not None and direct._local is not None:  # outside units
                mean.local.add_(direct.local)

    def average_whole(self, where: RankGroup) -> None:
        """Averages the gradients of replicated leaves over ranks."""
        # Those of rank-local tensors, such as the batch, stay each rank's own.
        positions = [
            i
            for i, (x, g) in enumerate(zip(self.leaves, self.grads, strict=True))
            if isinstance(x, Tensor)
            and isinstance(g, Tensor)
            and self.runtime.ownership.is_replicated(x)
        ]
        local_grads = [self.grads[i] for i in positions]
        means = _apply_packed(local_grads, MEAN, where, "plain gradients")
        for i, x in zip(positions, means, strict=True):
            self.grads[i] = x


def mark_updated(
    grads: tuple[PyTree, ...], differentiated: Sequence[PyTree], steps: GradientSteps
) -> tuple[PyTree, ...]:
    """Returns the gradients, with leaves that raise where a buffer was updated."""
    leaves, treedef = tree.flatten(tuple(differentiated), is_leaf=is_sharded)
    marked: list[Leaf] = treedef.flatten_up_to(grads)  # type: ignore[arg-type]
    for i, x in enumerate(leaves):
        if is_sharded(x) and id(x.packed) in steps.done:
            marked[i] = Sharded(None, x.layout, why_unusable=steps.why_consumed)
    return tree.unflatten(treedef, marked)


def _zero_gradient(shard: FlatShard) -> Tensor:
    """Returns the gradient of a buffer that no unit read on any rank."""
    casts, space, flat = frame().casts, shard.space, shard.flat
    zeros = space.empty_like(flat, scratch=True).zero_()
    # In the dtype that the others have, by `precision(gradients=)`.
    dtype = None if casts is None or flat.is_complex() else casts.gradients
    return zeros if dtype in (None, flat.dtype) else space.put(zeros, dtype)


def average_outcome(outcome: Outcome, gradients: Gradients, this_rank: Here) -> Outcome:
    """Averages an outcome over the ranks: loss, weight, aux and replicated gradients.

    In aux, floating scalars are averaged, and each `Reduced` is combined in its way.
    """
    runtime = gradients.runtime
    if runtime.groups.mean_size == 1:
        return outcome
    where = get_group(runtime.options.axes, this_rank)
    aux, aux_def = tree.flatten(outcome.aux, is_leaf=is_reduced)
    picked = [i for i, x in enumerate(aux) if is_averaged(x)]
    # All scalars in one message.
    one = torch.ones_like(outcome.total) if outcome.weight is None else outcome.weight
    values = [outcome.total, *[aux[i] for i in picked], one]
    with label("", "loss"):
        # At least fp32: a weight may be a count that bfloat16 cannot represent.
        wide = functools.reduce(
            torch.promote_types, [v.dtype for v in values], torch.float32
        )
        means = list(apply_map(torch.stack([v.to(wide) for v in values]), MEAN, where))
    weight = means.pop().detach()  # reduced together with what is differentiated
    weight = None if outcome.weight is None else weight.to(outcome.weight.dtype)
    for i, value in zip(picked, means[1:], strict=True):
        aux[i] = value.to(aux[i].dtype)
    # By order of appearance, which is one on all ranks: they return the same names.
    for kind in dict.fromkeys(type(x) for x in aux if is_reduced(x)):
        positions = [i for i, x in enumerate(aux) if type(x) is kind]
        values, treedef = tree.flatten([aux[i] for i in positions])
        values = _apply_packed(values, kind.over_ranks, where, kind.called)
        for i, x in zip(positions, tree.unflatten(treedef, values), strict=True):
            aux[i] = x
    gradients.average_whole(where)
    return outcome.with_grads(gradients.trees()).replace(
        total=means[0].to(outcome.total.dtype),
        weight=weight,
        aux=tree.unflatten(aux_def, aux),
    )


def _apply_packed(
    tensors: list[Tensor], linear_map: LinearMap, where: RankGroup, name: str
) -> list[Tensor]:
    """Applies a map to tensors, by one collective for each dtype."""
    tensors = [to_strided(x) for x in tensors]
    out = list(tensors)
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        by_dtype[x.dtype].append(i)
    for positions in by_dtype.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in positions])
        with label("", name):
            flat = apply_map(flat, linear_map, where)
        parts = flat.split([tensors[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            out[i] = part.view(tensors[i].shape)
    return out


def check_mapped(call: Call, taken: Sequence[Sharded]) -> None:
    """Raises if a vmap outside the unit maps over sharded leaves.

    Raises:
        LawError: it would map over the elements of this rank's part.
    """
    for leaf in taken:
        if leaf.layout.flat is not None and not leaf.local.ndim:
            raise LawError(
                f"vmap maps over {leaf.name!r} ({leaf.layout}), outside unit "
                f"{call.name!r}, which takes it: this rank's part of it is a row of "
                "elements, which have no dim 0 to map over. Map in a unit that has it "
                "whole: ff.unit(lambda params, x: vmap(fn, (0, None))(params, x), "
                "whole=True)"
            )


def check_derivatives(call: Call, taken: Sequence[Leaf], inputs: PyTree) -> None:
    """Raises if a derivative by parameters would mix samples of different ranks.

    Args:
        call: the unit call; ``taken``: its parameters, sharded or plain.
        inputs: its other arguments.

    Raises:
        LawError: the derivative is taken sample by sample, or in an enclosing unit.
    """
    # The functorch level of the innermost derivative by one of the parameters.
    innermost, name, local = 0, "", None
    for leaf in taken:
        x = leaf.local if isinstance(leaf, Sharded) else leaf
        if (level := _torch.differentiation_level(x)) > innermost:
            named = isinstance(leaf, Sharded) and leaf.name
            innermost, local = level, x
            name = repr(leaf.name) if named else "a parameter"
    if local is None:
        return
    # Taken within the enclosing unit, where derivatives are the rank's own.
    if call.frame.path and innermost > call.frame.functorch_level:
        raise inside_unit(call.frame.path, name, f"unit {call.unit.__name__!r}")
    # A vmap around the derivative, over the inputs: one derivative for each sample.
    levels = [
        _torch.vmap_levels_of(x) for x in tree.leaves(inputs) if isinstance(x, Tensor)
    ]
    mapped = any(0 < level < innermost for each in levels for level in each)
    check_samples(local, f"{name}, which unit {call.name!r} takes", mapped)
