"""Numbers in 8 bits, by blocks that share a scale: small floats, rounded by chance.

A code has 3 bits of mantissa, and the rest but a sign for an exponent: so its error is
relative to the number itself, not to the largest of the block as with even steps. A
moving average changes by less than a code's step at a time; rounded to the nearest one
it would stand still for ever. Rounded up or down by chance it moves as it should in the
mean.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fsfunc import _torch

BLOCK = 256
"""Elements that share a scale."""

CHUNK = 1 << 17
"""Elements worked on at a time on a CPU: few enough to stay in its cache."""

_CUT = 20  # bits of a float32's mantissa that a code has no room for
_TOP = 1.875  # the largest number of exponent 0 and 3 bits of mantissa
_SIGN = -(1 << 31)  # the bit of an int32, or a float32
_ONE = 127 << 3  # sign, exponent and 3 bits of mantissa of 1.0


def padded(count: int) -> int:
    """The least multiple of `BLOCK` that is not below ``count``."""
    return -(-count // BLOCK) * BLOCK


def chance(device: torch.device, count: int, seed: int) -> Tensor:
    """``count`` random numbers below 2^20, int32, which follow from ``seed``.

    A range of a table of twice `CHUNK` numbers: it is read from the cache, which is ten
    times as fast as to draw. A longer one begins anew.
    """
    table = _table(str(device))
    start = seed % CHUNK
    if start + count <= len(table):
        return table[start : start + count]
    return table.repeat(-(-(start + count) // len(table)))[start : start + count]


@lru_cache(maxsize=8)
def _table(device: str) -> Tensor:
    with _torch.beneath_all_modes(), torch.inference_mode(False):
        draw = torch.Generator().manual_seed(0)
        made = torch.randint(1 << _CUT, (2 * CHUNK,), generator=draw, device="cpu")
        return made.to(torch.device(device), torch.int32)


class Coder:
    """Codes of numbers with a sign, or of such as are never negative.

    With a sign the smallest step is 2^-18 of the block's largest number, without one
    2^-34; and there what is above 0 never becomes 0.

    Both use ``spare`` memory, and no operation that is slow on a CPU: fresh memory
    costs a page fault for 1024 numbers, and mixed dtypes are not vectorized.

    >>> coder, x = Coder(signed=True), torch.linspace(-1, 1, 256)
    >>> codes, scales = torch.empty(256, dtype=torch.uint8), torch.empty(1)
    >>> dither, spare = torch.zeros(2, 256, dtype=torch.int32)
    >>> coder.encode(x.clone(), codes, scales, dither, spare)
    >>> found = coder.decode(codes, scales, torch.empty(256), spare)
    >>> bool(((found - x).abs() <= x.abs() / 8 + 2.0**-18).all())
    True
    """

    def __init__(self, signed: bool):
        self.signed = signed
        exponents = 15 if signed else 31
        self.base = _ONE - (exponents << 3)  # of code 0
        self.last = 127 if signed else 255
        self.zero = 2.0**-exponents  # what code 0 stands for, and is taken off

    def encode(
        self, x: Tensor, codes: Tensor, scales: Tensor, dither: Tensor, spare: Tensor
    ) -> None:
        """Writes ``x`` as codes.

        A block with an infinity or a NaN comes back with one.

        Args:
            x: float32 [n], n a multiple of `BLOCK`; it is written over.
            codes: uint8 [n].
            scales: float32 [n / BLOCK].
            dither: int32 [n], below 2^20.
            spare: int32 [n], written over.
        """
        if self.signed:
            torch.bitwise_and(x.view(torch.int32), _SIGN, out=spare)
        rows = (x.abs_() if self.signed else x).view(-1, BLOCK)
        torch.amax(rows, 1, out=scales)
        scales.mul_(1 / _TOP)
        rows.div_(scales.unsqueeze(1)).add_(self.zero)  # 0 / 0: any code, times 0
        bits = x.view(torch.int32).add_(dither).bitwise_right_shift_(_CUT)
        # Nothing that is positive may become 0: a step is divided by its root.
        bits.sub_(self.base).clamp_(0 if self.signed else 1, self.last)
        if self.signed:
            bits.bitwise_or_(spare.bitwise_right_shift_(24))  # the lowest byte is ours
        codes.copy_(bits)

    def decode(
        self, codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor
    ) -> Tensor:
        """The numbers of ``codes``, in ``out``, float32 [n]; ``spare`` as above."""
        bits = out.view(torch.int32).copy_(codes)
        if self.signed:
            torch.bitwise_left_shift(bits, 24, out=spare)
            bits.bitwise_and_(127)
        bits.add_(self.base).bitwise_left_shift_(_CUT)
        out.sub_(self.zero)
        if self.signed:
            bits.bitwise_or_(spare.bitwise_and_(_SIGN))
        out.view(-1, BLOCK).mul_(scales.unsqueeze(1))
        return out
