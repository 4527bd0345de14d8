"""Functions that a GPU, or a compiler, runs as one kernel and a CPU as several.

A plan runs on fake tensors, for which torch runs the CPU's operators. Two things are
put right here:

- Inside a context of ``kernels_of("cuda")`` norms, dropout and attention run as the
  operators of a GPU: what these read, write and save for the backward.
- In units that ``jit`` compiles, a compiler makes one kernel of neighbouring operators
  that are pointwise, copies or reductions (`FusedChains`). The kernel reads what comes
  from elsewhere and writes what is read elsewhere; values in between stay in registers.

Source: torch's ATen, of CUDA: ``layer_norm_kernel.cu``, ``Dropout.cu``, and the choice
of attention's kernels (`attention_kernels`); TorchInductor's fusion of pointwise
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
from fsfunc.planning.attention_kernels import pick_kernel
from fsfunc.planning.events import Allocated, Event, Freed, Op, Ran

# Makes contexts in which torch's functions run the kernels of a device.
Kernels = Callable[[], AbstractContextManager[Any]]

# Operators that stand for CUDA's norms in a plan: there are no real kernels of them.
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
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, w: Tensor | None, dims: int
    ) -> Tensor:
        y, rstd = torch.ops.fsfunc_cuda.rms_norm(x, w, dims)
        ctx.save_for_backward(x, w, rstd)
        ctx.dims = dims
        return y

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, w, rstd = ctx.saved_tensors
        # The backward kernel has no derivative: a second one goes through operators,
        # as on a GPU.
        if torch.is_grad_enabled():
            return *_differentiable(dy, x, w, ctx.dims), None
        gradients = torch.ops.fsfunc_cuda.rms_norm_backward(dy, x, rstd, w)
        return (*gradients, *[None] * (3 - len(gradients)))


def _differentiable(
    dy: Tensor, x: Tensor, w: Tensor | None, dims: int
) -> tuple[Tensor, Tensor | None]:
    """Returns the derivatives of a norm, by operators that have derivatives."""
    last_dims = tuple(range(-dims, 0))
    rstd = torch.rsqrt(x.float().square().mean(last_dims, keepdim=True))
    normalized, g = x * rstd, dy if w is None else dy * w
    dx = rstd * (g - normalized * (g * normalized).mean(last_dims, keepdim=True))
    dw = None if w is None else (dy * normalized).sum_to_size(w.shape)
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


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Runs the attention that CUDA picks, where a CPU may compute all scores."""
    kernel = pick_kernel(query, key, value, attn_mask, is_causal)
    if (
        kernel == "efficient"
        and not enable_gqa
        and (attn_mask is None or not is_causal)
    ):
        bias, tensors = None, [query, key, value]
        if attn_mask is not None:
            bias = _bias_of(attn_mask, query.dtype)
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
            tensors.append(bias)
        saves = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        run = _torch.EFFICIENT_ATTENTION
        return run(query, key, value, bias, saves, dropout_p, is_causal, scale=scale)[0]
    if not dropout_p or kernel == "math":
        return NotImplemented
    masks = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
    return _FUSED(query, key, value, **masks, enable_gqa=enable_gqa)


def _bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what a mask adds to the scores, as torch makes it of truth values."""
    if mask.dtype != torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=dtype)
    return bias.masked_fill_(mask.logical_not(), float("-inf"))


def _of_heads(*args: Any, **keywords: Any) -> Any:
    """Runs torch's multi-head attention with the attention above.

    Within this function of torch's no mode sees what it calls, so the name that it
    calls is replaced.
    """

    def attention(*args: Any, **keywords: Any) -> Any:
        output = _attention(*args, **keywords)
        return _FUSED(*args, **keywords) if output is NotImplemented else output

    F.scaled_dot_product_attention = attention
    try:
        return F.multi_head_attention_forward(*args, **keywords)
    finally:
        F.scaled_dot_product_attention = _FUSED


_FUSED = F.scaled_dot_product_attention  # torch's own, which fuses without dropout
_KERNELS = {
    torch.rms_norm: _norm,
    F.rms_norm: _norm,
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _of_heads,
}


def kernels_of(device: str) -> Kernels:
    """Returns a maker of contexts in which torch's functions run a device's kernels.

    Under ``torch.func`` torch's own kernels run. A backward pass runs outside of every
    such context, so a recompute in it has to enter one.

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
    """Runs functions of torch as CUDA does."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kernel = _KERNELS.get(func)
        if kernel is not None and not _torch.functorch_active():
            output = kernel(*args, **(kwargs or {}))
            if output is not NotImplemented:
                return output
        return func(*args, **(kwargs or {}))


_DEVICES: Mapping[str, Kernels] = {"cpu": nullcontext, "cuda": _OfCUDA}
# One kernel makes the input's derivative and another one the weights': the cotangent
# and the input are read twice (GammaBetaBackward in ``layer_norm_kernel.cu``).
_IN_TWO = {
    torch.ops.aten.native_layer_norm_backward,
    torch.ops.fsfunc_cuda.rms_norm_backward,
}


def read_again(
    kernels: Kernels, func: _torch.OpOverload, outputs: Sequence[Tensor]
) -> int:
    """Returns how many of an operator's first arguments a second kernel reads too.

    Args:
        outputs: the tensors that it returned.
    """
    has_second_kernel = kernels is _OfCUDA and func.overloadpacket in _IN_TWO
    return 2 if has_second_kernel and len(outputs) > 1 else 0


_aten: Any = torch.ops.aten
# The compiler decomposes these into pointwise operators and reductions, or fuses them
# as they are.
_COMPOSED = {
    _aten._to_copy, _aten.cat, _aten.native_dropout, _aten.native_dropout_backward,
    _aten.native_layer_norm, _aten.native_layer_norm_backward, _aten._softmax,
    _aten._softmax_backward_data, _aten._log_softmax, _aten.constant_pad_nd,
    _aten._log_softmax_backward_data, _aten.slice_backward, _aten.fill, _aten.full,
    _aten.zeros, _aten.ones, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.stack, _aten.arange,
}  # fmt: skip


def fuses(func: _torch.OpOverload, op: Op) -> bool:
    """Returns whether a compiler makes an operator a part of its neighbours' kernel."""
    return not op.flops and _is_composed(func)


