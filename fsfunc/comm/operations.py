"""A table of the collectives, along dim 0 of a rank's tensor.

A row is all that there is to say of one: types and transposes, bytes, shapes, what each
rank receives, how processes move it, and the rounds of an estimate. Ledgers, the linear
maps and every backend read it, and none knows a collective by name.

To add a collective:

1. A row here. A reduction is its `Fold`: every backend knows how to reduce. Any other
   has a ``result``, which simulated ranks, ``vmap`` meshes and the type check run, and
   a ``route``, by which processes send; ``native`` if torch has it, for NCCL.
2. If it takes an argument, a field of `linear_maps.LinearMap`, which the row names.
3. Its function, as those in ``collectives``, with an example; if that is to be public,
   its name in ``fsfunc/__init__.py``, and other words for it in
   ``cli/names_command.py``. ``show/charts.py`` may give it a colour.

``tests/comm/test_new_collective.py`` adds one. A collective that is made of others
needs none of this: see ``collective_pairs``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc._torch.versions import all_gather_single

Sizes = tuple[tuple[int, ...], ...]  # rows, by sender and receiver
Types = tuple[str, str]  # before and after: see `linear_maps`


@dataclass(frozen=True)
class Fold:
    """An elementwise reduction over ranks.

    Args:
        name: that of torch's ``ReduceOp``.
        pair: the reduction of two tensors, a function that takes ``out=``.
        equal: that of so many tensors that are equal.
        ordered: whether it compares elements, as a maximum does: then it has no
            derivative, and takes no complex numbers.
    """

    name: str
    pair: Callable[..., Tensor]
    equal: Callable[[Tensor, int], Tensor]
    ordered: bool = False

    def of(self, xs: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Reduces two tensors or more in rank order, which fixes the bits."""
        total = xs[0]
        for x in xs[1:]:  # of mapped tensors nothing is made in ``out``
            total = self.pair(total, x) if out is None else self.pair(total, x, out=out)
        return total


SUM = Fold("SUM", torch.add, lambda x, n: x * n)
MAX = Fold("MAX", torch.maximum, lambda x, n: x.clone(), ordered=True)
MIN = Fold("MIN", torch.minimum, lambda x, n: x.clone(), ordered=True)


class Route(NamedTuple):
    """What one rank sends to others and receives from them, by index along the axis.

    What it says of the rank itself is ignored.
    """

    sent: Mapping[int, Tensor]
    received: Mapping[int, Tensor]


class MessageRounds(enum.Enum):
    """How messages follow each other on a network, for estimates."""

    RING = "n - 1 rounds to a neighbour; of a sum on all ranks, up a tree and down"
    PAIRS = "n - 1 rounds, between each two ranks bytes of their own"
    ONE = "one message of each rank"


def _not_given(*_: Any, **how: Any) -> Any:
    raise TypeError("the row of a collective has a fold, or a result and a route")


