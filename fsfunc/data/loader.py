"""``batches``: each rank's rows of every global batch, in an order that can be resumed.

The order of an epoch follows from the seed and the epoch alone, so all ranks agree on
it, whatever the mesh. A position in it is two numbers, which a checkpoint saves. The
rows are read by a ``DataLoader`` over a `BatchDataset`, whose items are whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.comparison import Section, agree
from fsfunc.comm.groups import get_group
from fsfunc.comm.mesh import Axis, Mesh, check_mesh, here, note_axes_read
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.data.dataset import BatchDataset, BatchOrder, RankShare
from fsfunc.sharded.inputs import check_integer
from fsfunc.tree.types import PyTree

_REAL = torch.zeros(0)  # a tensor with data, as what modes are to be beneath
# Options of a DataLoader that batches decides itself, and how a user may.
_DECIDED_HERE = {
    "sampler": "the order follows from seed",
    "batch_sampler": "the order follows from seed",
    "collate_fn": "pass collate",
    "num_workers": "pass workers",
    "generator": "pass seed",
    "persistent_workers": "workers stay from epoch to epoch",
}


@api_boundary
def batches(
    dataset: Any,
    mesh: Mesh | None,
    axis: Axis | None,
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = True,
    epochs: int | None = None,
    uneven: bool = False,
    workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> Batches:
    """Iterates over this rank's part of each global batch of ``batch_size`` rows.

    Args:
        dataset: has ``len``, and row ``i`` is ``dataset[i]``; the same on every rank.
        mesh: None for the whole batch, on one device.
        axis: one name or several, the first varying slowest, along which the rows of a
            batch are cut as `local_batch` cuts them. Ranks along others read the same.
        batch_size: rows of all ranks together.
        seed: determines the order of every epoch, and random numbers of the dataset.
        shuffle: a new order in each epoch; without it that of the dataset.
        drop_last: leave out the rows of an epoch that do not fill a batch.
        epochs: the number of epochs; without it, the iterator does not end.
        uneven: allow parts that differ by one row, and are empty where rows are few
            (return ``ff.Weighted`` from the loss then, so that the mean is exact).
        workers: processes that read ahead. Of simulated ranks each reads for itself:
            the rows are the same.
        collate: makes a batch of a list of rows; ``torch.utils.data.default_collate``
            without it. What it draws follows from the last row of a rank's part, and so
            depends on how many ranks there are; what the dataset draws does not.
        options: passed on to ``torch.utils.data.DataLoader``, such as ``pin_memory``.

    Returns:
        the iterator. ``len`` is the number of batches in an epoch; ``epoch()`` iterates
        over what is left of this one; ``position`` and ``seek`` resume it, on any mesh.

    Raises:
        ValueError: rows that the ranks cannot share evenly, and ``uneven`` is not set;
            a dataset that is empty, or does not fill one batch.
        TypeError: a dataset without a length, or one that is only iterable.
        RanksDiffer: ranks along ``axis`` with another seed, batch size or number of
            rows.

    Cost: one gather of 16 bytes, when it is made. A rank reads its own rows, and no
    others; one whose part is empty reads one row (thrice, where the batch has lists),
    and returns none of it: tensors and lists of rows are cut to none. While row ``i``
    is read the default generators of torch, Python and NumPy are seeded from (seed,
    epoch, i); then they are as before. That and the order take some 35 microseconds a
    row; ``workers`` take them off the step.

    >>> import fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> def main():
    ...     loader = ff.batches(range(10), mesh, "data", 4, shuffle=False, epochs=1)
    ...     return [batch.tolist() for batch in loader]
    >>> ff.spmd(main, mesh)()
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} gives its rows in one order only: batches needs "
            "dataset[i], so that each rank reads its own rows and a run can resume; or "
            "iterate over it on every rank, and cut each batch by ff.local_batch"
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no len: batches needs the number of rows in "
            "an epoch; give the dataset a __len__"
        )
    for option in options:
        if option in _DECIDED_HERE:
            raise TypeError(f"batches decides {option} itself: {_DECIDED_HERE[option]}")
    rows = len(dataset)
    check_integer(batch_size, "batch_size")
    check_integer(seed, "seed")
    if batch_size < 1 or rows < 1:
        raise ValueError(
            f"a batch of {batch_size} rows of a dataset of {rows}: both are at least 1"
        )
    order = BatchOrder(rows, batch_size, seed, shuffle, drop_last)
    if not len(order):
        raise ValueError(
            f"a dataset of {rows} rows does not fill a batch of {batch_size}: take a "
            "smaller batch_size, or pass drop_last=False"
        )
    share = _local_share(mesh, axis, order, uneven)
    dataset_of_batches = BatchDataset(dataset, order, share, collate or default_collate)
    # Simulated ranks are threads: each would start processes of its own.
    if mesh is not None and mesh.backend != "processes":
        workers = 0
        options = {k: v for k, v in options.items() if k not in _WORKER_OPTIONS}
    return Batches(dataset_of_batches, epochs, {"num_workers": workers, **options})


_WORKER_OPTIONS = ("prefetch_factor", "multiprocessing_context", "timeout", "in_order")


