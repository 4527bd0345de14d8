"""Tensors of a module by their state-dict names, tied ones once.

And functions that hold what a copy of their module would not: its own tensors.
"""

from __future__ import annotations

import functools
import gc
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fsfunc import _torch
from fsfunc._torch import products
from fsfunc.core.frames import Transformed
from fsfunc.interop.stubs import hook_tables


@dataclass(frozen=True)
class Tensors:
    """The tensors of a module, by the first of their names in ``state_dict()``.

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
    for name, m in module.named_modules():
        kind = type(m).__name__
        at = f"{name!r} is" if name else "the module is"
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
        if type(m).forward is nn.SyncBatchNorm.forward and _takes_statistics(m):
            raise TypeError(
                f"{at} a {kind}, whose statistics are over the processes of torch's "
                "own group, past every transform, and over no simulated ranks: put in "
                "its place a module whose forward calls ff.nn.sync_batch_norm("
                "{'weight': self.weight, 'bias': self.bias}, x, axis), with the axis "
                "of the mesh, or a BatchNorm, whose statistics are of this rank's rows"
            )
        if isinstance(m, torch.jit.ScriptModule) or kind in _WRAPPED:
            inside = f" (.{_WRAPPED[kind]})" if kind in _WRAPPED else ""
            raise TypeError(
                f"{at} a {kind}, which changes how it runs: give what is inside"
                f"{inside}, and ff.shard for the rest"
            )


def _takes_statistics(m: Any) -> bool:
    """True if a batch norm takes the statistics of its input."""
    return m.training or m.running_mean is None and m.running_var is None


_WRAPPED = {
    "DataParallel": "module", "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module", "OptimizedModule": "_orig_mod",
}  # fmt: skip


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
    if products.is_hooked(x) or getattr(x, "_post_accumulate_grad_hooks", None):
        raise TypeError(
            f"{name!r} has a hook, which no transform would run: change the gradients "
            "that value_and_grad returns"
        )


def _overlaps(found: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Names of tensors that share elements in memory."""
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


def check_closures(module: nn.Module) -> None:
    """Looks at the functions kept in a module's attributes and hooks.

    A copy of a module shares its functions, and a function that has the module, or one
    of its tensors, in a cell would compute with those of the first.

    Raises:
        TypeError: one does.
    """
    names = {id(m): n or type(module).__name__ for n, m in module.named_modules()}
    names |= {id(x): n for n, x in module.named_parameters()}
    names |= {id(x): n for n, x in module.named_buffers()}
    for name, m in module.named_modules():
        hooks = [hook for table in hook_tables(m) for hook in table.values()]
        kept = {k: x for k, x in vars(m).items() if k not in _OWN}
        for attribute, x in [*kept.items(), *(("its hook", hook) for hook in hooks)]:
            held = next(_held(x, names, set(), 8, within=False), None)
            if held is not None:
                where = f"{name}.{attribute}" if name else attribute
                raise TypeError(
                    f"{where} is a function that holds {held!r} by closure, default or "
                    "global name: what is run is a copy of the module, and this would "
                    "compute with the original. Make it a method of the module's class "
                    "(or types.MethodType(function, module)), and take the module of a "
                    "hook from its first argument"
                )


_OWN = frozenset(vars(nn.Module()))


def _held(
    x: Any, names: dict[int, str], seen: set[int], depth: int, *, within: bool
) -> Iterator[str]:
    """Names of what is held by the functions in ``x``; ``within`` one, all counts."""
    if id(x) in seen or not depth:
        return
    seen.add(id(x))
    if within and id(x) in names:
        yield names[id(x)]
    elif not isinstance(x, type | types.ModuleType | nn.Module | Tensor):
        x = x._run if isinstance(x, Transformed) else x
        function = isinstance(x, types.FunctionType)
        for y in _captured(x) if function else _inside(x, within):
            yield from _held(y, names, seen, depth - 1, within=within or function)


def _captured(function: types.FunctionType) -> list[Any]:
    """Objects that a function has in cells, as defaults, or by global names."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    try:
        of = inspect.getclosurevars(function)
    except ValueError:  # a cell that is empty as yet
        return found
    tensors = [x for x in of.globals.values() if isinstance(x, nn.Module | Tensor)]
    return [*found, *of.nonlocals.values(), *tensors]


def _inside(x: Any, within: bool) -> list[Any]:
    if isinstance(x, types.MethodType) and not within:
        return [x.__func__]  # what it is bound to is copied with it
    containers = list, tuple, set, frozenset, Mapping, functools.partial
    return gc.get_referents(x) if within or isinstance(x, containers) else []
