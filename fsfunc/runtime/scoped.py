"""A context variable's value for the length of a ``with`` block."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

__all__ = ["Scoped"]


class Scoped:
    """``with Scoped(var, value)``: a class, since each unit call opens several.

    >>> var = ContextVar("var", default=0)
    >>> with Scoped(var, 1):
    ...     var.get()
    1
    >>> var.get()
    0
    """

    __slots__ = ("var", "value", "token")

    def __init__(self, var: ContextVar[Any], value: Any):
        self.var, self.value = var, value

    def __enter__(self) -> Any:
        self.token = self.var.set(self.value)
        return self.value

    def __exit__(self, *_: Any) -> None:
        self.var.reset(self.token)
