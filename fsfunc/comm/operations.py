"""The table of collectives, along dim 0 of a rank's tensor.

A row, an :class:`Operation`, has all that there is to say of one collective: its types
and transposes, the bytes that it sends, the shape of its result, what each rank
receives, how processes move it, and its rounds for an estimate. The linear maps, the
ledgers and every backend read this table. No backend knows a collective by name; maps
that are no collectives, such as a cast, have a table in `linear_maps`.

    n = 3 ranks, x_i of rank i        psum          all_gather        psum_scatter
    rank 0: x_0                       x_0+x_1+x_2   [x_0, x_1, x_2]   part 0 of the sum
    rank 1: x_1                       x_0+x_1+x_2   [x_0, x_1, x_2]   part 1 of the sum
    rank 2: x_2                       x_0+x_1+x_2   [x_0, x_1, x_2]   part 2 of the sum

To add a collective:

1. A row here. A reduction is its `Fold`: every backend knows how to reduce. Any other
   has a ``reference``, which simulated ranks, ``vmap`` meshes and the type check run,
   and a ``route``, by which processes send; ``native`` if torch has it, for NCCL.
2. If it takes an argument, a field of `linear_maps.LinearMap`, which the row names. If
   its transpose is a map that sends nothing, that map's own transpose in
   `linear_maps.LOCAL_TRANSPOSES`.
3. Its function, as those in ``collectives``, with an example; if that is to be public,
   its name in ``fsfunc/__init__.py``, and other words for it in
   ``cli/names_command.py``. ``show/charts.py`` may give it a colour, and
   ``planning/hardware.py`` counts it among those whose ranks send in pairs, if so.

``tests/comm/test_new_collective.py`` adds one. A collective that is made of others
needs none of this: see ``collective_pairs``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc._torch.versions import all_gather_single

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as PG

    from fsfunc.comm.backends.link import GroupOfRanks

Sizes = tuple[tuple[int, ...], ...]  # numbers of rows: sizes[sender][receiver]
Types = tuple[str, str]  # before and after: see `linear_maps`


@dataclass(frozen=True)
class Fold:
    """An elementwise reduction over ranks.

    Args:
        name: that of torch's ``ReduceOp``.
        pair: reduces two tensors; a torch function that takes ``out=``.
        reduce_equal: ``(x, n)``: reduces n tensors that are all equal to ``x``.
        is_comparison: whether it compares elements, as a maximum does: then it has no
            derivative, and takes no complex numbers.
    """

    name: str
    pair: Callable[..., Tensor]
    reduce_equal: Callable[[Tensor, int], Tensor]
    is_comparison: bool = False

    def reduce(self, xs: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Reduces two tensors or more in rank order, which fixes the bits."""
        total = xs[0]
        for x in xs[1:]:
            # vmap has no rule for ``out=``: what may be batched is reduced without it.
            total = self.pair(total, x) if out is None else self.pair(total, x, out=out)
        return total


SUM = Fold("SUM", torch.add, lambda x, n: x * n)
MAX = Fold("MAX", torch.maximum, lambda x, n: x.clone(), is_comparison=True)
MIN = Fold("MIN", torch.minimum, lambda x, n: x.clone(), is_comparison=True)


class Route(NamedTuple):
    """What one rank sends to others and receives from them, by index along the axis.

    The entries of the rank itself are ignored.
    """

    sent: Mapping[int, Tensor]
    received: Mapping[int, Tensor]


class MessageRounds(enum.Enum):
    """How messages follow each other on a network, for estimates."""

    RING = "n - 1 rounds to a neighbour; of a sum on all ranks, up a tree and down"
    PAIRS = "n - 1 rounds, between each two ranks bytes of their own"
    ONE = "one message of each rank"


def _missing(*_: Any, **kwargs: Any) -> Any:
    raise TypeError("the row of a collective has a fold, or a reference and a route")


