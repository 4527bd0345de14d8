"""A torch-function mode for the type check: gradients, shapes and values asked for.

Operators do not tell it: gradients are taken, shapes and values leave the tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch, tree
from fsfunc.comm.attribution import called_by_user
from fsfunc.tracing.checker import Checker
from fsfunc.tracing.runs import with_data
from fsfunc.tracing.steadiness import said

_SHAPES: dict[Any, str] = {
    Tensor.shape.__get__: "shape",  # type: ignore[attr-defined]
    Tensor.ndim.__get__: "ndim",  # type: ignore[attr-defined]
    Tensor.size: "size",
    Tensor.dim: "dim",
    Tensor.numel: "numel",
    Tensor.nelement: "nelement",
    Tensor.__len__: "len",
    Tensor.ndimension: "ndimension",
    Tensor.stride: "stride",
    Tensor.nbytes.__get__: "nbytes",  # type: ignore[attr-defined]
}


_VALUES: dict[Any, str] = {
    Tensor.numpy: "numpy",
    Tensor.tolist: "tolist",
    Tensor.__array__: "numpy",
    Tensor.__dlpack__: "dlpack",
}
_SHOWN = {Tensor.__repr__, Tensor.__format__}


class Asked(TorchFunctionMode):
    """Reports gradients taken by autograd, shapes and values asked for, to a checker.

    It also records the numbers that functions are given.
    """

    def __init__(self, checker: Checker):
        super().__init__()
        self.checker = checker

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if name := _SHAPES.get(func):
            asker = sys._getframe(1)
            while asker.f_code.co_name in ("__len__", "handle_torch_function"):
                asker = asker.f_back or asker
            if called_by_user(asker):
                self.checker.measured(args[0], name)
            return func(*args, **(kwargs or {}))
        if (words := said(func, args, kwargs)) is not None:
            self.checker.said.append(words)
        if func in _SHOWN or func in _VALUES:
            return self._values(func, args, kwargs or {})
        if func in (Tensor.backward, torch.autograd.backward):
            return self._backward(func, args, kwargs or {})
        self.checker.indexing = func is Tensor.__getitem__
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self.checker.indexing = False
        if func is torch.autograd.grad:
            given = dict(zip(("outputs", "inputs"), args, strict=False)) | (
                kwargs or {}
            )
            inputs = given["inputs"]
            inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            of = [given["outputs"], given.get("grad_outputs")]
            self.checker.pulled(inputs, out, of)
        return out

    def _values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a function that takes values out of torch, or prints them."""
        if _torch.is_wrapped(args[0]):
            return func(*args, **kwargs)
        if (name := _VALUES.get(func)) is not None:
            value = self.checker.asked(name, args[0])
        else:
            value = _torch.value_of(args[0])
        with _torch.beneath_all_modes():
            value = with_data(args[0]) if value is None else value
            return func(value, *args[1:], **kwargs)

    def _backward(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        roots = [x.grad_fn for x in tree.leaves(args) if isinstance(x, Tensor)]
        nodes = _torch.graph_nodes(roots, set())
        found = [getattr(node, "variable", None) for node in nodes]
        leaves = [x for x in found if x is not None]
        out = func(*args, **kwargs)
        self.checker.pulled(leaves, [x.grad for x in leaves], args)
        return out
