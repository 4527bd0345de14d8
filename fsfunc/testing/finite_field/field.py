"""A finite field in float64 tensors: residues, their arithmetic, and random functions.

A number of an exact run is one float64 with up to 51 bits,

    residue + 2^25 companion + 2^50 kind

The residue modulo PRIME, a prime below 2^25, is its value: sums and products of
residues are exact in float64, whatever their order. A number may also carry a
companion, by which identities hold that no function of residues has:

    kind 0, a companion c > 0    its exponential is c:  exp(a + b) = exp(a) exp(b)
    kind 1                       it is the square root of c:  sqrt(c)^2 = c

The companion 0 means that there is none, and PRIME stands for a companion of value 0.
Operators that move numbers (views, copies, messages) move companions with them, so
that both cross processes.

A nonlinear function is a random one, the same for equal salts: equal arguments have
equal images, unequal ones independent images. `mode.py` maps torch's operators to the
rules that call the functions of this file.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

PRIME = 33554393
"""The largest prime below 2^25: a product of two residues is exact in float64."""

BITS = 25
_COMPANION_UNIT = 2.0**BITS
_KIND_UNIT = 2.0 ** (2 * BITS)
_LARGEST = 2 * _KIND_UNIT  # all numbers are below it

MINUS_INFINITY = _COMPANION_UNIT * PRIME + 1.0
"""The number whose exponential is 0: minus infinity, and constants below -1e29."""

# How near, relative to itself, a float of each dtype is to the fraction that was meant,
# after a few operations on floats.
_TOLERANCES = {
    torch.float64: Fraction(1, 1 << 50),
    torch.float32: Fraction(1, 1 << 22),
    torch.float16: Fraction(1, 1 << 10),
    torch.bfloat16: Fraction(1, 1 << 8),
}


INFINITY = _KIND_UNIT + PRIME - 1.0
"""The number that is larger than all others in the order of the field."""


class NoResidue(ValueError):
    """Raised for a value without a counterpart in the field: NaN, complex numbers."""


@functools.lru_cache(maxsize=4096)
def constant(value: float, dtype: torch.dtype = torch.float64) -> float:
    """Returns the number of the field for a float of Python, or of ``dtype``.

    A float is taken for the simplest fraction that is within rounding errors of it
    (2^-50 of itself in float64): 0.1 is 1/10, and 1 - 0.9 is that too. Beyond 1e29 it
    is taken for infinity, which such numbers in masks stand for.

    Raises:
        NoResidue: NaN, and a fraction whose denominator PRIME divides.

    >>> constant(0.5) * 2 % PRIME
    1.0
    >>> constant(1 - 0.9) == constant(0.1)
    True
    >>> constant(1 + 1e-12) == constant(1.0)
    False
    """
    if isinstance(value, int):
        return float(value % PRIME)
    if math.isnan(value):
        raise NoResidue("NaN has no residue")
    if abs(value) > 1e29:
        return MINUS_INFINITY if value < 0 else INFINITY
    simplest = _simplest_near(Fraction(value), _TOLERANCES[dtype])
    if simplest.denominator % PRIME == 0:
        raise NoResidue(f"{value!r} is a fraction whose denominator {PRIME} divides")
    inverse = pow(simplest.denominator, PRIME - 2, PRIME)
    return float(simplest.numerator % PRIME * inverse % PRIME)


def _simplest_near(x: Fraction, tolerance: Fraction) -> Fraction:
    """Returns the fraction of least denominator within ``tolerance`` of ``x``."""
    if x.denominator == 1:  # a whole number is the simplest already
        return x
    low, high = sorted((x * (1 - tolerance), x * (1 + tolerance)))
    return simplest_fraction_between(low, high)


def simplest_fraction_between(low: Fraction, high: Fraction) -> Fraction:
    """Returns the simplest fraction in an interval, by continued fractions."""
    if low <= 0 <= high:
        return Fraction(0)
    if high < 0:
        return -simplest_fraction_between(-high, -low)
    whole = math.floor(low)
    if whole == low:
        return Fraction(whole)
    if whole + 1 <= high:
        return Fraction(whole + 1)
    return whole + 1 / simplest_fraction_between(1 / (high - whole), 1 / (low - whole))


def small_fraction(residue: int) -> Fraction | None:
    """Returns the fraction of small numbers with this residue, or None.

    By the extended Euclidean algorithm, stopped where the remainder is small.

    >>> small_fraction(int(constant(-2 / 3)))
    Fraction(-2, 3)
    """
    (low, low_factor), (high, high_factor) = (PRIME, 0), (residue % PRIME, 1)
    while high > 1000:
        quotient = low // high
        low, high = high, low % high
        low_factor, high_factor = high_factor, low_factor - quotient * high_factor
    return Fraction(high, high_factor) if 0 < abs(high_factor) <= 1000 else None


def map_fractions(x: Tensor, fn: Callable[[Fraction], int], fallback: Tensor) -> Tensor:
    """Applies ``fn`` to the residues that stand for small fractions.

    For floor, round and the like: coordinates that a program computes in floats are
    small fractions, and are rounded as such. Any other residue becomes ``fallback``.
    """
    values = [
        float(w) if (q := small_fraction(int(v))) is None else float(fn(q) % PRIME)
        for v, w in zip(x.flatten().tolist(), fallback.flatten().tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


def salt(*names: str | int) -> int:
    """Returns 62 bits made of names and numbers, the same in every process."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


