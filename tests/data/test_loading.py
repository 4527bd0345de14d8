"""Batches: the rows of one device, each rank reading its own, resumed to the row."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

import fsfunc as ff
from fsfunc import _torch
from tests.checks import all_refused, same, simulated
from tests.covering import examples

numpy = pytest.importorskip("numpy")


class Rows:
    """A dataset that draws with each row, and knows which were read."""

    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        noise = torch.randn(2, dtype=torch.float64)
        drawn = [random.random(), float(numpy.random.rand()), *noise.tolist()]
        return {"row": i, "drawn": torch.tensor(drawn, dtype=torch.float64)}


def taken(loader, count):
    return [next(loader) for _ in range(count)]


def joined(parts, part_of_axis):
    """The global batch that the ranks' parts make up, in order along the axis."""
    by_part = dict(zip(part_of_axis, parts, strict=True))
    names = parts[0].keys()
    return {k: torch.cat([by_part[i][k] for i in sorted(by_part)]) for k in names}


MESHES = st.sampled_from(
    [({"data": n}, "data") for n in (1, 2, 3)]
    + [({"a": 2, "b": 3}, axis) for axis in ("a", "b", ("a", "b"), ("b", "a"))]
)


@given(MESHES, st.integers(5, 30), st.booleans(), st.booleans(), st.integers(0, 9))
@settings(max_examples=examples(10))
def test_ranks_see_what_one_device_sees(where, rows, shuffle, drop_last, seed):
    axes, axis = where
    size = 5
    how = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "uneven": True}
    alone = ff.batches(Rows(rows), None, None, size, **how)
    count = len(alone) + 2  # into the second epoch
    expected = taken(alone, count)
    mesh = ff.make_mesh(axes, "simulated")

    def main():
        dataset = Rows(rows)
        loader = ff.batches(dataset, mesh, axis, size, **how)
        mine = taken(loader, count)
        at = mesh.coordinate(axis)
        for whole, part in zip(expected, mine, strict=True):
            cut = ff.local_batch(whole, mesh, axis, uneven=True)
            same(cut, part)
        # Of an empty part one row is read for its form; else only the rank's own.
        own = [max(1, len(part["row"])) for part in mine]
        assert len(dataset.read) == sum(own)
        if all(len(part["row"]) for part in mine):
            assert dataset.read == torch.cat([p["row"] for p in mine]).tolist()
        return at, mine, loader.position

    with ff.ledger() as log:
        found = ff.spmd(main, mesh)()
    assert log.records == []
    for _, _, position in found:
        assert position == alone.position
    for k, whole in enumerate(expected):
        parts = {at: mine[k] for at, mine, _ in found}
        same(whole, joined([*parts.values()], [*parts]))


@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_has_each_row_once(drop_last):
    how = {"drop_last": drop_last, "epochs": 2, "collate": list}
    loader = ff.batches(range(23), None, None, 5, **how)
    assert len(loader) == (4 if drop_last else 5)
    epochs = []
    for epoch in range(2):
        assert loader.position["epoch"] == epoch
        rows = [row for batch in loader.epoch() for row in batch]
        assert len(rows) == len(set(rows)) == (20 if drop_last else 23)
        epochs.append(rows)
    assert epochs[0] != epochs[1]
    assert list(loader) == list(loader.epoch()) == []
    assert loader.position["epoch"] == 2


@given(st.integers(0, 12), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
@settings(max_examples=5)
def test_a_resumed_run_goes_on(done, before, after):
    expected = taken(ff.batches(Rows(22), None, None, 4, seed=3), 15)

    def part(n, run):
        mesh = ff.make_mesh({"data": n}, "simulated")

        def main():
            return run(ff.batches(Rows(22), mesh, "data", 4, seed=3))

        return ff.spmd(main, mesh)()

    def begin(loader):
        taken(loader, done)
        return loader.position

    def go_on(loader):
        taken(loader, 1)
        loader.seek(position)
        return taken(loader, 15 - done)

    position, *others = part(before, begin)
    assert all(other == position for other in others)
    assert all(type(value) is int for value in position.values())
    found = part(after, go_on)
    for k in range(15 - done):
        parts = [mine[k] for mine in found]
        same(expected[done + k], joined(parts, range(after)))


def test_workers_change_nothing_and_do_not_count_what_they_read_ahead():
    plain = ff.batches(Rows(12), None, None, 4)
    loader = ff.batches(Rows(12), None, None, 4, workers=1, prefetch_factor=2)
    for _ in range(4):  # past an epoch
        same(next(plain), next(loader))
        assert loader.position == plain.position
    loader.seek(plain.position)
    same(next(plain), next(loader))


class Failing(Rows):
    def __getitem__(self, i):
        if i == 3 and self.read.count(3) < 1:
            self.read.append(3)
            raise ZeroDivisionError
        return super().__getitem__(i)["row"]


def test_a_batch_that_could_not_be_read_is_the_next_one():
    """And the default generators are left alone."""

    def state():
        at = numpy.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), at[1].tolist(), at[2]

    before = state()
    loader = ff.batches(Failing(8), None, None, 2, shuffle=False)
    next(loader)
    with pytest.raises(ZeroDivisionError):
        next(loader)
    assert loader.position["batch"] == 1
    assert next(loader).tolist() == [2, 3]
    assert state() == before


