"""Results of operators on fake tensors of the CPU, found faster than torch does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from fsfunc._torch.fake_tensors import device_of
from fsfunc._torch.internals import storage_key

CPU = torch.device("cpu")

_aten: Any = torch.ops.aten
# What depends on shapes alone, alike on every device.
_OF_ONE = {
    _aten.slice.Tensor, _aten.select.int, _aten.as_strided.default,
    _aten.detach.default, _aten.alias.default, _aten.view.default,
    _aten.t.default, _aten.transpose.int, _aten.permute.default,
    _aten.expand.default, _aten._unsafe_view.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.unbind.int, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.view.dtype,
    _aten._new_zeros_with_same_feature_meta.default,
}  # fmt: skip
# What autograd's forward mode asks of each tensor, and Python of its device.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: device_of,
    _aten.is_same_size.default: lambda x, y: x.shape == y.shape,
    _aten._has_same_storage_numel.default: lambda x, y: _numel(x) == _numel(y),
    _aten.promote_types.default: lambda a, b: _promoted(a, b),
}
_COPIES = {_aten.zeros_like.default, _aten.empty_like.default}
_LIKE_ONE = {*_COPIES, _aten.new_empty.default, _aten.new_zeros.default}
_OF_NONE = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default,
}  # fmt: skip
_DRAWN = {
    _aten.randn.default, _aten.randn.generator, _aten.rand.default,
    _aten.rand.generator,
}  # fmt: skip


def fake_result(
    mode: FakeTensorMode, run: Callable[..., Any], func: Any, args: Any, kwargs: Any
) -> Any:
    """The result of ``func`` on fake tensors.

    ``run``, the mode's own way, is called once for arguments that look alike: it costs
    ten times as much as what is remembered here, of operators that make new memory, or
    write into their first argument.
    """
    out = quick_fake(mode, func, args, kwargs)
    if out is not NotImplemented:
        return out
    refuse_communication(func)
    key = _key(mode, func, args, kwargs) if _is_remembered(func) else None
    if key is None:
        return run(func, args, kwargs)
    made = _MADE.get(key)
    if made is None and _is_for_each(func) and (firsts := _firsts(mode, args)):
        return _for_each(mode, run, func, args, kwargs, firsts)
    if made is None:
        out = run(func, args, kwargs)
        if len(_MADE) >= _MOST_MADE:
            _MADE.clear()
        _MADE[key] = _made(func, out, args, kwargs)
        return out
    if made is _ODD:
        return run(func, args, kwargs)
    if made is _FIRST:
        return args[0]
    kind, specs = made
    new = new_fakes(mode, specs)
    return new[0] if kind is None else kind(new)


class Communicates(RuntimeError):
    """A step calls a collective of torch's own, which no transform sees."""


_COMMUNICATE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def refuse_communication(func: Any) -> None:
    """Raises if an operator is one of torch.distributed.

    Raises:
        Communicates: names it, and the way out.
    """
    if getattr(func, "namespace", "") in _COMMUNICATE:
        raise communicates(func._schema.name.partition("::")[2].rstrip("_"))


def communicates(what: str) -> Communicates:
    """The error for a step that calls ``what`` of torch.distributed."""
    return Communicates(
        f"the step calls torch.distributed, {what}, which goes past fsfunc: it is over "
        "the processes of torch's own group, whatever the mesh, sends nothing between "
        "simulated ranks, is in no ledger and no plan, and its derivative is not that "
        "of the ranks' mean. Call ff.psum, ff.pmean, ff.all_gather, ff.psum_scatter, "
        "ff.all_to_all, ff.ppermute or ff.pbroadcast, which are over an axis of the "
        "mesh; what is no part of the step is called outside it"
    )


def new_fakes(mode: FakeTensorMode, specs: Iterable[Any]) -> list[FakeTensor]:
    """Fake tensors of the CPU: of each the shape, the strides and the dtype."""
    with torch._C._DisableTorchDispatch():
        return [
            _over(mode, torch.empty_strided(*spec[:2], dtype=spec[2], device="meta"))
            for spec in specs
        ]


