"""Random numbers in blocks, of which any range can be drawn alone.

What an operator draws is cut into blocks of its flattened result, and each block has a
generator of its own: so the values depend neither on who draws them nor on how much of
them is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.generators import generators_kept, mix

BLOCK = 1 << 17
"""Elements that one generator draws: few enough to lie in a cache. To change it is to
change what every seed gives."""

_BLOCK_ON_DEVICE = 1 << 22
"""The same on any other device than the CPU, where a launch costs as much as to draw
this many: 1.5 G numbers take 358 launches, and the ends of a range 16 MiB beside it."""

Stream = tuple[int, int]  # (key, how many operators drew from it before)


@dataclass(frozen=True)
class Fill:
    """A random operator in place on a flat tensor, and its arguments."""

    operator: Any
    args: tuple[Any, ...]

    def __call__(self, x: Tensor, generator: torch.Generator) -> None:
        self.operator(x, *self.args, generator=generator)


def standard_normal() -> Fill:
    """Numbers of mean 0 and variance 1."""
    return Fill(_normal, (0.0, 1.0))


def any_bits() -> Fill:
    """Whole numbers from the lowest to the highest of a dtype."""
    return Fill(_bits, ())


_aten: Any = torch.ops.aten
_normal, _uniform = _aten.normal_.default, _aten.uniform_.default
_between = getattr(_aten.random_, "from")


def _bits(x: Tensor, *, generator: torch.Generator) -> None:
    _between(x, torch.iinfo(x.dtype).min, None, generator=generator)


_FILLED_BY: dict[Any, Callable[..., Fill]] = {
    _aten.randn: lambda **_: Fill(_normal, (0.0, 1.0)),
    _aten.randn_like: lambda **_: Fill(_normal, (0.0, 1.0)),
    _aten.normal: lambda mean, std, **_: Fill(_normal, (mean, std)),
    _aten.rand: lambda **_: Fill(_uniform, (0.0, 1.0)),
    _aten.rand_like: lambda **_: Fill(_uniform, (0.0, 1.0)),
    _aten.randint: lambda high, low=0, **_: Fill(_between, (low, high)),
    _aten.randint_like: lambda high, low=0, **_: Fill(_between, (low, high)),
}
# These fill their first argument with what depends on the others, which are numbers.
_IN_PLACE = {
    _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_, _aten.exponential_,
    _aten.geometric_, _aten.cauchy_, _aten.log_normal_,
}  # fmt: skip


def fill_of(func: Any, arguments: dict[str, Any]) -> Fill | None:
    """The elementwise fill by which ``func`` draws, or None where it does not.

    Args:
        func: a random operator of torch.
        arguments: what it was called with, by name.
    """
    packet = func.overloadpacket
    rest = {k: v for k, v in arguments.items() if k not in ("self", "generator")}
    if any(isinstance(v, Tensor) for v in rest.values()):
        return None
    if packet in _IN_PLACE:
        return Fill(func, tuple(rest.values()))
    made = _FILLED_BY.get(packet)
    return made(**rest) if made is not None else None


@dataclass
class Streams:
    """The streams of numbers that one function draws, operator by operator.

    A generator gives one number, from which all that is drawn from it follows, until
    somebody seeds it anew.

    Args:
        draws: whether generators are drawn from (where nothing is made, they are not).
    """

    draws: bool = True
    _known: dict[int, Any] = field(default_factory=dict)
    _count: int = 0

    def next(self, generator: torch.Generator | None, device: torch.device) -> Stream:
        """The stream of one operator, which names ``generator`` or none."""
        if not self.draws:
            self._count += 1
            return 0, self._count
        if generator is None:
            generator = _default(device)
        with _torch.beneath_all_modes():
            state = generator.get_state()
            known = self._known.get(id(generator))
            if known is None or not torch.equal(known[3], state):
                number = torch.empty((), dtype=torch.int64, device=generator.device)
                key = int(number.random_(generator=generator))
                known = generator, key, 0, generator.get_state()
            _, key, count, state = known
            self._known[id(generator)] = generator, key, count + 1, state
        return key, count


def _default(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def block_on(device: torch.device) -> int:
    """The elements that one generator draws on a device.

    On a GPU torch's numbers depend on how many one call draws, and on the number of its
    processors: so a block is always drawn whole, by one call, and the same bits are
    drawn for any mesh of GPUs of one kind. They are not those of a CPU.
    """
    return BLOCK if device.type in ("cpu", "meta") else _BLOCK_ON_DEVICE


def draw(fill: Fill, stream: Stream, x: Tensor, start: int, size: int) -> None:
    """Fills flat ``x`` with elements from ``start`` on of the ``size`` that are drawn.

    Cost: whole blocks are drawn, in place where they lie within ``x``.
    """
    generator, block = torch.Generator(x.device), block_on(x.device)
    stop = start + x.numel()
    for b in range(start // block, -(-stop // block)):
        first, end = b * block, min((b + 1) * block, size)
        low, high = max(first, start), min(end, stop)
        generator.manual_seed(mix(*stream, b))
        target = x[low - start : high - start]
        if high - low == end - first:
            fill(target, generator)
            continue
        whole = torch.empty(end - first, dtype=x.dtype, device=x.device)
        fill(whole, generator)
        target.copy_(whole[low - first : high - first])


def seeded(
    func: Any, stream: Stream, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The result for a stream of a random operator that draws in ways of its own."""
    kwargs = dict(kwargs)
    if "generator" in kwargs:
        kwargs["generator"] = None
    with generators_kept() as states:
        for g, _ in states:
            g.manual_seed(mix(*stream))
        return func(*args, **kwargs)
