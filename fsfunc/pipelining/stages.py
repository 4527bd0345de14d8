"""One stage of the user's own loss: its forward pass and its backward pass.

A unit call of another stage returns the received value, if this stage depends on it,
and otherwise a placeholder: a fake tensor of the right shape. Operations between the
calls run where their results are used, and the loss ends after the stage's last unit.

``backward`` is the whole backward pass. ``input_gradient`` and then ``weight_gradient``
are its two halves, with the same operations in all: a schedule can send the input
gradients first, and fill a bubble with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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

CAPTURED = (
    "what the loss does may change with its arguments, not with what its function "
    "captured; pass what changes as an argument"
)


class Ended(BaseException):
    """A stage's last unit has run. Not an Exception: a loss must not swallow it."""


class _Here(Stage):
    """In place of the stage's own run, for a call that was let through."""

    def unit(self, run: Any, call: Call) -> Any:
        return run


_HERE = _Here()


@dataclass(eq=False)
class StageRun(Stage):
    """Runs, of the unit calls of a loss, those of one stage, for one microbatch.

    Args:
        cut: the program of this microbatch's shapes, cut.
        plan: the stage.
        received: values of other stages that this one depends on.
        tied: whether each call needs a thread, so that its backward always runs.

    After the run ``made`` has the values that other stages depend on, ``starts`` and
    ``ends`` those of the threads.
    """

    cut: Cut
    plan: StagePlan
    received: Mapping[Value, Tensor]
    tied: bool

    def __post_init__(self) -> None:
        consumers = self.cut.consumers(self.plan.number)
        self.wanted = {v for _, values in consumers for v in values}
        self.made: dict[Value, Tensor] = {}
        self.starts: list[Tensor] = []
        self.ends: list[Tensor] = []
        self.stance = _torch.compiler_stance()  # of units; what is between runs plainly

    def decide(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        known, k = self.cut.program.calls, call.number
        name = call.unit.__name__
        if k >= len(known) or name != known[k].name:
            there = f"{known[k].name!r}" if k < len(known) else "no further call"
            raise RuntimeError(
                f"call {k} of the loss is of unit {name!r}, but when it was recorded "
                f"there was {there}: a pipelined loss must make the same unit calls on "
                "every rank and for every microbatch"
            )
        if k not in self.plan.calls:
            return self._elsewhere(k)
        self.check((params, inputs, keywords), f"call {k}, of unit {name!r},")
        out = self._here(call, params, inputs, keywords)
        if k == self.plan.calls[-1] and not self.plan.makes_loss:
            raise Ended
        return out

    def check(self, values: Any, what: str) -> None:
        """Raises if ``values`` have a placeholder for a value that was not sent."""
        for x in tree.leaves(values):
            if isinstance(x, _torch.FakeTensor) and not _torch.fake_active():
                raise RuntimeError(
                    f"{what} depends on an output of a stage on which it did not when "
                    f"the loss was recorded: {CAPTURED}"
                )

    def check_loss(self, returned: Any) -> None:
        """Raises where a loss returned what no other rank expects."""
        self.check(returned, "the loss")
        leaves, treedef = tree.flatten(returned)
        known = self.cut.program.loss.outputs
        found = [_look(x) for x in leaves]
        if treedef != known.treedef or found != [_look(x) for x in known.leaves]:
            raise RuntimeError(
                f"the loss returned {treedef} of {found}, but when it was recorded "
                f"{known}: {CAPTURED}"
            )

    def check_made(self, tracked: bool) -> None:
        """Raises where others wait for something else than what this stage made."""
        for value, x in self.made.items():
            spec = self.cut.spec(value)
            what = f"call {value.call}, of unit "
            what += f"{self.cut.program.calls[value.call].name!r},"
            if (x.shape, x.dtype) != (spec.shape, spec.dtype):
                raise RuntimeError(
                    f"{what} gave {x.dtype} {tuple(x.shape)} for another stage, where "
                    f"{spec.dtype} {tuple(spec.shape)} was recorded: the shape of what "
                    "is sent may depend on shapes, not on data or on what a function "
                    "captured; pad it, or make one unit of the call and its users"
                )
            if tracked and x.requires_grad and not spec.requires_grad:
                raise RuntimeError(
                    f"{what} is differentiated, and was not when the loss was "
                    f"recorded: {CAPTURED}"
                )

    def _here(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        leaves = tree.leaves(params) if self.tied else []
        device = next((x.device for x in leaves if isinstance(x, Tensor)), None)
        thread = UnitToken(device) if self.tied else None
        # A recompute holds the call, and we hold its outputs: no circle of the two.
        handlers = (_HERE, *call.frame.handlers[1:])
        inner = Call(call.unit, call.frame.replace(handlers=handlers), call.number)
        with run_as(Running(thread)), under_stance(self.stance):
            out = inner.run(params, *inputs, **keywords)
        if thread is not None and thread.token is not thread.start:
            self.starts.append(thread.start)
            self.ends.append(thread.token)
        flat, treedef = tree.flatten(out)
        for i, x in enumerate(flat):
            value = Value(call.number, i)
            if value in self.wanted:
                self.made[value] = x
                flat[i] = self._own(value, x)
        return tree.unflatten(treedef, flat)

    def _elsewhere(self, k: int) -> Any:
        leaves = list(self.cut.stand_ins[k])
        count_as(NO_MEMORY, (x for x in leaves if isinstance(x, Tensor)))
        for i in range(len(leaves)):
            value = Value(k, i)
            leaf = self.received.get(value, leaves[i])
            leaves[i] = self._own(value, leaf)
        return tree.unflatten(self.cut.program.calls[k].outputs.treedef, leaves)

    def _own(self, value: Value, x: Any) -> Any:
        """``x``, or a copy if the loss writes into it, as others read it too.

        That holds for a placeholder too, which would keep every write and its shape.
        """
        return x.clone() if value in self.cut.program.mutated else x


def _look(x: Any) -> Any:
    """The shape and dtype of a tensor or its spec; of other leaves nothing counts."""
    real = isinstance(x, Tensor | Spec)
    return (tuple(x.shape), x.dtype) if real else None


def abstractly(x: Tensor, how: LinearMap, where: RankGroup) -> Tensor:
    """A collective in a loss: one on a placeholder sends nothing, and is not recorded.

    In a plan all tensors are fake, and the planner knows the placeholders.
    """
    if not isinstance(x, _torch.FakeTensor) or (
        _torch.fake_active() and not has_no_memory(x)
    ):
        return apply_map(x, how, where)
    with silence():
        found = apply_map(x, how, replace(where, link=AbstractLink(where.rank)))
    count_as(NO_MEMORY, [found])
    return found


Give = Callable[[list[Tensor | None]], None]


class StageVjp:
    """The graph from ``outputs`` back to ``inputs`` and ``parameters``, used once.

    Outputs are kept as edges of the graph alone, so the tensors may go.

    Args:
        outputs: tensors that require grad.
        inputs: leaves that require grad and have none.
        parameters: leaves whose ``.grad`` the pull-back adds to. Those through which
            the stage's side effects hang, such as the zeros that start a thread of
            sharded units, are among them; an output with the cotangent zero is the
            thread's end.
        pool: memory for the parameters' gradients, used again once they are gone.

    >>> import torch
    >>> x, w = torch.ones(1, 2, requires_grad=True), torch.eye(2, requires_grad=True)
    >>> vjp = StageVjp([x @ w], [x], [w])
    >>> vjp.input_gradient([torch.ones(1, 2)])[0].tolist(), w.grad
    ([[1.0, 1.0]], None)
    >>> vjp.weight_gradient(); w.grad.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        pool: BufferPool | None = None,
    ):
        self.pool = BufferPool() if pool is None else pool
        self.outputs = [get_gradient_edge(y) for y in outputs]
        self.inputs, self.parameters = list(inputs), list(parameters)
        self.rest: Callable[[], None] | None = None  # for weight_gradient

    def backward(
        self, cotangents: Sequence[Tensor | None], give: Give | None = None
    ) -> list[Tensor | None]:
        """Returns the inputs' gradients and adds to the parameters'.

        Args:
            cotangents: one for each output, None for zero.
            give: called with what is returned as soon as it is there: before the
                products of weights, whose factors are kept till then.

        Cost: one backward pass, which frees the graph as it goes.
        """
        edges, grads = self._roots(cotangents)
        later: list[Callable[[], None]] | None = None if give is None else []
        pull_back(edges, grads, self.inputs, self.parameters, self.pool, later)
        found = [x.grad for x in self.inputs]
        for x in self.inputs:
            x.grad = None
        if give is not None:
            give(found)
        for add in later or ():
            add()
        return found

    def input_gradient(
        self, cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the inputs' gradients; the parameters' are left for later.

        Args:
            cotangents: one for each output, None for zero.

        Cost: the operations that lead to the inputs, and of the rest those that one
        kernel does together with them. What the weight gradients need is kept.
        """
        edges, grads = self._roots(cotangents)
        split = SplitBackward(edges, self.inputs, self.parameters, self.pool)
        self.inputs, self.rest = [], split.weight_gradient
        del edges
        return split.input_gradient(grads)

    def weight_gradient(self) -> None:
        """Adds to the parameters' gradients what ``input_gradient`` left."""
        rest, self.rest = self.rest, None
        assert rest is not None, "input_gradient comes before weight_gradient, once"
        rest()

    def _roots(
        self, cotangents: Sequence[Tensor | None]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """The outputs that have cotangents, which are not kept, and those."""
        both = zip(self.outputs, cotangents, strict=True)
        pairs = [(edge, g) for edge, g in both if g is not None]
        self.outputs = []
        return [edge for edge, _ in pairs], [g for _, g in pairs]
