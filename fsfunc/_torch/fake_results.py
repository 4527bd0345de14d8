"""Results of operators on fake tensors of the CPU, found faster than torch does.

torch's own way takes up to ten times as long, and a trace runs all operators of a step.
`fake_result` tries, in this order: views and new memory, by a table of operators
(`quick_fake`); a result that was remembered for operands that look alike; for an
operator over lists the results of tensors that look alike; and torch's own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from fsfunc._torch.dispatch import (
    Args,
    Kwargs,
    OpOverload,
    dispatch_mode_count,
    gives_views,
    outside_function_modes,
)
from fsfunc._torch.fake_tensors import device_of, fake_mode
from fsfunc._torch.internals import storage_key

CPU = torch.device("cpu")

Run: TypeAlias = Callable[[OpOverload, Args, Kwargs], Any]
Look: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""How a tensor looks: shape, strides and dtype."""
Key: TypeAlias = tuple[Hashable, ...]

_aten: Any = torch.ops.aten
# Views, whose results depend on shapes alone, alike on every device.
_VIEWS = {
    _aten.slice.Tensor, _aten.select.int, _aten.as_strided.default,
    _aten.detach.default, _aten.alias.default, _aten.view.default,
    _aten.t.default, _aten.transpose.int, _aten.permute.default,
    _aten.expand.default, _aten._unsafe_view.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.unbind.int, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.view.dtype,
    _aten._new_zeros_with_same_feature_meta.default,
}  # fmt: skip
# By identity: torch hashes an operator in Python.
_ONLY_VIEWS = {id(func) for func in _VIEWS if gives_views(func)}
# Questions that autograd's forward mode asks of each tensor, and Python of its device.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: device_of,
    _aten.is_same_size.default: lambda x, y: x.shape == y.shape,
    _aten._has_same_storage_numel.default: lambda x, y: (
        _storage_numel(x) == _storage_numel(y)
    ),
    _aten.promote_types.default: lambda a, b: _promote(a, b),
}
_SAME_SHAPE = {_aten.zeros_like.default, _aten.empty_like.default}
_NEW_LIKE_FIRST = {*_SAME_SHAPE, _aten.new_empty.default, _aten.new_zeros.default}
_NEW = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default,
}  # fmt: skip
_RANDOM = {
    _aten.randn.default, _aten.randn.generator, _aten.rand.default,
    _aten.rand.generator,
}  # fmt: skip
# Zeros in place of a tangent. torch's have a dispatch key, by which operators run in
# other ways, and what is remembered of them has none. Ranks must run alike: none has.
_ZEROS = {_aten._efficientzerotensor.default}


def fake_result(
    mode: FakeTensorMode, run: Run, func: OpOverload, args: Args, kwargs: Kwargs
) -> Any:
    """Returns the result of an operator on fake tensors.

    Args:
        mode: the mode of the fake tensors.
        run: torch's own way, called once for arguments that look alike. It takes ten
            times as long as to look up what is remembered, for operators that make new
            memory, or write into their first argument.
        func, args, kwargs: the operator's call.
    """
    out = quick_fake(mode, func, args, kwargs)
    if out is not NotImplemented:
        return out
    refuse_communication(func)
    key = _key(mode, func, args, kwargs) if _is_remembered(func) else None
    if key is None:
        return run(func, args, kwargs)
    remembered = _REMEMBERED.get(key)
    if remembered is None and _is_for_each(func) and (firsts := _firsts(mode, args)):
        return _for_each(mode, run, func, args, kwargs, firsts)
    if remembered is None:
        out = run(func, args, kwargs)
        if len(_REMEMBERED) >= _MOST_REMEMBERED:
            _REMEMBERED.clear()
        _REMEMBERED[key] = _to_remember(func, out, args, kwargs)
        return out
    if remembered is _ODD:
        return run(func, args, kwargs)
    if remembered is _FIRST:
        return args[0]
    container, specs = remembered
    results = new_fakes(mode, specs)
    return results[0] if container is None else container(results)


class Communicates(RuntimeError):
    """A step calls a collective of torch's own, which no transform sees."""