def test_an_abstract_mesh_reads_rows_and_forgets_them():
    def shape(n, rows):
        mesh = ff.make_mesh({"data": n}, "abstract")
        data = TensorDataset(torch.arange(2.0 * rows).view(rows, 2))

        def main():
            (x,) = next(ff.batches(data, mesh, "data", rows, uneven=True))
            assert isinstance(x, _torch.FakeTensor)
            return x.shape

        return ff.spmd(main, mesh)()

    assert shape(1000, 2000) == [(2, 2)]
    assert shape(2, 5) == [(3, 2), (2, 2)]  # parts of other sizes run apart


class Endless(IterableDataset):
    def __iter__(self):
        yield 0


class NoLength:
    def __getitem__(self, i):
        return i


MESH = simulated(4)


def of(dataset, size=4, mesh=MESH, axis="data", **how):
    call = lambda: ff.batches(dataset, mesh, axis, size, **how)  # noqa: E731
    return ff.spmd(call, MESH) if mesh is MESH and axis else call


def sought(**change):
    loader = ff.batches(range(12), None, None, 4)
    return lambda: loader.seek(loader.position | change)


test_bad_batches_and_positions_are_refused = all_refused({
    "an iterable": (of(Endless()), TypeError, "Endless gives its rows in one order"),
    "a set": (of({1, 2}), TypeError, "set gives its rows in one order only"),
    "no length": (of(NoLength()), TypeError, "NoLength has no len"),
    "nothing": (of([]), ValueError, "of a dataset of 0"),
    "no rows": (of(range(9), 0), ValueError, "a batch of 0 rows"),
    "few rows": (of(range(3)), ValueError, "3 rows does not fill a batch of 4"),
    "not divided": (of(range(9), 6), ValueError, "of 6 rows, over axis 'data' of size"),
    "the last": (of(range(9), drop_last=False), ValueError, "last batch .* of 1 rows"),
    "a generator": (of(range(9), generator=None), TypeError, "itself: pass seed"),
    "no axis": (of(range(8), axis=None), ValueError, "needs the axis"),
    "vmap": (of(range(8), mesh=ff.make_mesh({"data": 2}, "vmap")), ValueError,
        "cut it by ff.local_batch"),
    "outside": (lambda: ff.batches(range(8), MESH, "data", 4), RuntimeError, "inside"),
    "a seed": (sought(seed=1), ValueError, r"of other batches: seed 1 \(here 0\)"),
    "rows": (sought(batch_size=2, rows=11), ValueError,
        r"rows 11 \(here 12\), batch_size 2 \(here 4\)"),
    "an order": (sought(shuffle=0), ValueError, r"shuffle 0 \(here 1\)"),
    "a batch": (sought(batch=3), ValueError, "no batch 3 of epoch 0: an epoch has 3"),
    "an epoch": (sought(epoch=-1), ValueError, "no batch 0 of epoch -1"),
})  # fmt: skip


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda rank: {"seed": rank}, "seed: rank 0: 0; rank 1: 1"),
        (lambda rank: {"dataset": range(8 + rank)}, "rows: rank 0: 8; rank 1: 9"),
    ],
)
def test_ranks_with_unlike_orders_are_refused(how, said):
    mesh = simulated(2)

    def main():
        given = {"dataset": range(8), "mesh": mesh, "axis": "data", "batch_size": 4}
        return ff.batches(**given | how(mesh.rank))

    with pytest.raises(ValueError, match=f"unlike batches(.|\n)*{said}"):
        ff.spmd(main, mesh)()


@pytest.mark.processes
def test_processes_read_what_one_device_would(processes):
    """With workers, and resumed on another number of ranks."""
    program = """
        import json, torch, fsfunc as ff
        from tests.data.test_loading import Rows
        mesh = ff.make_mesh({"data": 2})
        loader = ff.batches(Rows(10), mesh, "data", 4, seed=2, workers=1)
        loader.seek({"epoch": 0, "batch": 1})
        found = [
            [batch["row"].tolist(), batch["drawn"].tolist(), loader.position]
            for batch, _ in zip(loader, range(3))
        ]
        print(json.dumps(found))
        torch.distributed.destroy_process_group()
    """
    ranks = [json.loads(line) for line in processes(program, 2).splitlines()]
    alone = ff.batches(Rows(10), None, None, 4, seed=2)
    next(alone)
    for (rows, drawn, at), (more, drawn_too, at_too) in zip(*ranks, strict=True):
        batch = next(alone)
        assert rows + more == batch["row"].tolist()
        assert drawn + drawn_too == batch["drawn"].tolist()
        assert at == at_too == alone.position
