"""A finite field in float64 tensors: residues, their arithmetic, and random functions.

A number of an exact run is one float64 with up to 51 bits,

    residue + 2^25 companion + 2^50 kind

The residue modulo PRIME, a prime below 2^25, is its value: sums and products of
residues are exact in float64, whatever their order. A number may also carry a
companion, by which identities hold that no function of residues has:

    kind 0, a companion c > 0    its exponential is c:  exp(a + b) = exp(a) exp(b)
    kind 1                       it is the square root of c:  sqrt(c)^2 = c

The companion 0 is none, and PRIME stands for a companion of value 0. What moves numbers
(views, copies, messages) moves companions with them; so both cross processes.

A nonlinear function is a random one, the same for equal salts: equal arguments have
equal images, unequal ones independent images. See `mode.py` for what runs on it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

PRIME = 33554393
"""The largest prime below 2^25: a product of two residues is exact in float64."""

BITS = 25
_SHIFT = 2.0**BITS
_KIND = 2.0 ** (2 * BITS)
_LARGEST = 2 * _KIND  # a number is below

NOTHING = _SHIFT * PRIME + 1.0
"""The number whose exponential is 0: minus infinity, and constants below -1e29."""

# A float of each dtype, after a few operations on floats, is as near to what was meant.
_NEAR = {
    torch.float64: Fraction(1, 1 << 50),
    torch.float32: Fraction(1, 1 << 22),
    torch.float16: Fraction(1, 1 << 10),
    torch.bfloat16: Fraction(1, 1 << 8),
}


INFINITE = _KIND + PRIME - 1.0
"""The number that is larger than all others."""


class NoResidue(ValueError):
    """A value that has no counterpart in the field: NaN, and complex numbers."""


@functools.lru_cache(maxsize=4096)
def constant(value: float, dtype: torch.dtype = torch.float64) -> float:
    """Returns the number for one of Python's, or for an element of ``dtype``.

    A float is taken for the simplest fraction that is within rounding errors of it
    (2^-50 of itself in float64): 0.1 is 1/10, and 1 - 0.9 is that too. Beyond 1e29 it
    is infinite, as masks mean it.

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
        return NOTHING if value < 0 else INFINITE
    meant = _simplest(Fraction(value), _NEAR[dtype])
    if meant.denominator % PRIME == 0:
        raise NoResidue(f"{value!r} is a fraction whose denominator {PRIME} divides")
    inverse = pow(meant.denominator, PRIME - 2, PRIME)
    return float(meant.numerator % PRIME * inverse % PRIME)


def _simplest(x: Fraction, near: Fraction) -> Fraction:
    """Returns the fraction of the smallest denominator within ``near`` of ``x``."""
    if x.denominator == 1:  # of those that are near it no whole number is simpler
        return x
    low, high = sorted((x * (1 - near), x * (1 + near)))
    return simplest_between(low, high)


def simplest_between(low: Fraction, high: Fraction) -> Fraction:
    """Returns the simplest fraction of an interval, by continued fractions."""
    if low <= 0 <= high:
        return Fraction(0)
    if high < 0:
        return -simplest_between(-high, -low)
    whole = math.floor(low)
    if whole == low:
        return Fraction(whole)
    if whole + 1 <= high:
        return Fraction(whole + 1)
    return whole + 1 / simplest_between(1 / (high - whole), 1 / (low - whole))


def fraction(residue: int) -> Fraction | None:
    """Returns the fraction of small numbers that a residue stands for, if one does.

    >>> fraction(int(constant(-2 / 3)))
    Fraction(-2, 3)
    """
    (low, a), (high, b) = (PRIME, 0), (residue % PRIME, 1)
    while high > 1000:
        low, a, high, b = high, b, low % high, a - low // high * b
    return Fraction(high, b) if 0 < abs(b) <= 1000 else None


def fractions(x: Tensor, fn: Callable[[Fraction], int], otherwise: Tensor) -> Tensor:
    """Returns a function of those residues that stand for small fractions.

    So the coordinates that a program computes in floats, and rounds, are what they
    are; of any other residue the result is ``otherwise``.
    """
    results = [
        float(w) if (q := fraction(int(v))) is None else float(fn(q) % PRIME)
        for v, w in zip(x.flatten().tolist(), otherwise.flatten().tolist(), strict=True)
    ]
    return torch.tensor(results, dtype=torch.float64).view(x.shape)


def salt(*names: Any) -> int:
    """Returns 62 bits for a name, the same in every process."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


# Residues


def modulo(x: Tensor) -> Tensor:
    """Returns whole numbers below 2^53 in magnitude modulo PRIME."""
    return torch.remainder(x, PRIME)


def product(a: Tensor, b: Any) -> Tensor:
    """Returns the products of residues."""
    return modulo(a * b)


def power(a: Tensor, n: int) -> Tensor:
    """Returns residues to a whole power; that of 0 to a negative one is 0."""
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


def powers(base: Tensor, exponent: Tensor) -> Tensor:
    """Returns residues to the powers that other residues are, as whole numbers."""
    base, exponent = torch.broadcast_tensors(base, exponent)
    left, result = exponent.to(torch.int64), torch.ones_like(base)
    while bool(left.any()):
        result = torch.where(left % 2 == 1, product(result, base), result)
        base, left = product(base, base), left // 2
    return result


def inverse(a: Tensor) -> Tensor:
    """Returns 1/a by Fermat's theorem, and 0 for 0."""
    if a.dim() == 0:
        return torch.full_like(a, pow(int(a), PRIME - 2, PRIME))
    return power(a, PRIME - 2)


