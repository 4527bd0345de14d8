"""Internals of torch's storages, modules, process groups and compiler.

Each function stands for one private attribute or function of torch, so that a new
version of torch is met here alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def storage_key(x: Tensor) -> int:
    """Returns a key that is equal for two tensors exactly if they share a storage.

    ``data_ptr`` would not do: it is 0 for every fake tensor, and raises in functorch.
    A sparse tensor has no storage, and a key of its own. No mode sees the call.
    """
    try:
        return torch._C._storage_address(x)  # type: ignore[attr-defined]
    except NotImplementedError:
        if x.layout == torch.strided:
            raise
        return x._cdata


def storage(x: Tensor) -> torch.UntypedStorage | Tensor:
    """Returns what holds the memory of ``x``: its storage; a sparse tensor itself."""
    return x.untyped_storage() if x.layout == torch.strided else x


def storage_uses(x: Tensor) -> int:
    """Returns how many tensors and Python objects hold the storage of ``x``."""
    return torch._C._storage_Use_Count(storage_key(x))


storage_uses_by_key: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns how many tensors and Python objects hold a storage, by its ``_cdata``."""

# Whether the backward passes of this thread run in threads of the devices.
uses_device_threads: Callable[[], bool] = torch._C._is_multithreading_enabled
set_uses_device_threads: Callable[[bool], None] = torch._C._set_multithreading_enabled


def likeness_check(tensors: list[Tensor]) -> Callable[..., bool]:
    """Returns ``check(*others)``: whether each is like the tensor at its place.

    That is in class, device, dtype, layout, shape, strides and whether it requires a
    gradient. It is one call of the compiler's guards, written in C++.

    Args:
        tensors: none occurs twice; the check keeps none of them alive.
    """
    sizes, strides = ([[*f(x)] for x in tensors] for f in (Tensor.size, Tensor.stride))
    guards: Any = torch._C._dynamo.guards.TensorGuards  # type: ignore[attr-defined]
    return guards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check


def tensor_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the dicts of a module's own parameters and own buffers, by attribute."""
    return module._parameters, module._buffers


def set_tensor_tables(
    module: torch.nn.Module,
    parameters: MutableMapping[str, Any],
    buffers: MutableMapping[str, Any],
) -> None:
    """Makes a module look for its parameters and buffers in these mappings."""
    module.__dict__["_parameters"] = parameters
    module.__dict__["_buffers"] = buffers


_HOOKS_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_HOOKS_AFTER = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def hook_tables(module: torch.nn.Module, *, before: bool) -> list[dict[Any, Any]]:
    """Returns the dicts of hooks that run before a module's forward, or the others."""
    names = _HOOKS_BEFORE if before else _HOOKS_AFTER
    return [module.__dict__[name] for name in names]


def group_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Returns how long a process group waits for a rank; None if without limit."""
    timeouts = []
    for device in group._device_types:  # type: ignore[union-attr]
        options = getattr(group._get_backend(device), "options", None)  # type: ignore
        timeouts.append(getattr(options, "_timeout", None))
    return min((t for t in timeouts if t is not None), default=None)


def default_store() -> dist.Store:
    """Returns the store in which the processes of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def never_free_process_groups() -> None:
    """Keeps this process from freeing any process group, even as Python ends.

    In a forked process that would wait for ever, for threads that only its parent has.
    """
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether a module was compiled by its ``compile()``."""
    return module._compiled_call_impl is not None


def is_compiled_function(fn: Callable[..., Any]) -> bool:
    """Returns whether torch.compile made ``fn``: under a mode it compiles it again."""
    return hasattr(fn, "_torchdynamo_orig_callable")


def is_compiler_error(error: BaseException) -> bool:
    """Returns whether torch.compile raised this, of what it was to compile."""
    # Not imported for this: if nothing was compiled, it is no error of the compiler's.
    module: Any = sys.modules.get("torch._dynamo.exc")
    if module is None:
        return False
    kinds = module.TorchDynamoException, module.FailOnRecompileLimitHit
    return isinstance(error, kinds)


def outside_graphs(reason: str) -> Callable[[F], F]:
    """Decorates a function that torch.compile may not trace.

    As ``torch.compiler.disable`` does, which imports the compiler.

    Args:
        reason: is in the compiler's error, where it may not leave the function out.
    """

    def mark(fn: Any) -> Any:
        fn._torchdynamo_disable, fn._torchdynamo_disable_msg = True, reason
        return fn

    return mark


# Returns what compiles the code that runs in this thread; None (or False: nothing new)
# where no compiled function is running. It is torch's own function: one of ours around
# it would be compiled too.
compiler_at_work: Callable[[], Any] = (
    torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]
)


def compiler_stance() -> Any:
    """Returns the stance of compiled functions, which torch has for all threads.

    None where nothing can have been compiled yet.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    return None if module is None else module._stance


def set_compiler_stance(stance: object) -> None:
    """Sets the stance: one that :func:`compiler_stance` returned, or its name.

    With ``"force_eager"`` compiled functions run as plain ones. This works between the
    graphs of a compiled function too, where ``torch.compiler.set_stance`` raises.
    """
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    if module is None:
        return  # the first fake mode imports it
    if stance is None or isinstance(stance, str):
        stance = module.DynamoStance(stance or "default")
    module._stance = stance
