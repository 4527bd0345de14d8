"""Optimizer steps fused into the backward pass, unit by unit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import frame, inside
from fsfunc.core.losses import Weighted
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.reduction_hooks import GradientSteps
from fsfunc.optim.leaves import Tree, flatten_like, paths_of, trainable
from fsfunc.optim.optimizer import (
    GradientScope,
    Optimizer,
    Phases,
    State,
    begin_step,
    finish_step,
    optimizer_factory,
)
from fsfunc.sharded.leaf import FlatShard, Parts, is_sharded


@optimizer_factory
def step_in_backward(optimizer: Optimizer) -> Optimizer:
    """``optimizer``, whose step of a unit is made as soon as its gradient is there.

    Under `shard` the gradients of a step then never exist all at once: what the
    backward of a unit gives is reduced, the unit's parameters and moments are stepped,
    and the gradient is forgotten, before that of the unit before it is complete. The
    bits are those of the usual step, and so are the messages.

    A buffer is stepped once all unit calls that read it have given their gradients, in
    the last microbatch of an `accumulate` within. What a loss reads outside units, or
    without a gradient, and whole parameters, are stepped when the backward is over; so
    is everything where no `shard` is around, as on one device.

    Args:
        optimizer: one that is ``elementwise``: `sharded_adam`, `sgd`, `lion`,
            `from_torch`, `partition`, `ema` or `master_weights` of such, a `chain`, or
            an `Optimizer` of your own that says so.

    Returns:
        the optimizer; its state is that of ``optimizer``, so a run may go on with it or
        without. It makes its train step itself, ``step_in_backward(...)(grad_fn)``,
        and is the outermost one: nothing is left for others to see.

    Raises:
        ValueError: an optimizer that does not treat each element by itself, or takes
            gradients in a way of its own; gradients that it did not see being taken,
            as in a chain around it; two gradient calls in one step; a ``Weighted``
            loss, whose weight is not known before its end; ``zero=1``, which reduces
            in the end; a pipeline; a shard within ``accumulate`` or another shard.
        RuntimeError: a gradient that was used up is read.

    Cost: no communication. Of gradients a rank holds those of two units: what the
    backward of one gives, and the reduced part of the other. In place under `donate`;
    else each buffer gets new memory while the backward runs. One fused call for each
    buffer, where the usual step has one for all.

    Source: Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited
    Resources (LOMO), 2023; ``_apply_optimizer_in_backward`` of torch.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda w, x: x * w)
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = unit(w, x)
    ...     return x.mean()
    >>> optimizer = ff.step_in_backward(ff.sgd(1.0))
    >>> def main():
    ...     step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
    ...     step, x = ff.donate(step), torch.tensor([[0.0, 2.0], [2.0, 4.0]])
    ...     x = ff.local_batch(x, mesh, "data")
    ...     ws = [torch.ones(2), torch.ones(2)]
    ...     state = ff.init_state(step, ws, optimizer, x)
    ...     return ff.unshard(step(state, x)[0].params)
    >>> ff.spmd(main, mesh)()[0]
    [tensor([ 0.5000, -0.5000]), tensor([ 0.5000, -0.5000])]
    """
    if optimizer.interprets is not None or isinstance(optimizer, _InBackward):
        raise ValueError(
            "step_in_backward is given an optimizer that takes gradients in a way of "
            "its own, as loss_scale does, which sees them all before it steps: use "
            "that one without step_in_backward, or give this one what makes its steps"
        )
    if not optimizer.elementwise:
        raise ValueError(
            "step_in_backward steps a part of the parameters at a time, so it takes an "
            "optimizer that treats each element by itself, such as ff.sharded_adam, "
            f"ff.sgd or ff.lion, and not {optimizer.called}; what needs norms or all "
            "gradients takes a step without it. Of an optimizer of your own say "
            "ff.Optimizer(..., elementwise=True)"
        )
    return _InBackward(optimizer)


class _InBackward(Optimizer):
    """Such an optimizer: its functions raise, but for how gradients are taken."""

    inner: Optimizer

    def __new__(cls, inner: Optimizer) -> _InBackward:
        def unseen(grads: Tree, state: State, params: Tree = None) -> Any:
            raise ValueError(_UNSEEN)

        def apply(grads: Tree, state: State, params: Tree) -> Phases:
            unseen(grads, state)  # before any optimizer of the step writes
            yield

        self = super().__new__(cls, inner.init, unseen, apply)
        self.inner = inner
        return self

    def gradient_scope(self, state: State, params: Tree = None) -> GradientScope:
        if params is None:  # something is around, and would see gradients used up
            return GradientScope((), self)
        steps = BackwardSteps(self.inner, state, params)
        return GradientScope((steps,), steps.rest())


USED_UP = (
    "step_in_backward has used this gradient up while the backward ran; what reads "
    "gradients, such as a norm or a clip, needs the step without it"
)


class BackwardSteps(GradientSteps):
    """The steps of one train step, buffer by buffer, and of the rest in the end.

    Args:
        optimizer, state, params: as before the step.
    """

    called = "step_in_backward"
    why_spent = USED_UP

    def __init__(self, optimizer: Optimizer, state: State, params: Tree):
        self.optimizer, self.state, self.frame = optimizer, state, frame()
        self.old, self.treedef = tree.flatten(params, is_sharded)
        self.paths = paths_of(self.treedef)
        self.kept = MirroredState(state, self.old, self.treedef, self.paths)
        self.new = list(self.old)
        self.done: dict[int, FlatShard] = {}  # by identity: buffers
        self.taken, self.count = False, 1
        found: dict[int, tuple[FlatShard, list[int]]] = {}
        for i, x in enumerate(self.old):
            if is_sharded(x) and (shard := x.packed) is not None and trainable(x):
                found.setdefault(id(shard), (shard, []))[1].append(i)
        self.at = {
            key: positions
            for key, (shard, positions) in found.items()
            if len(positions) == len(shard.members)
        }

    # The gradient call

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(call: GradientCall) -> Outcome:
            f = frame()
            # A derivative that the loss itself takes, or an evaluation of it.
            if f.in_loss or not call.argnums:
                return run(call)
            if any(h.same_batch for h in f.handlers):
                raise ValueError(_PIPELINE)
            if all(i == 0 for i, _ in f.micro) and self._knows(call):
                if self.taken:
                    raise ValueError(_TWICE)
                self.taken = True
            return run(call.replace(fn=self._watched(call.fn, call.has_aux)))

        return stepped

    def begins(self, call: GradientCall) -> None:
        if call.cotangent != 1:
            raise ValueError(_SCALED)

    def _knows(self, call: GradientCall) -> bool:
        """True if it differentiates some of the parameters that are to be stepped."""
        chosen = [call.args[i] for i in call.argnums]
        known = set(map(id, self.old))
        for x in tree.leaves(chosen, is_leaf=is_sharded):
            if id(x) in known or is_sharded(x) and id(x.packed) in self.at:
                return True
        return False

    def _watched(self, fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        """``fn``, whose loss is a mean; how many microbatches there are is noted."""

        @functools.wraps(fn)
        def loss(*args: Any, **keywords: Any) -> Any:
            self.count = math.prod(n for _, n in frame().micro)
            out = fn(*args, **keywords)
            value = out[0] if has_aux and isinstance(out, tuple) and out else out
            if isinstance(value, Weighted):
                raise ValueError(_WEIGHTED)
            return out

        return loss

    def for_call(
        self, keeps: dict[int, FlatShard], parts: Parts
    ) -> BackwardSteps | None:
        self.parts = parts
        tracer = frame().tracer
        runs = tracer is None or tracer.complete
        return self if runs and any(key in self.at for key in keeps) else None

    def takes(self, shard: FlatShard) -> bool:
        beside = any((id(shard), id(m)) in self.parts for m in shard.members)
        return id(shard) in self.at and not beside

    def step(self, shard: FlatShard, grad: Tensor, mean_size: int) -> None:
        if id(shard) in self.done:
            raise RuntimeError(f"a gradient of {shard.name} came after its step")
        positions = self.at[id(shard)]
        with inside(self.frame), torch.no_grad():
            if mean_size > 1:
                grad.div_(mean_size)
            if self.count > 1:
                grad.div_(self.count)
            made = zip(shard.members, shard.like(grad).leaves(), strict=True)
            by = {id(layout): leaf for layout, leaf in made}
            grads = {self.paths[i]: by[id(self.old[i].layout)] for i in positions}
            self._commit(positions, self._phases(positions, grads))
        self.done[id(shard)] = shard

    def _phases(self, positions: list[int], grads: dict[str, Any]) -> Phases:
        params = {self.paths[i]: self.old[i] for i in positions}
        return self.optimizer.phases(grads, self.kept.part(positions), params, True)

    def _commit(self, positions: list[int], phases: Phases) -> None:
        params, state = finish_step(phases)
        for i in positions:
            self.new[i] = params[self.paths[i]]
        self.kept.take(positions, state)

    # What is left

    def rest(self) -> Optimizer:
        """The optimizer that steps the other leaves, and returns the whole state."""
        inner = self.optimizer

        def update(grads: Tree, state: State, params: Tree = None) -> Any:
            if self.done:
                raise ValueError(_UNSEEN)
            return inner.update(grads, state, params)

        made = Optimizer(inner.init, update, self._apply)
        return made.described_as(inner.called, dict(inner.configuration))

    def _apply(self, grads: Tree, state: State, params: Tree) -> Phases:
        if not self.done:
            return (yield from self.optimizer.phases(grads, state, params, True))
        leaves, treedef = tree.flatten(params, is_sharded)
        found = flatten_like(treedef, grads, "gradients")
        stepped = {i for key in self.done for i in self.at[key]}
        same = len(leaves) == len(self.old) and state is self.state
        if not same or any(
            leaves[i] is not self.old[i]
            or not _is_used_up_gradient(found[i], self.old[i])
            for i in stepped
        ):
            raise ValueError(_OTHERS)
        rest = [i for i, g in enumerate(found) if g is not None and i not in stepped]
        step = None
        if rest:
            grads = {self.paths[i]: found[i] for i in rest}
            step = begin_step(self._phases(rest, grads))
        yield
        if step is not None:
            self._commit(rest, step)
        return tree.unflatten(self.treedef, self.new), self.kept.whole()


class MirroredState:
    """A state, and which trees in it are like the parameters, leaf by leaf.

    A piece of it has ``{path: leaf}`` in place of each such tree, and all else as it
    is: what the optimizer's ``init`` would have made of a dict of these parameters.

    Args:
        state: the optimizer's.
        leaves, treedef, paths: of the parameters.
    """

    def __init__(
        self, state: Any, leaves: Sequence[Any], treedef: Any, paths: Sequence[str]
    ):
        self.treedef, self.paths = treedef, paths

        def column(x: Any) -> list[Any] | None:
            """The leaves of a tree like the parameters, None where they have none."""
            if treedef.type is not None and type(x) is not treedef.type:
                return None  # finding that out of a state is slow: all of it is said
            try:
                found = treedef.flatten_up_to(x)
            except ValueError:
                return None
            pairs = zip(found, leaves, strict=True)
            return (
                found
                if all(c is None or _shaped_like(c, p) for c, p in pairs)
                else None
            )

        def ends(x: Any) -> bool:
            return is_sharded(x) or column(x) is not None

        self.given, self.spec = tree.flatten(state, ends)
        columns = [column(x) for x in self.given]
        self.columns = [None if c is None else list(c) for c in columns]  # after it
        self.before = columns
        self.after = list(self.given)  # of what is like no parameters

    def part(self, positions: Sequence[int]) -> Any:
        """The piece of the leaves at ``positions``."""
        items = []
        for x, column in zip(self.given, self.before, strict=True):
            if column is not None:
                x = {self.paths[i]: column[i] for i in positions}
            items.append(x)
        return tree.unflatten(self.spec, items)

    def take(self, positions: Sequence[int], piece: Any) -> None:
        """Takes in what has become of the piece at ``positions``."""
        found = self.spec.flatten_up_to(piece)
        for k, (x, column) in enumerate(zip(found, self.columns, strict=True)):
            if column is None:
                self.after[k] = x
                continue
            for i in positions:
                column[i] = x[self.paths[i]]

    def whole(self) -> Any:
        """The state after all pieces."""
        items = []
        for x, column in zip(self.after, self.columns, strict=True):
            items.append(x if column is None else tree.unflatten(self.treedef, column))
        return tree.unflatten(self.spec, items)


def _shaped_like(x: Any, leaf: Any) -> bool:
    """True if a leaf of a state may be one for each element of a parameter."""
    if is_sharded(leaf) != is_sharded(x) or not (
        is_sharded(x) or isinstance(x, Tensor)
    ):
        return False
    return tuple(x.shape) == tuple(leaf.shape)


def _is_used_up_gradient(grad: Any, leaf: Any) -> bool:
    """True if that is the gradient of a leaf, and used up."""
    spent = getattr(grad, "spent", "") == USED_UP
    return spent and grad.layout is leaf.layout


_UNSEEN = (
    "step_in_backward did not see these gradients being taken: have it make the train "
    "step, step_in_backward(optimizer)(grad_fn), with nothing around it. What needs "
    "all gradients, as clip_by_global_norm, loss_scale or apply_if_finite do, is for a "
    "step without it; other transformations go within it, as in "
    "step_in_backward(chain(clip_by_value(1.0), sharded_adam(1e-3)))"
)
_OTHERS = (
    "step_in_backward has stepped parameters while the backward ran, and is given "
    "other parameters, another state or other gradients: apply what its grad_fn "
    "returned to the state that the step was given"
)
_PIPELINE = (
    "step_in_backward in a pipeline: stages read parameters until the last microbatch; "
    "use the optimizer without it"
)
_WEIGHTED = (
    "step_in_backward with a Weighted loss: its weight is known only at the end. "
    "Return a mean, or use the optimizer without step_in_backward"
)
_SCALED = (
    "step_in_backward where the backward starts from another number than 1, as under "
    "loss_scale: scale the loss itself, or use the optimizer without step_in_backward"
)
_TWICE = (
    "step_in_backward in a step that takes gradients twice, the second time of "
    "parameters that are stepped already: make it one loss, or use the optimizer "
    "without step_in_backward"
)
