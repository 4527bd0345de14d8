"""Ranks that are about to do unlike things are told, before anything is computed."""

import re
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer, checksums
from tests.comm.unlike_programs import OVER_PROCESSES, UNLIKE, alike, block, run

PROGRAM = Path(__file__).with_name("unlike_programs.py")


@pytest.mark.processes
def test_processes_are_told_before_they_compute(processes):
    lines = processes(PROGRAM, 3).splitlines()
    assert len(lines) == 3 * (
        len(OVER_PROCESSES) + 6
    )  # five that may differ, and the cost
    assert [line for line in lines if not line.endswith(": right")] == []


@pytest.mark.parametrize("name", UNLIKE)
def test_simulated_ranks_are_told(name):
    most, odd = UNLIKE[name]
    n, last = 3, 1 if name in ("zero", "values") else 2  # in the middle, or at the end
    mesh = ff.make_mesh({"data": n}, "simulated")
    main = lambda: run(mesh, odd if mesh.rank == last else most)  # noqa: E731
    with pytest.raises(RanksDiffer, match=re.escape(odd.odd)) as caught:
        ff.spmd(main, mesh)()
    assert f"rank {last}: " in str(caught.value)


PAIR = ff.make_mesh({"data": 2}, "simulated")


SHARED = {"w": torch.eye(2), "b": torch.zeros(2)}


def laid(params, loss=lambda p, x: block(p, x).sum()):
    return ff.place(ff.shard(loss, PAIR, "data"), params, torch.ones(2, 2))


def numbered(alike):
    step = 5 if alike else 5 + PAIR.rank
    laid({"p": SHARED, "step": step}, lambda s, x: block(s["p"], x).sum())


def changed(alike):  # the last to come sees what the first one saw
    laid(SHARED)
    SHARED["w"].mul_(1 if alike else 2)
    laid(SHARED)


def outside_units(alike):
    def loss(p, x):
        total = block(p[0], x).sum()
        return total if alike or not PAIR.rank else total + p[1]["w"].sum()

    laid([SHARED, SHARED], ff.value_and_grad(loss))


@pytest.mark.parametrize(
    ("main", "said"),
    [
        (numbered, "'step': rank 0: 5; rank 1: 6"),
        (changed, "'w'"),
        (outside_units, "read outside units: rank 0: nothing; rank 1: '1/w'"),
    ],
)
def test_what_is_given_is_compared(main, said):
    ff.spmd(lambda: main(True), PAIR)()
    with pytest.raises(RanksDiffer, match=said):
        ff.spmd(lambda: main(False), PAIR)()


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


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees_each_element(dtype):
    for n in (0, 1, 3, 1000, 20_011):
        generator = torch.Generator().manual_seed(n)
        x = torch.randint(0, 2, (n,), generator=generator).to(dtype)
        same, shifted = x.clone(), torch.cat([torch.zeros(1).to(dtype), x])[1:]
        seen = checksums([x, same, shifted, x.view(-1, 1).mT])
        assert len(set(seen)) == 1
        for i in {0, n // 2, n - 1} if n else ():
            other = x.clone()
            other[i] = float(x[i] == 0)
            assert checksums([other]) != checksums([x]), (n, i)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
def test_a_checksum_sees_signs_order_and_views(dtype):
    """Two changes by one amount: of the highest bits, and within one row."""
    for n in (16, 20_011):
        x = torch.arange(1.0, n + 1).to(dtype)
        seen = checksums([x, x.flip(0), torch.cat([x[n // 2 :], x[: n // 2]])])
        for places in ([1, 3], [3, 7], [*range(n)], [0, n - 1]):
            other = x.clone()
            other[places] *= -1
            seen += checksums([other])
        for places in ([1, 3], [0, 9], [0, n - 1]):
            other = x.clone()
            other[places] = x[places[::-1]]
            seen += checksums([other])
        assert len(set(seen)) == len(seen)
    w = torch.randn(300, 200).to(dtype)
    assert len(set(checksums([w, w.T.contiguous(), w.flip(0)]))) == 3
    zero = torch.zeros((), dtype=dtype)
    assert checksums([zero]) != checksums([-zero])
    assert checksums([w[:1, 7], w[4:5, ::2][:, 3]]) == checksums([w[0, 7], w[4, 6]])
    z = torch.randn(5, dtype=torch.complex64)
    assert checksums([z.conj()]) == checksums([z.conj().resolve_conj()])
    assert checksums([z.conj()]) != checksums([z])
