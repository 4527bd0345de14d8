"""Modes of fake tensors: one of torch's, with faster rules for its results.

A fake tensor has shape, dtype and device, and no data: torch finds the result of an
operator by its rule for the device "meta". `HereFakeMode` asks `fake_results` first,
which remembers results by the shapes of operands. Traces and plans run in it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from fsfunc._torch.dispatch import (
    GROUPED_PRODUCT,
    Args,
    Kwargs,
    OpOverload,
    arguments_of,
)
from fsfunc._torch.fake_results import CPU, fake_result, new_fakes, refuse_communication
from fsfunc._torch.fake_tensors import device_of


class HereFakeMode(FakeTensorMode):
    """A mode of fake tensors, of devices that this torch can run, and no others.

    For another device autograd would end the process, as it looks for its streams.

    Attributes:
        common_attributes: those that all fake tensors of this mode have in common.
    """

    common_attributes: dict[str, Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(  # type: ignore[override]
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if func is _DEVICE:  # of each operand
            operand: Any = args[0]
            return device_of(operand)
        dispatch_slowly = super().__torch_dispatch__
        slowly = lambda func, args, kwargs: dispatch_slowly(func, types, args, kwargs)  # noqa: E731
        return fake_result(self, slowly, func, args, kwargs or {})

    def dispatch(  # type: ignore[override]
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if func is GROUPED_PRODUCT.default:
            arguments = arguments_of(func, tuple(args), dict(kwargs or {}))
            if device_of(arguments["self"]) == CPU:
                return _grouped_product(self, arguments)
        out = super().dispatch(func, types, args, kwargs)  # type: ignore[arg-type]
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, FakeTensor):
                check_device(x.fake_device)
        return out


_DEVICE: OpOverload = torch.ops.prim.device.default


def run_operator_below(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Runs an operator below the mode that has been given it; returns the result.

    Where the mode of fake tensors alone is on below, it is called directly: through
    torch's dispatcher the call would take longer.
    """
    mode = None
    if torch._C._len_torch_dispatch_stack() == 1:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if type(mode) is not HereFakeMode:
        refuse_communication(func)
        return func(*args, **kwargs)
    return fake_result(mode, _call, func, args, kwargs)


def _call(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    return func(*args, **kwargs)


def _grouped_product(mode: FakeTensorMode, arguments: dict[str, Any]) -> Tensor:
    """Returns the result of a product of groups on a CPU (for a mixture of experts).

    torch's own rule for tensors without data knows only one of its dtypes.
    """
    a, b = arguments["self"], arguments["mat2"]
    dtype, groups = arguments["out_dtype"] or a.dtype, ()
    if a.ndim == b.ndim:
        groups = arguments["offs"].shape if a.ndim == 2 else a.shape[:-2]
    size = (*groups, a.shape[-2], b.shape[-1])
    step = 16 // dtype.itemsize  # rows begin at a multiple of 16 bytes
    row = -(-size[-1] // step) * step
    strides = (size[-2] * row, row, 1)[-len(size) :]
    with torch._C._DisableTorchDispatch():
        return FakeTensor(
            mode, torch.empty_strided(size, strides, dtype=dtype, device="meta"), CPU
        )


@functools.cache  # it is asked of each result, and the driver answers slowly
def check_device(device: torch.device) -> None:
    """Raises for fake tensors of a device that this torch cannot run.

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
def _register_meta_rules() -> None:
    """Registers rules on tensors without data for operators for which torch has none.

    Else it would run the operator on zeros of full size.
    """
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel("aten::_fused_sgd_", "Meta"):
        _LIBRARY.impl("_fused_sgd_", lambda *args, **kwargs: None)


def _new_fake_mode() -> FakeTensorMode:
    _register_meta_rules()
    mode = HereFakeMode(allow_non_fake_inputs=True)
    _convert_meta_to_cpu(mode)
    return mode


def _convert_meta_to_cpu(mode: FakeTensorMode) -> None:
    """Makes a mode convert meta tensors to fake tensors of the CPU.

    For the device "meta" torch decomposes operators (attention into a product with all
    its scores) as no device does, so that plans would count other work.
    """
    converter: Any = mode.fake_tensor_converter
    convert, fakes = converter.from_real_tensor, WeakTensorKeyDictionary()

    def converted(
        fake_mode: FakeTensorMode, x: Tensor, *args: Any, **options: Any
    ) -> Any:
        is_plain = not (isinstance(x, FakeTensor) or x.is_conj() or x.is_neg())
        if x.device.type != "meta" or not is_plain:
            return convert(fake_mode, x, *args, **options)
        # A meta tensor at two places stays one tensor. Held weakly: neither lives on.
        fake = fakes[x]() if x in fakes else None
        if fake is None:
            properties = {"dtype": x.dtype, "requires_grad": x.requires_grad}
            device = device_of_fake(x)
            with mode:
                fake = torch.empty_strided(
                    x.shape, x.stride(), device=device, **properties
                )
            fakes[x] = weakref.ref(fake)
        return fake

    converter.from_real_tensor = converted


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """Returns the mode of the fake tensors among ``values``, or a new one."""
    for x in values:
        if isinstance(x, FakeTensor):
            return x.fake_mode
    return _new_fake_mode()


@functools.cache
def abstract_mode() -> FakeTensorMode:
    """Returns the one mode of all abstract meshes: tensors of two modes cannot meet."""
    return _new_fake_mode()


def fake_of(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """Returns ``x`` without its data."""
    return x if isinstance(x, FakeTensor) else mode.from_tensor(x, static_shapes=True)


def fake_like(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """Returns a fake tensor of the shape and strides of ``x``, in its own storage."""
    device = device_of_fake(x)
    if device == CPU and type(mode) is HereFakeMode:
        return new_fakes(mode, [(x.shape, x.stride(), x.dtype)])[0]
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def device_of_fake(x: Tensor) -> torch.device:
    """Returns the device of a tensor's fake one: see ``_convert_meta_to_cpu``."""
    return CPU if x.device.type == "meta" else x.device


def without_fake_cache(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Inside, torch does not cache the results of operators on fake tensors.

    Results from its cache share views, which forward mode cannot differentiate.
    """
    return fake_tensor.disable_fake_tensor_cache(mode)


def forget_fakes(mode: FakeTensorMode) -> None:
    """Drops the weak references that a mode has to what it made.

    A module that is converted (``module.double()``) cannot swap a parameter for another
    while there is one.
    """
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


@contextmanager
def without_fake_logs() -> Iterator[None]:
    """Inside, torch does not log what an operator refuses on fake tensors.

    Its pages of internals would stand before the error that is raised, once for each
    run. For this context alone: simulated ranks come and go in any order.
    """
    token = _LOGS_OFF.set(True)
    try:
        yield
    finally:
        _LOGS_OFF.reset(token)


_LOGS_OFF: ContextVar[bool] = ContextVar("fsfunc_quiet_fakes", default=False)
logging.getLogger(fake_tensor.__name__).addFilter(lambda _: not _LOGS_OFF.get())
