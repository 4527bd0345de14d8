"""Random numbers in blocks, of which any range can be drawn alone.

What an operator draws is cut into blocks of its flattened result, and each block has a
generator of its own: so the values depend neither on the rank that draws them nor on
the range that is drawn. ``init_state`` makes parameters so on any mesh, each rank its
own range; moments in 8 bits are rounded so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.generators import generators_restored, seed63

BLOCK = 1 << 17
"""Elements that one generator draws: few enough to lie in a cache. To change it is to
change what every seed gives."""

_BLOCK_ON_DEVICE = 1 << 22
"""The same on any other device than the CPU, where a launch costs as much as to draw
this many: 1.5 G numbers take 358 launches, and the ends of a range 16 MiB beside it."""

Stream = tuple[int, int]  # (key, how many operators drew from that key before)


@dataclass(frozen=True)
class Fill:
    """A random operator in place on a flat tensor, and its arguments."""

    operator: Callable[..., object]
    args: tuple[Any, ...]

    def __call__(self, x: Tensor, generator: torch.Generator) -> None:
        self.operator(x, *self.args, generator=generator)


def standard_normal() -> Fill:
    """Returns the fill of normal numbers of mean 0 and variance 1."""
    return Fill(_normal, (0.0, 1.0))


def any_bits() -> Fill:
    """Returns the fill of integers from the lowest to the highest of a dtype."""
    return Fill(_bits, ())


_aten: Any = torch.ops.aten
_normal, _uniform = _aten.normal_.default, _aten.uniform_.default
_between = getattr(_aten.random_, "from")


def _bits(x: Tensor, *, generator: torch.Generator) -> None:
    _between(x, torch.iinfo(x.dtype).min, None, generator=generator)


# Operators that return a new tensor, by the fill in place that gives its numbers.
_FILLED_BY: dict[Any, Callable[..., Fill]] = {
    _aten.randn: lambda **_: Fill(_normal, (0.0, 1.0)),
    _aten.randn_like: lambda **_: Fill(_normal, (0.0, 1.0)),
    _aten.normal: lambda mean, std, **_: Fill(_normal, (mean, std)),
    _aten.rand: lambda **_: Fill(_uniform, (0.0, 1.0)),
    _aten.rand_like: lambda **_: Fill(_uniform, (0.0, 1.0)),
    _aten.randint: lambda high, low=0, **_: Fill(_between, (low, high)),
    _aten.randint_like: lambda high, low=0, **_: Fill(_between, (low, high)),
}
# Operators that fill their first argument with numbers that depend on the others alone.
_IN_PLACE: set[Any] = {
    _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_, _aten.exponential_,
    _aten.geometric_, _aten.cauchy_, _aten.log_normal_,
}  # fmt: skip


def find_fill(func: Any, arguments: dict[str, Any]) -> Fill | None:
    """Returns the elementwise fill by which ``func`` draws, or None if it does not.

    Args:
        func: a random operator of torch, an ``OpOverload``.
        arguments: what it was called with, by name.
    """
    packet = func.overloadpacket
    options = {k: v for k, v in arguments.items() if k not in ("self", "generator")}
    # Means or bounds in a tensor differ from element to element.
    if any(isinstance(v, Tensor) for v in options.values()):
        return None
    if packet in _IN_PLACE:
        return Fill(func, tuple(options.values()))
    make_fill = _FILLED_BY.get(packet)
    return make_fill(**options) if make_fill is not None else None


@dataclass
class Streams:
    """The streams of numbers that one function draws, operator by operator.

    A generator gives one number, the key, from which all that is drawn from it follows,
    until it is seeded anew.

    Args:
        draws: whether generators are drawn from (where nothing is made, they are not).
    """

    draws: bool = True
    # By id of a generator: it, its key, operators so far, and its state after the key.
    _keys: dict[int, tuple[torch.Generator, int, int, Tensor]] = field(
        default_factory=dict
    )
    _count: int = 0

    def next(self, generator: torch.Generator | None, device: torch.device) -> Stream:
        """Returns the stream of one operator, which names ``generator`` or none."""
        if not self.draws:
            self._count += 1
            return 0, self._count
        if generator is None:
            generator = _default(device)
        with _torch.beneath_all_modes():
            state = generator.get_state()
            entry = self._keys.get(id(generator))
            # Another state than ours: it was seeded, or drawn from, by other code.
            if entry is None or not torch.equal(entry[3], state):
                number = torch.empty((), dtype=torch.int64, device=generator.device)
                key = int(number.random_(generator=generator))
                entry = generator, key, 0, generator.get_state()
            _, key, count, state = entry
            self._keys[id(generator)] = generator, key, count + 1, state
        return key, count


def _default(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def block_size(device: torch.device) -> int:
    """Returns how many elements one generator draws on a device.

    On a GPU torch's numbers depend on how many one call draws, and on the number of its
    processors: so a block is always drawn whole, by one call, and the same bits are
    drawn for any mesh of GPUs of one kind. They are not those of a CPU.
    """
    return BLOCK if device.type in ("cpu", "meta") else _BLOCK_ON_DEVICE


def draw(fill: Fill, stream: Stream, x: Tensor, start: int, size: int) -> None:
    """Fills flat ``x`` with a range of the ``size`` elements that an operator draws.

    Args:
        start: the position of the first element of ``x`` among them.

    Cost: whole blocks are drawn, in place where they lie within ``x``.
    """
    generator, block = torch.Generator(x.device), block_size(x.device)
    stop = start + x.numel()
    for b in range(start // block, -(-stop // block)):
        first, end = b * block, min((b + 1) * block, size)
        low, high = max(first, start), min(end, stop)
        generator.manual_seed(seed63(*stream, b))
        target = x[low - start : high - start]
        if high - low == end - first:
            fill(target, generator)
            continue
        # A block at an end of the range is drawn whole: of a part the numbers differ.
        whole_block = torch.empty(end - first, dtype=x.dtype, device=x.device)
        fill(whole_block, generator)
        target.copy_(whole_block[low - first : high - first])


def draw_seeded(
    func: Callable[..., Any],
    stream: Stream,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a random operator that no `Fill` stands for, seeded for a stream."""
    kwargs = dict(kwargs)
    if "generator" in kwargs:
        kwargs["generator"] = None
    with generators_restored() as states:
        for g, _ in states:
            g.manual_seed(seed63(*stream))
        return func(*args, **kwargs)