def _local_share(
    mesh: Mesh | None, axis: Axis | None, order: BatchOrder, uneven: bool
) -> RankShare:
    """Returns this rank's share; raises where the ranks cannot share every batch."""
    if mesh is None:
        return RankShare(0, 1)
    if check_mesh(mesh, "batches").backend == "vmap":
        raise ValueError(
            "the ranks of a vmap mesh run as one and cannot read rows of their own: "
            "make the batch outside of spmd, and cut it by ff.local_batch"
        )
    if axis is None:
        raise ValueError(f"batches on {mesh} needs the axis that cuts a batch")
    count = mesh.axis_size(axis)
    last = len(order) - 1
    for title, rows in (
        ("a batch", order.size(0)),
        (f"the last batch of an epoch of {order.rows}", order.size(last)),
    ):
        if rows % count:
            if not uneven:
                raise ValueError(
                    f"cannot cut {title}, of {rows} rows, over axis {axis!r} of size "
                    f"{count}: {rows} is not a multiple of {count}; pass uneven=True, "
                    "with ff.Weighted from the loss"
                )
            note_axes_read(mesh.check(axis))  # ranks have unlike numbers of rows
    where = get_group(axis, this_rank := here(mesh))
    # Not where ranks are only planned: nobody would answer.
    if this_rank.link.moves_data and this_rank.link.vmap_level is None:
        lines = [(name, repr(value)) for name, value in vars(order).items()]
        agree(where, Section(_UNLIKE, lines, _ALIKE))
    return RankShare(where.position, count)


_UNLIKE = "the ranks make unlike batches, whose rows would be read twice or never"
_ALIKE = (
    "Each rank reads its own rows of one order: give all of them the same dataset, "
    "batch_size and seed, and none that follow from the rank"
)


def _as_it_is(batch: PyTree) -> PyTree:
    """Returns a batch, which is collated already; workers get this by name."""
    return batch


class Batches(Iterator[Any]):
    """The batches of a dataset, as `batches` makes them.

    ``next`` hands out the batch at ``position``, which then is that of the next one:
    batches that workers have read ahead do not count.

    Args:
        dataset: of batches.
        epochs: how many; None for no end.
        options: of the ``DataLoader``.
    """

    def __init__(
        self, dataset: BatchDataset, epochs: int | None, options: dict[str, Any]
    ):
        self._dataset, self._epochs, self._options = dataset, epochs, options
        self._order = dataset.order
        self._epoch = self._batch = 0  # the position of the next batch
        self._stream: Iterator[Any] | None = None  # made when the next is asked for

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._order)

    def __next__(self) -> Any:
        if self._epochs is not None and self._epoch >= self._epochs:
            self._stream = None  # ends its workers
            raise StopIteration
        # A step that is planned runs on fake tensors: rows are read as real ones, and
        # the batch is made fake in the end.
        mode = _torch.fake_mode()
        try:
            with _torch.beneath_modes(_REAL):
                if self._stream is None:
                    self._stream = self._start_stream()
                batch = next(self._stream)
        except BaseException:
            # The stream would go on after the batch that was not handed out.
            self._stream = None
            raise
        self._batch += 1
        if self._batch == len(self):
            self._epoch, self._batch = self._epoch + 1, 0
        if mode is None:
            return batch
        fake = lambda x: fake_modes.fake_of(mode, x) if isinstance(x, Tensor) else x  # noqa: E731
        return tree.map(fake, batch)

    def epoch(self) -> Iterator[Any]:
        """Iterates over the rest of the epoch of ``position``."""
        epoch = self._epoch
        while self._epoch == epoch:
            try:
                batch = next(self)
            except StopIteration:
                return
            yield batch

    def _start_stream(self) -> Iterator[Any]:
        """Starts a new stream of batches from ``position`` on."""
        # What a DataLoader draws for its workers must not come from the default
        # generator, of which a resumed run would draw more often.
        with torch.device("cpu"):
            loader = DataLoader(
                self._dataset,  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._positions(),  # type: ignore[arg-type]
                collate_fn=_as_it_is,
                generator=torch.Generator().manual_seed(0),
                **self._options,
            )
            return iter(loader)

    def _positions(self) -> Iterator[tuple[int, int]]:
        """Yields (epoch, batch) of each batch from ``position`` on."""
        epoch, batch, count = self._epoch, self._batch, len(self)
        while self._epochs is None or epoch < self._epochs:
            yield epoch, batch
            batch += 1
            if batch == count:
                epoch, batch = epoch + 1, 0

    @property
    def position(self) -> dict[str, int]:
        """The place of the next batch: numbers that are the same on every rank.

        ``epoch`` and ``batch`` count from 0; the others identify the order. To be
        saved: ``{"train": state, "data": loader.position}``.
        """
        return {"epoch": self._epoch, "batch": self._batch, **self._identity()}

    def _identity(self) -> dict[str, int]:
        """Returns the numbers that tell this order from others."""
        return {name: int(value) for name, value in vars(self._order).items()}

    def seek(self, position: Mapping[str, int]) -> None:
        """Continues at a ``position`` that was read before, perhaps on another mesh.

        Raises:
            ValueError: a place of another order (another seed, batch size, ...) or one
                that does not exist.
        """
        epoch, batch = (int(position.get(k, -1)) for k in ("epoch", "batch"))
        differences = [
            f"{name} {position[name]} (here {value})"
            for name, value in self._identity().items()
            if int(position.get(name, value)) != value
        ]
        if differences:
            raise ValueError(
                f"this position is of other batches: {', '.join(differences)}; use the "
                "same ones, or continue at a place of these by seek({'epoch': ..., "
                "'batch': ...})"
            )
        if epoch < 0 or not 0 <= batch < len(self):
            raise ValueError(
                f"there is no batch {position.get('batch')} of epoch "
                f"{position.get('epoch')}: an epoch has {len(self)}, counted from 0"
            )
        self._epoch, self._batch, self._stream = epoch, batch, None
