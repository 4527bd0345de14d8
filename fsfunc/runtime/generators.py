"""The default random generators, saved and restored; and seeds, made of numbers.

A step that is recorded or checked, and a unit that is computed again, leave the
generators as they were. What must be equal on any mesh, or in a resumed run, is drawn
from a seed that is computed of the numbers that identify it (a row, a block, a unit
call): so neither `seed63` nor `seed64` may ever change.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from pickle import dumps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch
from fsfunc._torch.versions import generator_reference
from fsfunc.runtime.scopes import replace_draw

MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

States = list[tuple[Any, Any]]  # generators, and the state of each


class _Python:
    """Python's default generator, with the methods of torch's and numpy's."""

    get_state, set_state = staticmethod(random.getstate), staticmethod(random.setstate)


def generator_states() -> States:
    """Returns torch's default generators that are in use, and their states."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(g, g.get_state()) for g in generators]


def other_states() -> States:
    """Returns Python's generator, numpy's if that is imported, and their states."""
    numpy = sys.modules.get("numpy")
    generators = [_Python, numpy.random] if numpy else [_Python]
    return [(g, g.get_state()) for g in generators]


def watch_other_draws() -> Callable[[], bool]:
    """Returns a function that tells whether Python's or numpy's generators have drawn.

    The default ones, and objects that the garbage collector lists (so none that is
    older than a ``gc.freeze()``). A generator without a state, such as
    `random.SystemRandom`, is not seen.
    """
    numpy, classes = sys.modules.get("numpy"), (random.Random,)
    if numpy:  # the object that a Generator or RandomState draws of
        classes = (random.Random, numpy.random.BitGenerator)
    # Not isinstance: some objects, asked for ``__class__``, import a module.
    generators = [x for x in gc.get_objects() if issubclass(type(x), classes)]

    def states() -> list[bytes]:
        of_objects = [_state_of(x) for x in generators]
        return of_objects + [dumps(state) for _, state in other_states()]

    before = states()
    return lambda: before != states()


def _state_of(generator: Any) -> bytes:
    is_pythons = isinstance(generator, random.Random)
    return dumps(random.Random.getstate(generator) if is_pythons else generator.state)


def set_generators(states: States) -> None:
    """Restores the states of generators."""
    for g, state in states:
        g.set_state(state)


@contextmanager
def generators_restored(
    others: Iterable[torch.Generator] = (),
) -> Iterator[States]:
    """Restores the default generators and ``others`` at the end."""
    states = [*generator_states(), *[(g, g.get_state()) for g in others]]
    try:
        yield states
    finally:
        set_generators(states)


class RankDraws:
    """Draws of a unit call that differ from rank to rank: dropout, for example.

    The generators are seeded from the state of torch's default one, which is equal on
    ranks that have drawn alike, and from ``index``. At the end they are as if one
    number had been drawn, or none if nothing was: so they stay equal on all ranks.

    Args:
        index: another number on each rank.
        draws: whether the unit is known to draw; if not, the states are compared.
    """

    def __init__(self, index: int, *, draws: bool):
        before = generator_states()
        self.before: States = before
        # Where nothing is drawn the state is the same in each call: the seeded one is
        # cached for it.
        cached_for, seeded, seeded_bits = _SEEDED.get(index, _NEVER)
        if cached_for == (bits := _state_bits(before)):
            set_generators(seeded)
        else:
            digest = sha1(bits[0][1], usedforsecurity=False).digest()
            seed = seed63(int.from_bytes(digest[:8], "little"), index)
            for g, _ in before:
                g.manual_seed(seed)
            seeded = generator_states()
            seeded_bits = _state_bits(seeded)
            if len(_SEEDED) >= 256:
                _SEEDED.clear()
            _SEEDED[index] = bits, seeded, seeded_bits
        self.seeded_bits: StateBits | None = None if draws else seeded_bits

    def end(self, failed: bool) -> None:
        """Restores the generators, one number later; if ``failed`` exactly."""
        has_drawn = not failed
        if has_drawn and self.seeded_bits is not None:
            has_drawn = _state_bits(generator_states()) != self.seeded_bits
        set_generators(self.before)
        if has_drawn:
            draw_number()


def are_drawn(states: States) -> bool:
    """Returns whether generators have other states than these."""
    return any(_bytes(g.get_state()) != _bytes(state) for g, state in states)


StateBits = list[tuple[Any, bytes]]  # generators, and the bytes of their states

# By index: the states that `RankDraws` last found, and those that it seeded then, as
# states and as bytes.
_NEVER: tuple[StateBits, States, StateBits] = [], [], []
_SEEDED: dict[int, tuple[StateBits, States, StateBits]] = {}


def _state_bits(states: States) -> StateBits:
    return [(g, _bytes(state)) for g, state in states]


def _bytes(state: Tensor) -> bytes:
    # Not by an operator, which recorders would see: the state is no tensor of the step.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


@contextmanager
def other_generators_restored(seed: int | None = None) -> Iterator[None]:
    """Restores the generators of Python, and numpy's if that is imported, at the end.

    Args:
        seed: with which they begin inside; None: as they are.
    """
    states = other_states()
    try:
        if seed is not None:
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed)
        yield
    finally:
        set_generators(states)


class RecordedDraws(TorchFunctionMode):
    """Records generators that operators are passed, with their states before."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[tuple[Callable[[], Any], Tensor]] = []

    @property
    def states(self) -> States:
        """Those that still exist: what the function made itself, it makes again."""
        return [
            (g, state) for ref, state in self.references if (g := ref()) is not None
        ]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        g = (kwargs or {}).get("generator")
        if isinstance(g, torch.Generator) and g is not torch.default_generator:
            if all(g is not recorded for recorded, _ in self.states):
                self.references.append((generator_reference(g), g.get_state()))
        return func(*args, **(kwargs or {}))


def draw_number(generator: torch.Generator | None = None) -> int:
    """Draws a number from a generator (the default one); 0 where values are fake."""
    if _torch.fake_active():
        return replace_draw(0)
    device = torch.device("cpu") if generator is None else generator.device
    with _torch.beneath_functorch():  # or vmap would refuse
        number = torch.randint(1 << 62, (), generator=generator, device=device)
        return int(number.item())


def seed63(*numbers: int) -> int:
    """Returns a seed of 63 bits, each depending on all numbers: for a unit call."""
    state = 0
    for number in numbers:
        state = splitmix64((state ^ (number & MASK)) + _GOLDEN & MASK)
    return state >> 1


def seed64(*numbers: int) -> int:
    """Returns a seed of 64 bits, of numbers and their order: for a row of data.

    >>> seed64(0, 1) == seed64(0, 1), seed64(0, 1) == seed64(1, 0)
    (True, False)
    """
    x = 0
    for number in numbers:
        x = splitmix64((x + number + _GOLDEN) & MASK)
    return x


def splitmix64(x: int) -> int:
    """Maps 64-bit numbers one to one: the output function of SplitMix64.

    The same on every machine, for ever.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
