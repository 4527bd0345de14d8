"""Internals of torch's storages, modules, process groups and its compiler."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def storage_key(x: Tensor) -> int:
    """Equal for two tensors exactly where they share a storage.

    ``data_ptr`` would not do: it is 0 for every fake tensor, and raises in functorch.
    A sparse tensor has no storage: it shares with itself alone. No mode hears of it.
    """
    try:
        return torch._C._storage_address(x)  # type: ignore[attr-defined]
    except NotImplementedError:
        if x.layout == torch.strided:
            raise
        return x._cdata


def storage(x: Tensor) -> Any:
    """The holder of the memory that ``x`` lies in: to keep alive, or to tell apart."""
    return x.untyped_storage() if x.layout == torch.strided else x


def storage_uses(x: Tensor) -> int:
    """The number of tensors (and Python handles) that hold the storage of ``x``."""
    return torch._C._storage_Use_Count(storage_key(x))


# Of ``storage._cdata``: how many tensors and handles hold that storage.
uses_of: Callable[[int], int] = torch._C._storage_Use_Count

# Whether the backward passes of this thread run in threads of the devices.
device_threads: Callable[[], bool] = torch._C._is_multithreading_enabled
set_device_threads: Callable[[bool], None] = torch._C._set_multithreading_enabled


def alike(tensors: list[Tensor]) -> Callable[..., bool]:
    """``check(*others)``, of as many: whether each is like the one in its place.

    In class, device, dtype, layout, shape, strides and whether it asks for a gradient
    where these are taken: in one call. None occurs twice. It keeps none of ``tensors``.
    """
    sizes, strides = ([[*f(x)] for x in tensors] for f in (Tensor.size, Tensor.stride))
    kept: Any = torch._C._dynamo.guards.TensorGuards  # type: ignore[attr-defined]
    return kept(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts of a module's own parameters and its own buffers, by attribute."""
    return module._parameters, module._buffers


def set_tables(module: torch.nn.Module, parameters: Any, buffers: Any) -> None:
    """Makes a module look for its parameters and buffers in these dicts."""
    module.__dict__["_parameters"] = parameters
    module.__dict__["_buffers"] = buffers


_HOOKS_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_HOOKS_AFTER = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def hook_tables(module: torch.nn.Module, *, before: bool) -> list[dict[Any, Any]]:
    """The dicts of the hooks that run before a module's forward, or the others."""
    names = _HOOKS_BEFORE if before else _HOOKS_AFTER
    return [module.__dict__[name] for name in names]


def group_timeout(group: Any) -> timedelta | None:
    """The time that a process group waits for a rank; None where it has no limit."""
    found = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", None))
    return min((t for t in found if t is not None), default=None)


def default_store() -> Any:
    """The store in which the processes of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def keep_process_groups() -> None:
    """Has no process group freed in this process, not even as Python ends.

    In a fork that would wait for ever, for threads which its parent alone has.
    """
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def is_compiled(module: torch.nn.Module) -> bool:
    """True if a module was compiled by its ``compile()``."""
    return module._compiled_call_impl is not None


def is_compiled_function(fn: Callable[..., Any]) -> bool:
    """True if torch.compile made it: a mode around it would have it compile again."""
    return hasattr(fn, "_torchdynamo_orig_callable")


def is_of_compiler(error: BaseException) -> bool:
    """True if torch.compile raised this, of what it was to compile."""
    module: Any = sys.modules.get("torch._dynamo.exc")
    if module is None:
        return False
    kinds = module.TorchDynamoException, module.FailOnRecompileLimitHit
    return isinstance(error, kinds)


def outside_graphs(reason: str) -> Callable[[Any], Any]:
    """Decorates a function that torch.compile is not to look into: its error has this.

    As ``torch.compiler.disable``, which imports the compiler.
    """

    def mark(fn: Any) -> Any:
        fn._torchdynamo_disable, fn._torchdynamo_disable_msg = True, reason
        return fn

    return mark


# What compiles the code that runs in this thread; None (or False: nothing new) where no
# compiled function is running. As torch has it: a frame of ours it would compile too.
compiler_at_work: Callable[[], Any] = (
    torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]
)


def compiler_stance() -> Any:
    """The stance of compiled functions: torch has one for all threads.

    None where nothing can have been compiled yet.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    return None if module is None else module._stance


def set_compiler_stance(stance: Any) -> None:
    """Puts back what :func:`compiler_stance` returned; or ``"force_eager"``: plainly.

    Between the graphs of a compiled function too, where torch's own way is shut.
    """
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    if module is None:
        return  # the first fake mode imports it
    if stance is None or isinstance(stance, str):
        stance = module.DynamoStance(stance or "default")
    module._stance = stance
