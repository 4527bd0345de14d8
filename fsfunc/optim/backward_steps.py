"""Optimizer steps fused into the backward pass, unit by unit.

Under `shard`, the runtime asks `BackwardSteps` about each buffer whose gradient it has
reduced, and hands the gradient over in place of returning it. When the backward pass is
over, the optimizer's ``apply`` steps the other leaves, and puts the state together::

    backward of unit 3, reduce, step 3 | backward of unit 2, reduce, step 2 | ... | rest
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import Frame, frame, inside
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
from fsfunc.sharded.leaf import FlatShard, Parts, Sharded, is_sharded
from fsfunc.tree.types import Leaf, PyTree

_P = ParamSpec("_P")
_T = TypeVar("_T")


@optimizer_factory
def step_in_backward(optimizer: Optimizer) -> Optimizer:
    """Makes the step of ``optimizer`` for each unit as soon as its gradient is there.

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
    """A `step_in_backward`: its own functions raise, its gradient scope makes the step.

    So gradients that it has not seen being computed are refused.
    """

    inner: Optimizer

    def __new__(cls, inner: Optimizer) -> _InBackward:
        def unseen(grads: Tree, state: State, params: Tree = None) -> NoReturn:
            raise ValueError(_UNSEEN)

        def apply(grads: Tree, state: State, params: Tree) -> Phases:
            unseen(grads, state)  # before any optimizer of the step writes
            yield

        self = super().__new__(cls, inner.init, unseen, apply)
        self.inner = inner
        return self

    def gradient_scope(self, state: State, params: Tree = None) -> GradientScope:
        # Another optimizer around would see gradients that are used up: this one is
        # returned as it is, and its functions raise.
        if params is None:
            return GradientScope((), self)
        steps = BackwardSteps(self.inner, state, params)
        return GradientScope((steps,), steps.finishing_optimizer())


USED_UP = (
    "step_in_backward has used this gradient up while the backward ran; what reads "
    "gradients, such as a norm or a clip, needs the step without it"
)