@dataclass(frozen=True)
class Operation:
    """The properties of one collective.

    Functions take the number of ranks ``n``, a rank's index ``i``, and by name the
    collective's arguments.

    Args:
        sends: ``(n, i)``: the bytes that a rank sends, over those of its input.
        transposes: by types before and after, the op and the types of the transpose.
        fold: the reduction; None where the ranks' tensors are not combined.
        rows: ``(rows, n, i)``: the rows of the result, of an input of so many rows;
            None: those of the input, which may have no dims.
        agrees: whether the result is equal on all ranks.
        dims: the tensor dims of `LinearMap` that it works along: none, ``dim``, or
            ``dim`` and ``to_dim``.
        arguments: the fields of `LinearMap` that it takes by name.
        rounds: for estimates.

    Without a ``fold`` also

    Args:
        result: ``(xs, i)``: what a rank receives of the ranks' tensors, in memory of
            its own: the reference.
        route: ``(x, y, n, i)``: what a rank sends of ``x`` and receives of its result
            ``y``, into which it copies what is its own.
        one_way: whether a rank may send to one from which it receives nothing.
        native: ``(y, x, where, group)``: starts torch's own collective into ``y``;
            returns its work. None: its messages are one batch.
    """

    sends: Callable[..., Any]
    transposes: Mapping[Types, tuple[str, str, str]] = field(default_factory=dict)
    fold: Fold | None = None
    rows: Callable[..., int] | None = None
    agrees: bool = False
    dims: int = 0
    arguments: tuple[str, ...] = ()
    rounds: MessageRounds = MessageRounds.RING
    result: Callable[..., Tensor] = _not_given
    route: Callable[..., Route] = _not_given
    one_way: bool = False
    native: Callable[..., Any] | None = None

    @property
    def all_reduces(self) -> bool:
        """True if every rank receives the whole reduction."""
        return self.fold is not None and self.rows is None

    def result_shape(
        self, shape: Sequence[int], n: int, i: int, **how: Any
    ) -> tuple[int, ...]:
        """The shape of a rank's result."""
        if self.rows is None:
            return tuple(shape)
        return (self.rows(shape[0], n, i, **how), *shape[1:])

    def combine(self, xs: Sequence[Tensor], **how: Any) -> list[Tensor]:
        """The results of two ranks or more where rank i sent ``xs[i]``.

        Sums run in rank order, which fixes their bits. The results may share memory
        with each other, never with an input.
        """
        n = len(xs)
        if self.fold is not None:
            total = self.fold.of(xs)
            return [total] * n if self.rows is None else list(total.tensor_split(n))
        if self.agrees:
            return [self.result(xs, 0, **how)] * n
        return [self.result(xs, i, **how) for i in range(n)]

    def echo(self, x: Tensor, n: int, i: int, **how: Any) -> Tensor:
        """The result of a rank if all have ``x``."""
        if self.fold is not None:
            part = x if self.rows is None else x.tensor_split(n)[i]
            return self.fold.equal(part, n)
        if how.get("sizes"):  # each has rows of its own: all are as the first one
            return x[:1].expand(self.result_shape(x.shape, n, i, **how))
        return self.result([x] * n, i, **how)


def _ring(n: int, i: int, **_: Any) -> Fraction:
    return Fraction(n - 1, n)


def _both_ways(n: int, i: int, **_: Any) -> Fraction:
    return 2 * _ring(n, i)


# all_gather


def _joined(xs: Sequence[Tensor], i: int, **_: Any) -> Tensor:
    """Of one, a copy with its strides."""
    return torch.cat(list(xs)) if len(xs) > 1 else xs[0].clone()


def _gather_route(x: Tensor, y: Tensor, n: int, i: int, **_: Any) -> Route:
    parts = y.tensor_split(n)
    mine = parts[i]
    if mine.data_ptr() != x.data_ptr():  # at zero 1 and 2 the state's part is there
        mine.copy_(x)
    return Route(dict.fromkeys(range(n), mine), dict(enumerate(parts)))


def _native_gather(y: Tensor, x: Tensor, where: Any, group: Any, **_: Any) -> Any:
    return all_gather_single(y, x, group=group, async_op=True)


# all_to_all


def _sent_away(n: int, i: int, sizes: Sizes = (), **_: Any) -> Fraction:
    if not sizes:
        return _ring(n, i)
    return 1 - Fraction(sizes[i][i], sum(sizes[i]) or 1)