@functools.cache
def _is_for_each(func: Any) -> bool:
    """True if an operator makes a tensor of each in its lists, by that one alone."""
    returns = [str(x.type) for x in func._schema.returns]
    name = func._schema.name.partition("::")[2]
    return name.startswith("_foreach_") and returns == ["List[Tensor]"]


def _firsts(mode: FakeTensorMode, args: Any) -> list[int]:
    """For each place in the lists the first that looks alike; [] if all are unlike."""
    lists = [x for x in args if isinstance(x, (tuple, list))]
    if len({len(x) for x in lists}) != 1:
        return []
    known: dict[Any, int] = {}
    firsts: list[int] = []
    for i, row in enumerate(zip(*lists, strict=True)):
        key: list[Any] = []
        if not _looks(mode, row, key):
            return []
        firsts.append(known.setdefault(tuple(key), i))
    return firsts if len(known) < len(firsts) else []


def _for_each(
    mode: Any, run: Any, func: Any, args: Any, kwargs: Any, firsts: list[int]
) -> Any:
    """Results of an operator for each in its lists, run for the first of a kind."""
    some = sorted(set(firsts))
    args = [[x[i] for i in some] if type(x) in (tuple, list) else x for x in args]
    out = dict(zip(some, fake_result(mode, run, func, args, kwargs), strict=True))
    look = {i: (x.shape, x.stride(), x.dtype) for i, x in out.items()}
    others = iter(new_fakes(mode, [look[j] for i, j in enumerate(firsts) if i != j]))
    return [out[i] if i == j else next(others) for i, j in enumerate(firsts)]


def quick_fake(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a view, or of new memory, or ``NotImplemented``.

    The mode's own way costs three times as much; this one knows a few operators.
    """
    way = _way(func)
    if way == "view" or way == "like":
        x = args[0]
        odd = not isinstance(x, FakeTensor) or x.constant is not None
        if odd or x.fake_device != CPU or x.fake_mode is not mode:
            return NotImplemented
        if way == "view" and not kwargs:
            with torch._C._DisableTorchDispatch():
                out = func(*args)
                if isinstance(out, (list, tuple)):
                    return [_over(mode, part) for part in out]
                return _over(mode, out)
        if func in _COPIES and not kwargs.get("memory_format") and x.is_contiguous():
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or x.dtype}
            func, args = _aten.empty_strided.default, (x.shape, x.stride())
    elif way == "answer":
        return _ANSWERS[func](*args)
    elif way == "none":
        return NotImplemented if _constants(args) else None  # nothing to write
    elif way != "new":
        return NotImplemented
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    if kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    if device is not None and torch.device(device) != CPU:
        return NotImplemented
    if way != "view":
        kwargs["device"] = "meta"
    if func in _DRAWN:
        kwargs.pop("generator", None)
        func = _aten.empty.memory_format
    with torch._C._DisableTorchDispatch():
        return _over(mode, func(*args, **kwargs))


@functools.cache
def _way(func: Any) -> str:
    """The rule for the results of an operator, or "" if it is not known here."""
    ways = {"view": _OF_ONE, "like": _LIKE_ONE, "answer": _ANSWERS}
    ways["new"] = _OF_NONE | _DRAWN
    found = next((way for way, known in ways.items() if func in known), "")
    if not found and func._schema.is_mutable and not func._schema.returns:
        return "none"
    return found


def _constants(values: Iterable[Any]) -> bool:
    """True if the value of a tensor among these, or in a list of them, is known."""
    for x in values:
        if type(x) is FakeTensor:
            if x.constant is not None:
                return True
        elif isinstance(x, (list, tuple)) and _constants(x):
            return True
    return False


@functools.cache
def _promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    with torch._C._DisableTorchDispatch():
        return torch.promote_types(a, b)


def _numel(x: Tensor) -> int:
    """The number of elements of its dtype that a tensor's storage has."""
    return x.untyped_storage().nbytes() // x.itemsize


def _over(mode: Any, x: Tensor) -> FakeTensor:
    """A fake tensor of the CPU over one on "meta", as its constructor makes it.

    That one takes three times as long: all but the tensor itself is always the same.
    """
    if not hasattr(mode, "always"):
        return FakeTensor(mode, x, CPU)
    if mode.always is None:  # without the mode itself, or it would hold itself
        mode.always = dict(FakeTensor(mode, x.detach(), CPU).__dict__)
        del mode.always["fake_mode"]
    fake = Tensor._make_subclass(
        FakeTensor,
        x,
        x.requires_grad,
        dispatch_device=True,
        device_for_backend_keys=CPU,  # type: ignore[arg-type]
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(mode.always, fake_mode=mode)
    return fake


_MADE: dict[Any, Any] = {}  # what operators made of arguments that look so
_MOST_MADE = 1 << 16
_ODD, _FIRST = object(), object()
_OF_NUMBERS = {torch.float64, torch.int64, torch.complex128, torch.bool}
_SHAPELESS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format}
    | {torch.device}
)


