"""NaN in all memory that nobody has written: what reads it, shows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsfunc.runtime.buffer_pool import BufferPool

__all__ = ["poison"]


@contextmanager
def poison() -> Iterator[None]:
    """Fills memory that means nothing yet, or no more, with NaN.

    Inside, the buffers of gathers and reductions are spoiled as they are handed out and
    as they are let go of, and so is what ``torch.empty`` and its like return (integers:
    their largest). A step that reads a stale buffer, or padding, then returns NaN,
    where it may have been right by chance.

    It holds for the whole process, on CPU and CUDA.

    >>> import torch
    >>> with poison():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    poisoned = BufferPool.poison
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic.*")
        try:
            # torch fills what is new only where it is asked to be deterministic.
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = True
            BufferPool.poison = True
            yield
        finally:
            BufferPool.poison = poisoned
            settings.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(was, warn_only=warned)