@dataclass(frozen=True)
class Operation:
    """One row of the table: the properties of a collective.

    Functions take the number of ranks ``n``, a rank's index ``i``, and by name the
    collective's arguments.

    Args:
        sent_ratio: ``(n, i)``: the bytes that a rank sends, over those of its input.
        transposes: by types before and after, the op and the types of the transpose.
        fold: the reduction; None where the ranks' tensors are not combined.
        out_rows: ``(rows, n, i)``: the rows of the result, of an input of so many
            rows; None: those of the input, which may have no dims.
        same_on_all: whether the result is equal on all ranks.
        dims: the number of tensor dims of `LinearMap` that it works along: 0, 1
            (``dim``) or 2 (``dim`` and ``to_dim``).
        arguments: the fields of `LinearMap` that it takes by name.
        rounds: for estimates.

    Without a ``fold`` also

    Args:
        reference: ``(xs, i)``: what rank i receives of the ranks' tensors, in memory
            of its own.
        route: ``(x, y, n, i)``: what a rank sends of ``x`` and receives of its result
            ``y``, into which it copies its own part.
        one_way: whether a rank may send to one from which it receives nothing.
        native: ``(y, x, group, pg)``: starts torch's own collective into ``y`` on the
            process group ``pg``; returns its work. None: its messages are one batch.
    """

    sent_ratio: Callable[..., Fraction | int]
    transposes: Mapping[Types, tuple[str, str, str]] = field(default_factory=dict)
    fold: Fold | None = None
    out_rows: Callable[..., int] | None = None
    same_on_all: bool = False
    dims: int = 0
    arguments: tuple[str, ...] = ()
    rounds: MessageRounds = MessageRounds.RING
    reference: Callable[..., Tensor] = _missing
    route: Callable[..., Route] = _missing
    one_way: bool = False
    native: Callable[..., dist.Work | None] | None = None

    @property
    def all_reduces(self) -> bool:
        """Whether every rank receives the whole reduction."""
        return self.fold is not None and self.out_rows is None

    def result_shape(
        self, shape: Sequence[int], n: int, i: int, **kwargs: Any
    ) -> tuple[int, ...]:
        """Returns the shape of a rank's result."""
        if self.out_rows is None:
            return tuple(shape)
        return (self.out_rows(shape[0], n, i, **kwargs), *shape[1:])

    def combine(self, xs: Sequence[Tensor], **kwargs: Any) -> list[Tensor]:
        """Returns the results of two ranks or more where rank i sent ``xs[i]``.

        Sums run in rank order, which fixes their bits. The results may share memory
        with each other, never with an input.
        """
        n = len(xs)
        if self.fold is not None:
            total = self.fold.reduce(xs)
            return [total] * n if self.out_rows is None else list(total.tensor_split(n))
        if self.same_on_all:
            return [self.reference(xs, 0, **kwargs)] * n
        return [self.reference(xs, i, **kwargs) for i in range(n)]

    def result_if_equal(self, x: Tensor, n: int, i: int, **kwargs: Any) -> Tensor:
        """Returns the result of a rank if all ranks have ``x``.

        It stands in for what others send where one rank's call runs alone, from a
        recording: with ``sizes`` its rows are copies, of the right number.
        """
        if self.fold is not None:
            part = x if self.out_rows is None else x.tensor_split(n)[i]
            return self.fold.reduce_equal(part, n)
        # If parts are unequal, the other ranks' rows are not known: all rows are copies
        # of the first.
        if kwargs.get("sizes"):
            return x[:1].expand(self.result_shape(x.shape, n, i, **kwargs))
        return self.reference([x] * n, i, **kwargs)


def _ring(n: int, i: int, **_: Any) -> Fraction:
    return Fraction(n - 1, n)


def _ring_both_ways(n: int, i: int, **_: Any) -> Fraction:
    return 2 * _ring(n, i)


# all_gather


def _concatenate(xs: Sequence[Tensor], i: int, **_: Any) -> Tensor:
    # `cat` of one tensor would lose the strides, which `clone` keeps.
    return torch.cat(list(xs)) if len(xs) > 1 else xs[0].clone()


def _gather_route(x: Tensor, y: Tensor, n: int, i: int, **_: Any) -> Route:
    parts = y.tensor_split(n)
    local_part = parts[i]
    # At zero 1 and 2 the state's part is a view of the buffer that is gathered into.
    if local_part.data_ptr() != x.data_ptr():
        local_part.copy_(x)
    return Route(dict.fromkeys(range(n), local_part), dict(enumerate(parts)))


def _native_gather(
    y: Tensor, x: Tensor, group: GroupOfRanks, pg: PG, **_: Any
) -> dist.Work | None:
    return all_gather_single(y, x, group=pg, async_op=True)


# all_to_all


def _sent_elsewhere(n: int, i: int, sizes: Sizes = (), **_: Any) -> Fraction:
    if not sizes:
        return _ring(n, i)
    return 1 - Fraction(sizes[i][i], sum(sizes[i]) or 1)


