"""Modes of fake tensors: made, with faster rules of their own, and their results."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from fsfunc._torch.dispatch import GROUPED_PRODUCT, arguments_of
from fsfunc._torch.fake_results import (
    CPU,
    fake_result,
    new_fakes,
    refuse_communication,
)
from fsfunc._torch.fake_tensors import device_of


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
        if func is _DEVICE_ASKED:  # of each operand
            asked: Any = args[0]
            return device_of(asked)
        mine = super().__torch_dispatch__
        slowly = lambda func, args, kwargs: mine(func, types, args, kwargs)  # noqa: E731
        return fake_result(self, slowly, func, args, kwargs or {})

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


_DEVICE_ASKED: Any = torch.ops.prim.device.default


def result_below(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator, for a mode that has been given it.

    Where only the mode of fake tensors is on below, it is asked right here.
    """
    mode = None
    if torch._C._len_torch_dispatch_stack() == 1:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if type(mode) is not HereFakeMode:
        refuse_communication(func)
        return func(*args, **kwargs)
    return fake_result(mode, _plainly, func, args, kwargs)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


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


@functools.cache  # it is asked of each result, and the driver answers slowly
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


def fake_of(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """``x`` without its data."""
    return x if isinstance(x, FakeTensor) else mode.from_tensor(x, static_shapes=True)


def fake_like(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """A fake tensor of the shape and strides of ``x``, in a storage of its own."""
    where = device_of_fake(x)
    if where == CPU and type(mode) is HereFakeMode:
        return new_fakes(mode, [(x.shape, x.stride(), x.dtype)])[0]
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=where)


def device_of_fake(x: Tensor) -> torch.device:
    """The device of a tensor's fake one: see ``_take_meta_for_cpu``."""
    return CPU if x.device.type == "meta" else x.device


def without_fake_cache(mode: FakeTensorMode) -> Any:
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
    """Inside, torch does not log what an operator refuses on fake tensors.

    Its pages of internals would stand before the error that is raised, once for each
    run. For this context alone: simulated ranks come and go in any order.
    """
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


_QUIET: ContextVar[bool] = ContextVar("fsfunc_quiet_fakes", default=False)
logging.getLogger(fake_tensor.__name__).addFilter(lambda _: not _QUIET.get())
