"""Which rows a batch has, and how a rank reads its own, random numbers included.

The random numbers that a dataset draws for a row follow from the seed, the epoch and
the row. The number of ranks and of workers does not show in them, nor where a run was
resumed.

The order of an epoch is computed index by index, and never held whole. A Feistel
network with random functions of its halves permutes the numbers of b bits. A number
that falls outside of ``range(n)`` is permuted again until it falls inside, which is a
permutation too (cycle walking). It takes less than two walks on average.

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, section 3 and 5.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.runtime.generators import (
    generators_restored,
    other_generators_restored,
    seed64,
    splitmix64,
)
from fsfunc.tree.types import Leaf, PyTree


class Dataset(Protocol):
    """A dataset of rows by number, as of ``torch.utils.data``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class BatchOrder:
    """The order of rows in batches: a function of these five, whatever the mesh."""

    rows: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    def __len__(self) -> int:
        """Counts the batches in an epoch."""
        full, remainder = divmod(self.rows, self.batch_size)
        return full + bool(remainder and not self.drop_last)

    def size(self, batch: int) -> int:
        """Returns the number of rows of a batch, over all ranks."""
        return min(self.batch_size, self.rows - batch * self.batch_size)

    def rows_of(self, epoch: int) -> range | Shuffled:
        """Returns the row at each place of an epoch."""
        if not self.shuffle:
            return range(self.rows)
        return Shuffled(self.rows, seed64(self.seed, epoch))


class RankShare(NamedTuple):
    """The part of a batch that a rank reads, one of ``count``."""

    index: int
    count: int

    def places(self, rows: int) -> range:
        """Returns the places of its rows in a batch, as ``torch.tensor_split``."""
        each, remainder = divmod(rows, self.count)
        start = self.index * each + min(self.index, remainder)
        return range(start, start + each + (self.index < remainder))


class BatchDataset:
    """A dataset of batches, as a ``DataLoader`` and its workers see it.

    Args:
        dataset: the user's, of rows.
        collate: makes a batch of a list of rows.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: BatchOrder,
        share: RankShare,
        collate: Callable[[list[Any]], PyTree],
    ):
        self.dataset: Dataset = dataset
        self.order: BatchOrder = order
        self.share: RankShare = share
        self.collate = collate
        # The order of the epoch that was read last.
        self._epoch = -1
        self._rows: range | Shuffled = range(0)

    def __getitem__(self, position: tuple[int, int]) -> PyTree:
        """Returns this rank's part of the batch at (epoch, batch)."""
        epoch, batch = position
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self.order.rows_of(epoch)
        start = batch * self.order.batch_size
        places = self.share.places(self.order.size(batch))
        # A part without rows still has the structure of a batch: it is made of one row,
        # and cut to none.
        local_rows = [self._rows[start + k] for k in places or range(1)]
        with _seeding_generators() as seed_all:

            def read(rows: list[int]) -> PyTree:
                items = []
                for row in rows:
                    seed_all(seed64(self.order.seed, epoch, row))
                    items.append(self.dataset[row])
                return self.collate(items)

            local_batch = read(local_rows)
            if places:
                return local_batch
            # A batch of two rows shows which lists have an item for each row.
            has_lists = any(map(_is_list, tree.leaves(local_batch, _is_list)))
            of_two = read(local_rows * 2) if has_lists else local_batch
        return _cut_to_no_rows(local_batch, of_two)


def _is_list(x: PyTree) -> bool:
    return type(x) in (list, tuple)


def _cut_to_no_rows(of_one: PyTree, of_two: PyTree) -> PyTree:
    """Cuts a batch of one row to none.

    Args:
        of_two: the batch of that row twice.
    """

    def cut(x: Leaf, y: Leaf) -> Leaf:
        if isinstance(x, Tensor):
            return x[:0] if x.ndim else x
        if not _is_list(x):
            return x
        if len(x) != len(y):  # an item for each row
            return x[:0]
        return type(x)(map(_cut_to_no_rows, x, y))

    return tree.map(cut, of_one, of_two, is_leaf=_is_list)


@contextmanager
def _seeding_generators() -> Iterator[Callable[[int], None]]:
    """Yields a function that seeds the default generators; restores them at its end."""
    numpy = sys.modules.get("numpy")  # if nobody has imported it, nobody draws by it

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)

    with generators_restored(), other_generators_restored():
        yield seed_all


_ROUNDS = 8  # twice what makes an ideal network indistinguishable from chance
# With fewer bits a network reaches some orders more often than others.
_LEAST_BITS = 8


class Shuffled:
    """``range(n)`` in an order that ``key`` decides; ``shuffled[i]`` is the i-th.

    Cost: a few microseconds an index, and no memory.

    >>> order = Shuffled(10, key=3)
    >>> sorted(order[i] for i in range(10)) == list(range(10))
    True
    """

    n: int

    def __init__(self, n: int, key: int):
        self.n, bits = n, max(_LEAST_BITS, (n - 1).bit_length())
        self._low_bits = bits // 2
        self._masks = (1 << bits - self._low_bits) - 1, (1 << self._low_bits) - 1
        self._keys = [seed64(key, k) for k in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"index {i} of an order of {self.n}")
        i = self._permute(i)
        while i >= self.n:
            i = self._permute(i)
        return i

    def _permute(self, x: int) -> int:
        """Permutes the numbers of so many bits: the Feistel network."""
        high_mask, low_mask = self._masks
        high, low = x >> self._low_bits, x & low_mask
        for k in range(0, _ROUNDS, 2):  # each half by a random function of the other
            high ^= splitmix64(low ^ self._keys[k]) & high_mask
            low ^= splitmix64(high ^ self._keys[k + 1]) & low_mask
        return high << self._low_bits | low