def _split_sizes(
    x: Tensor, n: int, i: int, sizes: Sizes
) -> tuple[list[int], list[int]]:
    """Returns how many rows rank i sends to each index, and receives from each."""
    if not sizes:
        return [x.shape[0] // n] * n, [x.shape[0] // n] * n
    return list(sizes[i]), [row[i] for row in sizes]


def _exchange(xs: Sequence[Tensor], i: int, sizes: Sizes = (), **_: Any) -> Tensor:
    cuts = [_split_sizes(x, len(xs), s, sizes)[0] for s, x in enumerate(xs)]
    pairs = zip(xs, cuts, strict=True)
    return _concatenate([x.narrow(0, sum(cut[:i]), cut[i]) for x, cut in pairs], i)


def _exchange_route(
    x: Tensor, y: Tensor, n: int, i: int, sizes: Sizes = (), **_: Any
) -> Route:
    rows_sent, rows_received = _split_sizes(x, n, i, sizes)
    parts, slots = x.split(rows_sent), y.split(rows_received)
    slots[i].copy_(parts[i])
    return Route(dict(enumerate(parts)), dict(enumerate(slots)))


def _native_exchange(
    y: Tensor, x: Tensor, group: GroupOfRanks, pg: PG, sizes: Sizes = (), **_: Any
) -> dist.Work | None:
    sent, received = _split_sizes(x, group.size, group.index, sizes)
    return dist.all_to_all_single(y, x, received, sent, group=pg, async_op=True)


# pbroadcast


def _broadcast_route(
    x: Tensor, y: Tensor, n: int, i: int, source: int = 0, **_: Any
) -> Route:
    if i != source:
        return Route({}, {source: y})
    y.copy_(x)
    return Route(dict.fromkeys(range(n), x), {})


def _native_broadcast(
    y: Tensor, x: Tensor, group: GroupOfRanks, pg: PG, source: int = 0, **_: Any
) -> dist.Work | None:
    y.copy_(x)  # torch broadcasts in place
    return dist.broadcast(y, group.ranks[source], group=pg, async_op=True)


# ppermute

Pairs = Sequence[tuple[int, int]]  # (source, target)


def _permute(xs: Sequence[Tensor], i: int, pairs: Pairs = (), **_: Any) -> Tensor:
    sources = [s for s, d in pairs if d == i]
    return xs[sources[0]].clone() if sources else torch.zeros_like(xs[i])


def _permute_route(
    x: Tensor, y: Tensor, n: int, i: int, pairs: Pairs = (), **_: Any
) -> Route:
    sent = {d: x for s, d in pairs if s == i}
    received = {s: y for s, d in pairs if d == i}
    # No message goes from a rank to itself, and none to a rank that is no target.
    if not received:
        y.zero_()
    elif i in received:
        y.copy_(x)
    return Route(sent, received)


OPERATIONS: dict[str, Operation] = {
    "psum": Operation(
        _ring_both_ways,
        {
            ("V", "I"): ("cast", "I", "V"),
            ("P", "I"): ("cast", "I", "R"),
            ("P", "R"): ("psum", "P", "R"),
            ("V", "V"): ("psum", "V", "V"),
            ("P", "V"): ("psum", "V", "R"),
            ("V", "R"): ("psum", "P", "V"),
        },
        fold=SUM,
        same_on_all=True,
    ),
    "pmax": Operation(_ring_both_ways, fold=MAX, same_on_all=True),
    "pmin": Operation(_ring_both_ways, fold=MIN, same_on_all=True),
    "all_gather": Operation(
        lambda n, i, **_: n - 1,
        {
            ("V", "V"): ("psum_scatter", "V", "V"),
            ("V", "R"): ("psum_scatter", "P", "V"),
            ("V", "I"): ("slice", "I", "V"),
        },
        out_rows=lambda rows, n, i, **_: rows * n,
        same_on_all=True,
        dims=1,
        reference=_concatenate,
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
        out_rows=lambda rows, n, i, **_: rows // n,
        dims=1,
    ),
    "all_to_all": Operation(
        _sent_elsewhere,
        {("V", "V"): ("all_to_all", "V", "V")},
        out_rows=lambda rows, n, i, sizes=(), **_: (
            sum(row[i] for row in sizes) if sizes else rows
        ),
        dims=2,
        arguments=("sizes",),
        rounds=MessageRounds.PAIRS,
        reference=_exchange,
        route=_exchange_route,
        native=_native_exchange,
    ),
    "pbroadcast": Operation(
        _ring,
        {
            ("V", "V"): ("collect", "V", "V"),
            ("V", "I"): ("keep", "I", "V"),
        },
        same_on_all=True,
        arguments=("source",),
        reference=lambda xs, i, source=0, **_: xs[source].clone(),
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
        reference=_permute,
        route=_permute_route,
        one_way=True,
    ),
}
