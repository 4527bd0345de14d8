"""The mode in which operators compute in the field.

It lies below autograd and torch.func: so derivatives, vmap, hooks and transforms run as
ever, and what arrives here is the arithmetic that they ask for. Each operator has one
of these, found once by its name:

    a rule              of rules.py and the files beside it
    a move              views, copies, gathers: as it is
    its counterpart     of what writes in place or into ``out=``
    torch's own decomposition into operators that have rules
    none                it is refused, by name; nothing is guessed

Tensors without floating values (indices, masks) are computed as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc._torch import formulas
from fsfunc.comm.attribution import current_label, source_line
from fsfunc.testing.finite_field import field as numbers
from fsfunc.testing.finite_field import linear_algebra as _linear_algebra  # noqa: F401
from fsfunc.testing.finite_field import matrices as _matrices  # noqa: F401
from fsfunc.testing.finite_field import resampling as _resampling  # noqa: F401
from fsfunc.testing.finite_field.field import Field, NoResidue, lifted
from fsfunc.testing.finite_field.indexing import FACTORIES, FILLS, MOVES, SUMS
from fsfunc.testing.finite_field.optimizer_kernels import each, fused
from fsfunc.testing.finite_field.rules import RULES, value

_NARROW = (torch.float16, torch.bfloat16, torch.float32)


class NoExactRule(NotImplementedError):
    """An operator that an exact run does not know."""


class Exact(_torch.HiddenFromCompile):
    """Computes in a field. It may be entered in several threads, one after the other.

    Args:
        field: the random choices of a draw.

    """

    enters_ranks = True  # simulated ranks enter it too: it acts alike in each thread
    rounds = False

    def __init__(self, field: Field):
        super().__init__()
        self.field = field
        self.handlers: dict[Any, Callable[..., Any]] = {}
        self.decomposed: set[Any] = set()  # operators whose decompositions run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        _refuse_codes(func, args, kwargs)
        if types or _torch.fake_active() or _is_meta(args):
            return _without_data(func, args, kwargs)
        handler = self.handlers.get(func)
        if handler is None:
            handler = self.handlers[func] = self._handler(func)
        try:
            return handler(func, args, kwargs)
        except NoExactRule:
            raise
        except (NoResidue, NotImplementedError) as error:  # by a rule: of what, where
            raise self._refusal(func, str(error)) from error

    def _handler(self, func: Any) -> Callable[..., Any]:
        """Returns what computes an operator; the order is that of precedence."""
        key = _key(func)
        name = key.partition(".")[0]
        if func.namespace == "c10d":
            return self._send
        if key == "_to_copy" or key == "prims.convert_element_type":
            return self._convert
        if key in RULES:
            return _Computed(self, RULES[key])
        if name.startswith("_foreach_"):
            return self._each
        if fused(name) is not None:
            return self._fused
        if name in FACTORIES:
            return self._make
        if name == "copy_":
            return self._copy
        if key in MOVES or name in MOVES or _torch.gives_views(func):
            return self._move
        if name in FILLS and "reduce" not in key:
            return self._fill
        if name in SUMS:
            return self._sum
        if formulas.is_seeded(func):
            return self._draw
        if (counterpart := formulas.functional(func)) is not None:
            return _Written(self, *counterpart)
        return self._decompose

    # Handlers: (the operator, its arguments) to its result.

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable:
            _refuse_narrow(func, args)
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy from floats into integers is a cast."""
        into, source = args[0], args[1]
        _refuse_narrow(func, args)
        if source.is_floating_point() and not into.is_floating_point():
            source = self._convert(formulas.TO_COPY, (source,), {"dtype": into.dtype})
        return func(into, source, *args[2:], **kwargs)

    def _send(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Messages between processes move numbers; a backend's own sums are floats'."""
        if "reduce" in func._schema.name and _has_floats(args, kwargs):
            raise self._refusal(
                func, "a backend of torch's adds floats: run it on simulated ranks, or "
                "on processes whose tensors lie on the CPU",
            )  # fmt: skip
        return func(*args, **kwargs)

    def _fill(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What writes scalars into floats writes their numbers."""
        if func._schema.is_mutable:
            _refuse_narrow(func, args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        if any(x.is_floating_point() for x in tensors) or func in _CHOICES:
            args = [_filling(x) for x in args]
            kwargs = {k: _filling(x) for k, x in kwargs.items()}
        return func(*args, **kwargs)

    def _sum(self, func: Any, args: Any, kwargs: Any) -> Any:
        of = lambda x: value(x) if _has_floats([x], {}) else x  # noqa: E731
        return numbers.modulo(func(*map(of, args), **kwargs))

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor holds numbers, in float64; unwritten memory holds zeros."""
        if kwargs.get("dtype") in _NARROW:
            kwargs = {**kwargs, "dtype": torch.float64}
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if "zerotensor" in func._schema.name:  # it has no memory
            return torch.zeros(result.shape, dtype=torch.float64)
        if "empty" in func._schema.name:  # first: what its memory held may be NaN
            return result.to(torch.float64).zero_()
        if result.is_meta or bool(result.isnan().any()):  # NaN that may be left out
            return result.to(torch.float64)
        return numbers.constants(result)

    def _convert(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Casts among floats are the identity: they prove algebra, not rounding."""
        x, dtype = args[0], kwargs.get("dtype", args[1] if len(args) > 1 else None)
        args = args[:1]
        if x.is_complex() or dtype is not None and dtype.is_complex:
            raise self._refusal(func, "complex numbers have no residues")
        if dtype is None or dtype.is_floating_point:
            if dtype is None and not x.is_floating_point():
                return func(*args, **kwargs)
            kept = {k: v for k, v in kwargs.items() if k != "dtype"}
            return formulas.TO_COPY(lifted(x), dtype=torch.float64, **kept)
        if x.is_floating_point():
            x = value(x)
            if dtype != torch.bool:  # a number is the whole one that it stands for
                x = numbers.fractions(x, math.trunc, x)
            x = numbers.balanced(x)
        return formulas.TO_COPY(x, **{**kwargs, "dtype": dtype})

    def _each(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _has_floats(args, kwargs):
            return func(*args, **kwargs)
        with self:
            return each(func, args, kwargs)

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        equation = fused(_key(func).partition(".")[0])
        assert equation is not None, "the handler of a kernel that has an equation"
        with self:
            return equation(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _has_floats(args, kwargs):
            result = func(*args, **kwargs)
            if not _has_floats((result,), {}):
                return result  # an order of rows, say
        raise self._refusal(
            func, "it draws numbers: draw them before, and give them to the step; "
            "dropout takes p=0.0",
        )  # fmt: skip

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _has_floats(args, kwargs):
            result = func(*args, **kwargs)
            if not _has_floats((result,), {}):
                return result
        decomposition = formulas.decomposition(func)
        if decomposition is None or func in self.decomposed:  # it is made of itself
            raise self._refusal(func, "no rule says what it is in a field")
        self.decomposed.add(func)
        try:
            with self:
                result = decomposition(*args, **kwargs)
        finally:
            self.decomposed.discard(func)
        if result is NotImplemented:
            raise self._refusal(func, "no rule says what it is in a field")
        return result

    def _refusal(self, func: Any, reason: str) -> NoExactRule:
        return NoExactRule(f"{_called(func)} in an exact run{_where()}: {reason}")


def _filling(x: Any) -> Any:
    """Returns the number that is written for a scalar; NaN may never be chosen."""
    return numbers.constant(x) if isinstance(x, float) and x == x else x


def _without_data(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator on fake or meta tensors: of the dtypes that an exact run has."""
    if kwargs.get("dtype") in _NARROW:
        kwargs = {**kwargs, "dtype": torch.float64}
    result = func(*args, **kwargs)
    takes_dtype = any(a.name == "dtype" for a in func._schema.arguments)
    if takes_dtype and isinstance(result, Tensor) and result.dtype in _NARROW:
        if _key(func).partition(".")[0] in FACTORIES:
            return func(*args, **{**kwargs, "dtype": torch.float64})
    return result


class _Computed:
    """What a rule computes, where there are floats."""

    def __init__(self, mode: Exact, rule: Callable[..., Any]):
        self.mode, self.rule = mode, rule

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _has_floats(args, kwargs):
            result = func(*args, **kwargs)
            if not _has_floats((result,), {}):
                return result  # of integers alone
        return self.rule(self.mode.field, *args, **kwargs)


class _Written:
    """What writes in place, or into ``out=``: computes the result, and copies it."""

    def __init__(self, mode: Exact, counterpart: Any, written: tuple[str, ...]):
        self.mode, self.counterpart, self.written = mode, counterpart, written

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _has_floats(args, kwargs):
            return func(*args, **kwargs)
        named = _torch.arguments_of(func, args, kwargs)
        into = [named[name] for name in self.written]
        if func._schema.arguments[-1].is_out:
            for name in self.written:
                del named[name]
        with self.mode:
            results = self.counterpart(**named)
        results = results if isinstance(results, tuple | list) else (results,)
        for x, result in zip(into, results, strict=True):
            _refuse_narrow(func, [x])
            if x.shape != result.shape and func._schema.arguments[-1].is_out:
                x.resize_(result.shape)
            x.copy_(result)
        return into[0] if len(into) == 1 else tuple(into)


_CHOICES = [getattr(torch.ops.aten.where, x) for x in torch.ops.aten.where.overloads()]


def _key(func: Any) -> str:
    """Returns an operator's name in the table of rules."""
    name = func._schema.name.replace("::", ".").removeprefix("aten.")
    overload = func._overloadname
    return name if overload == "default" else f"{name}.{overload}"


def _called(func: Any) -> str:
    return f"torch.ops.{func._schema.name.replace('::', '.')}"


def _floats(values: Any) -> Iterator[Any]:
    for x in values:
        if isinstance(x, Tensor):
            if x.is_floating_point() or x.is_complex():
                yield x
        elif isinstance(x, list | tuple):
            yield from _floats(x)
        elif isinstance(x, float):
            yield x


def _is_meta(args: Any) -> bool:
    for x in args:
        if isinstance(x, list | tuple) and x:
            x = x[0]
        if isinstance(x, Tensor):
            return x.is_meta
    return False


def _has_floats(args: Any, kwargs: Any) -> bool:
    return next(_floats(args), None) is not None or bool(
        kwargs and next(_floats(kwargs.values()), None) is not None
    )


_CODES = (torch.int8, torch.uint8)
_BITS = (torch.int32, torch.int16, *_NARROW)


def _refuse_codes(func: Any, args: Any, kwargs: Any) -> None:
    """Raises where floats are cut to codes of 8 bits, or their bits are computed on."""
    name = func._schema.name
    if name not in ("aten::_to_copy", "aten::view") or not args[0].is_floating_point():
        return
    if name == "aten::_to_copy" and kwargs.get("dtype") in _CODES:
        what = "cuts floats to codes of 8 bits"
    elif func._overloadname == "dtype" and args[1] in _BITS:
        what = "reads the bits of floats"
    else:
        return
    raise NoExactRule(
        f"{_called(func)} in an exact run{_where()} {what}, which no number of a "
        "field has: leave quantised messages, moments in 8 bits and stochastic "
        "rounding out"
    )


def _where() -> str:
    """Returns the user's line (in a backward, of the gradient call) and the unit."""
    unit, phase = current_label()[:2]
    return f" at {source_line()}" + (f", in unit {unit!r} ({phase})" if unit else "")


def _refuse_narrow(func: Any, args: Any) -> None:
    """Raises where numbers would be written into a tensor that rounds them."""
    into = args[0]
    if isinstance(into, Tensor) and into.dtype in _NARROW:
        raise NoExactRule(
            f"{_called(func)} in an exact run{_where()} writes into {into.dtype} of "
            f"shape {tuple(into.shape)}, made outside of it: numbers need float64. "
            "Make it inside, or give it to the step as part of its state"
        )
