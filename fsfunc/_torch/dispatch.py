"""Dispatch modes, and what they see: what an operator reads, writes, views and tells.

A watcher of operators is an :class:`OperatorMode`: it states its question in
``operator``, and asks this file what the operator does with memory. Tables by storage
are `runtime.memory.StorageTable`, where a watcher holds no storage itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _pop_mode,
    _push_mode,
)

from fsfunc._torch.internals import storage_key

if TYPE_CHECKING:
    from torch._ops import OpOverload as _OpOverload
    from torch._ops import OpOverloadPacket as _OpOverloadPacket

OpOverload: TypeAlias = "_OpOverload[..., Any]"
"""An operator with its overload, such as ``aten.add.Tensor``: what modes are given."""

OpOverloadPacket: TypeAlias = "_OpOverloadPacket[..., Any]"
"""An operator with all its overloads, such as ``aten.add``."""

TorchFunction: TypeAlias = Callable[..., Any]
"""A function or method of torch's Python interface, as function modes are given it."""

Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of an operator or function: tensors, lists, numbers."""

Kwargs: TypeAlias = dict[str, Any]
"""Its keyword arguments."""


def active_modes() -> list[str]:
    """Names of the function and dispatch modes that act in this thread alone."""
    functions = torch.overrides._get_current_function_mode_stack()
    dispatch = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return [
        type(m).__name__
        for m in [*functions, *dispatch]
        if not isinstance(m, DeviceContext) and not getattr(m, "enters_ranks", False)
    ]


def modes_of_ranks() -> list[Any]:
    """The dispatch modes that are on here and act alike in every thread."""
    dispatch = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return [m for m in dispatch if getattr(m, "enters_ranks", False)]


def is_rounded() -> bool:
    """False inside a mode that computes without rounding."""
    return all(getattr(m, "rounds", True) for m in modes_of_ranks())


def plain_tensors() -> Any:
    """Inside, tensors of subclasses are taken for plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def beneath_all_modes() -> Iterator[None]:
    """Inside, no dispatch mode sees anything: what is made is real."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield


@contextmanager
def beneath_modes(x: Tensor) -> Iterator[None]:
    """Inside, no dispatch mode sees what is done to ``x``, unless ``x`` is fake."""
    if isinstance(x, FakeTensor):
        yield
        return
    with beneath_all_modes():
        yield


@contextmanager
def outside_modes() -> Iterator[None]:
    """Whatever modes are on, tensors that are copied here are what they were."""
    with beneath_all_modes(), torch.inference_mode(False):
        yield


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that are on."""


@contextmanager
def outside_function_modes() -> Iterator[None]:
    """Inside, no torch function mode that was on sees anything."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch.overrides._pop_mode())  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)  # type: ignore[attr-defined]


_frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]

# Attention on the CPU, of which torch's own counter of operations knows nothing.
CPU_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
# Each row times the matrix of its group: a mixture of experts.
GROUPED_PRODUCT: Any = torch.ops.aten._grouped_mm


@functools.cache
def tells(func: Any) -> str:
    """The kind of knowledge of values that an operator gives, or "" if none.

    "value": a number, or an answer, to Python. "places": they may decide the shape of
    its result.
    """
    if torch.Tag.data_dependent_output in func.tags:
        return "value"
    return "places" if torch.Tag.dynamic_output_shape in func.tags else ""


def is_view(func: Any, args: Any) -> bool:
    """True if all that a call on fake tensors gives lies in the memory of its first."""
    return gives_views(func) and type(args[0]) is FakeTensor


@functools.cache
def gives_views(func: Any) -> bool:
    """True of an operator whose results lie in the memory of an argument."""
    made = [result.alias_info for result in func._schema.returns]
    if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
        return False  # it may copy, as ``reshape`` does
    return bool(made) and all(x is not None and not x.is_write for x in made)


@functools.cache
def makes_memory(func: Any) -> bool:
    """True of an operator that writes nothing, and whose results are no views."""
    made = [result.alias_info for result in func._schema.returns]
    return not (func._schema.is_mutable or any(made))


def value_of(x: Tensor) -> Tensor | None:
    """``x`` with its data, on no graph; None if it is fake and has none."""
    return x.constant if isinstance(x, FakeTensor) else x.detach()


def arguments_of(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of an operator's call, by name and in its schema's order."""
    found = {}
    for i, argument in enumerate(operator._schema.arguments):
        if i < len(args):
            found[argument.name] = args[i]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


# In training they write the running statistics, and their schemas do not say so.
_BATCH_NORMS = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
}


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, and in lists, tuples and dicts of them, in order."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            found += tensors_in(x)
        elif isinstance(x, dict):
            found += tensors_in(x.values())
    return found


def written(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The arguments, and elements of lists, that an operator says it writes.

    Version counters would not tell a mode: they rise after it has returned.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return []  # of higher order: it runs others
    if schema.name in _BATCH_NORMS and args[5]:
        return tensors_in(args[3:5])
    if not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return tensors_in(found)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not guard each call against torch.compile."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class UnheardMode(DispatchMode):
    """One that torch.compile does not hear of: it runs no function eagerly for it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        skip = _frames._FrameAction.SKIP  # else it compiles the mode's own code
        strategy = _frames._FrameExecStrategy(skip, skip)
        handler: Any = cls.__torch_dispatch__
        _frames.set_code_exec_strategy(handler.__code__, strategy)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> UnheardMode:
        _push_mode(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _pop_mode()


class OperatorMode(DispatchMode):
    """Calls ``operator`` for each operator that runs, in backward passes too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked all the time
        return self.operator(func, args, kwargs or {})

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator and returns its result."""
        return func(*args, **kwargs)


class Writes(UnheardMode, OperatorMode):
    """Tells of writes into the memory of tensors, by ``.data`` too, before them.

    Args:
        watched: the tensors; ``told``: called with one that is to be written.
    """

    supports_higher_order_operators = True

    def __init__(self, watched: list[Tensor], told: Callable[[Tensor], None]):
        super().__init__()
        self.watched, self.told = set(map(storage_key, watched)), told

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        for x in written(func, args, kwargs):
            if storage_key(x) in self.watched:
                self.told(x)
        return func(*args, **kwargs)


_DEVICE: Any = torch.ops.prim.device.default
