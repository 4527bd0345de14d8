"""The bytes of a tensor, without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

__all__ = ["bytes_of", "copy"]


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, to be read and written.

    The view keeps the tensor alive. numpy would do the same, but not for bfloat16, and
    it is not a dependency.

    >>> import torch
    >>> bytes_of(torch.tensor([1, 258], dtype=torch.int16)).tolist()
    [1, 0, 2, 1]
    """
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            f"a view of bytes needs a contiguous CPU tensor, not {x.device}"
        )
    if x.nbytes == 0:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.tensor = x
    return memoryview(memory).cast("B")


def copy(into: memoryview, source: memoryview) -> None:
    """Fills ``into`` with the first bytes of ``source``, both writable.

    Other threads run meanwhile, as they do not for a slice's assignment; and it takes
    no threads of its own, as torch's copies do.

    >>> into = bytearray(2)
    >>> copy(memoryview(into), memoryview(bytearray(b"abc")))
    >>> into
    bytearray(b'ab')
    """
    if len(into) > len(source):
        raise ValueError(f"{len(into)} bytes are to come from {len(source)}")
    if len(into):
        target, first = map(ctypes.c_char.from_buffer, (into, source))
        ctypes.memmove(ctypes.byref(target), ctypes.byref(first), len(into))