def _cuts(x: Tensor, n: int, i: int, sizes: Sizes) -> tuple[list[int], list[int]]:
    """By index, how many rows a rank sends there, and receives from there."""
    if not sizes:
        return [x.shape[0] // n] * n, [x.shape[0] // n] * n
    return list(sizes[i]), [row[i] for row in sizes]


def _exchanged(xs: Sequence[Tensor], i: int, sizes: Sizes = (), **_: Any) -> Tensor:
    cuts = [_cuts(x, len(xs), s, sizes)[0] for s, x in enumerate(xs)]
    pairs = zip(xs, cuts, strict=True)
    return _joined([x.narrow(0, sum(cut[:i]), cut[i]) for x, cut in pairs], i)


def _exchange_route(
    x: Tensor, y: Tensor, n: int, i: int, sizes: Sizes = (), **_: Any
) -> Route:
    sent, received = _cuts(x, n, i, sizes)
    parts, slots = x.split(sent), y.split(received)
    slots[i].copy_(parts[i])
    return Route(dict(enumerate(parts)), dict(enumerate(slots)))


def _native_exchange(
    y: Tensor, x: Tensor, where: Any, group: Any, sizes: Sizes = (), **_: Any
) -> Any:
    sent, received = _cuts(x, where.size, where.index, sizes)
    return dist.all_to_all_single(y, x, received, sent, group=group, async_op=True)


# pbroadcast


def _broadcast_route(
    x: Tensor, y: Tensor, n: int, i: int, source: int = 0, **_: Any
) -> Route:
    if i != source:
        return Route({}, {source: y})
    y.copy_(x)
    return Route(dict.fromkeys(range(n), x), {})


def _native_broadcast(
    y: Tensor, x: Tensor, where: Any, group: Any, source: int = 0, **_: Any
) -> Any:
    y.copy_(x)
    return dist.broadcast(y, where.ranks[source], group=group, async_op=True)


# ppermute

Pairs = Sequence[tuple[int, int]]  # (source, target)


def _permuted(xs: Sequence[Tensor], i: int, pairs: Pairs = (), **_: Any) -> Tensor:
    sources = [s for s, d in pairs if d == i]
    return xs[sources[0]].clone() if sources else torch.zeros_like(xs[i])


def _permute_route(
    x: Tensor, y: Tensor, n: int, i: int, pairs: Pairs = (), **_: Any
) -> Route:
    sent = {d: x for s, d in pairs if s == i}
    received = {s: y for s, d in pairs if d == i}
    if not received:
        y.zero_()
    elif i in received:
        y.copy_(x)
    return Route(sent, received)


OPERATIONS = {
    "psum": Operation(
        _both_ways,
        {
            ("V", "I"): ("cast", "I", "V"),
            ("P", "I"): ("cast", "I", "R"),
            ("P", "R"): ("psum", "P", "R"),
            ("V", "V"): ("psum", "V", "V"),
            ("P", "V"): ("psum", "V", "R"),
            ("V", "R"): ("psum", "P", "V"),
        },
        fold=SUM,
        agrees=True,
    ),
    "pmax": Operation(_both_ways, fold=MAX, agrees=True),
    "pmin": Operation(_both_ways, fold=MIN, agrees=True),
    "all_gather": Operation(
        lambda n, i, **_: n - 1,
        {
            ("V", "V"): ("psum_scatter", "V", "V"),
            ("V", "R"): ("psum_scatter", "P", "V"),
            ("V", "I"): ("slice", "I", "V"),
        },
        rows=lambda rows, n, i, **_: rows * n,
        agrees=True,
        dims=1,
        result=_joined,
        route=_gather_route,
        native=_native_gather,
    ),
    "psum_scatter": Operation(
        _ring,
        {
            ("V", "V"): ("all_gather", "V", "V"),
            ("P", "V"): ("all_gather", "V", "R"),
        },
        fold=SUM,
        rows=lambda rows, n, i, **_: rows // n,
        dims=1,
    ),
    "all_to_all": Operation(
        _sent_away,
        {("V", "V"): ("all_to_all", "V", "V")},
        rows=lambda rows, n, i, sizes=(), **_: (
            sum(row[i] for row in sizes) if sizes else rows
        ),
        dims=2,
        arguments=("sizes",),
        rounds=MessageRounds.PAIRS,
        result=_exchanged,
        route=_exchange_route,
        native=_native_exchange,
    ),
    "pbroadcast": Operation(
        _ring,
        {
            ("V", "V"): ("collect", "V", "V"),
            ("V", "I"): ("keep", "I", "V"),
        },
        agrees=True,
        arguments=("source",),
        result=lambda xs, i, source=0, **_: xs[source].clone(),
        route=_broadcast_route,
        one_way=True,
        native=_native_broadcast,
    ),
    "ppermute": Operation(
        # Of a source; other ranks send nothing.
        lambda n, i, pairs=(), **_: int(any(s == i != d for s, d in pairs)),
        {("V", "V"): ("ppermute", "V", "V")},
        arguments=("pairs",),
        rounds=MessageRounds.ONE,
        result=_permuted,
        route=_permute_route,
        one_way=True,
    ),
}