class BackwardSteps(GradientSteps):
    """The steps of one train step: buffer by buffer, and all other leaves at its end.

    Args:
        optimizer: steps a part of the leaves at a time.
        state, params: as before the step.
    """

    called = "step_in_backward"
    why_consumed = USED_UP
    optimizer: Optimizer
    state: State
    frame: Frame
    old: list[Leaf]
    treedef: tree.TreeDef
    has_gradient_call: bool
    microbatches: int

    def __init__(self, optimizer: Optimizer, state: State, params: Tree):
        # The backward pass runs in frames of its own: a step runs in this one.
        self.optimizer, self.state, self.frame = optimizer, state, frame()
        self.old, self.treedef = tree.flatten(params, is_sharded)
        self.paths: list[str] = paths_of(self.treedef)
        self.mirrored: MirroredState = MirroredState(
            state, self.old, self.treedef, self.paths
        )
        self.new: list[Leaf] = list(self.old)
        self.done: dict[int, FlatShard] = {}  # buffers that were stepped, by identity
        self.has_gradient_call, self.microbatches = False, 1
        by_buffer: dict[int, tuple[FlatShard, list[int]]] = {}
        for i, x in enumerate(self.old):
            if is_sharded(x) and (shard := x.packed) is not None and trainable(x):
                by_buffer.setdefault(id(shard), (shard, []))[1].append(i)
        # By identity, the buffers of which all leaves are here, and these positions.
        self.positions: dict[int, list[int]] = {
            key: positions
            for key, (shard, positions) in by_buffer.items()
            if len(positions) == len(shard.members)
        }

    # The gradient call

    def gradient(
        self, run: Callable[[GradientCall], Outcome]
    ) -> Callable[[GradientCall], Outcome]:
        def stepped(call: GradientCall) -> Outcome:
            current = frame()
            # A derivative that the loss itself takes, or an evaluation of it.
            if current.in_loss or not call.argnums:
                return run(call)
            if any(h.same_batch for h in current.handlers):
                raise ValueError(_PIPELINE)
            # A second call would differentiate parameters that are stepped already.
            is_first_microbatch = all(i == 0 for i, _ in current.micro)
            if is_first_microbatch and self._differentiates_params(call):
                if self.has_gradient_call:
                    raise ValueError(_TWICE)
                self.has_gradient_call = True
            return run(call.replace(fn=self._check_loss(call.fn, call.has_aux)))

        return stepped

    def begins(self, call: GradientCall) -> None:
        if call.cotangent != 1:
            raise ValueError(_SCALED)

    def _differentiates_params(self, call: GradientCall) -> bool:
        """Returns whether a call differentiates some of the parameters to step."""
        arguments = [call.args[i] for i in call.argnums]
        params = set(map(id, self.old))
        for x in tree.leaves(arguments, is_leaf=is_sharded):
            if id(x) in params or is_sharded(x) and id(x.packed) in self.positions:
                return True
        return False

    def _check_loss(self, fn: Callable[_P, _T], has_aux: bool) -> Callable[_P, _T]:
        """Wraps a loss: it must be a plain mean. Counts the microbatches too."""

        @functools.wraps(fn)
        def loss(*args: _P.args, **keywords: _P.kwargs) -> _T:
            self.microbatches = math.prod(n for _, n in frame().micro)
            returned = fn(*args, **keywords)
            value: Any = returned
            if has_aux and isinstance(value, tuple) and value:
                value = value[0]
            if isinstance(value, Weighted):
                raise ValueError(_WEIGHTED)
            return returned

        return loss

    def for_call(
        self, keeps: dict[int, FlatShard], parts: Parts
    ) -> BackwardSteps | None:
        self.parts = parts
        tracer = frame().tracer
        # A recorder that runs only a part of a step sees it without these steps.
        runs = tracer is None or tracer.complete
        return self if runs and any(key in self.positions for key in keeps) else None

    def takes(self, shard: FlatShard) -> bool:
        # A leaf that is read outside units too gets a second gradient, which comes when
        # the backward pass is over.
        read_outside = any((id(shard), id(m)) in self.parts for m in shard.members)
        return id(shard) in self.positions and not read_outside

    def step(self, shard: FlatShard, grad: Tensor, mean_size: int) -> None:
        if id(shard) in self.done:
            raise RuntimeError(f"a gradient of {shard.name} came after its step")
        positions = self.positions[id(shard)]
        with inside(self.frame), torch.no_grad():
            # Two divisions, as the usual step has them: one by their product could give
            # other bits.
            if mean_size > 1:
                grad.div_(mean_size)
            if self.microbatches > 1:
                grad.div_(self.microbatches)
            pairs = zip(shard.members, shard.like(grad).leaves(), strict=True)
            by_layout = {id(layout): leaf for layout, leaf in pairs}
            grads = {
                self.paths[i]: by_layout[id(self.old[i].layout)] for i in positions
            }
            self._commit(positions, self._phases(positions, grads))
        self.done[id(shard)] = shard

    def _phases(self, positions: list[int], grads: dict[str, Leaf]) -> Phases:
        """Makes a step of the leaves at ``positions``, as dicts by path."""
        params = {self.paths[i]: self.old[i] for i in positions}
        return self.optimizer.phases(grads, self.mirrored.part(positions), params, True)

    def _commit(self, positions: list[int], phases: Phases) -> None:
        """Finishes a step of some leaves, and stores what it made of them."""
        params, state = finish_step(phases)
        for i in positions:
            self.new[i] = params[self.paths[i]]
        self.mirrored.take(positions, state)

    # The other leaves

    def finishing_optimizer(self) -> Optimizer:
        """Makes the optimizer that steps all other leaves, and ends the step."""
        inner = self.optimizer

        def update(
            grads: Tree, state: State, params: Tree = None
        ) -> tuple[Tree, State]:
            if self.done:
                raise ValueError(_UNSEEN)
            return inner.update(grads, state, params)

        finishing = Optimizer(inner.init, update, self._apply)
        return finishing.described_as(inner.called, dict(inner.configuration))

    def _apply(self, grads: Tree, state: State, params: Tree) -> Phases:
        if not self.done:
            return (yield from self.optimizer.phases(grads, state, params, True))
        leaves, treedef = tree.flatten(params, is_sharded)
        gradients = flatten_like(treedef, grads, "gradients")
        stepped = {i for key in self.done for i in self.positions[key]}
        # Parameters are written over already: only these may be what is applied to.
        is_same_step = len(leaves) == len(self.old) and state is self.state
        if not is_same_step or any(
            leaves[i] is not self.old[i]
            or not _is_used_up_gradient(gradients[i], self.old[i])
            for i in stepped
        ):
            raise ValueError(_OTHERS)
        remaining = [
            i for i, g in enumerate(gradients) if g is not None and i not in stepped
        ]
        step = None
        if remaining:
            grads = {self.paths[i]: gradients[i] for i in remaining}
            step = begin_step(self._phases(remaining, grads))
        yield
        if step is not None:
            self._commit(remaining, step)
        return tree.unflatten(self.treedef, self.new), self.mirrored.whole()


