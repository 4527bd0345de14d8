"""What a stage keeps of one microbatch's forward pass, and how it pulls back.

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
        self.state = "new"
        self.rest: Callable[[], None] | None = None  # for weight_gradient

    def backward(
        self, cotangents: Sequence[Tensor | None], give: Give | None = None
    ) -> list[Tensor | None]:
        """The inputs' gradients, None where there is none; adds to the parameters'.

        Args:
            cotangents: one for each output, None for zero.
            give: called with what is returned as soon as it is there: before the
                products of weights, whose factors are kept till then.

        Raises:
            RuntimeError: it has been used.
            ValueError: cotangents unlike the outputs in number.

        Cost: one backward pass, which frees the graph as it goes.
        """
        edges, grads = self._start("backward", "spent", cotangents)
        inputs, parameters = self.inputs, self.parameters
        self._forget()
        found: list[Tensor | None] = []

        def take() -> None:
            found.extend(x.grad for x in inputs)
            for x in inputs:
                x.grad = None
            if give is not None:
                give(found)

        between = None if give is None else take
        pull_back(edges, grads, inputs, parameters, self.pool, between)
        if give is None:
            take()
        return found

    def input_gradient(
        self, cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The inputs' gradients, None where there is none; the rest is for later.

        The arguments and errors are those of :meth:`backward`.

        Cost: the operations that lead to the inputs, and of the rest those that one
        kernel does together with them. What the weight gradients need is kept.
        """
        edges, grads = self._start("input_gradient", "half", cotangents)
        split = SplitBackward(edges, self.inputs, self.parameters, self.pool)
        self._forget()
        self.rest = split.weight_gradient
        del edges
        return split.input_gradient(grads)

    def weight_gradient(self) -> None:
        """Adds to the parameters' gradients what ``input_gradient`` left.

        Raises:
            RuntimeError: not right after ``input_gradient``, and once.
        """
        if self.state != "half" or self.rest is None:
            raise RuntimeError(
                "weight_gradient comes after input_gradient, and once: "
                + _SAYS[self.state]
            )
        self.state = "spent"
        rest, self.rest = self.rest, None
        rest()

    def _start(
        self, what: str, then: str, cotangents: Sequence[Tensor | None]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        if self.state != "new":
            raise RuntimeError(
                f"{what} of a forward pass that is used: {_SAYS[self.state]}"
            )
        if len(cotangents) != len(self.outputs):
            raise ValueError(
                f"{len(cotangents)} cotangents for {len(self.outputs)} outputs"
            )
        self.state = then
        both = zip(self.outputs, cotangents, strict=True)
        pairs = [(edge, g) for edge, g in both if g is not None]
        return [edge for edge, _ in pairs], [g for _, g in pairs]

    def _forget(self) -> None:
        self.outputs, self.inputs, self.parameters = [], [], []


_SAYS = {
    "new": "nothing has been pulled back yet",
    "half": "its input gradients are out, and weight_gradient is due",
    "spent": "all its gradients are out; record another forward pass",
}
