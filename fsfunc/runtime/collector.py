"""Python's garbage collector, for work that makes many objects and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector waits: of thousands of new values it would find none to free.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
