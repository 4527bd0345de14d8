"""Ranks that are about to do unlike things are told, before anything is computed."""

import re
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer, Section, checksums, compare
from fsfunc.comm.groups import group
from tests.comm.unlike_programs import UNLIKE, Case, alike, block, run

PROGRAM = Path(__file__).with_name("unlike_programs.py")


@pytest.mark.processes
def test_processes_are_told_before_they_compute(processes):
    lines = processes(PROGRAM, 3).splitlines()
    assert len(lines) == 3 * (len(UNLIKE) + 6)  # five that may differ, and the cost
    assert [line for line in lines if not line.endswith(": right")] == []


@pytest.mark.parametrize(
    "name, n",
    [(k, n) for k, c in UNLIKE.items() for n in (2, 3)[bool(c[0].schedule) :]],
)
def test_simulated_ranks_are_told(name, n):
    most, odd = UNLIKE[name]
    mesh = ff.make_mesh({"data": n}, "simulated")
    main = lambda: run(mesh, odd if mesh.rank == n - 1 else most)  # noqa: E731
    with pytest.raises(RanksDiffer, match=re.escape(odd.odd)) as caught:
        ff.spmd(main, mesh)()
    assert f"rank {n - 1}: " in str(caught.value)


@pytest.mark.parametrize("name", ["zero", "values", "shapes", "drawn"])
def test_a_rank_in_the_middle_is_told(name):
    most, odd = UNLIKE[name]
    mesh = ff.make_mesh({"data": 4}, "simulated")
    with pytest.raises(RanksDiffer, match="rank 2: "):
        ff.spmd(lambda: run(mesh, odd if mesh.rank == 2 else most), mesh)()


def test_what_may_differ_may_differ():
    mesh = ff.make_mesh({"data": 3}, "simulated")
    names = ff.spmd(lambda: list(alike(mesh)), mesh)()[0]
    for name in names:
        ff.spmd(lambda name=name: run(mesh, alike(mesh)[name]), mesh)()


def test_only_ranks_that_share_parameters_are_compared():
    """Over a model axis every rank has parameters, and perhaps units, of its own."""
    mesh = ff.make_mesh({"model": 2, "data": 2}, "simulated")

    def main(own):
        wide = own == (mesh.coordinate("model") if own < 2 else mesh.rank)
        w = torch.ones(3, 4 if wide else 2)
        f = ff.shard(lambda p, x: block(p, x).sum(), mesh, "data")
        p = {"w": w * (1 + own * wide), "b": torch.zeros(w.shape[1])}
        return ff.unshard(ff.place(f, p, torch.ones(2, 3)))["w"].sum().item()

    assert ff.spmd(lambda: main(1), mesh)() == [6, 6, 24, 24]
    with pytest.raises(
        RanksDiffer, match=r"'w': rank 2: f32\[3, 2\]; rank 3: f32\[3, 4"
    ):
        ff.spmd(lambda: main(3), mesh)()


def test_state_numbers_are_compared():
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main(steps):
        f = ff.shard(lambda s, x: block(s["p"], x).sum(), mesh, "data")
        params = {"w": torch.eye(2), "b": torch.zeros(2)}
        return ff.place(f, {"p": params, "step": steps[mesh.rank]}, torch.ones(2, 2))

    ff.spmd(lambda: main([5, 5]), mesh)()
    with pytest.raises(RanksDiffer, match="'step': rank 0: 5; rank 1: 6"):
        ff.spmd(lambda: main([5, 6]), mesh)()


def test_tensors_that_change_are_read_again():
    mesh = ff.make_mesh({"data": 2}, "simulated")
    shared = {"w": torch.eye(2), "b": torch.zeros(2)}

    def main(factor):
        f = ff.shard(lambda p, x: block(p, x).sum(), mesh, "data")
        ff.place(f, shared, torch.ones(2, 2))
        shared["w"].mul_(factor)
        return ff.place(f, shared, torch.ones(2, 2))

    ff.spmd(lambda: main(1), mesh)()  # the last to come sees what the first one saw
    with pytest.raises(RanksDiffer, match="'w'"):
        ff.spmd(lambda: main(2), mesh)()