def bilinear(
    fn: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, terms: int
) -> Tensor:
    """Returns a function that sums products of residues, ``terms`` of them at most.

    ``a`` is cut into pieces of so few bits that no such sum is rounded.
    """
    bits = 53 - BITS - max(terms - 1, 1).bit_length()
    if bits < 1:
        raise NotImplementedError(f"a sum of {terms} products is not exact in float64")
    result: Tensor | None = None
    at = -(-BITS // bits) * bits - bits  # of the lowest bit of a piece
    while at >= 0:
        piece = torch.floor(a / 2**at) if at else a
        if at + bits < BITS:
            piece = torch.remainder(piece, 2**bits)
        part = modulo(fn(piece, b))
        # Pieces come from the highest: Horner's rule.
        result = part if result is None else modulo(result * 2.0**bits + part)
        at -= bits
    assert result is not None, "a number has some bits, and so a piece"
    return result


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of matrices of residues."""
    return bilinear(torch.matmul, a, b, a.shape[-1])


def balanced(x: Tensor) -> Tensor:
    """Returns residues from -(PRIME - 1)/2 to (PRIME - 1)/2: negation is negation."""
    return torch.where(x > PRIME // 2, x - PRIME, x)


def scrambled(x: Tensor, salt: int) -> Tensor:
    """Returns a random function of whole numbers, from 0 to PRIME - 1."""
    z = x.to(torch.int64) + salt
    for factor in (0x1545F4914F6CDD1D, 0x369DEA0F31A53F85):
        z = (z ^ (z >> 29)) * factor
    z = (z ^ (z >> 32)) & 0x7FFFFFFFFFFFFFFF
    return torch.remainder(z, PRIME).to(torch.float64)


# Numbers: a residue, and what it carries


def carries(x: Tensor) -> bool:
    """Returns whether some number has a companion."""
    return bool(x.numel()) and bool(x.max() >= _SHIFT)


def residue(x: Tensor) -> Tensor:
    """Returns the values of numbers, without companions."""
    return torch.remainder(x, _SHIFT) if carries(x) else x


def lifted(x: Tensor) -> Tensor:
    """Returns numbers for a tensor of numbers, of whole numbers, or of other floats.

    Floats that are no numbers were made outside of the run: constants of the program.
    (A whole one of float64 that is as large as numbers with companions are cannot be
    told from these.)
    """
    if x.dtype == torch.bool:
        return x.to(torch.float64)
    if x.is_complex():
        raise NoResidue("complex numbers have no residues")
    if not x.is_floating_point():
        return torch.remainder(x, PRIME).to(torch.float64)
    # Numbers are float64: a narrower tensor holds none.
    return _lifted(x, _LARGEST if x.dtype == torch.float64 else PRIME)


def constants(x: Tensor) -> Tensor:
    """Returns numbers for floats that are none: what a program writes as a literal."""
    return _lifted(x, PRIME)


def _lifted(x: Tensor, most: float) -> Tensor:
    """Returns numbers for floats; whole ones below ``most`` are numbers already."""
    wide = x.to(torch.float64)
    if not x.numel():
        return wide
    low, high = torch.aminmax(wide)
    if low >= 0 and high < most and torch.equal(wide, wide.floor()):
        return wide
    values = [
        v if 0 <= v < most and v == math.floor(v) else constant(v, x.dtype)
        for v in wide.flatten().tolist()
    ]
    return torch.tensor(values, dtype=torch.float64).view(wide.shape)


class Field:
    """The random choices of one draw: functions, and an order of all residues.

    Args:
        seed: of the draw; equal in every process of a run.

    Attributes:
        functions, divisions: how many calls of random functions, and divisions, there
            were: at each of them two values that differ may become equal by chance.
        decisions: the answers of comparisons of single numbers, in their order.

    >>> field, x = Field(0), torch.tensor([3.0, 4.0], dtype=torch.float64)
    >>> y = field.root(field.function("anything", x))
    >>> torch.equal(field.square(y), field.function("anything", x))
    True
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.functions = self.divisions = 0
        self.decisions: list[bool] = []
        self.factor = float(salt("order", seed) % (PRIME - 1) + 1)

    def function(self, name: str, x: Tensor, sign: int = 0) -> Tensor:
        """Returns the random function ``name`` of residues.

        Args:
            sign: -1 for an odd function, 1 for an even one.
        """
        self.functions += 1
        key = salt(name, self.seed)
        if not sign:
            return scrambled(x, key)
        y = balanced(x)
        image = scrambled(y.abs(), key)
        return modulo(image * y.sign()) if sign < 0 else image

    def order(self, x: Tensor) -> Tensor:
        """Returns keys by which numbers are compared: odd, and 0 for 0.

        It is one order of the whole field. It does not go with addition: whether
        a > b and whether a - b > 0 are two questions.
        """
        key = balanced(product(residue(x), self.factor))
        if not carries(x):
            return key
        key = torch.where(x == NOTHING, -math.inf, key)
        return torch.where(x == INFINITE, math.inf, key)

    def decided(self, answer: Tensor) -> Tensor:
        """Returns the answer of a comparison, and notes a single one."""
        if answer.numel() == 1:
            self.decisions.append(bool(answer))
        return answer

    def inverse(self, x: Tensor) -> Tensor:
        """Returns 1/x, and notes that it divides."""
        self.divisions += 1
        return inverse(x)

    # Exponentials

    def exp(self, x: Tensor) -> Tensor:
        """Returns exponentials: the companions of those that have one."""
        drawn = self._drawn_exp(residue(x))
        if not carries(x):
            return drawn
        companion = torch.remainder(torch.floor(x / _SHIFT), _SHIFT)
        return torch.where(_exp_known(x), modulo(companion), drawn)

    def _drawn_exp(self, x: Tensor) -> Tensor:
        """Never 0, and 1 for 0: so products and quotients stay what they are."""
        image = torch.remainder(self.function("exp", x), PRIME - 1) + 1
        return torch.where(x == 0, 1.0, image)

    def with_exp(self, x: Tensor, exponential: Tensor) -> Tensor:
        """Returns numbers of these residues and exponentials."""
        companion = torch.where(exponential == 0, float(PRIME), exponential)
        # All numbers whose exponential is 0 are one number.
        return torch.where(exponential == 0, NOTHING, x + _SHIFT * companion)

    def exponential(self, x: Tensor) -> Tensor:
        """Returns ``x`` with its exponentials: what a shift by ``x`` keeps equal."""
        return self.with_exp(residue(x), self.exp(x))

    def log(self, x: Tensor) -> Tensor:
        """Returns logarithms, whose exponentials are ``x``."""
        x = residue(x)
        return self.with_exp(self._drawn_log(x), x)

    def _drawn_log(self, x: Tensor) -> Tensor:
        return torch.where(x == 1, 0.0, self.function("log", x))

    def add(self, a: Tensor, b: Tensor, minus: bool = False) -> Tensor:
        """Returns a + b, or a - b.

        A maximum and a logarithm make the logarithm of what the sum's exponential is:
        so m + log(sum(exp(x - m))) is one value for every m.
        """
        values = residue(a), residue(b)
        total = modulo(values[0] - values[1] if minus else values[0] + values[1])
        if not _has_exp(a) and not _has_exp(b):
            return total
        exps = self.exp(a), self.exp(b)
        both = product(exps[0], self.inverse(exps[1]) if minus else exps[1])
        if not minus:
            # Which of the two is a logarithm as `log` makes it, which a maximum.
            pairs = [*zip(values, exps, strict=True)]
            log_a, log_b = (v == self._drawn_log(e) for v, e in pairs)
            max_a, max_b = (e == self._drawn_exp(v) for v, e in pairs)
            known = _exp_known(a) & _exp_known(b)
            one_log = known & (log_a & (log_b | max_b) | max_a & log_b)
            total = torch.where(one_log, self._drawn_log(both), total)
        some = torch.broadcast_tensors(_exp_known(a) | _exp_known(b), total)[0]
        return torch.where(some, self.with_exp(total, both), total)

    def negative(self, a: Tensor) -> Tensor:
        """Returns -a; of minus infinity, infinity."""
        result = self.add(torch.zeros_like(a), a, minus=True)
        if carries(a):
            result = torch.where(a == NOTHING, INFINITE, result)
            result = torch.where(a == INFINITE, NOTHING, result)
        return result

    # Roots

    def root(self, x: Tensor) -> Tensor:
        """Returns square roots: numbers that know what they are the root of."""
        x = residue(x)
        value = self.function("sqrt", x)
        plain = x <= 1  # they are their own roots
        marked = value + _SHIFT * torch.where(x == 0, float(PRIME), x) + _KIND
        return torch.where(plain, x, marked)

    def square(self, x: Tensor) -> Tensor:
        """Returns squares; of roots, what they are roots of."""
        value = residue(x)
        squares = product(value, value)
        if not carries(x):
            return squares
        radicand = modulo(torch.remainder(torch.floor(x / _SHIFT), _SHIFT))
        return torch.where(x >= _KIND, radicand, squares)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns a b; equal roots make what they are roots of."""
        values = product(residue(a), residue(b))
        if not carries(a) and not carries(b):
            return values
        a, b = torch.broadcast_tensors(a, b)
        values = torch.where((a == b) & (a >= _KIND), self.square(a), values)
        return torch.where(a == 1, b, torch.where(b == 1, a, values))


def _exp_known(x: Tensor) -> Tensor:
    return (x >= _SHIFT) & (x < _KIND)


def _has_exp(x: Tensor) -> bool:
    return carries(x) and bool(_exp_known(x).any())
