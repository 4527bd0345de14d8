"""What every link offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["Done", "Link", "Work"]

_ALL_AT_ONCE = (
    "no rank of a vmap mesh can {} alone: they all run as one program; use a simulated "
    "mesh"
)


class Work:
    """A collective or a transfer under way; ``wait`` returns this rank's result."""

    def wait(self) -> Tensor:
        raise NotImplementedError

    def done(self) -> bool:
        """Whether it is known to be over: asks, and waits for nothing."""
        raise NotImplementedError


class Done(Work):
    """A collective that is already complete."""

    def __init__(self, result: Tensor):
        self.result = result

    def wait(self) -> Tensor:
        return self.result

    def done(self) -> bool:
        return True


class Link:
    """One rank's connection to the others of its mesh."""

    rank: int = 0
    moves: bool = True  # data; what is only planned stays where it is
    device: str = "cpu"  # of tensors that a caller makes only to move them
    notes: dict[Any, Any] | None = None  # what ranks of one process tell each other
    level: int | None = None  # the functorch level that is the mesh, on a vmap mesh

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        what: str = "",
        **how: Any,
    ) -> Work:
        """Issues ``op`` on contiguous ``x`` along dim 0, over two ranks or more.

        The work's result is ``out`` where that is given: contiguous, of its shape.
        With ``any_order`` in ``how``, other ranks may wait for it in another order.
        ``what`` is the name of a buffer: the same one on every rank.
        """
        raise NotImplementedError

    def send(self, x: Tensor, where: Any, to: int, what: str = "") -> Work:
        """Sends contiguous ``x`` to the rank at index ``to``; see ``Group.send``."""
        raise RuntimeError(_ALL_AT_ONCE.format("send"))

    def receive(self, like: Tensor, where: Any, source: int, what: str = "") -> Work:
        """Receives into ``like`` what the rank at index ``source`` sends."""
        raise RuntimeError(_ALL_AT_ONCE.format("receive"))

    def trim(self) -> None:
        """Lets go of memory that is kept for the next collectives."""

    def apply(self, function: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        """Calls a collective's Function on ``x``."""
        return function(x, *rest)

    def exchange(self, move: Any, x: Tensor, where: Any) -> Tensor:
        """All ranks' results of ``move``, stacked along dim 0 as their inputs are."""
        raise NotImplementedError

    def axis_index(self, where: Any) -> Any:
        """This rank's index along the axis of ``where``."""
        return where.index
