"""The tree of gradients of a sharded gradient call; checks of derivatives of units.

Sums of packed buffers, divided into means, are put into the tree, and the gradients of
replicated leaves are averaged over the ranks. A parameter's derivative is one of that
mean: so a unit refuses derivatives of ``torch.func`` that are taken sample by sample,
or inside an enclosing unit.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.groups import RankGroup, group, strided
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.typed_maps import MEAN, LawError, check_samples
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import frame
from fsfunc.core.losses import averaged as is_averaged
from fsfunc.core.losses import is_reduced
from fsfunc.core.outcomes import Outcome
from fsfunc.core.reduction_hooks import UNSEEN, GradientSteps
from fsfunc.core.units import Call, inside_unit
from fsfunc.sharded.leaf import PENDING, FlatShard, PendingGradient, Sharded, is_sharded
from fsfunc.sharded.packing import complete_shards
from fsfunc.transforms.shard_options import ShardOptions
from fsfunc.transforms.shard_runtime import ShardRuntime


def summed_here(chosen: Any, options: ShardOptions) -> tuple[dict[int, FlatShard], int]:
    """By id, the buffers of this shard of which all leaves are differentiated.

    And the number of differentiated leaves that are plain tensors.
    """
    leaves = tree.leaves(chosen, is_leaf=is_sharded)
    summed: dict[int, FlatShard] = {}
    for _, shard in complete_shards(leaves):
        real = differentiable(shard.flat) and not shard.flat.requires_grad
        if real and options.gathers(shard.members[0]):
            summed[id(shard)] = shard
    plain = [x for x in filterfalse(is_sharded, leaves) if isinstance(x, Tensor)]
    return summed, len(plain)


class Gradients:
    """The gradients of a sharded gradient call, leaf by leaf.

    Args:
        chosen: the differentiated arguments; ``grads``: a tree for each.

    Raises:
        RuntimeError: an inner transform replaced gradients that the runtime sums.
    """

    def __init__(self, chosen: Any, grads: Any, runtime: ShardRuntime):
        self.runtime = runtime
        self.leaves, self.treedef = tree.flatten(tuple(chosen), is_leaf=is_sharded)
        # By the leaves of the arguments: a gradient may be None, which is no leaf.
        self.grads: list[Any] = self.treedef.flatten_up_to(grads)  # type: ignore
        pending = [g for g in self.grads if isinstance(g, PendingGradient)]
        due = [len(shard.members) for shard in runtime.summed.values()]
        if len(pending) < sum(due):
            raise RuntimeError(f"a transform within shard changes gradients: {PENDING}")

    def trees(self) -> Any:
        """The trees of gradients."""
        return tree.unflatten(self.treedef, self.grads)

    def _pending(self) -> list[int]:
        """The positions of leaves whose gradients the runtime sums."""
        summed = self.runtime.summed
        every = enumerate(self.leaves)
        return [i for i, x in every if is_sharded(x) and id(x.packed) in summed]

    def take_parts(self) -> None:
        """Adds gradients of parts that were read outside units to the tree."""
        for i in self._pending() if self.runtime.parts else ():
            x = self.leaves[i]
            part = self.runtime.parts.get((id(x.packed), id(x.layout)))
            if part is not None and part.grad is not None:
                self.grads[i] = x.with_local(part.grad)

    def check_observed(self) -> None:
        """Raises if some of this rank's gradient was shown to no observer.

        Raises:
            LawError: gradients of parts that the loss read outside units, or of leaves
                that ranks of the mean have other blocks of.
        """
        for shard in self.runtime.summed.values():
            if set(shard.split_axes) & set(self.runtime.options.axes):
                why = f"{shard.name} is owned by ranks of the data"
                raise LawError(UNSEEN.format(why))
        for i in self._pending():
            if (g := self.grads[i]) is not None and g._local is not None:
                raise LawError(UNSEEN.format(f"{g.name!r} is read outside units"))

    def take_sums(self) -> None:
        """Puts the sums of the runtime into the tree, as means."""
        shards, runtime = {}, self.runtime
        steps = runtime.sums.steps
        done = {} if steps is None else steps.done
        for key, shard in runtime.summed.items():
            if key in done:
                continue
            grad = runtime.sums.grads.get(key)
            shards[key] = shard.like(_zeros(shard) if grad is None else grad)
        sums, half = [], torch.float16  # GradientSums._keep divided float16 and casts
        for key, s in shards.items():
            if key in runtime.sums.earlier:
                continue  # divided as it came
            if half != s.flat.dtype == runtime.summed[key].flat.dtype:
                sums.append(s.flat)
        if sums and runtime.groups.mean_size > 1:
            torch._foreach_div_(sums, runtime.groups.mean_size)
        leaves = {}
        for key, shard in shards.items():
            made = shard.leaves()
            leaves[key] = dict(zip(map(id, shard.members), made, strict=True))
        for i in self._pending():
            x, direct = self.leaves[i], self.grads[i]
            if id(x.packed) in done:
                self.grads[i] = None
                continue
            new = self.grads[i] = leaves[id(x.packed)][id(x.layout)]
            if direct is not None and direct._local is not None:  # outside units
                new.local.add_(direct.local)

    def average_whole(self, where: RankGroup) -> None:
        """Averages the gradients of replicated leaves over ranks."""
        whole = [
            i
            for i, (x, g) in enumerate(zip(self.leaves, self.grads, strict=True))
            if isinstance(x, Tensor)
            and isinstance(g, Tensor)
            and self.runtime.ownership.is_replicated(x)
        ]
        given = [self.grads[i] for i in whole]
        means = _packed(given, MEAN, where, "plain gradients")
        for i, x in zip(whole, means, strict=True):
            self.grads[i] = x


def shown(grads: Any, chosen: Any, steps: GradientSteps) -> tuple[Any, ...]:
    """The trees of gradients, with leaves that raise where a buffer was updated."""
    old, treedef = tree.flatten(tuple(chosen), is_leaf=is_sharded)
    out: list[Any] = treedef.flatten_up_to(grads)  # type: ignore[arg-type]
    for i, x in enumerate(old):
        if is_sharded(x) and id(x.packed) in steps.done:
            out[i] = Sharded(None, x.layout, spent=steps.why_spent)
    return tree.unflatten(treedef, out)


def _zeros(shard: FlatShard) -> Tensor:
    """The gradient of a buffer that no unit read here, as those of other ranks are."""
    casts, home, flat = frame().casts, shard.space, shard.flat
    zeros = home.empty_like(flat, scratch=True).zero_()
    given = None if casts is None or flat.is_complex() else casts.gradients
    return zeros if given in (None, flat.dtype) else home.put(zeros, given)


def averaged(outcome: Outcome, found: Gradients, at: Any) -> Outcome:
    """The outcome averaged over the ranks: loss, weight, aux and replicated gradients.

    In aux, floating scalars are averaged, and what is `Reduced` combined in its way.
    """
    runtime = found.runtime
    if runtime.groups.mean_size == 1:
        return outcome
    where = group(runtime.options.axes, at)
    aux, spec = tree.flatten(outcome.aux, is_leaf=is_reduced)
    picked = [i for i, x in enumerate(aux) if is_averaged(x)]
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
        values = _packed(values, kind.over_ranks, where, kind.called)
        for i, x in zip(positions, tree.unflatten(treedef, values), strict=True):
            aux[i] = x
    found.average_whole(where)
    return outcome.with_grads(found.trees()).replace(
        total=means[0].to(outcome.total.dtype),
        weight=weight,
        aux=tree.unflatten(spec, aux),
    )


def _packed(
    tensors: list[Tensor], how: LinearMap, where: RankGroup, name: str
) -> list[Tensor]:
    """``how`` applied to tensors, one collective for each dtype."""
    tensors = [strided(x) for x in tensors]
    out = list(tensors)
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        by_dtype[x.dtype].append(i)
    for positions in by_dtype.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in positions])
        with label("", name):
            flat = apply_map(flat, how, where)
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


def check_derivatives(call: Call, taken: Sequence[Any], inputs: Any) -> None:
    """Raises if a derivative by parameters would mix samples of different ranks.

    Args:
        call: the unit call; ``taken``: its parameters, sharded or plain.
        inputs: its other arguments.

    Raises:
        LawError: the derivative is taken sample by sample, or in an enclosing unit.
    """
    inner, name, local = 0, "", None
    for leaf in taken:
        x = leaf.local if isinstance(leaf, Sharded) else leaf
        if (level := _torch.differentiation_level(x)) > inner:
            named = isinstance(leaf, Sharded) and leaf.name
            inner, name, local = level, repr(leaf.name) if named else "a parameter", x
    if local is None:
        return
    if call.frame.path and inner > call.frame.level:
        raise inside_unit(call.frame.path, name, f"unit {call.unit.__name__!r}")
    seen = [
        _torch.vmap_levels_of(x) for x in tree.leaves(inputs) if isinstance(x, Tensor)
    ]
    mapped = any(0 < level < inner for each in seen for level in each)
    check_samples(local, f"{name}, which unit {call.name!r} takes", mapped)
