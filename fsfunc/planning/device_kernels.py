"""Functions that a GPU, or a compiler, runs as one kernel and a CPU as several.

On tensors without data torch runs what a CPU would. Inside :func:`kernels_of` a GPU a
step is planned with that one's kernels: what they read, write and save. In the units
that ``jit`` compiles, neighbouring operators that work on elements, copy them or reduce
them are one (`FusedChains`). It reads what comes from elsewhere, and writes what
somebody elsewhere reads; what lies between stays in registers, and has no memory.

Source: torch's ATen, of CUDA: ``layer_norm_kernel.cu``, ``Dropout.cu``, and the choice
of attention's kernels in ``sdp_utils.cpp``; TorchInductor's fusion of pointwise
operators and reductions (Ansel et al., 2024, section 4.4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch
from fsfunc.planning.events import Allocated, Event, Freed, Op, Ran

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
    return _FUSED(*args, **keywords)


def _of_heads(*args: Any, **keywords: Any) -> Any:
    """Within this function of torch's no mode hears what it calls."""

    def attention(*args: Any, **keywords: Any) -> Any:
        found = _attention(*args, **keywords)
        return _FUSED(*args, **keywords) if found is NotImplemented else found

    F.scaled_dot_product_attention = attention
    try:
        return F.multi_head_attention_forward(*args, **keywords)
    finally:
        F.scaled_dot_product_attention = _FUSED


_FUSED = F.scaled_dot_product_attention
_KERNELS = {
    torch.rms_norm: _norm,
    F.rms_norm: _norm,
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _of_heads,
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


_aten: Any = torch.ops.aten
# Written as such operators by the compiler's decompositions, or fused as they are.
_COMPOSED = {
    _aten._to_copy, _aten.cat, _aten.native_dropout, _aten.native_dropout_backward,
    _aten.native_layer_norm, _aten.native_layer_norm_backward, _aten._softmax,
    _aten._softmax_backward_data, _aten._log_softmax, _aten.constant_pad_nd,
    _aten._log_softmax_backward_data, _aten.slice_backward, _aten.fill, _aten.full,
    _aten.zeros, _aten.ones, _aten.zeros_like, _aten.ones_like, _aten.full_like,
}  # fmt: skip


def fuses(func: Any, op: Op) -> bool:
    """True if a compiler makes an operator a part of its neighbours' kernel."""
    return not op.flops and _is_composed(func)


@functools.cache
def _is_composed(func: Any) -> bool:
    tags = {torch.Tag.pointwise, torch.Tag.reduction}
    named = func.overloadpacket in _COMPOSED or "rms_norm" in str(func)
    return named or bool(tags.intersection(func.tags))


class _Fused:
    """One kernel: what it reads, and of what it made, what is read elsewhere."""

    def __init__(self, op: Op, at: Hashable):
        self.op, self.at = op, at
        self.read: dict[int, int] = {}  # bytes of each storage
        self.made: dict[int, int] = {}
        self.leaves: set[int] = set()

    def whole(self) -> Op:
        """It as one operator."""
        written = sum(self.made[number] for number in self.leaves)
        return self.op._replace(bytes=sum(self.read.values()) + written)


class FusedChains:
    """The chains of one plan."""

    def __init__(self) -> None:
        self.open: _Fused | None = None
        self.chains: dict[int, _Fused] = {}  # by the identity of their operators
        # Of storages: the chain that made one, and its number there.
        self.makers: dict[int, tuple[_Fused, int]] = {}

    def add(
        self,
        op: Op,
        at: Hashable,
        read: dict[int, int],
        made: dict[int, int],
        fused: bool,
    ) -> Op | None:
        """The operator to note for one that ran; None for a part of the last one.

        Args:
            at: its unit call and phase; ``read``, ``made``: bytes by storage.
            fused: whether it may be a part of a chain.
        """
        chain = self.open
        if not fused:
            self.open = chain = None
        elif chain is None or chain.at != at:
            op = op._replace(name="fused")
            self.open = chain = self.chains[id(op)] = _Fused(op, at)
        for number, size in read.items():
            maker, made_as = self.makers.get(number, (None, 0))
            if maker is not None and maker is chain:
                continue
            if maker is not None:
                maker.leaves.add(made_as)
            if chain is not None:
                chain.read[number] = max(size, chain.read.get(number, 0))
        for number, size in made.items():
            if chain is not None and number not in chain.read:
                chain.made[number] = size
                self.makers[number] = chain, number
            else:
                self.makers.pop(number, None)
        return op if chain is None or chain.op is op else None

    def rename(self, names: Mapping[int, int]) -> None:
        """Takes storages for others, of rounds that were noted without being run."""
        self.makers = {names.get(n, n): made for n, made in self.makers.items()}

    def whole(self, events: Iterable[Event]) -> list[Event]:
        """The events of a plan that is over, each chain with all its bytes.

        What a chain makes, and drops before anything else runs, has no memory.
        """
        ops = {key: chain.whole() for key, chain in self.chains.items()}
        found: list[Event] = []
        passing: dict[int, int] = {}  # where a chain took what is not given back yet
        fused = False
        for e in events:
            if isinstance(e, Allocated):
                if fused:
                    passing[e.storage] = len(found)
            elif not isinstance(e, Freed):
                passing.clear()
                fused = isinstance(e, Ran) and id(e.op) in ops
                if isinstance(e, Ran) and fused:
                    e = e._replace(op=ops[id(e.op)])
            elif (at := passing.pop(e.storage, None)) is not None:
                found[at] = found[at]._replace(bytes=0)  # pyright: ignore
            found.append(e)
        return found
