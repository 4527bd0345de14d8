"""The vector-Jacobian product of one stage for one microbatch.

``backward`` is the whole of it. ``input_gradient`` and then ``weight_gradient`` are its
two halves, with the same operations in all: the schedule can pass the input gradients
on first, and fill a bubble with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsfunc.pipelining.backward_split import SplitBackward
from fsfunc.pipelining.fused_gradients import pull_back
from fsfunc.runtime.buffer_pool import BufferPool

__all__ = ["StageVjp"]

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
