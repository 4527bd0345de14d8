"""FSDP where there is no GPU: what it computes, not when."""

import contextlib
from typing import Any

import torch
from torch import Tensor


def without_cuda() -> None:
    """FSDP orders its work by streams of CUDA; without them all is in order."""

    class Stream:
        def __init__(self, *args: Any, **keywords: Any):
            pass

        def nothing(self, *args: Any) -> None:
            pass

        wait_stream = wait_event = synchronize = nothing
        __eq__ = lambda self, other: True  # noqa: E731
        __hash__ = lambda self: 0  # noqa: E731

    one = Stream()
    cuda: Any = torch.cuda
    tensor: Any = Tensor
    cuda.Stream, cuda.current_stream = Stream, lambda *a: one
    cuda.stream = lambda *a: contextlib.nullcontext()
    cuda.synchronize = lambda *a, **k: None
    cuda.is_available = lambda: True
    tensor.record_stream = lambda self, *a: None
    tensor.pin_memory = lambda self, *a: self
    tensor.cuda = lambda self, *a, **k: self
    # What is read from a device is a copy: FSDP gathers each moment into one buffer.
    tensor.cpu = lambda self, *a, **k: self.clone()
