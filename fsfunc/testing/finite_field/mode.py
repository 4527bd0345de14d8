"""The dispatch mode in which torch's operators compute in the field.

It lies below autograd and torch.func. So derivatives, vmap, hooks and transforms run as
ever, and the arithmetic that they ask for arrives here. ``_handler`` finds, once for
each operator, how it is computed:

    a rule             of rules.py and the files beside it
    a move             views, copies, gathers: torch's operator, unchanged
    a counterpart      for an operator that writes in place or into ``out=``
    a decomposition    torch's own, into operators that have rules
    none               it is refused by name; nothing is guessed

Operators on tensors without floats (indices, masks) are computed as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc._torch import formulas
from fsfunc.comm.attribution import current_label, source_line
from fsfunc.testing.finite_field import field as numbers

# Imported for the rules that they register.
from fsfunc.testing.finite_field import linear_algebra as _linear_algebra  # noqa: F401
from fsfunc.testing.finite_field import matrices as _matrices  # noqa: F401
from fsfunc.testing.finite_field import resampling as _resampling  # noqa: F401
from fsfunc.testing.finite_field.field import Field, NoResidue, lift
from fsfunc.testing.finite_field.indexing import FACTORIES, FILLS, MOVES, SUMS
from fsfunc.testing.finite_field.optimizer_kernels import kernel_equation, run_foreach
from fsfunc.testing.finite_field.rules import RULES, Overload, Rule, residue_of

_NARROW = (torch.float16, torch.bfloat16, torch.float32)


Handler = Callable[[Overload, tuple[Any, ...], dict[str, Any]], Any]


class NoExactRule(NotImplementedError):
    """Raised for an operator that an exact run has no rule for."""


class Exact(_torch.HiddenFromCompile):
    """Computes in a field. It may be entered in several threads, one after the other.

    Args:
        field: the field, with the random choices of a draw.
    """

    enters_ranks = True  # in the thread of each simulated rank too
    rounds = False

    def __init__(self, field: Field):
        super().__init__()
        self.field = field
        self.handlers: dict[Overload, Handler] = {}
        self.decomposed: set[Overload] = set()  # operators whose decompositions run

    def __torch_dispatch__(
        self,
        func: Overload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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
        except (
            NoResidue,
            NotImplementedError,
        ) as error:  # a rule's: adds the operator and the place
            raise self._refusal(func, str(error)) from error

    def _handler(self, func: Overload) -> Handler:
        """Returns the handler of an operator: the first that fits, in this order."""
        key = _rule_key(func)
        name = key.partition(".")[0]
        if func.namespace == "c10d":
            return self._send_message
        if key == "_to_copy" or key == "prims.convert_element_type":
            return self._convert
        if key in RULES:
            return _RuleHandler(self, RULES[key])
        if name.startswith("_foreach_"):
            return self._run_foreach
        if kernel_equation(name) is not None:
            return self._run_fused
        if name in FACTORIES:
            return self._make_tensor
        if name == "copy_":
            return self._copy
        if key in MOVES or name in MOVES or _torch.gives_views(func):
            return self._move
        if name in FILLS and "reduce" not in key:
            return self._fill_scalars
        if name in SUMS:
            return self._sum_at_indices
        if formulas.is_seeded(func):
            return self._draw_numbers
        if (counterpart := formulas.functional(func)) is not None:
            return _InPlaceHandler(self, *counterpart)
        return self._decompose

    # Handlers: they take an operator and its arguments, and return its result.

    def _move(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func._schema.is_mutable:
            _refuse_narrow(func, args)
        return func(*args, **kwargs)

    def _copy(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Copies; from floats into integers that is a cast."""
        target, source = args[0], args[1]
        _refuse_narrow(func, args)
        if source.is_floating_point() and not target.is_floating_point():
            source = self._convert(formulas.TO_COPY, (source,), {"dtype": target.dtype})
        return func(target, source, *args[2:], **kwargs)

    def _send_message(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Sends a message between processes; refuses sums, which a backend rounds."""
        if "reduce" in func._schema.name and _has_floats(args, kwargs):
            raise self._refusal(
                func, "a backend of torch's adds floats: run it on simulated ranks, or "
                "on processes whose tensors lie on the CPU",
            )  # fmt: skip
        return func(*args, **kwargs)

    def _fill_scalars(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Replaces scalars by their numbers, if the operator writes into floats."""
        if func._schema.is_mutable:
            _refuse_narrow(func, args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        if any(x.is_floating_point() for x in tensors) or func in _WHERE_OVERLOADS:
            args = [_number_to_write(x) for x in args]  # type: ignore[assignment]
            kwargs = {k: _number_to_write(x) for k, x in kwargs.items()}
        return func(*args, **kwargs)

    def _sum_at_indices(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        to_residue = lambda x: residue_of(x) if _has_floats([x], {}) else x  # noqa: E731
        return numbers.modulo(func(*map(to_residue, args), **kwargs))

    def _make_tensor(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Makes a tensor of numbers, in float64, with zeros in unwritten memory."""
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

    def _convert(
        self,
        func: Overload | _torch.OpOverloadPacket,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Casts a tensor; among floats that is the identity, as nothing is rounded."""
        x, dtype = args[0], kwargs.get("dtype", args[1] if len(args) > 1 else None)
        args = args[:1]
        if x.is_complex() or dtype is not None and dtype.is_complex:
            raise self._refusal(func, "complex numbers have no residues")
        if dtype is None or dtype.is_floating_point:
            if dtype is None and not x.is_floating_point():
                return func(*args, **kwargs)
            options = {k: v for k, v in kwargs.items() if k != "dtype"}
            return formulas.TO_COPY(lift(x), dtype=torch.float64, **options)
        if x.is_floating_point():
            x = residue_of(x)
            if (
                dtype != torch.bool
            ):  # a residue stands for a fraction, which is truncated
                x = numbers.map_fractions(x, math.trunc, x)
            x = numbers.to_signed(x)
        return formulas.TO_COPY(x, **{**kwargs, "dtype": dtype})

    def _run_foreach(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not _has_floats(args, kwargs):
            return func(*args, **kwargs)
        with self:
            return run_foreach(func, args, kwargs)

    def _run_fused(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        equation = kernel_equation(_rule_key(func).partition(".")[0])
        assert equation is not None, "the handler of a kernel that has an equation"
        with self:
            return equation(*args, **kwargs)

    def _draw_numbers(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not _has_floats(args, kwargs):
            result = func(*args, **kwargs)
            if not _has_floats((result,), {}):
                return result  # an order of rows, say
        raise self._refusal(
            func, "it draws numbers: draw them before, and give them to the step; "
            "dropout takes p=0.0",
        )  # fmt: skip

    def _decompose(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not _has_floats(args, kwargs):
            result = func(*args, **kwargs)
            if not _has_floats((result,), {}):
                return result
        decomposition = formulas.decomposition(func)
        if (
            decomposition is None or func in self.decomposed
        ):  # a decomposition that calls itself
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

    def _refusal(
        self, func: Overload | _torch.OpOverloadPacket, reason: str
    ) -> NoExactRule:
        return NoExactRule(
            f"{_operator_name(func)} in an exact run{_describe_location()}: {reason}"
        )


def _number_to_write(x: Any) -> Any:
    """Returns the number to write for a scalar."""
    # NaN stays: ``where`` may never choose it.
    return numbers.constant(x) if isinstance(x, float) and x == x else x


def _without_data(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on fake or meta tensors, with the dtypes of an exact run."""
    if kwargs.get("dtype") in _NARROW:
        kwargs = {**kwargs, "dtype": torch.float64}
    result = func(*args, **kwargs)
    takes_dtype = any(a.name == "dtype" for a in func._schema.arguments)
    if takes_dtype and isinstance(result, Tensor) and result.dtype in _NARROW:
        if _rule_key(func).partition(".")[0] in FACTORIES:
            return func(*args, **{**kwargs, "dtype": torch.float64})
    return result


class _RuleHandler:
    """The handler of an operator with a rule, which is used if there are floats."""

    def __init__(self, mode: Exact, rule: Rule):
        self.mode, self.rule = mode, rule

    def __call__(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not _has_floats(args, kwargs):
            result = func(*args, **kwargs)
            if not _has_floats((result,), {}):
                return result  # integers alone
        return self.rule(self.mode.field, *args, **kwargs)


class _InPlaceHandler:
    """The handler of an operator that writes in place, or into ``out=``.

    It computes the functional counterpart's result, and copies it.
    """

    def __init__(
        self, mode: Exact, counterpart: Callable[..., Any], written: tuple[str, ...]
    ):
        self.mode, self.counterpart, self.written = mode, counterpart, written

    def __call__(
        self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not _has_floats(args, kwargs):
            return func(*args, **kwargs)
        arguments = _torch.arguments_of(func, args, kwargs)
        targets = [arguments[name] for name in self.written]
        if func._schema.arguments[-1].is_out:
            for name in self.written:
                del arguments[name]
        with self.mode:
            results = self.counterpart(**arguments)
        results = results if isinstance(results, tuple | list) else (results,)
        for x, result in zip(targets, results, strict=True):
            _refuse_narrow(func, [x])
            if x.shape != result.shape and func._schema.arguments[-1].is_out:
                x.resize_(result.shape)
            x.copy_(result)
        return targets[0] if len(targets) == 1 else tuple(targets)


_WHERE_OVERLOADS = [
    getattr(torch.ops.aten.where, x) for x in torch.ops.aten.where.overloads()
]


def _rule_key(func: Overload) -> str:
    """Returns an operator's name in the table of rules."""
    name = func._schema.name.replace("::", ".").removeprefix("aten.")
    overload = func._overloadname
    return name if overload == "default" else f"{name}.{overload}"


def _operator_name(func: Overload | _torch.OpOverloadPacket) -> str:
    schema: Any = func._schema
    return f"torch.ops.{schema.name.replace('::', '.')}"


def _floats(values: Iterable[Any]) -> Iterator[Any]:
    for x in values:
        if isinstance(x, Tensor):
            if x.is_floating_point() or x.is_complex():
                yield x
        elif isinstance(x, list | tuple):
            yield from _floats(x)
        elif isinstance(x, float):
            yield x


def _is_meta(args: Sequence[Any]) -> bool:
    for x in args:
        if isinstance(x, list | tuple) and x:
            x = x[0]
        if isinstance(x, Tensor):
            return x.is_meta
    return False


def _has_floats(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return next(_floats(args), None) is not None or bool(
        kwargs and next(_floats(kwargs.values()), None) is not None
    )


_CODE_DTYPES = (torch.int8, torch.uint8)
_BIT_DTYPES = (torch.int32, torch.int16, *_NARROW)


def _refuse_codes(
    func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises NoExactRule if floats become codes of 8 bits, or their bits are read."""
    name = func._schema.name
    if name not in ("aten::_to_copy", "aten::view") or not args[0].is_floating_point():
        return
    if name == "aten::_to_copy" and kwargs.get("dtype") in _CODE_DTYPES:
        reason = "cuts floats to codes of 8 bits"
    elif func._overloadname == "dtype" and args[1] in _BIT_DTYPES:
        reason = "reads the bits of floats"
    else:
        return
    raise NoExactRule(
        f"{_operator_name(func)} in an exact run{_describe_location()} {reason}, which "
        "no number of a field has: leave quantised messages, moments in 8 bits and "
        "stochastic rounding out"
    )


def _describe_location() -> str:
    """Returns the unit and the user's line, in a backward that of the gradient call."""
    unit, phase = current_label()[:2]
    return f" at {source_line()}" + (f", in unit {unit!r} ({phase})" if unit else "")


def _refuse_narrow(func: Overload, args: Sequence[Any]) -> None:
    """Raises NoExactRule if a write would round numbers: into less than float64."""
    target = args[0]
    if isinstance(target, Tensor) and target.dtype in _NARROW:
        raise NoExactRule(
            f"{_operator_name(func)} in an exact run{_describe_location()} writes into "
            f"{target.dtype} of shape {tuple(target.shape)}, made outside of it: "
            "numbers need float64. Make it inside, or give it to the step as part of "
            "its state"
        )
