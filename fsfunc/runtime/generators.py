"""The default random generators, kept and put back; and seeds, mixed of numbers.

Whatever must come out the same on any mesh, or in a resumed run, is drawn from a seed
that is mixed of the numbers that tell it: so neither mixture may ever change.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha1
from pickle import dumps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch
from fsfunc._torch.versions import generator_reference
from fsfunc.runtime.scopes import draws_in_graph

MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

States = list[tuple[Any, Any]]  # of generators: how they stand


class _Python:
    """Python's default generator, as torch's and numpy's are asked."""

    get_state, set_state = staticmethod(random.getstate), staticmethod(random.setstate)


def generator_states() -> States:
    """The default generators in use, and how they stand."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(g, g.get_state()) for g in generators]


def other_states() -> States:
    """Those of Python and of numpy, if that is there, and how they stand."""
    numpy = sys.modules.get("numpy")
    generators = [_Python, numpy.random] if numpy else [_Python]
    return [(g, g.get_state()) for g in generators]


def drawn_elsewhere() -> Callable[[], bool]:
    """A function: True once a generator of Python's or numpy's was drawn of.

    The default ones, and objects that the garbage collector lists (so none of before a
    ``gc.freeze()``). One that has no state, such as `random.SystemRandom`, is not seen.
    """
    numpy, kinds = sys.modules.get("numpy"), (random.Random,)
    if numpy:  # the object that a Generator or RandomState draws of
        kinds = (random.Random, numpy.random.BitGenerator)
    # By type: to ask some objects for their class imports a module.
    found = [x for x in gc.get_objects() if issubclass(type(x), kinds)]

    def states() -> list[bytes]:
        objects = [_state_of(x) for x in found]
        return objects + [dumps(state) for _, state in other_states()]

    before = states()
    return lambda: before != states()


def _state_of(generator: Any) -> bytes:
    python = isinstance(generator, random.Random)
    return dumps(random.Random.getstate(generator) if python else generator.state)


def set_generators(states: States) -> None:
    """Puts generators back to how they stood."""
    for g, state in states:
        g.set_state(state)


@contextmanager
def generators_kept(more: Iterable[Any] = ()) -> Iterator[States]:
    """Whatever is drawn inside, default generators and ``more`` end as they began."""
    states = [*generator_states(), *[(g, g.get_state()) for g in more]]
    try:
        yield states
    finally:
        set_generators(states)


class OwnDraws:
    """The generators as they are for a rank alone; the ranks go on with equal ones.

    They are seeded from how torch's default one stands (alike on ranks that have drawn
    alike) and from ``index``. In the end they go on as if one number had been drawn, or
    none if nothing was.

    Args:
        index: tells the numbers of the rank from those of others.
        draws: whether something is drawn, as far as is known; if not, it is looked for.
    """

    def __init__(self, index: int, *, draws: bool):
        self.before = before = generator_states()
        found, seeded, standing = _SEEDED.get(index, _NEVER)
        if found == (given := _standing(before)):  # as always where nothing is drawn
            set_generators(seeded)
        else:
            digest = sha1(given[0][1], usedforsecurity=False).digest()
            seed = mix(int.from_bytes(digest[:8], "little"), index)
            for g, _ in before:
                g.manual_seed(seed)
            seeded = generator_states()
            standing = _standing(seeded)
            if len(_SEEDED) >= 256:
                _SEEDED.clear()
            _SEEDED[index] = given, seeded, standing
        self.standing = None if draws else standing

    def end(self, failed: bool) -> None:
        """Puts the generators to what follows; ``failed``: as they were before."""
        drawn = not failed
        if drawn and self.standing is not None:
            drawn = _standing(generator_states()) != self.standing
        set_generators(self.before)
        if drawn:
            one_number()


def are_drawn(states: States) -> bool:
    """True if generators stand otherwise than they did."""
    return any(_bytes(g.get_state()) != _bytes(state) for g, state in states)


Standing = list[tuple[Any, bytes]]  # of generators: states, to compare

# By index, how generators stood when `OwnDraws` last seeded them, and did afterwards.
_NEVER: tuple[Standing, States, Standing] = [], [], []
_SEEDED: dict[int, tuple[Standing, States, Standing]] = {}


def _standing(states: States) -> Standing:
    return [(g, _bytes(state)) for g, state in states]


def _bytes(state: Tensor) -> bytes:
    """How a generator stands. It is no memory of the step, and no operator reads it."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


@contextmanager
def other_generators_kept(seed: int | None = None) -> Iterator[None]:
    """The same of those of Python and of numpy, if that is there.

    Args:
        seed: with which they begin inside; None: as they stand.
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


class NotedDraws(TorchFunctionMode):
    """Notes generators that operators are given, each as it is before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Callable[[], Any], Tensor]] = []

    @property
    def found(self) -> States:
        """Those that are there still: one that the function made, it makes again."""
        return [(g, x) for ref, x in self.seen if (g := ref()) is not None]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        g = (kwargs or {}).get("generator")
        if isinstance(g, torch.Generator) and g is not torch.default_generator:
            if all(g is not one for one, _ in self.found):
                self.seen.append((generator_reference(g), g.get_state()))
        return func(*args, **(kwargs or {}))


def one_number(generator: torch.Generator | None = None) -> int:
    """One number from a generator (the default one); 0 where values are fake."""
    if _torch.fake_active():
        return draws_in_graph(0)
    device = torch.device("cpu") if generator is None else generator.device
    with _torch.beneath_functorch():  # or vmap would refuse
        number = torch.randint(1 << 62, (), generator=generator, device=device)
        return int(number.item())


def mix(*numbers: int) -> int:
    """The seed of a unit call: one 63-bit number, each bit depending on all."""
    state = 0
    for number in numbers:
        state = scrambled((state ^ (number & MASK)) + _GOLDEN & MASK)
    return state >> 1


def mixed(*numbers: int) -> int:
    """The seed of a row or an order: below 2^64, of all ``numbers`` and their order.

    >>> mixed(0, 1) == mixed(0, 1), mixed(0, 1) == mixed(1, 0)
    (True, False)
    """
    x = 0
    for number in numbers:
        x = scrambled((x + number + _GOLDEN) & MASK)
    return x


def scrambled(x: int) -> int:
    """Another number of 64 bits for each: the output function of SplitMix64.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    The same on every machine, for ever.
    """
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