# Sections and checksums


def test_a_difference_names_keys_ranks_and_what_to_do():
    lines = {
        0: [("a", "1"), ("b", "2")],
        1: [("a", "1"), ("b", "3")],
        2: [("a", "1"), ("b", "2"), ("c", "4")],
    }
    mesh = ff.make_mesh({"data": 3}, "simulated")

    def main(ranks):
        where = group("data")
        said = Section("they differ", lines[ranks[where.rank]], "be alike")
        compare([Section("not this", [("x", "y")]), said], where)

    ff.spmd(lambda: main([0, 0, 0]), mesh)()
    expected = "they differ:\n  b: rank 0: 2; rank 1: 3\nbe alike"
    with pytest.raises(RanksDiffer) as caught:
        ff.spmd(lambda: main([0, 1, 2]), mesh)()
    assert str(caught.value) == expected
    with pytest.raises(RanksDiffer, match="c: rank 0: nothing; rank 2: 4"):
        ff.spmd(lambda: main([0, 0, 2]), mesh)()


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 3, 1000, 20_011])
def test_a_checksum_sees_each_element(dtype, n):
    generator = torch.Generator().manual_seed(n)
    x = torch.randint(0, 2, (n,), generator=generator).to(dtype)
    same, shifted = x.clone(), torch.cat([torch.zeros(1).to(dtype), x])[1:]
    seen = checksums([x, same, shifted, x.view(-1, 1).mT])
    assert len(set(seen)) == 1
    for i in {0, n // 2, n - 1} if n else ():
        other = x.clone()
        other[i] = float(x[i] == 0)
        assert checksums([other]) != checksums([x]), i


def test_a_checksum_sees_order_and_views():
    w = torch.randn(300, 200)
    seen = checksums([w, w.T.contiguous(), w.flip(0), torch.cat([w[100:], w[:100]])])
    assert len(set(seen)) == 4
    z = torch.randn(5, dtype=torch.complex64)
    assert checksums([z.conj()]) == checksums([z.conj().resolve_conj()])
    assert checksums([z.conj()]) != checksums([z])
    assert checksums([torch.zeros(())]) != checksums([-torch.zeros(())])
    assert checksums([w[:1, 7], w[4:5, ::2][:, 3]]) == checksums([w[0, 7], w[4, 6]])


def exchanged(x, i, j):
    x[i], x[j] = x[j].clone(), x[i].clone()


def negated(x, *places):
    for i in places:
        x[i] = -x[i]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("n", [16, 100_000])
def test_a_checksum_sees_signs_and_what_changed_places(dtype, n):
    """Two changes by one amount: of the highest bits, and within one row."""
    x = torch.arange(1.0, n + 1).to(dtype)
    seen = checksums([x])
    for change, *places in [
        (negated, 1, 3), (negated, 3, 7), (negated, *range(n)), (negated, 0, n - 1),
        (exchanged, 1, 3), (exchanged, 0, 9), (exchanged, 0, n - 1),
    ]:  # fmt: skip
        change(other := x.clone(), *places)
        seen += checksums([other])
    assert len(set(seen)) == len(seen)


def test_a_record_is_of_the_whole_step():
    """The lines name calls, leaves, casts, and what is read outside units."""
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        f = lambda p, x: block(p[0], x).sum() + p[1]["w"].sum()  # noqa: E731
        f = ff.value_and_grad(f if mesh.rank else lambda p, x: block(p[0], x).sum())
        ff.place(ff.shard(f, mesh, "data"), Case().params, torch.ones(2, 4))

    with pytest.raises(RanksDiffer) as caught:
        ff.spmd(main, mesh)()
    text = str(caught.value)
    assert "read outside units: rank 0: nothing; rank 1: '1/w'" in text
