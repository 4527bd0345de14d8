"""The tensors of a module by their state-dict names, tied ones once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fsfunc import _torch

__all__ = ["Tensors", "computed", "tensors_of"]


@dataclass(frozen=True)
class Tensors:
    """What a module holds; names are those of ``state_dict()``, the first of several.

    Args:
        params: parameters that are trained.
        frozen: parameters with ``requires_grad`` False.
        buffers: buffers, those that no state dict has included.
        overlapping: buffers in whose memory others lie too.
    """

    params: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    overlapping: frozenset[str]

    @property
    def all(self) -> dict[str, Tensor]:
        return self.params | self.frozen | self.buffers


def tensors_of(module: nn.Module) -> Tensors:
    """The tensors of a module, as they are.

    Raises:
        TypeError: not a module, or one that is wrapped for another library; a tensor
            with hooks.
        ValueError: a parameter without a shape, with memory in common with another
            tensor, or that its forward changes (``max_norm``).
    """
    _check_kind(module)
    params: dict[str, Tensor] = {}
    frozen: dict[str, Tensor] = {}
    for name, x in module.named_parameters():
        _check_tensor(name, x)
        (params if x.requires_grad else frozen)[name] = x
    buffers = dict(module.named_buffers())
    for name, x in buffers.items():
        _check_tensor(name, x)
    found = list(_overlaps(params | frozen | buffers))
    for one, other in found:
        if not (one in buffers and other in buffers):
            raise ValueError(
                f"{one!r} and {other!r} are different tensors in one memory: to tie "
                "them, register the same parameter under both names"
            )
    overlapping = frozenset(name for pair in found for name in pair)
    return Tensors(params, frozen, buffers, overlapping)


def computed(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Attributes that a hook or a forward computed: no leaves, which none may copy."""
    for name, m in module.named_modules():
        for attribute, x in vars(m).items():
            if isinstance(x, Tensor) and x.grad_fn is not None:
                yield f"{name}.{attribute}" if name else attribute, x


def _check_kind(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(module).__name__}")
    for name, m in module.named_modules():
        kind = type(m).__name__
        at = f"{name!r} is" if name else "the module is"
        if isinstance(m, torch.jit.ScriptModule):
            raise TypeError(f"{at} a {kind}, whose code cannot be cut: give the module")
        if getattr(m, "max_norm", None) is not None:
            raise ValueError(
                f"{at} a {kind} with max_norm, which changes its weight in forward: "
                "leave max_norm out, and normalise the rows that are looked up"
            )
        if _torch.is_compiled(m):
            raise TypeError(
                f"{at} compiled in place, and what runs is a copy of it: give the "
                "module before its compile(), and compile functions that it calls"
            )
        wrapped = next((a for a in ("_orig_mod", "module") if hasattr(m, a)), None)
        if wrapped and kind in _WRAPPED:
            raise TypeError(
                f"{at} a {kind}, which changes how it runs: give what is inside "
                f"(.{wrapped}), and ff.shard for the rest"
            )


_WRAPPED = (
    "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel",
    "OptimizedModule",
)  # fmt: skip


def _check_tensor(name: str, x: Tensor) -> None:
    if isinstance(x, UninitializedParameter | UninitializedBuffer):
        raise ValueError(
            f"{name!r} has no shape yet: run the module once on a batch before it is "
            "given to from_module"
        )
    if hasattr(x, "device_mesh"):
        raise TypeError(
            f"{name!r} is a {type(x).__name__}, sharded already: give the module "
            "before fully_shard or parallelize_module"
        )
    if _torch.is_hooked(x) or getattr(x, "_post_accumulate_grad_hooks", None):
        raise TypeError(
            f"{name!r} has a hook, which no transform would run: change the gradients "
            "that value_and_grad returns"
        )


def _overlaps(found: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Names of tensors whose elements lie in one memory."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, x in found.items():
        if x.layout is torch.strided and x.numel():
            size, start = x.element_size(), int(x.storage_offset())
            reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            span = start * size, (start + int(reach) + 1) * size, name
            spans.setdefault(_torch.storage_key(x), []).append(span)
    for sharing in spans.values():
        sharing.sort()
        last, holder = -1, ""
        for start, stop, name in sharing:
            if start < last:
                yield holder, name
            if stop > last:
                last, holder = stop, name
