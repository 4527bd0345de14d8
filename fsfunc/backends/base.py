"""What every link offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["Done", "Link", "Work"]


class Work:
    """A collective under way; ``wait`` returns this rank's result."""

    def wait(self) -> Tensor:
        raise NotImplementedError


class Done(Work):
    """A collective that is already complete."""

    def __init__(self, result: Tensor):
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class Link:
    """One rank's connection to the others of its mesh."""

    rank: int = 0
    moves_data = True

    def start(
        self, op: str, x: Tensor, where: Any, *, out: Tensor | None = None, **how: Any
    ) -> Work:
        """Issues ``op`` on contiguous ``x`` along dim 0, into ``out`` where given."""
        raise NotImplementedError

    def level(self, axis: tuple[str, ...]) -> int | None:
        """The functorch level that is this axis, on a vmap mesh."""
        return None

    def apply(self, function: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        """Calls a collective's Function on ``x``."""
        return function(x, *rest)

    def axis_index(self, where: Any) -> Any:
        """This rank's index along the axis of ``where``."""
        return where.index
