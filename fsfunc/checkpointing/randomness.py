"""The states of the default random generators, as text, of every rank."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsfunc.units import generator_states

__all__ = ["random_state", "restore_random", "together"]


def random_state() -> dict[str, str]:
    """How the default generators stand, by device type."""
    return {
        g.device.type: base64.b64encode(bytes(state.tolist())).decode()
        for g, state in generator_states()
    }


def together(states: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The states of all ranks; those that are equal, as they usually are, once."""
    distinct: list[Mapping[str, str]] = []
    for state in states:
        if state not in distinct:
            distinct.append(state)
    return {"states": distinct, "of": [distinct.index(state) for state in states]}


def restore_random(random: Mapping[str, Any], rank: int) -> None:
    """Sets this rank's default generators as they stood when it was saved.

    Where there are more ranks now, they take the saved ones in turn.
    """
    if not random:
        return
    mine = random["states"][random["of"][rank % len(random["of"])]]
    for kind, text in mine.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if kind == "cpu":
            torch.default_generator.set_state(state)
        elif kind == "cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state)  # also where CUDA was not used so far