class MirroredState:
    """An optimizer's state, of which a piece can be stepped: that of some parameters.

    Some trees in a state are like the parameters, such as ``mu``. A piece has ``{path:
    leaf}`` in place of each such tree, and everything else as it is: this is what the
    optimizer's ``init`` would have made for a dict of these parameters.

    Args:
        state: the optimizer's.
        leaves, treedef, paths: of the parameters.
    """

    treedef: tree.TreeDef
    paths: Sequence[str]
    nodes: list[PyTree]
    treedef_of_nodes: tree.TreeDef

    def __init__(
        self,
        state: State,
        leaves: Sequence[Leaf],
        treedef: tree.TreeDef,
        paths: Sequence[str],
    ):
        self.treedef, self.paths = treedef, paths

        def column_of(x: PyTree) -> list[Leaf] | None:
            """Returns the leaves of a tree like the parameters; None if it is none."""
            # First by its class: an error of `flatten_up_to` describes the whole state,
            # which is slow.
            if treedef.type is not None and type(x) is not treedef.type:
                return None
            try:
                column = treedef.flatten_up_to(x)
            except ValueError:
                return None
            pairs = zip(column, leaves, strict=True)
            fits = all(c is None or _shaped_like(c, p) for c, p in pairs)
            return column if fits else None

        def is_node(x: PyTree) -> bool:
            return is_sharded(x) or column_of(x) is not None

        # The nodes of the state: trees like the parameters (columns), and other leaves.
        self.nodes, self.treedef_of_nodes = tree.flatten(state, is_node)
        self.columns: list[list[Leaf] | None] = [column_of(x) for x in self.nodes]
        self.new_columns: list[list[Leaf] | None] = [
            None if c is None else list(c) for c in self.columns
        ]
        self.new_nodes: list[PyTree] = list(self.nodes)  # those that are no columns

    def part(self, positions: Sequence[int]) -> State:
        """Returns the piece of the parameters at ``positions``, as before the step."""
        nodes = []
        for node, column in zip(self.nodes, self.columns, strict=True):
            if column is not None:
                node = {self.paths[i]: column[i] for i in positions}
            nodes.append(node)
        return tree.unflatten(self.treedef_of_nodes, nodes)

    def take(self, positions: Sequence[int], piece: State) -> None:
        """Stores what a step has made of the piece at ``positions``."""
        nodes = self.treedef_of_nodes.flatten_up_to(piece)
        for k, (node, column) in enumerate(zip(nodes, self.new_columns, strict=True)):
            if column is None:
                self.new_nodes[k] = node
                continue
            for i in positions:
                column[i] = node[self.paths[i]]

    def whole(self) -> State:
        """Returns the state after the steps of all pieces."""
        nodes = []
        for node, column in zip(self.new_nodes, self.new_columns, strict=True):
            if column is not None:
                node = tree.unflatten(self.treedef, column)
            nodes.append(node)
        return tree.unflatten(self.treedef_of_nodes, nodes)


def _shaped_like(x: Leaf, leaf: Leaf) -> bool:
    """Returns whether a leaf of a state has an element for each of a parameter's."""
    if is_sharded(leaf) != is_sharded(x) or not (
        is_sharded(x) or isinstance(x, Tensor)
    ):
        return False
    return tuple(x.shape) == tuple(leaf.shape)


def _is_used_up_gradient(grad: Leaf, leaf: Sharded) -> bool:
    """Returns whether ``grad`` is the gradient of a leaf, and used up by its step."""
    is_used_up = getattr(grad, "why_unusable", "") == USED_UP
    return is_used_up and grad.layout is leaf.layout


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
