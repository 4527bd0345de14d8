"""The rows of each batch, in an order of their own, read so that chance repeats itself.

What a dataset draws for a row follows from the seed, the epoch and the row: neither the
number of ranks nor that of workers shows in it, nor does where a run was resumed.

An order is computed index by index, and never held whole. A Feistel network with random
functions of its halves permutes the numbers of b bits; a number that falls outside of
``range(n)`` is permuted on until it falls inside, which is again a permutation (cycle
walking). It takes less than two walks on average.

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, section 3 and 5.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.runtime.generators import (
    generators_restored,
    other_generators_restored,
    seed64,
    splitmix64,
)


@dataclass(frozen=True)
class Order:
    """The order of rows in batches: a function of these five, and of no mesh."""

    rows: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(self.rows, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def size(self, batch: int) -> int:
        """The rows of a batch of all ranks."""
        return min(self.batch_size, self.rows - batch * self.batch_size)

    def of(self, epoch: int) -> Any:
        """The row at each place of an epoch."""
        if not self.shuffle:
            return range(self.rows)
        return Shuffled(self.rows, seed64(self.seed, epoch))


class Share(NamedTuple):
    """The part of a batch that a rank reads, one of ``count``."""

    index: int
    count: int

    def of(self, rows: int) -> range:
        """The places of its rows in a batch: ``torch.tensor_split``'s."""
        each, more = divmod(rows, self.count)
        start = self.index * each + min(self.index, more)
        return range(start, start + each + (self.index < more))


class BatchDataset:
    """A dataset of batches, as a ``DataLoader`` and its workers see it."""

    def __init__(
        self, dataset: Any, order: Order, share: Share, collate: Callable[..., Any]
    ):
        self.dataset, self.order, self.share = dataset, order, share
        self.collate = collate
        self._epoch, self._rows = -1, None

    def __getitem__(self, at: tuple[int, int]) -> Any:
        """This rank's part of the batch at (epoch, batch)."""
        epoch, batch = at
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self.order.of(epoch)
        start = batch * self.order.batch_size
        places = self.share.of(self.order.size(batch))
        # A part of no rows has the form of a batch: that of one row, cut to none.
        taken = [self._rows[start + k] for k in places or range(1)]  # type: ignore
        with _kept_generators() as seed_all:

            def batch_of(rows: list[int]) -> Any:
                found = []
                for row in rows:
                    seed_all(seed64(self.order.seed, epoch, row))
                    found.append(self.dataset[row])
                return self.collate(found)

            made = batch_of(taken)
            if places:
                return made
            # A batch of two shows which lists have an item for each row.
            lists = any(map(_is_list, tree.leaves(made, _is_list)))
            more = batch_of(taken * 2) if lists else made
        return _emptied(made, more)


def _is_list(x: Any) -> bool:
    return type(x) in (list, tuple)


def _emptied(one: Any, two: Any) -> Any:
    """A batch of one row cut to none; ``two`` is the batch of that row twice."""

    def cut(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor):
            return x[:0] if x.ndim else x
        if not _is_list(x):
            return x
        if len(x) != len(y):
            return x[:0]
        return type(x)(map(_emptied, x, y))

    return tree.map(cut, one, two, is_leaf=_is_list)


@contextmanager
def _kept_generators() -> Iterator[Callable[[int], None]]:
    """Gives what seeds the default generators, which are put back in the end."""
    numpy = sys.modules.get("numpy")

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)

    with generators_restored(), other_generators_restored():
        yield seed_all


_ROUNDS = 8  # twice what makes an ideal network indistinguishable from chance
_SMALL = 8  # bits: below, a network of a few bits reaches some orders more than others


class Shuffled:
    """``range(n)`` in an order that ``key`` decides; ``shuffled[i]`` is its i-th.

    Cost: a few microseconds an index, and no memory.

    >>> order = Shuffled(10, key=3)
    >>> sorted(order[i] for i in range(10)) == list(range(10))
    True
    """

    def __init__(self, n: int, key: int):
        self.n, bits = n, max(_SMALL, (n - 1).bit_length())
        self._low = bits // 2
        self._masks = (1 << bits - self._low) - 1, (1 << self._low) - 1
        self._keys = [seed64(key, k) for k in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"index {i} of an order of {self.n}")
        i = self._permuted(i)
        while i >= self.n:
            i = self._permuted(i)
        return i

    def _permuted(self, x: int) -> int:
        high, low = self._masks
        left, right = x >> self._low, x & low
        for k in range(0, _ROUNDS, 2):  # each half by a random function of the other
            left ^= splitmix64(right ^ self._keys[k]) & high
            right ^= splitmix64(left ^ self._keys[k + 1]) & low
        return left << self._low | right
