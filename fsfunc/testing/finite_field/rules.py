"""Rules of operators in the field: a table of them, and the elementwise ones.

A rule is a function of a `Field` and of an operator's arguments, by the operator's name
in torch: ``"mul.Tensor"`` is ``torch.ops.aten.mul.Tensor``. Rules of operators that
write in place or into ``out=`` are those of their functional counterparts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsfunc.testing.finite_field import field as numbers
from fsfunc.testing.finite_field.field import (
    INFINITE,
    NOTHING,
    Field,
    lifted,
    modulo,
    product,
    residue,
)

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the operators of these names."""

    def register(fn: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = fn
        return fn

    return register


def number(x: Any) -> Tensor:
    """Returns numbers for an operand: a tensor, or a scalar of Python's."""
    if isinstance(x, Tensor):
        return lifted(x)
    return _scalar(numbers.constant(x))


@functools.lru_cache(maxsize=256)
def _scalar(x: float) -> Tensor:
    """Returns a tensor of a number, which no rule writes into."""
    return torch.tensor(x, dtype=torch.float64)


def value(x: Any) -> Tensor:
    """Returns the residues of an operand, without companions."""
    return residue(number(x))


def is_float(x: Any) -> bool:
    """Returns whether an operand is a float, or a tensor of floats."""
    return isinstance(x, float) or isinstance(x, Tensor) and x.is_floating_point()


# Arithmetic


@rule("add.Tensor", "add.Scalar", "prims.add")
def add(f: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """Returns a + alpha b."""
    b = number(b) if alpha == 1 else f.multiply(number(b), number(alpha))
    return f.add(number(a), b)


@rule("sub.Tensor", "sub.Scalar", "prims.sub")
def subtract(f: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """Returns a - alpha b."""
    b = number(b) if alpha == 1 else f.multiply(number(b), number(alpha))
    return f.add(number(a), b, minus=True)


@rule("rsub.Tensor", "rsub.Scalar")
def subtract_from(f: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """Returns b - alpha a."""
    return subtract(f, b, a, alpha)


@rule("mul.Tensor", "mul.Scalar", "prims.mul")
def multiply(f: Field, a: Any, b: Any) -> Tensor:
    """Returns a b."""
    return f.multiply(number(a), number(b))


@rule("div.Tensor", "div.Scalar", "true_divide.Tensor", "prims.div")
def divide(f: Field, a: Any, b: Any) -> Tensor:
    """Returns a / b; a quotient by 0 is 0."""
    return f.multiply(number(a), f.inverse(value(b)))


@rule("neg", "prims.neg")
def negate(f: Field, a: Any) -> Tensor:
    """Returns -a."""
    return f.negative(number(a))


@rule("reciprocal", "prims.reciprocal")
def reciprocal(f: Field, a: Any) -> Tensor:
    """Returns 1 / a."""
    return f.inverse(value(a))


@rule("addcmul")
def addcmul(f: Field, x: Any, a: Any, b: Any, value: Any = 1) -> Tensor:
    """Returns x + value a b."""
    return add(f, x, multiply(f, a, b), alpha=value)


@rule("addcdiv")
def addcdiv(f: Field, x: Any, a: Any, b: Any, value: Any = 1) -> Tensor:
    """Returns x + value a / b."""
    return add(f, x, divide(f, a, b), alpha=value)


@rule("lerp.Scalar", "lerp.Tensor")
def lerp(f: Field, a: Any, b: Any, weight: Any) -> Tensor:
    """Returns a + weight (b - a)."""
    return add(f, a, multiply(f, subtract(f, b, a), weight))


@rule("pow.Tensor_Scalar", "prims.pow")
def to_power(f: Field, x: Any, exponent: Any) -> Tensor:
    """Returns powers: products, roots, or a random function of the base."""
    if isinstance(exponent, Tensor):
        return to_powers(f, x, exponent)
    if exponent == 2:
        return f.square(number(x))
    if exponent == int(exponent):
        return numbers.power(value(x), int(exponent))
    if abs(exponent) == 0.5:
        root = f.root(value(x))
        return root if exponent > 0 else f.inverse(residue(root))
    image = f.function(f"pow {abs(exponent)!r}", value(x))
    return image if exponent > 0 else f.inverse(image)


@rule("square")
def square(f: Field, x: Any) -> Tensor:
    """Returns squares; of a root, what it is the root of."""
    return f.square(number(x))


@rule("pow.Tensor_Tensor", "pow.Scalar")
def to_powers(f: Field, x: Any, exponent: Any) -> Tensor:
    """An exponent that is a tensor is the whole number that its residue is."""
    return numbers.powers(value(x), value(exponent))


# Functions


@rule("exp", "prims.exp")
def exp(f: Field, x: Any) -> Tensor:
    """Returns exponentials, by the field's own function."""
    return f.exp(number(x))


@rule("expm1", "prims.expm1")
def expm1(f: Field, x: Any) -> Tensor:
    """Returns exponentials less 1."""
    return modulo(f.exp(number(x)) - 1)


@rule("exp2", "prims.exp2")
def exp2(f: Field, x: Any) -> Tensor:
    """Returns a random function: powers of 2 know nothing of those of e."""
    return f.function("exp2", value(x))


@rule("log", "prims.log")
def log(f: Field, x: Any) -> Tensor:
    """Returns logarithms, whose exponentials are x."""
    return f.log(number(x))


@rule("log1p", "prims.log1p")
def log1p(f: Field, x: Any) -> Tensor:
    """Returns logarithms of 1 + x."""
    return f.log(modulo(value(x) + 1))


@rule("sqrt", "prims.sqrt")
def sqrt(f: Field, x: Any) -> Tensor:
    """Returns roots, whose squares are x."""
    return f.root(value(x))


@rule("rsqrt", "prims.rsqrt")
def rsqrt(f: Field, x: Any) -> Tensor:
    """Returns 1 over roots."""
    return f.inverse(residue(f.root(value(x))))


@rule("sigmoid")
def sigmoid(f: Field, x: Any) -> Tensor:
    """1 / (1 + exp(-x)), with the exponential's own function."""
    return f.inverse(modulo(1 + f.exp(f.negative(number(x)))))


def _function(name: str, sign: int = 0) -> None:
    """Registers a random function; torch differentiates it by others, and by itself."""

    @rule(name, f"prims.{name}")
    def function(f: Field, x: Any, *args: Any, **keywords: Any) -> Tensor:
        said = [name, *map(repr, args), *map(repr, sorted(keywords.items()))]
        return f.function(" ".join(said), value(x), sign)


for name in ("tanh", "sin", "tan", "asin", "atan", "sinh", "asinh", "atanh", "erf",
             "erfinv"):  # fmt: skip
    _function(name, -1)
for name in ("cos", "cosh"):
    _function(name, 1)
for name in ("acos", "acosh", "erfc", "log2", "log10", "lgamma", "digamma", "i0",
             "gelu", "special_ndtri", "special_log_ndtr", "special_erfcx", "frac",
             "special_i0e", "special_i1", "special_i1e", "special_airy_ai",
             "special_spherical_bessel_j0"):  # fmt: skip
    _function(name)
for name in ("bessel_j", "bessel_y", "modified_bessel_i", "modified_bessel_k",
             "scaled_modified_bessel_k"):  # fmt: skip
    for order in "01":
        _function(f"special_{name}{order}")


def _rounded(name: str, fn: Callable[..., int]) -> None:
    @rule(name, f"prims.{name}")
    def function(f: Field, x: Any) -> Tensor:
        x = value(x)
        return numbers.fractions(x, fn, f.function(name, x))


fn: Any
for name, fn in (("floor", math.floor), ("ceil", math.ceil), ("trunc", math.trunc),
                 ("round", round)):  # fmt: skip
    _rounded(name, fn)


def _function_of_two(name: str) -> None:
    @rule(name, f"{name}.Tensor", f"{name}.Scalar", f"prims.{name}")
    def function(f: Field, a: Any, b: Any, **keywords: Any) -> Tensor:
        said = " ".join([name, *map(repr, sorted(keywords.items()))])
        return f.function(
            said, modulo(f.function(f"{said} first", value(a)) + value(b))
        )


for name in ("remainder", "fmod", "atan2", "hypot", "polygamma", "igamma", "igammac",
             "special_zeta"):  # fmt: skip
    _function_of_two(name)


@rule("gelu_backward")
def gelu_backward(f: Field, g: Any, x: Any, approximate: str = "none") -> Tensor:
    """Of each way to approximate a derivative of its own."""
    slope = f.function(f"gelu_backward {approximate}", value(x))
    return product(value(g), slope)


@rule("tanh_backward")
def tanh_backward(f: Field, g: Any, y: Any) -> Tensor:
    """Returns g (1 - y^2), for y of the random function tanh."""
    y = value(y)
    return product(value(g), modulo(1 - product(y, y)))


@rule("sigmoid_backward")
def sigmoid_backward(f: Field, g: Any, y: Any) -> Tensor:
    """Returns g y (1 - y)."""
    y = value(y)
    return product(value(g), product(y, modulo(1 - y)))


@rule("sgn", "sign", "prims.sign")
def sign(f: Field, x: Any) -> Tensor:
    """Returns 1, 0 or -1, by the order of the field."""
    return modulo(f.order(number(x)).sign())


@rule("abs", "prims.abs")
def absolute(f: Field, x: Any) -> Tensor:
    """Returns x or -x, whichever is not below 0 in the order of the field."""
    x = number(x)
    return torch.where(f.decided(f.order(x) < 0), f.negative(x), x)


@rule("hardshrink_backward", "softshrink_backward")
def shrink_backward(f: Field, g: Any, x: Any, size: Any) -> Tensor:
    """Returns g where x is larger than ``size``, and 0 elsewhere."""
    beyond = f.order(absolute(f, x)) > f.order(number(size))
    return torch.where(beyond, value(g), 0.0)


# Comparisons: by the order of the field, and by values


@rule("signbit", "prims.signbit")
def is_negative(f: Field, x: Any) -> Tensor:
    """Returns whether x is below 0 in the order of the field."""
    return f.decided(f.order(number(x)) < 0)


def _compared(name: str) -> None:
    @rule(f"{name}.Tensor", f"{name}.Scalar", f"prims.{name}")
    def compare(f: Field, a: Any, b: Any) -> Tensor:
        a, b = number(a), number(b)
        return f.decided(getattr(torch, name)(f.order(a), f.order(b)))


for name in ("lt", "le", "gt", "ge"):
    _compared(name)


@rule("eq.Tensor", "eq.Scalar", "prims.eq")
def equals(f: Field, a: Any, b: Any) -> Tensor:
    """Returns whether two numbers have one value."""
    if isinstance(b, float) and math.isinf(b):  # companions tell
        return number(a) == (INFINITE if b > 0 else NOTHING)
    return value(a) == value(b)


@rule("ne.Tensor", "ne.Scalar", "prims.ne")
def differs(f: Field, a: Any, b: Any) -> Tensor:
    """Returns whether two numbers have two values."""
    return ~equals(f, a, b)


@rule("isclose")
def is_close(f: Field, a: Any, b: Any, *tolerances: Any, **keywords: Any) -> Tensor:
    """Nothing is near in a field."""
    return value(a) == value(b)


@rule("allclose")
def all_close(f: Field, a: Any, b: Any, *tolerances: Any, **keywords: Any) -> bool:
    """Returns whether all are equal: nothing is near in a field."""
    return bool((value(a) == value(b)).all())


@rule("equal")
def all_equal(f: Field, a: Any, b: Any) -> bool:
    """Returns whether all values of two tensors are equal."""
    return torch.equal(value(a), value(b))


@rule("maximum", "prims.maximum", "fmax", "prims.fmax")
def maximum(f: Field, a: Any, b: Any) -> Tensor:
    """Returns the larger of two, with its exponential."""
    a, b = number(a), number(b)
    return f.exponential(torch.where(f.decided(f.order(a) >= f.order(b)), a, b))


@rule("minimum", "prims.minimum", "fmin", "prims.fmin")
def minimum(f: Field, a: Any, b: Any) -> Tensor:
    """Returns the smaller of two, with its exponential."""
    a, b = number(a), number(b)
    return f.exponential(torch.where(f.decided(f.order(a) <= f.order(b)), a, b))


@rule("clamp", "clamp.Tensor")
def clamp(f: Field, x: Any, low: Any = None, high: Any = None) -> Tensor:
    """Returns x between bounds, by the order of the field."""
    x = number(x)
    if low is not None and not _infinite(low):
        low = number(low)
        x = torch.where(f.decided(f.order(x) >= f.order(low)), x, low)
    if high is not None and not _infinite(high):
        high = number(high)
        x = torch.where(f.decided(f.order(x) <= f.order(high)), x, high)
    return x


@rule("clamp_min", "clamp_min.Tensor")
def clamp_min(f: Field, x: Any, low: Any) -> Tensor:
    """Returns x, or the lower bound."""
    return clamp(f, x, low)


@rule("clamp_max", "clamp_max.Tensor")
def clamp_max(f: Field, x: Any, high: Any) -> Tensor:
    """Returns x, or the upper bound."""
    return clamp(f, x, None, high)


@rule("relu")
def relu(f: Field, x: Any) -> Tensor:
    """Returns x, or 0 where it is below 0."""
    return clamp(f, x, 0)


def _infinite(x: Any) -> bool:
    """True of a bound of Python's that bounds nothing."""
    return isinstance(x, float) and x in (float("inf"), float("-inf"))


@rule("threshold_backward")
def threshold_backward(f: Field, g: Any, x: Any, threshold: Any) -> Tensor:
    """Returns g where x is above the threshold, and 0 elsewhere."""
    return torch.where(f.order(number(x)) <= f.order(number(threshold)), 0.0, value(g))


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
    """Python reads the number of the least magnitude that a residue stands for."""
    return float(numbers.balanced(value(x)))