_DISTRIBUTED = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def refuse_communication(func: OpOverload) -> None:
    """Raises if an operator is one of torch.distributed.

    Raises:
        Communicates: names it, and the way out.
    """
    if getattr(func, "namespace", "") in _DISTRIBUTED:
        raise communication_error(func._schema.name.partition("::")[2].rstrip("_"))


def communication_error(operation: str) -> Communicates:
    """Returns the error for a step that calls ``operation`` of torch.distributed."""
    return Communicates(
        f"the step calls torch.distributed, {operation}, which goes past fsfunc: it is "
        "over the processes of torch's own group, whatever the mesh, sends nothing "
        "between simulated ranks, is in no ledger and no plan, and its derivative is "
        "not that of the ranks' mean. Call ff.psum, ff.pmean, ff.all_gather, "
        "ff.psum_scatter, ff.all_to_all, ff.ppermute or ff.pbroadcast, which are over "
        "an axis of the mesh; what is no part of the step is called outside it"
    )


def view_below(func: OpOverload, args: Args) -> Any:
    """Returns the views that an operator gives of a fake tensor, for a mode above.

    ``NotImplemented`` if it gives none, or not of one of `fake_modes.HereFakeMode`. Two
    of three operators of a step are views, so nothing else is asked of them.
    """
    if id(func) in _ONLY_VIEWS and torch._C._len_torch_dispatch_stack() == 1:
        mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if hasattr(mode, "common_attributes"):
            return quick_fake(mode, func, args, {})
    return NotImplemented


def new_fakes(mode: FakeTensorMode, specs: Iterable[Look]) -> list[FakeTensor]:
    """Returns new fake tensors of the CPU, of these shapes, strides and dtypes."""
    with torch._C._DisableTorchDispatch():
        return [
            _fake_over(
                mode, torch.empty_strided(*spec[:2], dtype=spec[2], device="meta")
            )
            for spec in specs
        ]


def fakes_like(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor] | None:
    """Returns new fake tensors like these, as ``torch.empty_like`` of each would.

    One call for all of them takes a fifth of the time.

    Args:
        dtypes: theirs; None: that of the tensor.

    Returns:
        None where torch has to make them: these are not all plain dense fakes, or
        another mode than that of fake tensors is to see it.
    """
    if not tensors or dispatch_mode_count() != 1 or type(tensors[0]) is not FakeTensor:
        return None
    mode: Any = fake_mode()
    if mode is None:
        return None
    looks: list[Look] = []
    with outside_function_modes():
        for x, dtype in zip(tensors, dtypes, strict=True):
            if type(x) is not FakeTensor or x.fake_mode is not mode:
                return None
            if device_of(x) != CPU or not x.is_contiguous():
                return None
            looks.append((tuple(x.shape), x.stride(), dtype or x.dtype))
        return new_fakes(mode, looks)  # type: ignore[return-value]


@functools.cache
def _is_for_each(func: OpOverload) -> bool:
    """Returns whether an operator makes a tensor of each in its lists, one by one."""
    returns = [str(x.type) for x in func._schema.returns]
    name = func._schema.name.partition("::")[2]
    return name.startswith("_foreach_") and returns == ["List[Tensor]"]


def _firsts(mode: FakeTensorMode, args: Args) -> list[int]:
    """Returns for each position in the lists the first position that looks alike.

    Empty if all are unlike. The parameters of an optimizer are alike in every layer.
    """
    lists = [x for x in args if isinstance(x, (tuple, list))]
    if len({len(x) for x in lists}) != 1:
        return []
    known: dict[Any, int] = {}
    firsts: list[int] = []
    for i, row in enumerate(zip(*lists, strict=True)):
        key: list[Any] = []
        if not _extend_key(mode, row, key):
            return []
        firsts.append(known.setdefault(tuple(key), i))
    return firsts if len(known) < len(firsts) else []


