"""Bytes, counts, seconds and axes, in one spelling wherever they are said.

Amounts have three digits; units are decimal: 1 kB is 1,000 bytes, 1 GB is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

__all__ = ["of_axes", "of_bytes", "of_count", "of_flops", "of_seconds", "of_share"]

_LARGE = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_SMALL = ("", "m", "µ", "n", "p")


def of_bytes(value: int | float | Fraction) -> str:
    """Bytes as text.

    >>> [of_bytes(n) for n in (0, 999, 1_234, 999_999, 80 * 10**9)]
    ['0 B', '999 B', '1.23 kB', '1.00 MB', '80.0 GB']
    """
    return f"{_large(value)}B"


def of_flops(value: int | float | Fraction) -> str:
    """Floating point operations as text.

    >>> of_flops(300), of_flops(3.12e14)
    ('300 FLOP', '312 TFLOP')
    """
    return f"{_large(value)}FLOP"


def of_count(value: int | float | Fraction) -> str:
    """Elements, operations, tokens: anything counted.

    >>> of_count(12), of_count(1_500), of_count(-6.02e23)
    ('12', '1.50 k', '-602 Z')
    """
    return _large(value).rstrip()


def of_seconds(value: float) -> str:
    """A time as text.

    >>> [of_seconds(t) for t in (0, 83.1e-6, 0.9999, 75, 4321.0)]
    ['0 s', '83.1 µs', '1.00 s', '75.0 s', '4321 s']
    """
    if not value:
        return "0 s"
    step = 0
    while step < len(_SMALL) - 1 and abs(float(_digits(value * 1000**step))) < 1:
        step += 1
    return f"{_digits(value * 1000**step)} {_SMALL[step]}s"


def of_share(part: float | Fraction, whole: float | Fraction) -> str:
    """A part of ``whole`` in per cent.

    >>> of_share(1, 3), of_share(0, 0), of_share(1, 2000)
    ('33 %', '0 %', '<1 %')
    """
    share = float(100 * part / whole) if whole else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def of_axes(sizes: Mapping[str, int]) -> str:
    """A mesh's axes as text.

    >>> of_axes({"data": 4, "pipe": 2})
    'data=4, pipe=2'
    """
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def _large(value: int | float | Fraction) -> str:
    """Three digits, a blank and the unit's prefix."""
    if abs(value) < 1000 and value == int(value):
        return f"{int(value)} "
    scaled, step = float(value), 0
    while step < len(_LARGE) - 1 and abs(float(_digits(scaled))) >= 1000:
        scaled, step = scaled / 1000, step + 1
    return f"{_digits(scaled)} {_LARGE[step]}"


def _digits(value: float) -> str:
    """Three digits: ``1.23``, ``12.3``, ``123``; all of them of a longer number."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:.0f}"
