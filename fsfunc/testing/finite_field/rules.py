"""Rules of operators in the field: a table of them, and the elementwise ones.

A rule is a function of a `Field` and of an operator's arguments, by the operator's name
in torch: ``"mul.Tensor"`` is ``torch.ops.aten.mul.Tensor``. Rules of operators that
write in place or into ``out=`` are those of their functional counterparts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.testing.finite_field import field as numbers
from fsfunc.testing.finite_field.field import (
    INFINITY,
    MINUS_INFINITY,
    Field,
    lift,
    modulo,
    product,
    strip_companions,
)

Rule = Callable[..., Any]
Operand = Tensor | float
"""An argument of an elementwise operator: a tensor, or a scalar of Python's."""

RULES: dict[str, Rule] = {}

# An operator of torch, such as ``torch.ops.aten.add.Tensor``, as modes get it.
Overload: TypeAlias = _torch.OpOverload


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the operators of these names."""

    def register(fn: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = fn
        return fn

    return register


def lift_operand(x: Operand) -> Tensor:
    """Returns an operand as numbers of the field."""
    if isinstance(x, Tensor):
        return lift(x)
    return _scalar(numbers.constant(x))


@functools.lru_cache(maxsize=256)
def _scalar(x: float) -> Tensor:
    """Returns a tensor of a number; cached, as no rule writes into its operands."""
    return torch.tensor(x, dtype=torch.float64)


def residue_of(x: Operand) -> Tensor:
    """Returns the residues of an operand, without companions."""
    return strip_companions(lift_operand(x))


def is_float(x: Operand) -> bool:
    """Returns whether an operand is a float, or a tensor of floats."""
    return isinstance(x, float) or isinstance(x, Tensor) and x.is_floating_point()


# Arithmetic


@rule("add.Tensor", "add.Scalar", "prims.add")
def add(f: Field, a: Operand, b: Operand, alpha: Operand = 1) -> Tensor:
    """Returns a + alpha b."""
    b = (
        lift_operand(b)
        if alpha == 1
        else f.multiply(lift_operand(b), lift_operand(alpha))
    )
    return f.add(lift_operand(a), b)


@rule("sub.Tensor", "sub.Scalar", "prims.sub")
def subtract(f: Field, a: Operand, b: Operand, alpha: Operand = 1) -> Tensor:
    """Returns a - alpha b."""
    b = (
        lift_operand(b)
        if alpha == 1
        else f.multiply(lift_operand(b), lift_operand(alpha))
    )
    return f.add(lift_operand(a), b, minus=True)


@rule("rsub.Tensor", "rsub.Scalar")
def subtract_from(f: Field, a: Operand, b: Operand, alpha: Operand = 1) -> Tensor:
    """Returns b - alpha a."""
    return subtract(f, b, a, alpha)


@rule("mul.Tensor", "mul.Scalar", "prims.mul")
def multiply(f: Field, a: Operand, b: Operand) -> Tensor:
    """Returns a b."""
    return f.multiply(lift_operand(a), lift_operand(b))


@rule("div.Tensor", "div.Scalar", "true_divide.Tensor", "prims.div")
def divide(f: Field, a: Operand, b: Operand) -> Tensor:
    """Returns a / b; a quotient by 0 is 0."""
    return f.multiply(lift_operand(a), f.inverse(residue_of(b)))


@rule("neg", "prims.neg")
def negate(f: Field, a: Operand) -> Tensor:
    """Returns -a."""
    return f.negative(lift_operand(a))


@rule("reciprocal", "prims.reciprocal")
def reciprocal(f: Field, a: Operand) -> Tensor:
    """Returns 1 / a."""
    return f.inverse(residue_of(a))


@rule("addcmul")
def addcmul(f: Field, x: Operand, a: Operand, b: Operand, value: Operand = 1) -> Tensor:
    """Returns x + value a b."""
    return add(f, x, multiply(f, a, b), alpha=value)


@rule("addcdiv")
def addcdiv(f: Field, x: Operand, a: Operand, b: Operand, value: Operand = 1) -> Tensor:
    """Returns x + value a / b."""
    return add(f, x, divide(f, a, b), alpha=value)


@rule("lerp.Scalar", "lerp.Tensor")
def lerp(f: Field, a: Operand, b: Operand, weight: Operand) -> Tensor:
    """Returns a + weight (b - a)."""
    return add(f, a, multiply(f, subtract(f, b, a), weight))


@rule("pow.Tensor_Scalar", "prims.pow")
def to_power(f: Field, x: Operand, exponent: Operand) -> Tensor:
    """Returns powers: products, roots, or a random function of the base."""
    if isinstance(exponent, Tensor):
        return to_powers(f, x, exponent)
    if exponent == 2:
        return f.square(lift_operand(x))
    if exponent == int(exponent):
        return numbers.power(residue_of(x), int(exponent))
    if abs(exponent) == 0.5:
        root = f.root(residue_of(x))
        return root if exponent > 0 else f.inverse(strip_companions(root))
    image = f.random_function(f"pow {abs(exponent)!r}", residue_of(x))
    return image if exponent > 0 else f.inverse(image)


@rule("square")
def square(f: Field, x: Operand) -> Tensor:
    """Returns squares; of a root, what it is the root of."""
    return f.square(lift_operand(x))


@rule("pow.Tensor_Tensor", "pow.Scalar")
def to_powers(f: Field, x: Operand, exponent: Operand) -> Tensor:
    """Returns powers; a tensor of exponents counts as whole numbers, its residues."""
    return numbers.elementwise_powers(residue_of(x), residue_of(exponent))


# Functions


@rule("exp", "prims.exp")
def exp(f: Field, x: Operand) -> Tensor:
    """Returns exponentials."""
    return f.exp(lift_operand(x))


@rule("expm1", "prims.expm1")
def expm1(f: Field, x: Operand) -> Tensor:
    """Returns exponentials less 1."""
    return modulo(f.exp(lift_operand(x)) - 1)


@rule("exp2", "prims.exp2")
def exp2(f: Field, x: Operand) -> Tensor:
    """Returns a random function, which shares no identity with exp."""
    return f.random_function("exp2", residue_of(x))


@rule("log", "prims.log")
def log(f: Field, x: Operand) -> Tensor:
    """Returns logarithms, whose exponentials are x."""
    return f.log(lift_operand(x))


@rule("log1p", "prims.log1p")
def log1p(f: Field, x: Operand) -> Tensor:
    """Returns logarithms of 1 + x."""
    return f.log(modulo(residue_of(x) + 1))


@rule("sqrt", "prims.sqrt")
def sqrt(f: Field, x: Operand) -> Tensor:
    """Returns roots, whose squares are x."""
    return f.root(residue_of(x))


@rule("rsqrt", "prims.rsqrt")
def rsqrt(f: Field, x: Operand) -> Tensor:
    """Returns 1 over roots."""
    return f.inverse(strip_companions(f.root(residue_of(x))))


@rule("sigmoid")
def sigmoid(f: Field, x: Operand) -> Tensor:
    """Returns 1 / (1 + exp(-x)), by the exponential of the field."""
    return f.inverse(modulo(1 + f.exp(f.negative(lift_operand(x)))))


def _register_random(name: str, sign: int = 0) -> None:
    """Registers an operator as a random function.

    torch derives its derivative from other operators, or from the function itself.
    """

    @rule(name, f"prims.{name}")
    def function(f: Field, x: Operand, *args: Any, **keywords: Any) -> Tensor:
        salt_parts = [name, *map(repr, args), *map(repr, sorted(keywords.items()))]
        return f.random_function(" ".join(salt_parts), residue_of(x), sign)


for name in ("tanh", "sin", "tan", "asin", "atan", "sinh", "asinh", "atanh", "erf",
             "erfinv"):  # fmt: skip
    _register_random(name, -1)
for name in ("cos", "cosh"):
    _register_random(name, 1)
for name in ("acos", "acosh", "erfc", "log2", "log10", "lgamma", "digamma", "i0",
             "gelu", "special_ndtri", "special_log_ndtr", "special_erfcx", "frac",
             "special_i0e", "special_i1", "special_i1e", "special_airy_ai",
             "special_spherical_bessel_j0"):  # fmt: skip
    _register_random(name)
for name in ("bessel_j", "bessel_y", "modified_bessel_i", "modified_bessel_k",
             "scaled_modified_bessel_k"):  # fmt: skip
    for order in "01":
        _register_random(f"special_{name}{order}")


def _register_rounding(name: str, fn: Callable[[Fraction], int]) -> None:
    """Registers a rounding, which is done to residues of small fractions alone."""

    @rule(name, f"prims.{name}")
    def function(f: Field, x: Operand) -> Tensor:
        x = residue_of(x)
        return numbers.map_fractions(x, fn, f.random_function(name, x))


fn: Callable[[Fraction], int]
for name, fn in (("floor", math.floor), ("ceil", math.ceil), ("trunc", math.trunc),
                 ("round", round)):  # fmt: skip
    _register_rounding(name, fn)


def _register_random_of_two(name: str) -> None:
    """Registers an operator of two operands as a random function of both."""

    @rule(name, f"{name}.Tensor", f"{name}.Scalar", f"prims.{name}")
    def function(f: Field, a: Operand, b: Operand, **keywords: Any) -> Tensor:
        salt = " ".join([name, *map(repr, sorted(keywords.items()))])
        return f.random_function(
            salt,
            modulo(f.random_function(f"{salt} first", residue_of(a)) + residue_of(b)),
        )


for name in ("remainder", "fmod", "atan2", "hypot", "polygamma", "igamma", "igammac",
             "special_zeta"):  # fmt: skip
    _register_random_of_two(name)


@rule("gelu_backward")
def gelu_backward(
    f: Field, g: Operand, x: Operand, approximate: str = "none"
) -> Tensor:
    """Returns g times a random derivative, another one for each approximation."""
    slope = f.random_function(f"gelu_backward {approximate}", residue_of(x))
    return product(residue_of(g), slope)


@rule("tanh_backward")
def tanh_backward(f: Field, g: Operand, y: Operand) -> Tensor:
    """Returns g (1 - y^2), for y of the random function tanh."""
    y = residue_of(y)
    return product(residue_of(g), modulo(1 - product(y, y)))


@rule("sigmoid_backward")
def sigmoid_backward(f: Field, g: Operand, y: Operand) -> Tensor:
    """Returns g y (1 - y)."""
    y = residue_of(y)
    return product(residue_of(g), product(y, modulo(1 - y)))


@rule("sgn", "sign", "prims.sign")
def sign(f: Field, x: Operand) -> Tensor:
    """Returns 1, 0 or -1, by the order of the field."""
    return modulo(f.order_keys(lift_operand(x)).sign())


@rule("abs", "prims.abs")
def absolute(f: Field, x: Operand) -> Tensor:
    """Returns x or -x, whichever is not below 0 in the order of the field."""
    x = lift_operand(x)
    return torch.where(f.note_decision(f.order_keys(x) < 0), f.negative(x), x)


@rule("hardshrink_backward", "softshrink_backward")
def shrink_backward(f: Field, g: Operand, x: Operand, size: Operand) -> Tensor:
    """Returns g where x is larger than ``size``, and 0 elsewhere."""
    beyond = f.order_keys(absolute(f, x)) > f.order_keys(lift_operand(size))
    return torch.where(beyond, residue_of(g), 0.0)


# Comparisons: by the order of the field, and by values


@rule("signbit", "prims.signbit")
def is_negative(f: Field, x: Operand) -> Tensor:
    """Returns whether x is below 0 in the order of the field."""
    return f.note_decision(f.order_keys(lift_operand(x)) < 0)


def _register_comparison(name: str) -> None:
    """Registers a comparison, which goes by the order of the field."""

    @rule(f"{name}.Tensor", f"{name}.Scalar", f"prims.{name}")
    def compare(f: Field, a: Operand, b: Operand) -> Tensor:
        a, b = lift_operand(a), lift_operand(b)
        return f.note_decision(getattr(torch, name)(f.order_keys(a), f.order_keys(b)))


for name in ("lt", "le", "gt", "ge"):
    _register_comparison(name)


@rule("eq.Tensor", "eq.Scalar", "prims.eq")
def equals(f: Field, a: Operand, b: Operand) -> Tensor:
    """Returns whether two numbers have the same residue."""
    if isinstance(b, float) and math.isinf(b):  # told by its companion
        return lift_operand(a) == (INFINITY if b > 0 else MINUS_INFINITY)
    return residue_of(a) == residue_of(b)


@rule("ne.Tensor", "ne.Scalar", "prims.ne")
def differs(f: Field, a: Operand, b: Operand) -> Tensor:
    """Returns whether two numbers have different residues."""
    return ~equals(f, a, b)


@rule("isclose")
def is_close(
    f: Field, a: Operand, b: Operand, *tolerances: float, **keywords: bool | float
) -> Tensor:
    """Returns whether numbers are equal: nothing is near in a field."""
    return residue_of(a) == residue_of(b)


@rule("allclose")
def all_close(
    f: Field, a: Operand, b: Operand, *tolerances: float, **keywords: bool | float
) -> bool:
    """Returns whether all are equal: nothing is near in a field."""
    return bool((residue_of(a) == residue_of(b)).all())


@rule("equal")
def all_equal(f: Field, a: Operand, b: Operand) -> bool:
    """Returns whether all values of two tensors are equal."""
    return torch.equal(residue_of(a), residue_of(b))


@rule("maximum", "prims.maximum", "fmax", "prims.fmax")
def maximum(f: Field, a: Operand, b: Operand) -> Tensor:
    """Returns the larger of two, with its exponential."""
    a, b = lift_operand(a), lift_operand(b)
    return f.attach_exponential(
        torch.where(f.note_decision(f.order_keys(a) >= f.order_keys(b)), a, b)
    )


@rule("minimum", "prims.minimum", "fmin", "prims.fmin")
def minimum(f: Field, a: Operand, b: Operand) -> Tensor:
    """Returns the smaller of two, with its exponential."""
    a, b = lift_operand(a), lift_operand(b)
    return f.attach_exponential(
        torch.where(f.note_decision(f.order_keys(a) <= f.order_keys(b)), a, b)
    )


@rule("clamp", "clamp.Tensor")
def clamp(
    f: Field, x: Operand, low: Operand | None = None, high: Operand | None = None
) -> Tensor:
    """Returns x between bounds, by the order of the field."""
    x = lift_operand(x)
    if low is not None and not _is_infinite(low):
        low = lift_operand(low)
        x = torch.where(f.note_decision(f.order_keys(x) >= f.order_keys(low)), x, low)
    if high is not None and not _is_infinite(high):
        high = lift_operand(high)
        x = torch.where(f.note_decision(f.order_keys(x) <= f.order_keys(high)), x, high)
    return x


@rule("clamp_min", "clamp_min.Tensor")
def clamp_min(f: Field, x: Operand, low: Operand) -> Tensor:
    """Returns x, or the lower bound."""
    return clamp(f, x, low)


@rule("clamp_max", "clamp_max.Tensor")
def clamp_max(f: Field, x: Operand, high: Operand) -> Tensor:
    """Returns x, or the upper bound."""
    return clamp(f, x, None, high)


@rule("relu")
def relu(f: Field, x: Operand) -> Tensor:
    """Returns x, or 0 where it is below 0."""
    return clamp(f, x, 0)


def _is_infinite(x: Operand) -> bool:
    """Returns whether a bound is a float that bounds nothing."""
    return isinstance(x, float) and x in (float("inf"), float("-inf"))


@rule("threshold_backward")
def threshold_backward(f: Field, g: Operand, x: Operand, threshold: Operand) -> Tensor:
    """Returns g where x is above the threshold, and 0 elsewhere."""
    return torch.where(
        f.order_keys(lift_operand(x)) <= f.order_keys(lift_operand(threshold)),
        0.0,
        residue_of(g),
    )


@rule("isnan", "isinf", "isposinf", "isneginf")
def never(f: Field, x: Tensor) -> Tensor:
    """Returns False for each number: all are finite."""
    return torch.zeros_like(x, dtype=torch.bool)


@rule("isfinite")
def always(f: Field, x: Tensor) -> Tensor:
    """Returns True for each number: all are finite."""
    return torch.ones_like(x, dtype=torch.bool)


# Numbers that leave for Python


@rule("_local_scalar_dense", "item")
def item(f: Field, x: Tensor) -> float:
    """Returns the number of least magnitude with this residue, for Python to read."""
    return float(numbers.to_signed(residue_of(x)))