def _for_each(
    mode: FakeTensorMode,
    run: Run,
    func: OpOverload,
    args: Args,
    kwargs: Kwargs,
    firsts: list[int],
) -> list[FakeTensor]:
    """Returns the results of an operator over lists, run for the ``firsts`` alone."""
    positions = sorted(set(firsts))
    args = [  # type: ignore[assignment]
        [x[i] for i in positions] if type(x) in (tuple, list) else x for x in args
    ]
    out = dict(zip(positions, fake_result(mode, run, func, args, kwargs), strict=True))
    looks = {i: (x.shape, x.stride(), x.dtype) for i, x in out.items()}
    others = iter(new_fakes(mode, [looks[j] for i, j in enumerate(firsts) if i != j]))
    return [out[i] if i == j else next(others) for i, j in enumerate(firsts)]


def quick_fake(
    mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs
) -> Any:
    """Returns the result of a view, or of new memory, else ``NotImplemented``.

    torch's own way takes three times as long; this one knows a few operators.
    """
    rule = _rule(func)
    if rule == "view" or rule == "like":
        x = args[0]
        is_odd = not isinstance(x, FakeTensor) or x.constant is not None
        if is_odd or x.fake_device != CPU or x.fake_mode is not mode:
            return NotImplemented
        if rule == "view" and not kwargs:
            with torch._C._DisableTorchDispatch():
                # A third of all views. What is made over ``x`` is detached from it.
                out = x if func is _aten.detach.default else func(*args)
                if isinstance(out, (list, tuple)):
                    return [_fake_over(mode, part) for part in out]
                return _fake_over(mode, out)
        if (
            func in _SAME_SHAPE
            and not kwargs.get("memory_format")
            and x.is_contiguous()
        ):
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or x.dtype}
            func, args = _aten.empty_strided.default, (x.shape, x.stride())
    elif rule == "answer":
        return _ANSWERS[func](*args)
    elif rule == "none":
        return NotImplemented if _has_known_value(args) else None  # nothing to write
    elif rule != "new":
        return NotImplemented
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    if kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    if device is not None and torch.device(device) != CPU:
        return NotImplemented
    if rule != "view":
        kwargs["device"] = "meta"
    if func in _RANDOM or func in _ZEROS:
        kwargs.pop("generator", None)
        func = _aten.empty.memory_format
    with torch._C._DisableTorchDispatch():
        return _fake_over(mode, func(*args, **kwargs))


@functools.cache
def _rule(func: OpOverload) -> str:
    """Returns the rule for the results of an operator, or "" if none is known here.

    "view", "like" (as new memory like the first operand), "answer", "new", or "none",
    for an operator that only writes.
    """
    rules = {"view": _VIEWS, "like": _NEW_LIKE_FIRST, "answer": _ANSWERS}
    rules["new"] = _NEW | _RANDOM | _ZEROS
    rule = next((name for name, operators in rules.items() if func in operators), "")
    if not rule and func._schema.is_mutable and not func._schema.returns:
        return "none"
    return rule


def _has_known_value(values: Iterable[Any]) -> bool:
    """Returns whether a tensor among these, or in a list of them, has a known value."""
    for x in values:
        if type(x) is FakeTensor:
            if x.constant is not None:
                return True
        elif isinstance(x, (list, tuple)) and _has_known_value(x):
            return True
    return False


@functools.cache
def _promote(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    with torch._C._DisableTorchDispatch():
        return torch.promote_types(a, b)


def _storage_numel(x: Tensor) -> int:
    """Returns how many elements of its dtype a tensor's storage has."""
    return x.untyped_storage().nbytes() // x.itemsize


def _fake_over(mode: Any, x: Tensor) -> FakeTensor:
    """Returns a fake tensor of the CPU for one on "meta", as ``FakeTensor(...)`` does.

    The constructor takes three times as long to set attributes that are always the
    same: they are copied from the first fake tensor of the mode.

    Args:
        mode: a `fake_modes.HereFakeMode`, or another one, for the plain constructor.
        x: a tensor on the device "meta".
    """
    if not hasattr(mode, "common_attributes"):
        return FakeTensor(mode, x, CPU)
    # Without the mode among them: it would hold itself, and never be freed.
    if mode.common_attributes is None:
        mode.common_attributes = dict(FakeTensor(mode, x.detach(), CPU).__dict__)
        del mode.common_attributes["fake_mode"]
    fake = Tensor._make_subclass(
        FakeTensor,
        x,
        False,
        dispatch_device=True,
        device_for_backend_keys=CPU,  # type: ignore[arg-type]
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(mode.common_attributes, fake_mode=mode)
    return fake


# By the key of a call: the class of its results, if they are a list or a tuple, and how
# they look; or one of the two below.
_REMEMBERED: dict[Key, Any] = {}
_MOST_REMEMBERED = 1 << 16
# A result that cannot be remembered; and one that is the first argument.
_ODD, _FIRST = object(), object()
# A tensor without dims of one of these dtypes may stand for a number of Python, which
# has other rules of promotion.
_NUMBER_DTYPES = {torch.float64, torch.int64, torch.complex128, torch.bool}
_PLAIN_TYPES = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format}
    | {torch.device}
)


