"""Torch functions of a recorded step that read leaves outside of units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import tree
from fsfunc.comm.attribution import is_internal
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.groups import plain
from fsfunc.tracing.steadiness import said

_READS_NOTHING = {
    "__get__", "detach", "requires_grad_", "is_floating_point", "dim", "size", "numel",
    "element_size", "stride", "storage_offset", "is_contiguous", "untyped_storage",
    "is_complex", "__len__", "_is_view", "is_inference", "zeros_like", "empty_like",
    "ones_like", "new_zeros", "new_empty", "grad", "_make_dual", "_unpack_dual",
    "split",
}  # fmt: skip


_DERIVATIVES = {torch.autograd.grad, Tensor.backward, torch.autograd.backward}


class Reads(TorchFunctionMode):
    """Tells a `recorder.Recorder` which functions are called, and on what."""

    def __init__(self, recorder: Any):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.recorder.touched(args)
        if name == "__get__":  # of a tensor, most often its shape
            return func(*args)
        if (words := said(func, args, kwargs)) is not None:
            self.recorder.said.append(words)
        if name not in _READS_NOTHING:
            self.recorder.read((args, kwargs or {}))
        if func in _DERIVATIVES and not is_internal():
            self.recorder.plain = False
        return func(*map(_plain_in, args), **_plain_in(kwargs or {}))


def _plain_in(value: Any) -> Any:
    """An argument of a torch function, its recorded leaves as tensors."""
    if isinstance(value, (list, tuple, dict)) and value:
        return tree.map(plain, value, is_leaf=is_sharded)
    return plain(value)
