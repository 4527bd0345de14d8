"""Descriptions of machines: a few numbers, checked and read-only.

A `Hardware` is one rank's device, its memory and the network around it. `cost_model`
and `simulation` read it; known ones are in `hardware`, and `calibration` measures the
machine at hand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fsfunc.comm.operations import OPERATIONS
from fsfunc.tree.structure import did_you_mean

DTYPES = (
    "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"
)  # fmt: skip


@dataclass(frozen=True)
class Level:
    """One level of the network's hierarchy: the links of a node, or the network.

    Args:
        ranks: how many ranks a group of this level has, such as 8 for a node; 0 means
            all, for the outermost level.
        bandwidth: bytes/s in one direction that leave one group of the level below. At
            the first level that is one rank; at the next a node, whose ranks share it.
        latency: the seconds that a message takes in addition to those of its bytes.

    Raises:
        TypeError: a field that it does not have.
        ValueError: a rate that is not above 0, a negative number of ranks.

    >>> Level(ranks=8, bandwidth=300e9, latency=10e-6).ranks
    8
    """

    ranks: int
    bandwidth: float
    latency: float

    def __new__(cls, *args: Any, **fields: Any) -> Level:
        # Before the dataclass's own __init__, whose error has no nearest name.
        refuse_unknown(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, int) or isinstance(self.ranks, bool):
            raise ValueError(f"ranks of a level is a whole number, got {self.ranks!r}")
        if self.ranks < 0:
            raise ValueError(f"ranks of a level is not below 0, got {self.ranks}")
        _check_positive("bandwidth of a level", self.bandwidth)
        _check_not_negative("latency of a level", self.latency)


@dataclass(frozen=True)
class Hardware:
    """The device of a rank, its memory and its links.

    Ranks are on nodes in the mesh's row-major order. Two with equal fields are equal,
    and one can be the key of a dict. Its mappings cannot be changed.

    Args:
        name: its name in messages and tables.
        peak: FLOP/s of matrix products by the dtype's name, such as "bfloat16".
        efficiency: pairs (size, share of peak) for products [m, k] @ [k, n], whose size
            is (m·k·n)**(1/3), by growing size; between points it is interpolated in
            log(size).
        attention: the share of peak that fused attention reaches; or, by the
            generation of its kernels such as "fa2", the shares of (forward, backward)
            at infinite length and heads of 128, the likeliest generation first.
        bandwidth: bytes/s of memory, read and written, that operators reach.
        overhead: the seconds that an operator costs beside its work; if ``processors``
            are given, those in which the host launches it, or a transfer, ahead of the
            device.
        levels: those of the network, the innermost first; () if it sends nothing.
        memory: the bytes that a rank has for tensors.
        margin: the share of ``memory`` that a plan is to leave free to be judged to
            fit, as plans count less than a card takes.
        process: the bytes that a rank's process holds in the same memory beside
            tensors, such as the interpreter and torch; already taken off ``memory``.
        device: "cpu" or "cuda": whose kernels run, for ``plan(device=)``.
        overlap: the share of a transfer's time that goes on beside computing: 1 if
            copy engines move the data, less if the cores that compute do.
        rates: bytes/s of what is slower than memory or links alone: for operators by
            name ("aten.gelu"), of all that they read and write; for collectives
            ("psum"), of what a rank sends.
        fresh: bytes/s at which memory from the system is first written and returned;
            None if a caching allocator makes that free.
        stores: memory beside the device, by the kind of its ``Store``, such as "host":
            (bytes/s of copies between it and the device, bytes/s of what the host
            computes there, bytes), as one rank's part when all use it at once.
            Without an entry "host" the device itself computes in the host's memory.
        processors: streaming multiprocessors, over which a product's tiles are dealt; 0
            if the curve of ``efficiency`` has that in it.
        straggling: the share of a step by which each doubling of the nodes delays it.
        utilisation: the share of the 16-bit peak for the rule of thumb, 6ND.
        uncertain: how far an estimate may be off, as a natural logarithm, for reasons
            that no part of it explains; 0.1 is about 10%.
        pairwise: the collectives, such as "all_gather", whose ranks send to each other
            directly and not around a ring, as the library's do over gloo.

    Raises:
        TypeError: a field that it does not have.
        ValueError: a rate not above 0, a share outside (0, 1], sizes or levels that do
            not grow, an unknown dtype; named with the field.

    >>> Hardware("one core", peak={"float32": 1e11}, efficiency=[(512, 0.9)],
    ...     attention=0.4, bandwidth=1e10, overhead=1e-6, levels=(), memory=2**34).name
    'one core'
    """

    name: str
    peak: Mapping[str, float]
    efficiency: tuple[tuple[float, float], ...]
    attention: float | Mapping[str, tuple[float, float]]
    bandwidth: float
    overhead: float
    levels: tuple[Level, ...]
    memory: int
    device: str = "cpu"
    overlap: float = 1.0
    rates: Mapping[str, float] = field(default_factory=dict)
    fresh: float | None = None
    stores: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    processors: int = 0
    straggling: float = 0.0
    utilisation: float | None = None
    uncertain: float = 0.1
    pairwise: tuple[str, ...] = ()
    margin: float = 0.0
    process: int = 0

    def __new__(cls, *args: Any, **fields: Any) -> Hardware:
        # Before the dataclass's own __init__, whose error has no nearest name.
        refuse_unknown(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # What a caller gave may change later: the fields are copied, read-only.
        curve = tuple((size, share) for size, share in self.efficiency)
        for name, value in (
            ("peak", MappingProxyType(dict(self.peak))),
            ("rates", MappingProxyType(dict(self.rates))),
            ("stores", MappingProxyType({k: (*v,) for k, v in self.stores.items()})),
            ("efficiency", curve),
            ("levels", tuple(self.levels)),
            ("pairwise", tuple(self.pairwise)),
        ):
            object.__setattr__(self, name, value)
        self._check_peak()
        self._check_curve()
        self._check_levels()
        self._check_attention()
        _check_positive("bandwidth", self.bandwidth)
        for name in ("overhead", "processors", "straggling", "uncertain", "process"):
            _check_not_negative(name, getattr(self, name))
        if self.utilisation is not None:
            _check_share("utilisation", self.utilisation)
        _check_positive("memory", self.memory)
        _check_not_negative("margin", self.margin)
        if self.margin >= 1:
            raise ValueError(f"margin is a share below 1, got {self.margin!r}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap is a share, 0 to 1, got {self.overlap!r}")
        if self.fresh is not None:
            _check_positive("fresh", self.fresh)
        for name, rate in self.rates.items():
            _check_positive(f'rates["{name}"]', rate)
        for name in self.pairwise:
            if name not in OPERATIONS:
                raise ValueError(
                    f'pairwise has "{name}"{did_you_mean(name, OPERATIONS)}; the '
                    f"collectives are: {', '.join(OPERATIONS)}"
                )
        for name, store in self.stores.items():
            parts = ("of copies", "of computing", "its bytes")
            for part, value in zip(parts, store, strict=True):
                _check_positive(f'stores["{name}"], {part}', value)

    def _check_peak(self) -> None:
        if not self.peak:
            raise ValueError(f"peak names no dtype; give one of {', '.join(DTYPES)}")
        for dtype, rate in self.peak.items():
            if dtype not in DTYPES:
                raise ValueError(
                    f'peak has no dtype "{dtype}"{did_you_mean(dtype, DTYPES)}; '
                    f"it knows: {', '.join(DTYPES)}"
                )
            _check_positive(f'peak["{dtype}"]', rate)

    def _check_curve(self) -> None:
        if not self.efficiency:
            raise ValueError("efficiency has no point; give (size, share) pairs")
        last_size = 0.0
        for size, share in self.efficiency:
            _check_positive("a size of efficiency", size)
            _check_share(f"efficiency at size {size:g}", share)
            if size <= last_size:
                raise ValueError(
                    f"efficiency is sorted by size, each once: {size:g} after "
                    f"{last_size:g}"
                )
            last_size = size

    def _check_attention(self) -> None:
        if not isinstance(self.attention, Mapping):
            _check_share("attention", self.attention)
            return
        if not self.attention:
            raise ValueError("attention names no generation of kernels, such as 'fa2'")
        for name, (forward, backward) in self.attention.items():
            _check_share(f'attention["{name}"], forward', forward)
            _check_share(f'attention["{name}"], backward', backward)
        pairs = {name: tuple(pair) for name, pair in self.attention.items()}
        object.__setattr__(self, "attention", MappingProxyType(pairs))

    def _check_levels(self) -> None:
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if inner.ranks == 0 or 0 < outer.ranks <= inner.ranks:
                raise ValueError(
                    "levels go outwards, each of more ranks than the one before (0, "
                    f"for all, last): {outer.ranks} after {inner.ranks}"
                )

    def __hash__(self) -> int:  # mappings have no hash; equal ones have equal others
        return hash((self.name, self.efficiency, self.bandwidth, self.levels))

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        picklable = [dict(x) if isinstance(x, Mapping) else x for x in values]
        return Hardware, tuple(picklable)  # read-only mappings cannot be pickled

    @property
    def usable(self) -> int:
        """The bytes that a plan may need: ``memory`` without its ``margin``."""
        return int(self.memory * (1 - self.margin))

    def efficiency_at(self, size: float) -> float:
        """Returns the share of peak that a product of this size reaches.

        Below the first point it falls in proportion to the size, as so small a product
        is bound by what grows slower than its work. Above the last it is constant.
        """
        points = self.efficiency
        first, share = points[0]
        if size <= first:
            return share * size / first
        for (low, low_share), (high, high_share) in zip(
            points, points[1:], strict=False
        ):
            if size <= high:
                return low_share + (high_share - low_share) * math.log(
                    size / low
                ) / math.log(high / low)
        return points[-1][1]


def refuse_unknown(cls: type, names: Iterable[str]) -> None:
    """Raises a TypeError for the first of ``names`` that is no field of ``cls``."""
    field_names = [f.name for f in dataclasses.fields(cls)]
    for name in names:
        if name not in field_names:
            raise TypeError(
                f'{cls.__name__} has no field "{name}"'
                f"{did_you_mean(name, field_names)}; it has: {', '.join(field_names)}"
            )


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is a number above 0, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is finite and above 0, got {value!r}")


def _check_not_negative(name: str, value: float) -> None:
    if value != 0 or isinstance(value, bool):
        _check_positive(name, value)


def _check_share(name: str, value: float) -> None:
    _check_positive(name, value)
    if value > 1:
        raise ValueError(f"{name} is a share, above 0 and at most 1, got {value!r}")