@functools.cache
def _is_remembered(func: OpOverload) -> bool:
    """Returns whether shapes alone determine what an operator makes, in new memory.

    Or whether it returns its first argument, into which it writes.
    """
    data_tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    data_tags |= {torch.Tag.inplace_view}
    parameters, returns = func._schema.arguments, func._schema.returns
    if func.namespace != "aten" or data_tags & set(func.tags) or not returns:
        return False
    if func._schema.is_mutable:
        written = [x.name for x in parameters if x.alias_info and x.alias_info.is_write]
        return written == [parameters[0].name] and len(returns) == 1
    tensor_types = ("Tensor", "List[Tensor]")
    return all(x.alias_info is None and str(x.type) in tensor_types for x in returns)


def _key(
    mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs
) -> Key | None:
    """Returns a key that determines how a call's results look; None where none does."""
    key: list[Any] = [func, torch.get_default_dtype()]
    if not _extend_key(mode, args, key):
        return None
    if kwargs:
        key += kwargs
        if not _extend_key(mode, kwargs.values(), key):
            return None
    if () in key and len({x for x in key[2:] if type(x) is torch.dtype}) > 1:
        # Beside another dtype: the result's depends on whether the tensor without dims
        # stands for a number of Python, which does not show.
        return None
    return tuple(key)


def _extend_key(mode: FakeTensorMode, values: Iterable[Any], key: list[Any]) -> bool:
    """Adds to ``key`` what decides how results look; returns False if that is not all.

    Args:
        values: the arguments.
        key: is extended.
    """
    for x in values:
        kind = type(x)
        if kind is FakeTensor:
            dtype, shape = x.dtype, x.shape
            if (
                x.fake_mode is not mode
                or x.fake_device != CPU
                or x.constant is not None
                or x.layout is not torch.strided
                or not shape
                and dtype in _NUMBER_DTYPES
                or x.is_neg()
                or dtype.is_complex
                and x.is_conj()
            ):
                return False
            key += (dtype, shape, x.stride())
        elif kind in _PLAIN_TYPES:
            key += (kind, x)
        elif kind is tuple or kind is list:
            key += (kind, len(x))
            if not _extend_key(mode, x, key):
                return False
        else:
            return False
    return True


def _to_remember(func: OpOverload, out: Any, args: Args, kwargs: Kwargs) -> Any:
    """Returns what to remember of a call's results.

    That is (their class, how each looks) if each lies in memory of its own; ``_FIRST``
    if the result is the first argument; else ``_ODD``.
    """
    if func._schema.is_mutable:
        return _FIRST if out is args[0] else _ODD
    container = type(out) if isinstance(out, (tuple, list)) else None
    container = getattr(
        container, "_make", container
    )  # a named tuple takes no sequence
    looks = []
    operands = tree_leaves((args, kwargs))
    storages = {storage_key(x) for x in operands if isinstance(x, Tensor)}
    for x in (out,) if container is None else out:
        if type(x) is not FakeTensor or x.fake_device != CPU or x.constant is not None:
            return _ODD
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            return _ODD
        dims = zip(x.shape, x.stride(), strict=True)
        extent = 1 + sum((n - 1) * step for n, step in dims) if x.numel() else 0
        size = x.untyped_storage().nbytes()
        key = storage_key(x)
        if x.storage_offset() or size != extent * x.element_size() or key in storages:
            return _ODD
        storages.add(key)
        looks.append((tuple(x.shape), x.stride(), x.dtype))
    return container, looks