# Residues


def modulo(x: Tensor) -> Tensor:
    """Returns whole numbers, below 2^53 in magnitude, modulo PRIME."""
    return torch.remainder(x, PRIME)


def product(a: Tensor, b: Tensor | float) -> Tensor:
    """Returns the products of residues."""
    return modulo(a * b)


def power(a: Tensor, n: int) -> Tensor:
    """Returns residues to a whole power; 0 to a negative power is 0."""
    if n < 0:
        return power(inverse(a), -n)
    result: Tensor | None = None
    while n:
        if n & 1:
            result = a if result is None else product(result, a)
        n >>= 1
        if n:
            a = product(a, a)
    return torch.ones_like(a) if result is None else result


def elementwise_powers(base: Tensor, exponent: Tensor) -> Tensor:
    """Returns residues to powers, the exponents being residues as whole numbers."""
    base, exponent = torch.broadcast_tensors(base, exponent)
    remaining, product_so_far = exponent.to(torch.int64), torch.ones_like(base)
    while bool(remaining.any()):
        product_so_far = torch.where(
            remaining % 2 == 1, product(product_so_far, base), product_so_far
        )
        base, remaining = product(base, base), remaining // 2
    return product_so_far


def inverse(a: Tensor) -> Tensor:
    """Returns 1/a by Fermat's theorem, and 0 for 0."""
    if a.dim() == 0:
        return torch.full_like(a, pow(int(a), PRIME - 2, PRIME))
    return power(a, PRIME - 2)


