"""Dispatch modes, and what they see: what an operator reads, writes, views and reveals.

Whoever watches operators derives from :class:`OperatorMode` and overrides ``operator``,
which is called with each operator, in backward passes too. The functions here say what
an operator does with memory. A table by storage, `runtime.memory.StorageTable`, keeps
no storage alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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
    from torch._ops import HigherOrderOperator
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
    """Returns the names of the function and dispatch modes that are on in this thread.

    Without the default device, and without the modes that all ranks enter.
    """
    functions = torch.overrides._get_current_function_mode_stack()
    dispatch = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return [
        type(m).__name__
        for m in [*functions, *dispatch]
        if not isinstance(m, DeviceContext) and not getattr(m, "enters_ranks", False)
    ]


def modes_of_ranks() -> list[TorchDispatchMode]:
    """Returns the dispatch modes that are on, and that every rank's thread enters."""
    dispatch = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return [m for m in dispatch if getattr(m, "enters_ranks", False)]


def is_rounded() -> bool:
    """Returns False inside a mode that computes without rounding, else True."""
    return all(getattr(m, "rounds", True) for m in modes_of_ranks())


def as_plain_tensors() -> AbstractContextManager[None]:
    """Inside, torch functions take tensors of subclasses for plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def beneath_all_modes() -> Iterator[None]:
    """Inside, no dispatch mode sees anything: what is made is real."""
    # Most often none is on: to take them off costs more than to look.
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
    """Inside, tensors are copied as they are, whatever modes are on outside."""
    with beneath_all_modes(), torch.inference_mode(False):
        yield


dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes that are on."""


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


def modes_around() -> tuple[Any, ...]:
    """Returns the modes, hooks and flags by which equal functions do other things."""
    autograd, cuda = torch._C._autograd, torch.backends.cuda  # type: ignore[attr-defined]
    flags = (
        torch.are_deterministic_algorithms_enabled(), cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )  # fmt: skip
    return (
        tuple(torch.overrides._get_current_function_mode_stack()),  # type: ignore[attr-defined]
        tuple(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),  # type: ignore[attr-defined]
        autograd._top_saved_tensors_default_hooks(True),
        flags,
    )


# The part of the compiler that decides which frames of Python it compiles.
_eval_frame: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]

# Attention on the CPU, for which torch's own counter of FLOPs has no formula.
CPU_ATTENTION: OpOverloadPacket = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
)
CPU_ATTENTION_BACKWARD: OpOverloadPacket = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
# CUDA's attention with masks or of heads of unlike sizes: fake tensors run it anywhere
EFFICIENT_ATTENTION: OpOverloadPacket = (
    torch.ops.aten._scaled_dot_product_efficient_attention
)
# The product of each row and the matrix of its group: for a mixture of experts.
GROUPED_PRODUCT: OpOverloadPacket = torch.ops.aten._grouped_mm


@functools.cache
def data_dependence(func: OpOverload) -> Literal["", "value", "shape"]:
    """Returns what of an operator's result depends on its operands' values.

    "value": it returns a number, or an answer, to Python. "shape": the values may
    decide the shape of its result. "": neither, so that it can run without data.
    """
    if torch.Tag.data_dependent_output in func.tags:
        return "value"
    return "shape" if torch.Tag.dynamic_output_shape in func.tags else ""


def is_view(func: OpOverload, args: Args) -> bool:
    """Returns whether a call gives views of its first argument, a fake tensor."""
    return gives_views(func) and type(args[0]) is FakeTensor


@functools.cache
def gives_views(func: OpOverload) -> bool:
    """Returns whether an operator's results always lie in the memory of an argument."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
        return False  # it may copy, as ``reshape`` does
    return bool(aliases) and all(
        alias is not None and not alias.is_write for alias in aliases
    )


@functools.cache
def makes_memory(func: OpOverload) -> bool:
    """Returns whether an operator writes nothing, and its results are no views."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return not (func._schema.is_mutable or any(aliases))


def value_of(x: Tensor) -> Tensor | None:
    """Returns ``x`` with its data, on no graph; None if it is fake and has none.

    A fake tensor of one number that Python made knows its value.
    """
    return x.constant if isinstance(x, FakeTensor) else x.detach()


def arguments_of(operator: OpOverload, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Returns the arguments of an operator's call by name, in its schema's order."""
    arguments = {}
    for i, argument in enumerate(operator._schema.arguments):
        if i < len(args):
            arguments[argument.name] = args[i]
        elif argument.name in kwargs:
            arguments[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
    return arguments


# In training they write the running statistics, and their schemas do not say so.
_BATCH_NORMS = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
}


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among values and in lists, tuples and dicts, in order."""
    tensors: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (tuple, list)):
            tensors += tensors_in(x)
        elif isinstance(x, dict):
            tensors += tensors_in(x.values())
    return tensors


def tensors_written(
    operator: OpOverload | HigherOrderOperator, args: Args, kwargs: Kwargs
) -> list[Tensor]:
    """Returns the arguments, and elements of lists, that an operator's call writes.

    By its schema: version counters do not show a write to a mode, as they rise after it
    has returned.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return []  # of higher order: it runs other operators, which are asked
    if schema.name in _BATCH_NORMS and args[5]:
        return tensors_in(args[3:5])
    if not schema.is_mutable:
        return []
    arguments = []
    for i, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            arguments.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return tensors_in(arguments)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not guard each call against torch.compile."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class HiddenFromCompile(DispatchMode):
    """A mode that does not keep torch.compile from running compiled functions inside.

    Under any other mode on the stack the compiler runs the plain function.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Else the compiler would compile the mode's own code.
        skip = _eval_frame._FrameAction.SKIP
        strategy = _eval_frame._FrameExecStrategy(skip, skip)
        handler: Any = cls.__torch_dispatch__
        _eval_frame.set_code_exec_strategy(handler.__code__, strategy)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    # Without torch's own bookkeeping, by which the compiler learns of modes.
    def __enter__(self) -> HiddenFromCompile:
        _push_mode(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _pop_mode()


class OperatorMode(DispatchMode):
    """A mode that calls ``operator`` for each operator, in backward passes too."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        # Python asks fake tensors for their device all the time.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return self.operator(func, args, kwargs or {})

    def operator(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Runs an operator and returns its result."""
        return func(*args, **kwargs)


class WriteWatcher(HiddenFromCompile, OperatorMode):
    """Calls a function before each write into the memory of tensors.

    By ``.data`` too, which no version counter shows.

    Args:
        watched: the tensors.
        on_write: is called with the tensor that is about to be written.
    """

    supports_higher_order_operators = True

    def __init__(self, watched: list[Tensor], on_write: Callable[[Tensor], None]):
        super().__init__()
        self.watched, self.on_write = set(map(storage_key, watched)), on_write

    def operator(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        for x in tensors_written(func, args, kwargs):
            if storage_key(x) in self.watched:
                self.on_write(x)
        return func(*args, **kwargs)


_DEVICE: OpOverload = torch.ops.prim.device.default