@functools.cache
def _is_composed(func: _torch.OpOverload) -> bool:
    tags = {torch.Tag.pointwise, torch.Tag.reduction}
    name = str(func)  # prims.iota is what the compiler makes of arange
    is_named = func.overloadpacket in _COMPOSED
    is_named = is_named or "rms_norm" in name or name.startswith("prims.iota")
    return is_named or bool(tags.intersection(func.tags))


class _Fused:
    """A kernel that a compiler makes of neighbouring operators.

    Args:
        op: the first operator, in whose place the kernel is recorded.
        call_and_phase: the unit call and phase in which it runs.

    Attributes:
        read_bytes: by storage, the bytes that it reads from elsewhere.
        made_bytes: by storage, the bytes that its operators make.
        read_elsewhere: those of ``made_bytes`` that are read outside, and so written.
    """

    op: Op
    call_and_phase: Hashable

    def __init__(self, op: Op, call_and_phase: Hashable):
        self.op, self.call_and_phase = op, call_and_phase
        self.read_bytes: dict[int, int] = {}
        self.made_bytes: dict[int, int] = {}
        self.read_elsewhere: set[int] = set()

    def merged(self) -> Op:
        """Returns the kernel as one operator."""
        written_bytes = sum(self.made_bytes[number] for number in self.read_elsewhere)
        return self.op._replace(bytes=sum(self.read_bytes.values()) + written_bytes)


class FusedChains:
    """The fused kernels of one plan.

    An `observer.Observer` adds each operator as it runs. What a kernel writes is known
    only when the plan is over: so its bytes are set at the end (`merged`).

    Attributes:
        open_chain: the kernel that the next operator may join.
        chains: by the ``id`` of the operator in the plan's events, its kernel.
        maker_of: by storage, the kernel that made it, and its number then.
    """

    def __init__(self) -> None:
        self.open_chain: _Fused | None = None
        self.chains: dict[int, _Fused] = {}
        self.maker_of: dict[int, tuple[_Fused, int]] = {}

    def add(
        self,
        op: Op,
        call_and_phase: Hashable,
        reads: dict[int, int],
        writes: dict[int, int],
        can_fuse: bool,
    ) -> Op | None:
        """Adds an operator; returns what to record, None for a part of the last kernel.

        Args:
            call_and_phase: in which unit call and phase it ran.
            reads, writes: the bytes that it reads and makes, by storage.
            can_fuse: whether it may be a part of a kernel.
        """
        chain = self.open_chain
        if not can_fuse:
            self.open_chain = chain = None
        elif chain is None or chain.call_and_phase != call_and_phase:
            op = op._replace(name="fused")
            self.open_chain = chain = self.chains[id(op)] = _Fused(op, call_and_phase)
        for number, size in reads.items():
            maker, number_there = self.maker_of.get(number, (None, 0))
            if maker is not None and maker is chain:
                continue
            if maker is not None:
                maker.read_elsewhere.add(number_there)
            if chain is not None:
                chain.read_bytes[number] = max(size, chain.read_bytes.get(number, 0))
        for number, size in writes.items():
            if chain is not None and number not in chain.read_bytes:
                chain.made_bytes[number] = size
                self.maker_of[number] = chain, number
            else:
                self.maker_of.pop(number, None)
        return op if chain is None or chain.op is op else None

    def rename(self, names: Mapping[int, int]) -> None:
        """Renames storages, after rounds that were noted without being run."""
        self.maker_of = {names.get(n, n): maker for n, maker in self.maker_of.items()}

    def merged(self, events: Iterable[Event]) -> list[Event]:
        """Returns the events of a plan that is over, each kernel with all its bytes.

        A storage that a kernel makes, and that is freed before anything else runs,
        takes no memory: it stayed in registers.
        """
        ops = {key: chain.merged() for key, chain in self.chains.items()}
        merged: list[Event] = []
        # By storage that the last kernel made: where its event is in `merged`.
        took_at: dict[int, int] = {}
        in_chain = False
        for event in events:
            if isinstance(event, Allocated):
                if in_chain:
                    took_at[event.storage] = len(merged)
            elif not isinstance(event, Freed):
                took_at.clear()
                in_chain = isinstance(event, Ran) and id(event.op) in ops
                if isinstance(event, Ran) and in_chain:
                    event = event._replace(op=ops[id(event.op)])
            elif (index := took_at.pop(event.storage, None)) is not None:
                merged[index] = merged[index]._replace(bytes=0)  # pyright: ignore
            merged.append(event)
        return merged
