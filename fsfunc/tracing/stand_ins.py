"""Placeholder values for a step that asks for values during the type check.

Where nobody has them, others in their place. From turn to turn they are others, so that
a step is seen on more than one of its ways; where they are a rank's own, they are never
those of a neighbour, so that what is made of them is told apart.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import source_line

__all__ = ["StandIns"]

_COUNTS, _NUMBERS = (1, 2, 0), (1.0, 2.0**20, -(2.0**20))
_PATIENCE = 32  # a loop until something holds asks for it at one line


class StandIns:
    """Values for whoever asks.

    Args:
        rank: who asks; ``odd``: whether it is the other one of two neighbours; None
            leaves counts, which may be places and lengths, as they are.
        turn: another number, other values; ``turns`` says how many there are, by what
            was asked.
    """

    def __init__(self, rank: int, odd: bool | None, turn: int = 0):
        self.rank, self.odd, self.turn, self.turns = rank, odd, turn, 1
        self._count: Counter[str] = Counter()

    def of(self, x: Tensor, own: bool) -> Tensor:
        """A placeholder for the value of ``x``; ``own``: if it is each rank's own."""
        with _torch.beneath_all_modes(), torch.no_grad():
            value = _torch.value_of(x)
            if x.dtype == torch.bool:
                value = self.truth(False if value is None else value, own)
                return torch.as_tensor(value).expand(x.shape)
            real = x.is_floating_point() or x.is_complex()
            turn, choices = self._turn(3), _NUMBERS if real else _COUNTS
            if value is None or turn and real:
                value = torch.full(tuple(x.shape), choices[turn], dtype=x.dtype)
            if own and real:
                value = value + (value.abs() + 1) * (self.rank / 64)
            elif own and self.odd is not None:
                value = value + (value + self.odd) % 2
            return value

    def truth(self, found: Tensor | bool, own: bool) -> Tensor | bool:
        """The same of answers that are yes or no."""
        turn = bool(self._turn(2))
        return bool(self.odd) ^ turn if own else found ^ turn

    def _turn(self, most: int) -> int:
        line = source_line()
        self._count[line] += 1
        self.turns = max(self.turns, most)
        return (self.turn + max(0, self._count[line] - _PATIENCE)) % most
