"""Dispatch modes, the operators that they see, and the mode of fake tensors."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from fsfunc._torch.fake_results import CPU, fake_result


def active_modes() -> list[str]:
    """Names of the torch function and dispatch modes that are on in this thread."""
    functions = torch.overrides._get_current_function_mode_stack()
    dispatch = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return [
        type(m).__name__
        for m in [*functions, *dispatch]
        if not isinstance(m, DeviceContext)
    ]


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


# Attention on the CPU, of which torch's own counter of operations knows nothing.
CPU_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
# Each row times the matrix of its group: a mixture of experts.
GROUPED_PRODUCT: Any = torch.ops.aten._grouped_mm


@functools.cache
def tells_value(func: Any) -> bool:
    """True if an operator gives Python a number, or an answer, made of values."""
    return torch.Tag.data_dependent_output in func.tags


@functools.cache
def tells_places(func: Any) -> bool:
    """True if the values of its tensors may decide the shape of what one gives."""
    return torch.Tag.dynamic_output_shape in func.tags


def is_view(func: Any, args: Any) -> bool:
    """True if all that a call on fake tensors gives lies in the memory of its first."""
    return _gives_views(func) and type(args[0]) is FakeTensor


@functools.cache
def _gives_views(func: Any) -> bool:
    made = [result.alias_info for result in func._schema.returns]
    if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
        return False  # it may copy, as ``reshape`` does
    return bool(made) and all(x is not None and not x.is_write for x in made)


def value_of(x: Tensor) -> Tensor | None:
    """``x`` with its data, on no graph; None if it is fake and has none."""
    if isinstance(x, FakeTensor):
        return x.constant
    return x.detach()


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


def written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments, tensors or lists of them, that an operator says it writes.

    Version counters would not tell a mode: they rise after it has returned.
    """
    schema = operator._schema
    if schema.name in _BATCH_NORMS and args[5]:
        return list(args[3:5])
    if not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not guard each call against torch.compile."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class HereFakeMode(FakeTensorMode):
    """Fake tensors of the devices that this torch can run, and of no others.

    Of another device autograd would end the process, where it looks for its streams.
    ``always`` holds the attributes that all of them have in common.
    """

    always: dict[str, Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        slowly = functools.partial(
            super().__torch_dispatch__, func, types, args, kwargs
        )
        return fake_result(self, slowly, func, args, kwargs)

    def dispatch(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is GROUPED_PRODUCT.default:
            given = arguments_of(func, tuple(args), dict(kwargs or {}))
            if device_of(given["self"]) == CPU:
                return _grouped_product(self, given)
        out = super().dispatch(func, types, args, kwargs)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, FakeTensor):
                check_device(x.fake_device)
        return out


def result_below(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator, for a mode that has been given it.

    Where only the mode of fake tensors is on below, it is asked right here.
    """
    mode = None
    if torch._C._len_torch_dispatch_stack() == 1:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if type(mode) is not HereFakeMode:
        return func(*args, **kwargs)
    slowly = functools.partial(func, *args, **kwargs)
    return fake_result(mode, slowly, func, args, kwargs)


def _grouped_product(mode: FakeTensorMode, given: dict[str, Any]) -> Tensor:
    """The result of a product of groups on a CPU (a mixture of experts).

    torch's own rule for tensors without data knows only one of its dtypes.
    """
    a, b = given["self"], given["mat2"]
    dtype, groups = given["out_dtype"] or a.dtype, ()
    if a.ndim == b.ndim:
        groups = given["offs"].shape if a.ndim == 2 else a.shape[:-2]
    size = (*groups, a.shape[-2], b.shape[-1])
    step = 16 // dtype.itemsize  # rows begin at a multiple of 16 bytes
    row = -(-size[-1] // step) * step
    strides = (size[-2] * row, row, 1)[-len(size) :]
    with torch._C._DisableTorchDispatch():
        return FakeTensor(
            mode, torch.empty_strided(size, strides, dtype=dtype, device="meta"), CPU
        )


def check_device(device: torch.device) -> None:
    """Refuses tensors without data of a device that this torch cannot run.

    Raises:
        ValueError: names the device and the way out.
    """
    if device.type in ("cpu", "meta"):
        return
    if not (device.type == "cuda" and torch.cuda.is_available()):
        raise ValueError(
            f"a fake tensor of device {str(device)!r} cannot be used with this torch, "
            "which cannot run that device: make parameters and batch on the CPU; a "
            "plan is the same"
        )


_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


@functools.cache
def _teach() -> None:
    """Tells torch what this does to tensors without data, where it does not know.

    It would run the operator on zeros of full size in their place.
    """
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has("aten::_fused_sgd_", "Meta"):
        _LIBRARY.impl("_fused_sgd_", lambda *args, **kwargs: None)


def _new_fake_mode() -> FakeTensorMode:
    _teach()
    mode = HereFakeMode(allow_non_fake_inputs=True)
    _take_meta_for_cpu(mode)
    return mode


def _take_meta_for_cpu(mode: FakeTensorMode) -> None:
    """Makes fake tensors of the CPU of a mode's meta tensors.

    On "meta" torch takes an operator's slowest way (attention with all its scores),
    which no device runs.
    """
    converter: Any = mode.fake_tensor_converter
    plainly, made = converter.from_real_tensor, WeakTensorKeyDictionary()

    def converted(fake_mode: FakeTensorMode, x: Tensor, *args: Any, **how: Any) -> Any:
        bare = not (isinstance(x, FakeTensor) or x.is_conj() or x.is_neg())
        if x.device.type != "meta" or not bare:
            return plainly(fake_mode, x, *args, **how)
        known = made[x]() if x in made else None
        if known is None:
            like = {"dtype": x.dtype, "requires_grad": x.requires_grad}
            where = device_of_fake(x)
            with mode:
                known = torch.empty_strided(x.shape, x.stride(), device=where, **like)
            made[x] = weakref.ref(known)
        return known

    converter.from_real_tensor = converted


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """The mode of the fake tensors among ``values``, or a new one."""
    for x in values:
        if isinstance(x, FakeTensor):
            return x.fake_mode
    return _new_fake_mode()


@functools.cache
def abstract_mode() -> FakeTensorMode:
    """The one mode of all abstract meshes: tensors of two modes cannot meet."""
    return _new_fake_mode()


def fake_mode() -> FakeTensorMode | None:
    """The fake tensor mode that is on in this thread, if one is."""
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return next((m for m in reversed(stack) if isinstance(m, FakeTensorMode)), None)


def fake_active() -> bool:
    """True if a fake tensor mode is on in this thread."""
    return fake_mode() is not None


def fake_of(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """``x`` without its data."""
    return x if isinstance(x, FakeTensor) else mode.from_tensor(x, static_shapes=True)


def device_of_fake(x: Tensor) -> torch.device:
    """The device of a tensor's fake one: see ``_take_meta_for_cpu``."""
    return CPU if x.device.type == "meta" else x.device


def device_of(x: Tensor) -> torch.device:
    """``x.device``, without the operator that a fake tensor runs to tell it."""
    return x.fake_device if isinstance(x, FakeTensor) else x.device


def is_data_dependent(error: BaseException) -> bool:
    """True if ``error`` is a fake tensor refusing to tell a value."""
    return isinstance(
        error,
        (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
        ),
    )


def remembering_nothing(mode: FakeTensorMode) -> Any:
    """Inside, each operator on fakes is asked anew.

    The results that torch remembers share views, and forward mode cannot have those.
    """
    return fake_tensor.disable_fake_tensor_cache(mode)


def forget_fakes(mode: FakeTensorMode) -> None:
    """Lets go of the weak references that a mode keeps to what it made.

    A module that is converted (``module.double()``) cannot swap a parameter for another
    while there is one.
    """
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Inside, torch does not log what an operator refuses on fake tensors."""
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
