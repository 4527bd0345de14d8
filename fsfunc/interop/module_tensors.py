"""Tensors of a module by their state-dict names, tied ones once.

`from_module` begins here: it takes a module's tensors (`collect_tensors`), which become
its parameters and buffers. It refuses modules whose copy without tensors would compute
something else, such as those with functions that have the original module, or its
tensors, in a closure (`check_closures`).
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
from fsfunc.interop.stubs import all_hook_tables


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of a module, by the first of their names in ``state_dict()``.

    Args:
        params: parameters that are trained.
        frozen: parameters with ``requires_grad`` False.
        buffers: all buffers, also those that are not in the state dict.
        overlapping: buffers in whose memory others lie too.
    """

    params: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    overlapping: frozenset[str]

    @property
    def all(self) -> dict[str, Tensor]:
        return self.params | self.frozen | self.buffers


def collect_tensors(module: nn.Module) -> ModuleTensors:
    """Collects the tensors of a module, as they are.

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
    pairs = list(_overlaps(params | frozen | buffers))
    for first, second in pairs:
        if not (first in buffers and second in buffers):
            raise ValueError(
                f"{first!r} and {second!r} are different tensors in one memory: to tie "
                "them, register the same parameter under both names"
            )
    # Buffers that are only read may share memory: a call that writes one is refused.
    overlapping = frozenset(name for pair in pairs for name in pair)
    return ModuleTensors(params, frozen, buffers, overlapping)


def computed_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors that a hook or a forward computed, such as normalised weights.

    They are no leaves of a graph, and torch copies only leaves.
    """
    for name, m in module.named_modules():
        for attribute, x in vars(m).items():
            if isinstance(x, Tensor) and x.grad_fn is not None:
                yield f"{name}.{attribute}" if name else attribute, x


def _check_kind(module: nn.Module) -> None:
    """Raises if a module in it does not run as a plain function of its tensors."""
    for name, m in module.named_modules():
        kind = type(m).__name__
        subject = f"{name!r} is" if name else "the module is"
        if getattr(m, "max_norm", None) is not None:
            raise ValueError(
                f"{subject} a {kind} with max_norm, which changes its weight in "
                "forward: leave max_norm out, and normalise the rows that are looked up"
            )
        if _torch.is_compiled(m):
            raise TypeError(
                f"{subject} compiled in place, and what runs is a copy of it: give the "
                "module before its compile(), and compile functions that it calls"
            )
        if type(m).forward is nn.SyncBatchNorm.forward and _takes_statistics(m):
            raise TypeError(
                f"{subject} a {kind}, whose statistics are over the processes of "
                "torch's own group, past every transform, and over no simulated "
                "ranks: put in "
                "its place a module whose forward calls ff.nn.sync_batch_norm("
                "{'weight': self.weight, 'bias': self.bias}, x, axis), with the axis "
                "of the mesh, or a BatchNorm, whose statistics are of this rank's rows"
            )
        if isinstance(m, torch.jit.ScriptModule) or kind in _WRAPPED:
            inside = f" (.{_WRAPPED[kind]})" if kind in _WRAPPED else ""
            raise TypeError(
                f"{subject} a {kind}, which changes how it runs: give what is inside"
                f"{inside}, and ff.shard for the rest"
            )


def _takes_statistics(m: Any) -> bool:
    """Returns whether a batch norm takes the statistics of its input."""
    return m.training or m.running_mean is None and m.running_var is None


# By the name of a wrapper's class, the attribute with the module inside.
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


def _overlaps(tensors: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yields pairs of names of tensors that share elements in memory."""
    spans: dict[int, list[tuple[int, int, str]]] = {}  # by storage
    for name, x in tensors.items():
        if x.layout is torch.strided and x.numel():
            size, start = x.element_size(), int(x.storage_offset())
            reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            span = start * size, (start + int(reach) + 1) * size, name
            spans.setdefault(_torch.storage_key(x), []).append(span)
    for sharing in spans.values():
        # In order of memory: a tensor overlaps an earlier one if it begins before the
        # furthest end so far.
        sharing.sort()
        furthest, furthest_name = -1, ""
        for start, stop, name in sharing:
            if start < furthest:
                yield furthest_name, name
            if stop > furthest:
                furthest, furthest_name = stop, name


def check_closures(module: nn.Module) -> None:
    """Raises if a function in a module's attributes or hooks has the module itself.

    A copy of a module shares its functions. One that has the module or a tensor of it
    in a closure would compute with the original, not with the copy.
    """
    names = {id(m): n or type(module).__name__ for n, m in module.named_modules()}
    names |= {id(x): n for n, x in module.named_parameters()}
    names |= {id(x): n for n, x in module.named_buffers()}
    for name, m in module.named_modules():
        hooks = [hook for table in all_hook_tables(m) for hook in table.values()]
        set_by_user = {k: x for k, x in vars(m).items() if k not in _MODULE_ATTRIBUTES}
        for attribute, x in [
            *set_by_user.items(),
            *(("its hook", hook) for hook in hooks),
        ]:
            captured = next(_captured_names(x, names, set(), 8, within=False), None)
            if captured is not None:
                attribute_path = f"{name}.{attribute}" if name else attribute
                raise TypeError(
                    f"{attribute_path} is a function that holds {captured!r} by "
                    "closure, default or global name: what is run is a copy of the "
                    "module, and this would compute with the original. Make it a "
                    "method of the module's class (or types.MethodType(function, "
                    "module)), and take the module of a hook from its first argument"
                )


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _captured_names(
    x: Any, names: dict[int, str], visited: set[int], depth: int, *, within: bool
) -> Iterator[str]:
    """Yields names of the modules and tensors that functions in ``x`` capture.

    Args:
        names: those to look for, by id.
        visited: ids of objects that were looked at.
        depth: how many references to follow.
        within: whether ``x`` is captured by a function itself. A module that is not is
            copied with the module that has it.
    """
    if id(x) in visited or not depth:
        return
    visited.add(id(x))
    if within and id(x) in names:
        yield names[id(x)]
    elif not isinstance(x, type | types.ModuleType | nn.Module | Tensor):
        x = x._run if isinstance(x, Transformed) else x
        is_function = isinstance(x, types.FunctionType)
        for y in _captured_objects(x) if is_function else _referents(x, within):
            yield from _captured_names(
                y, names, visited, depth - 1, within=within or is_function
            )


def _captured_objects(function: types.FunctionType) -> list[Any]:
    """Returns what a function has in cells, as defaults, or by global names."""
    defaults = [
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    try:
        captured = inspect.getclosurevars(function)
    except ValueError:  # a cell that is empty as yet
        return defaults
    globals_ = captured.globals.values()
    tensors = [x for x in globals_ if isinstance(x, nn.Module | Tensor)]
    return [*defaults, *captured.nonlocals.values(), *tensors]


def _referents(x: Any, within: bool) -> list[Any]:
    """Returns what ``x`` refers to; outside functions, what containers have."""
    if isinstance(x, types.MethodType) and not within:
        return [x.__func__]  # what it is bound to is copied with it
    containers = list, tuple, set, frozenset, Mapping, functools.partial
    return gc.get_referents(x) if within or isinstance(x, containers) else []
