"""One stage of the user's own loss: its forward pass and its backward pass.

`runtime.Worker` makes a `StageRun` for each forward action, and from what it leaves a
`StageVjp` for the backward. Under the `StageRun` the whole loss function runs; this
stage's unit calls compute, others return what was received, or a placeholder::

    loss(params, x):   h = a(x)      y = b(h)     z = c(y)    mean(z)
    stage 0 runs a:    computes      (the loss is left)
    stage 1 runs b:    received      computes     (the loss is left)
    stage 2 runs c:    placeholder   received     computes    computes

A placeholder is a fake tensor of the right shape: nothing that this stage computes
depends on its value. Operations between unit calls run in each stage that uses their
results, so outputs of units are all that is sent. The loss itself runs, not its
recording: to replay recorded operations would lose the user's ``no_grad``, autograd
Functions, and microbatches of another size.

``StageVjp.backward`` is the whole backward pass. ``input_gradient`` and then
``weight_gradient`` are its two halves, with the same operations in all: a schedule can
send the input gradients first, and compute weight gradients in what would be a bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsfunc import _torch, tree
from fsfunc.comm.backends.abstract import AbstractLink
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import silence
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.core.execution_context import Running, UnitToken, run_as
from fsfunc.core.frames import Stage
from fsfunc.core.units import Call
from fsfunc.pipelining.backward_split import SplitBackward
from fsfunc.pipelining.fused_gradients import pull_back
from fsfunc.pipelining.stage_plans import Cut, StagePlan
from fsfunc.runtime.memory import NO_MEMORY, BufferPool, count_as, has_no_memory
from fsfunc.runtime.scopes import under_stance
from fsfunc.tracing.programs import Spec, Value
from fsfunc.tree.types import Leaf, PyTree

CAPTURED = (
    "what the loss does may change with its arguments, not with what its function "
    "captured; pass what changes as an argument"
)


class Ended(BaseException):
    """Raised after a stage's last unit, to leave the user's loss.

    Not an Exception: a loss that catches those must not swallow it.
    """


class _LetThrough(Stage):
    """Stands for the `StageRun` in a unit call of this stage, which runs as it is."""

    def unit(self, run: Callable[..., PyTree], call: Call) -> Callable[..., PyTree]:
        return run


_LET_THROUGH = _LetThrough()


@dataclass(eq=False)
class StageRun(Stage):
    """Runs one stage's unit calls of a loss, for one microbatch.

    Args:
        cut: the loss's program for this microbatch's shapes, in stages.
        plan: the stage.
        received: values of other stages that this one depends on.
        needs_tokens: whether each unit call has a token (`UnitToken`), through which
            its backward always runs. Sharded units need it: their backward reduces
            gradients with other ranks, even if the loss does not use their output.

    After the run ``produced`` has the values that other stages depend on, and
    ``start_tokens`` and ``end_tokens`` the tokens as they entered and left the units.
    """

    cut: Cut
    plan: StagePlan
    received: Mapping[Value, Tensor]
    needs_tokens: bool

    def __post_init__(self) -> None:
        consumers = self.cut.consumers(self.plan.number)
        # Values that are not sent stay out of `produced`: it would keep them alive.
        self.sent_values: set[Value] = {v for _, values in consumers for v in values}
        self.produced: dict[Value, Tensor] = {}
        self.start_tokens: list[Tensor] = []
        self.end_tokens: list[Tensor] = []
        # `Worker._F` turns compiled functions off, as a placeholder has no memory for a
        # kernel to read. A unit of this stage has real tensors, and compiles as before.
        self.unit_stance: Any = _torch.compiler_stance()

    def decide(
        self,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        """Returns what a unit call of the loss gives: computed, received, or stood for.

        Raises:
            RuntimeError: a call that was not recorded, or that needs a value which was
                not sent.
            Ended: after the last call of a stage that is not the last.
        """
        recorded, k = self.cut.program.calls, call.number
        name = call.unit.__name__
        if k >= len(recorded) or name != recorded[k].name:
            expected = (
                f"{recorded[k].name!r}" if k < len(recorded) else "no further call"
            )
            raise RuntimeError(
                f"call {k} of the loss is of unit {name!r}, but when it was recorded "
                f"there was {expected}: a pipelined loss must make the same unit calls "
                "on every rank and for every microbatch"
            )
        if k not in self.plan.calls:
            return self._stand_in(k)
        self.check((params, inputs, keywords), f"call {k}, of unit {name!r},")
        outputs = self._run_call(call, params, inputs, keywords)
        if k == self.plan.calls[-1] and not self.plan.makes_loss:
            raise Ended
        return outputs

    def check(self, values: PyTree, subject: str) -> None:
        """Raises if ``values`` contain a placeholder: a value that was not sent."""
        for x in tree.leaves(values):
            # In a plan every tensor is fake, and placeholders cannot be told by it.
            if isinstance(x, _torch.FakeTensor) and not _torch.fake_active():
                raise RuntimeError(
                    f"{subject} depends on an output of a stage on which it did not "
                    f"when the loss was recorded: {CAPTURED}"
                )

    def check_loss(self, returned: PyTree) -> None:
        """Raises if a loss returned other shapes than recorded.

        The other ranks have blanks of the recorded shapes, into which the result of the
        last stage is broadcast.
        """
        self.check(returned, "the loss")
        leaves, treedef = tree.flatten(returned)
        recorded = self.cut.program.loss.outputs
        described = [_describe(x) for x in leaves]
        if treedef != recorded.treedef or described != [
            _describe(x) for x in recorded.leaves
        ]:
            raise RuntimeError(
                f"the loss returned {treedef} of {described}, but when it was recorded "
                f"{recorded}: {CAPTURED}"
            )

    def check_made(self, tracked: bool) -> None:
        """Raises if another stage's posted receive would not fit what this one made."""
        for value, x in self.produced.items():
            spec = self.cut.spec(value)
            subject = f"call {value.call}, of unit "
            subject += f"{self.cut.program.calls[value.call].name!r},"
            if (x.shape, x.dtype) != (spec.shape, spec.dtype):
                raise RuntimeError(
                    f"{subject} gave {x.dtype} {tuple(x.shape)} for another stage, "
                    f"where {spec.dtype} {tuple(spec.shape)} was recorded: the shape "
                    "of what is sent may depend on shapes, not on data or on what a "
                    "function captured; pad it, or make one unit of the call and its "
                    "users"
                )
            if tracked and x.requires_grad and not spec.requires_grad:
                raise RuntimeError(
                    f"{subject} is differentiated, and was not when the loss was "
                    f"recorded: {CAPTURED}"
                )

    def _run_call(
        self,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        params_leaves = tree.leaves(params) if self.needs_tokens else []
        device = next((x.device for x in params_leaves if isinstance(x, Tensor)), None)
        unit_token = UnitToken(device) if self.needs_tokens else None
        # `remat` keeps the call for its recompute, and this object keeps outputs whose
        # graph keeps the recompute: with `self` among the call's handlers that would be
        # a circle, and tensors would wait for the garbage collector.
        handlers = (_LET_THROUGH, *call.frame.handlers[1:])
        inner = Call(call.unit, call.frame.replace(handlers=handlers), call.number)
        with run_as(Running(unit_token)), under_stance(self.unit_stance):
            outputs = inner.run(params, *inputs, **keywords)
        if unit_token is not None and unit_token.latest is not unit_token.start:
            self.start_tokens.append(unit_token.start)
            self.end_tokens.append(unit_token.latest)
        leaves, treedef = tree.flatten(outputs)
        for i, x in enumerate(leaves):
            value = Value(call.number, i)
            if value in self.sent_values:
                self.produced[value] = x
                leaves[i] = self._copy_if_mutated(value, x)
        return tree.unflatten(treedef, leaves)

    def _stand_in(self, k: int) -> PyTree:
        """Returns what call ``k`` of another stage gives: received values, or fakes."""
        leaves: list[Leaf] = list(self.cut.placeholders[k])
        count_as(NO_MEMORY, (x for x in leaves if isinstance(x, Tensor)))
        for i in range(len(leaves)):
            value = Value(k, i)
            leaf = self.received.get(value, leaves[i])
            leaves[i] = self._copy_if_mutated(value, leaf)
        return tree.unflatten(self.cut.program.calls[k].outputs.treedef, leaves)

    def _copy_if_mutated(self, value: Value, x: Leaf) -> Leaf:
        """Returns ``x``, or a copy if the loss writes into it: others read it too.

        Placeholders are copied too. They serve all runs of the cut, and a write that
        resizes one would be seen by the next run.
        """
        return x.clone() if value in self.cut.program.mutated else x


def _describe(x: Leaf) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Returns the shape and dtype of a tensor or its spec, None for other leaves."""
    is_tensor = isinstance(x, Tensor | Spec)
    return (tuple(x.shape), x.dtype) if is_tensor else None


def apply_or_stand_in(
    x: Tensor, linear_map: LinearMap, rank_group: RankGroup
) -> Tensor:
    """Runs a collective between a loss's units; on a placeholder it sends nothing.

    Each rank has placeholders at other places of the loss, so a collective on them
    would have no partner. It gives a tensor of the right shape, and is not recorded.
    """
    # In a plan all tensors are fake; there the planner's counter knows placeholders.
    if not isinstance(x, _torch.FakeTensor) or (
        _torch.fake_active() and not has_no_memory(x)
    ):
        return apply_map(x, linear_map, rank_group)
    with silence():
        stand_in = apply_map(
            x, linear_map, replace(rank_group, link=AbstractLink(rank_group.rank))
        )
    count_as(NO_MEMORY, [stand_in])
    return stand_in


TakeGradients = Callable[[list[Tensor | None]], None]


class StageVjp:
    """The vector-Jacobian product of one stage and microbatch, which is used once.

    Args:
        outputs: tensors that require grad.
        inputs: leaves that require grad and whose ``.grad`` is None.
        parameters: leaves to whose ``.grad`` the gradients are added. The start tokens
            of sharded units are among them, and their end tokens are outputs with the
            cotangent zero, so that every unit's backward runs.
        pool: memory for the parameters' gradients, used again once they are gone.

    >>> import torch
    >>> x, w = torch.ones(1, 2, requires_grad=True), torch.eye(2, requires_grad=True)
    >>> vjp = StageVjp([x @ w], [x], [w])
    >>> vjp.input_gradient([torch.ones(1, 2)])[0].tolist(), w.grad
    ([[1.0, 1.0]], None)
    >>> vjp.weight_gradient(); w.grad.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    pool: BufferPool
    outputs: list[GradientEdge]
    inputs: list[Tensor]
    parameters: list[Tensor]

    def __init__(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        pool: BufferPool | None = None,
    ):
        self.pool = BufferPool() if pool is None else pool
        # Edges, not the tensors: activations that no backward needs are freed.
        self.outputs = [get_gradient_edge(y) for y in outputs]
        self.inputs, self.parameters = list(inputs), list(parameters)
        self.finish_weights: Callable[[], None] | None = None  # for weight_gradient

    def backward(
        self, cotangents: Sequence[Tensor | None], give: TakeGradients | None = None
    ) -> list[Tensor | None]:
        """Returns the inputs' gradients and adds to the parameters'.

        Args:
            cotangents: one for each output, None for zero.
            give: is called with the inputs' gradients as soon as they are computed.
                Weight gradients that are products come after it; their factors stay in
                memory until then.

        Cost: one backward pass, which frees the graph as it goes.
        """
        edges, grads = self._used_outputs(cotangents)
        deferred: list[Callable[[], None]] | None = None if give is None else []
        pull_back(edges, grads, self.inputs, self.parameters, self.pool, deferred)
        # Inputs are leaves of this stage's graph, so the engine put it into ``.grad``.
        input_grads = [x.grad for x in self.inputs]
        for x in self.inputs:
            x.grad = None
        if give is not None:
            give(input_grads)
        for add in deferred or ():
            add()
        return input_grads

    def input_gradient(
        self, cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the inputs' gradients; the parameters' are left for later.

        Args:
            cotangents: one for each output, None for zero.

        Cost: the operations that lead to the inputs, and those weight gradients that
        the same kernels compute. Saved tensors that the others need stay in memory.
        """
        edges, grads = self._used_outputs(cotangents)
        split = SplitBackward(edges, self.inputs, self.parameters, self.pool)
        self.inputs, self.finish_weights = [], split.weight_gradient
        del edges  # they keep graph nodes alive that the first half frees
        return split.input_gradient(grads)

    def weight_gradient(self) -> None:
        """Adds the weight gradients that ``input_gradient`` left to the parameters'."""
        finish_weights, self.finish_weights = self.finish_weights, None
        assert finish_weights is not None, (
            "input_gradient comes before weight_gradient, once"
        )
        finish_weights()

    def _used_outputs(
        self, cotangents: Sequence[Tensor | None]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Returns the outputs' edges that have a cotangent, and these; forgets both."""
        edge_grads = zip(self.outputs, cotangents, strict=True)
        pairs = [(edge, g) for edge, g in edge_grads if g is not None]
        self.outputs = []
        return [edge for edge, _ in pairs], [g for _, g in pairs]