@functools.cache
def _is_remembered(func: Any) -> bool:
    """True if shapes alone say what an operator makes, in memory of its own.

    Or if it makes nothing, and returns its first argument, into which it writes.
    """
    odd = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    odd |= {torch.Tag.inplace_view}
    given, made = func._schema.arguments, func._schema.returns
    if func.namespace != "aten" or odd & set(func.tags) or not made:
        return False
    if func._schema.is_mutable:
        changed = [x.name for x in given if x.alias_info and x.alias_info.is_write]
        return changed == [given[0].name] and len(made) == 1
    kinds = ("Tensor", "List[Tensor]")
    return all(x.alias_info is None and str(x.type) in kinds for x in made)


def _key(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A key of the shapes of a call's results, or None if that is unknown."""
    key: list[Any] = [func, torch.get_default_dtype()]
    if not _looks(mode, args, key):
        return None
    if kwargs:
        key += kwargs
        if not _looks(mode, kwargs.values(), key):
            return None
    if () in key and len({x for x in key[2:] if type(x) is torch.dtype}) > 1:
        return None  # a tensor without dims may be a number of Python: of which type?
    return tuple(key)


def _looks(mode: FakeTensorMode, values: Iterable[Any], key: list[Any]) -> bool:
    """Adds the properties of arguments that decide how results look; False if odd."""
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
                and dtype in _OF_NUMBERS
                or x.is_neg()
                or dtype.is_complex
                and x.is_conj()
            ):
                return False
            key += (dtype, shape, x.stride())
        elif kind in _SHAPELESS:
            key += (kind, x)
        elif kind is tuple or kind is list:
            key += (kind, len(x))
            if not _looks(mode, x, key):
                return False
        else:
            return False
    return True


def _made(func: Any, out: Any, args: Any, kwargs: Any) -> Any:
    """The shapes of results that lie in memory of their own, or ``_ODD``.

    ``_FIRST`` if the result is the first argument.
    """
    if func._schema.is_mutable:
        return _FIRST if out is args[0] else _ODD
    kind = type(out) if isinstance(out, (tuple, list)) else None
    kind = getattr(kind, "_make", kind)  # a named tuple takes no sequence
    specs = []
    given = tree_leaves((args, kwargs))
    seen = {storage_key(x) for x in given if isinstance(x, Tensor)}
    for x in (out,) if kind is None else out:
        if type(x) is not FakeTensor or x.fake_device != CPU or x.constant is not None:
            return _ODD
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            return _ODD
        steps = zip(x.shape, x.stride(), strict=True)
        reach = 1 + sum((n - 1) * step for n, step in steps) if x.numel() else 0
        size = x.untyped_storage().nbytes()
        key = storage_key(x)
        if x.storage_offset() or size != reach * x.element_size() or key in seen:
            return _ODD
        seen.add(key)
        specs.append((tuple(x.shape), x.stride(), x.dtype))
    return kind, specs