def sum_of_products(
    fn: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, terms: int
) -> Tensor:
    """Returns ``fn(a, b)`` exactly, for a function that sums products of residues.

    Args:
        fn: linear in each argument: a matrix product, a convolution.
        terms: the most products that it adds up.
    """
    # a is cut into pieces of so few bits that a sum of ``terms`` products of a piece
    # and a residue is below 2^53, and float64 does not round it.
    bits = 53 - BITS - max(terms - 1, 1).bit_length()
    if bits < 1:
        raise NotImplementedError(f"a sum of {terms} products is not exact in float64")
    total: Tensor | None = None
    shift = -(-BITS // bits) * bits - bits  # of the lowest bit of a piece
    while shift >= 0:
        piece = torch.floor(a / 2**shift) if shift else a
        if shift + bits < BITS:
            piece = torch.remainder(piece, 2**bits)
        partial = modulo(fn(piece, b))
        # From the highest piece down: Horner's rule.
        total = partial if total is None else modulo(total * 2.0**bits + partial)
        shift -= bits
    assert total is not None, "a number has some bits, and so a piece"
    return total


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of matrices of residues."""
    return sum_of_products(torch.matmul, a, b, a.shape[-1])


def to_signed(x: Tensor) -> Tensor:
    """Returns residues as numbers from -(PRIME - 1)/2 to (PRIME - 1)/2.

    So the number for -x is the negative of that for x.
    """
    return torch.where(x > PRIME // 2, x - PRIME, x)


def scramble(x: Tensor, salt: int) -> Tensor:
    """Returns a random function of whole numbers, with values from 0 to PRIME - 1."""
    # A hash of 64 bits by multiplications and shifts, as in splitmix64.
    bits = x.to(torch.int64) + salt
    for factor in (0x1545F4914F6CDD1D, 0x369DEA0F31A53F85):
        bits = (bits ^ (bits >> 29)) * factor
    bits = (bits ^ (bits >> 32)) & 0x7FFFFFFFFFFFFFFF
    return torch.remainder(bits, PRIME).to(torch.float64)


# Numbers: a residue, and what it carries


def has_companions(x: Tensor) -> bool:
    """Returns whether some number has a companion."""
    return bool(x.numel()) and bool(x.max() >= _COMPANION_UNIT)


def strip_companions(x: Tensor) -> Tensor:
    """Returns the residues of numbers, without companions."""
    return torch.remainder(x, _COMPANION_UNIT) if has_companions(x) else x


def lift(x: Tensor) -> Tensor:
    """Returns numbers for a tensor: of numbers already, of integers, or of floats.

    Floats that are no numbers were made outside of the run: they are constants of the
    program. (A whole float64 as large as a number with a companion is taken for one.)
    """
    if x.dtype == torch.bool:
        return x.to(torch.float64)
    if x.is_complex():
        raise NoResidue("complex numbers have no residues")
    if not x.is_floating_point():
        return torch.remainder(x, PRIME).to(torch.float64)
    # Numbers are float64: a narrower tensor holds none.
    return _lift_floats(x, _LARGEST if x.dtype == torch.float64 else PRIME)


def constants(x: Tensor) -> Tensor:
    """Returns numbers for floats that a program has as literals."""
    return _lift_floats(x, PRIME)


def _lift_floats(x: Tensor, limit: float) -> Tensor:
    """Returns numbers for floats; whole ones below ``limit`` are taken for numbers."""
    in_float64 = x.to(torch.float64)
    if not x.numel():
        return in_float64
    low, high = torch.aminmax(in_float64)
    if low >= 0 and high < limit and torch.equal(in_float64, in_float64.floor()):
        return in_float64
    values = [
        v if 0 <= v < limit and v == math.floor(v) else constant(v, x.dtype)
        for v in in_float64.flatten().tolist()
    ]
    return torch.tensor(values, dtype=torch.float64).view(in_float64.shape)


class Field:
    """The random choices of one draw: functions, and an order of all residues.

    Args:
        seed: the seed of all choices; equal in every process of a run.

    Attributes:
        functions: the number of calls of random functions.
        divisions: the number of divisions. At each of both, two values that differ may
            become equal by chance.
        decisions: the answers of comparisons of single numbers, in their order.

    >>> field, x = Field(0), torch.tensor([3.0, 4.0], dtype=torch.float64)
    >>> y = field.root(field.random_function("anything", x))
    >>> torch.equal(field.square(y), field.random_function("anything", x))
    True
    """

    functions: int
    divisions: int
    order_factor: float

    def __init__(self, seed: int):
        self.seed = seed
        self.functions = self.divisions = 0
        self.decisions: list[bool] = []
        self.order_factor = float(salt("order", seed) % (PRIME - 1) + 1)

    def random_function(self, name: str, x: Tensor, sign: int = 0) -> Tensor:
        """Returns the random function ``name`` of residues.

        Args:
            sign: -1 for an odd function, 1 for an even one.
        """
        self.functions += 1
        key = salt(name, self.seed)
        if not sign:
            return scramble(x, key)
        y = to_signed(x)
        image = scramble(y.abs(), key)
        return modulo(image * y.sign()) if sign < 0 else image

    def order_keys(self, x: Tensor) -> Tensor:
        """Returns the keys by which numbers are compared; -x has minus x's key.

        It is a total order of the field, but no order of a field can agree with its
        addition: whether a > b and whether a - b > 0 are two questions.
        """
        key = to_signed(product(strip_companions(x), self.order_factor))
        if not has_companions(x):
            return key
        key = torch.where(x == MINUS_INFINITY, -math.inf, key)
        return torch.where(x == INFINITY, math.inf, key)

    def note_decision(self, answer: Tensor) -> Tensor:
        """Returns the answer of a comparison; notes it if it is a single one."""
        if answer.numel() == 1:
            self.decisions.append(bool(answer))
        return answer

    def inverse(self, x: Tensor) -> Tensor:
        """Returns 1/x, and counts a division."""
        self.divisions += 1
        return inverse(x)

    # Exponentials

    def exp(self, x: Tensor) -> Tensor:
        """Returns exponentials: the companion of a number that knows its own."""
        drawn = self._random_exp(strip_companions(x))
        if not has_companions(x):
            return drawn
        companion = torch.remainder(torch.floor(x / _COMPANION_UNIT), _COMPANION_UNIT)
        return torch.where(_knows_exponential(x), modulo(companion), drawn)

    def _random_exp(self, x: Tensor) -> Tensor:
        """Returns a random function that is never 0, and 1 for 0.

        So one can divide by exponentials, and exp(0) = 1 holds.
        """
        image = torch.remainder(self.random_function("exp", x), PRIME - 1) + 1
        return torch.where(x == 0, 1.0, image)

    def with_exponential(self, x: Tensor, exponential: Tensor) -> Tensor:
        """Returns numbers of these residues and exponentials."""
        companion = torch.where(exponential == 0, float(PRIME), exponential)
        # Numbers whose exponential is 0 are all the same number, minus infinity.
        return torch.where(
            exponential == 0, MINUS_INFINITY, x + _COMPANION_UNIT * companion
        )

    def attach_exponential(self, x: Tensor) -> Tensor:
        """Returns ``x`` with its exponentials as companions.

        So exp(y - x) exp(x) = exp(y) holds for a maximum x that a softmax subtracts.
        """
        return self.with_exponential(strip_companions(x), self.exp(x))

    def log(self, x: Tensor) -> Tensor:
        """Returns logarithms of x, with x as their exponentials."""
        x = strip_companions(x)
        return self.with_exponential(self._random_log(x), x)

    def _random_log(self, x: Tensor) -> Tensor:
        return torch.where(x == 1, 0.0, self.random_function("log", x))

    def add(self, a: Tensor, b: Tensor, minus: bool = False) -> Tensor:
        """Returns a + b, or with ``minus`` a - b.

        A maximum plus a logarithm is the logarithm of the product of exponentials: so
        m + log(sum(exp(x - m))) is the same for every m.
        """
        values = strip_companions(a), strip_companions(b)
        total = modulo(values[0] - values[1] if minus else values[0] + values[1])
        if not _any_knows_exponential(a) and not _any_knows_exponential(b):
            return total
        exponentials = self.exp(a), self.exp(b)
        exponential = product(
            exponentials[0], self.inverse(exponentials[1]) if minus else exponentials[1]
        )
        if not minus:
            # A number is a logarithm if `log` would give it, and a maximum if its
            # exponential is that of its residue.
            pairs = [*zip(values, exponentials, strict=True)]
            log_a, log_b = (v == self._random_log(e) for v, e in pairs)
            max_a, max_b = (e == self._random_exp(v) for v, e in pairs)
            both_known = _knows_exponential(a) & _knows_exponential(b)
            one_log = both_known & (log_a & (log_b | max_b) | max_a & log_b)
            total = torch.where(one_log, self._random_log(exponential), total)
        has_exponential = torch.broadcast_tensors(
            _knows_exponential(a) | _knows_exponential(b), total
        )[0]
        return torch.where(
            has_exponential, self.with_exponential(total, exponential), total
        )

    def negative(self, a: Tensor) -> Tensor:
        """Returns -a; infinity for minus infinity."""
        result = self.add(torch.zeros_like(a), a, minus=True)
        if has_companions(a):
            result = torch.where(a == MINUS_INFINITY, INFINITY, result)
            result = torch.where(a == INFINITY, MINUS_INFINITY, result)
        return result

    # Roots

    def root(self, x: Tensor) -> Tensor:
        """Returns square roots: numbers with their radicand as companion."""
        x = strip_companions(x)
        random_root = self.random_function("sqrt", x)
        own_root = x <= 1  # 0 and 1
        with_radicand = (
            random_root
            + _COMPANION_UNIT * torch.where(x == 0, float(PRIME), x)
            + _KIND_UNIT
        )
        return torch.where(own_root, x, with_radicand)

    def square(self, x: Tensor) -> Tensor:
        """Returns squares; the radicand of a root."""
        value = strip_companions(x)
        squares = product(value, value)
        if not has_companions(x):
            return squares
        radicand = modulo(
            torch.remainder(torch.floor(x / _COMPANION_UNIT), _COMPANION_UNIT)
        )
        return torch.where(x >= _KIND_UNIT, radicand, squares)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns a b; the radicand, if both are the same root."""
        values = product(strip_companions(a), strip_companions(b))
        if not has_companions(a) and not has_companions(b):
            return values
        a, b = torch.broadcast_tensors(a, b)
        values = torch.where((a == b) & (a >= _KIND_UNIT), self.square(a), values)
        return torch.where(a == 1, b, torch.where(b == 1, a, values))


def _knows_exponential(x: Tensor) -> Tensor:
    return (x >= _COMPANION_UNIT) & (x < _KIND_UNIT)


def _any_knows_exponential(x: Tensor) -> bool:
    return has_companions(x) and bool(_knows_exponential(x).any())
