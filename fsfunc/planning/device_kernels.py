"""Functions that a GPU runs as one kernel and a CPU as several.

On tensors without data torch runs what a CPU would. Inside :func:`kernels_of` a GPU a
step is planned with that one's kernels: what they read, write and save.

Source: torch's ATen, of CUDA: ``layer_norm_kernel.cu``, ``Dropout.cu``, and the choice
of attention's kernels in ``sdp_utils.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch

Kernels = Callable[[], AbstractContextManager[Any]]

_LIBRARY = torch.library.Library("fsfunc_cuda", "DEF")
_LIBRARY.define("rms_norm(Tensor x, Tensor? w, int dims) -> (Tensor, Tensor)")
_LIBRARY.define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? w) -> Tensor[]"
)


@torch.library.register_fake("fsfunc_cuda::rms_norm", lib=_LIBRARY)
def _rms_norm(x: Tensor, w: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[: x.ndim - dims], *[1] * dims)
    return torch.empty_like(x), x.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("fsfunc_cuda::rms_norm_backward", lib=_LIBRARY)
def _rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, w: Tensor | None
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (x, w) if t is not None]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, dims):  # type: ignore[override]
        y, rstd = torch.ops.fsfunc_cuda.rms_norm(x, w, dims)
        ctx.save_for_backward(x, w, rstd)
        ctx.dims = dims
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, w, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # of operators, as on a GPU
            return *_differentiable(dy, x, w, ctx.dims), None
        found = torch.ops.fsfunc_cuda.rms_norm_backward(dy, x, rstd, w)
        return (*found, *[None] * (3 - len(found)))


def _differentiable(dy: Tensor, x: Tensor, w: Tensor | None, dims: int) -> Any:
    """The derivatives of a norm, made of operators that have derivatives."""
    over = tuple(range(-dims, 0))
    rstd = torch.rsqrt(x.float().square().mean(over, keepdim=True))
    normal, g = x * rstd, dy if w is None else dy * w
    dx = rstd * (g - normal * (g * normal).mean(over, keepdim=True))
    dw = None if w is None else (dy * normal).sum_to_size(w.shape)
    return dx.to(x.dtype), None if dw is None or w is None else dw.to(w.dtype)


def _norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if weight is not None and weight.dtype != input.dtype or not input.numel():
        return NotImplemented  # these are composed on CUDA, too
    return _RMSNorm.apply(input, weight, len(normalized_shape))


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training or inplace or not 0 < p < 1:
        return NotImplemented
    return torch.native_dropout(input, p, True)[0]


def _attention(*args: Any, dropout_p: float = 0.0, **keywords: Any) -> Any:
    """Fused, with dropout too; a CPU computes all scores then."""
    if len(args) > 4:
        args, dropout_p = (*args[:4], 0.0, *args[5:]), args[4]
    if not dropout_p:
        return NotImplemented
    return F.scaled_dot_product_attention(*args, **keywords)


_KERNELS = {
    torch.rms_norm: _norm,
    F.rms_norm: _norm,
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}


def kernels_of(device: str) -> Kernels:
    """Makes contexts inside which functions of torch run the kernels of a device.

    Under ``torch.func`` they run those of the tensors' own. A backward pass runs
    outside every such context: what it computes again needs one.

    Raises:
        ValueError: a device that is neither "cpu" nor "cuda".
    """
    if device not in _DEVICES:
        raise ValueError(
            f"device={device!r}: a step is planned with the kernels of "
            f"{' or '.join(map(repr, _DEVICES))}"
        )
    return _DEVICES[device]


class _OfCUDA(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kernel = _KERNELS.get(func)
        if kernel is not None and not _torch.functorch_active():
            found = kernel(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return func(*args, **(kwargs or {}))


_DEVICES: Mapping[str, Kernels] = {"cpu": nullcontext, "cuda": _OfCUDA}
# One kernel makes an input's derivative and another one those of the weights: what
# comes, and the input, are read twice (GammaBetaBackward in ``layer_norm_kernel.cu``).
_IN_TWO = {
    torch.ops.aten.native_layer_norm_backward,
    torch.ops.fsfunc_cuda.rms_norm_backward,
}


def read_again(kernels: Kernels, func: Any, made: Sequence[Tensor]) -> int:
    """The number of first arguments of an operator that a second kernel reads too.

    ``made``: what it returned.
    """
    in_two = kernels is _OfCUDA and func.overloadpacket in _IN_TWO
    return 2 if in_two and len(made) > 1 else 0
