"""What a rank says of a collective or a transfer that it came to, and who disagrees."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsfunc.accounting import current_label, source_line

__all__ = ["Call", "CollectiveMismatch", "Signature", "digest", "signature", "table"]

Signature = tuple[Any, ...]  # op, how, axis, shape, dtype, whose values


class CollectiveMismatch(RuntimeError):
    """Ranks met in one group with different collectives, or one missed the other."""


def signature(
    op: str, how: Mapping[str, Any], axis: tuple[str, ...], x: Tensor, what: str
) -> Signature:
    """What must be the same on every rank of a collective."""
    return op, tuple(how.items()), axis, x.shape, x.dtype, what


@functools.lru_cache(maxsize=1 << 16)
def digest(said: Signature) -> bytes:
    """Eight bytes for a signature, the same ones in every process."""
    op, how, axis, shape, dtype, what = said
    text = repr((op, how, axis, tuple(shape), str(dtype), what))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass(frozen=True)
class Call:
    """What one rank said when it came to a collective or a transfer."""

    said: Signature
    unit: str = ""
    phase: str = ""
    where: str = ""

    @classmethod
    def now(cls, said: Signature) -> Call:
        """The call that is being made, with its label and source line."""
        return cls(said, *current_label(), source_line())

    def __str__(self) -> str:
        op, how, axes, shape, dtype, what = self.said
        whose = what or self.unit
        phase = f" ({self.phase})" if self.phase else ""
        unit = (f" of {whose}" if whose else "") + phase
        kind = str(dtype).removeprefix("torch.")
        axis, how = ", ".join(axes), "".join(f" {k}={v}" for k, v in how)
        at = f" at {self.where}" if self.where else ""
        return f'{op} over "{axis}"{how}, {kind}{list(shape)}{unit}{at}'


def table(title: str, said: Mapping[int, Any]) -> str:
    """What each rank said, a line for each."""
    return f"{title}:\n" + "\n".join(f"  rank {r} {call}" for r, call in said.items())
