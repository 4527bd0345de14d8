"""Ranks that are about to do unlike things are told, before anything is computed.

A program of each, and of what may differ. The last rank does what the others do not.
Run over three processes it prints a line for some of the cases; simulated ranks run
all of them.
"""

import dataclasses
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.comm import descriptions
from fsfunc.comm.backends.channels import Channel
from fsfunc.comm.comparison import (
    RanksDiffer,
    Section,
    agree,
    raise_everywhere,
    run_everywhere,
)
from fsfunc.comm.descriptions import checksums
from fsfunc.comm.groups import get_group

OPTIMIZER = ff.sgd(0.1)


@ff.unit
def block(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def loss(params, x, order):
    for i in order:
        x = block(params[i], x)
    return x.square().mean()


def params_of(n=3, width=4, dtype=torch.float32):
    leaf = lambda i, *shape: torch.full(shape, 0.1 * i, dtype=dtype)  # noqa: E731
    return [{"w": leaf(i, width, width), "b": leaf(-i, width)} for i in range(n)]


def drawn():
    return [{"w": torch.randn(4, 4), "b": torch.zeros(4)} for _ in range(3)]


@dataclasses.dataclass
class Case:
    """What one rank does; the defaults are what most do."""

    odd: str = ""  # what an error has to name
    order: tuple[int, ...] = (0, 1, 2)
    zero: int = 3
    min_bytes: int = 0
    wrap: object = None
    params: object = dataclasses.field(default_factory=params_of)
    x: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(6, 4))
    seed: int | None = None
    schedule: object = None  # a pipeline in place of shard
    how: str = "place"


def run(mesh, case):
    """Lays out in parts, or whole."""
    (axis,) = mesh.axes
    f = ff.value_and_grad(lambda p, x: loss(p, x, case.order))
    f = case.wrap(f) if case.wrap else f
    if case.schedule is not None:
        f = ff.pipeline(f, mesh, axis, n_microbatches=3, schedule=case.schedule)
    else:
        f = ff.shard(f, mesh, axis, zero=case.zero, min_bytes=case.min_bytes)
    if case.seed is not None:
        torch.manual_seed(case.seed)
    if case.how == "whole":  # no unit takes them
        f = ff.shard(lambda p, x: x.mean(), mesh, axis)
    if case.how == "init_state":
        step = OPTIMIZER(f)
        return ff.init_state(step, case.params, OPTIMIZER, case.x).params
    return ff.place(f, case.params, case.x)


def seeded(seed):
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return drawn()


one_f, gpipe = ff.schedules.one_f_one_b(3, 3), ff.schedules.gpipe(3, 3)
half = torch.bfloat16


def filled(value):
    return [{"w": torch.full((4, 4), value), "b": torch.zeros(4)} for _ in range(3)]


def made_of(x):
    return [{"w": torch.ones(4, 4) * x[0], "b": torch.zeros(4)} for _ in range(3)]


scaled = [{"w": 2 * p["w"], "b": p["b"]} for p in params_of()]
double = params_of(dtype=torch.float64)
made = partial(Case, how="init_state")
# What most ranks do (by default what a case does), and what the last one does.
ODD = {
    "order": Case("block(1/b, 1/w)", order=(1, 0, 2)),
    "a call less": Case("unit call 2", order=(0, 1)),
    "zero": Case("zero=1", zero=1),
    "min_bytes": Case("min_bytes=99", min_bytes=99),
    "accumulate": Case("n=2", wrap=lambda f: ff.accumulate(f, 2)),
    "remat": Case("remat(policy=None)", wrap=ff.remat),
    "precision": Case("in bfloat16", wrap=lambda f: ff.precision(f, half)),
    "shapes": Case("[5, 5]", params=params_of(width=5), x=torch.ones(6, 5)),
    "dtypes": Case("f64", params=double, x=torch.ones(6, 4).double()),
    "leaves": Case("leaf '3/w'", params=params_of(4)),
    "values": Case("'1/w'", params=scaled),
}
UNLIKE = {name: (Case(), odd) for name, odd in ODD.items()} | {
    "values, two seeds": (made(params=seeded(0)), made("'0/w'", params=seeded(1))),
    "values, whole": (
        Case(how="whole"), Case("'1/w'", params=scaled, how="whole"),
    ),
    "drawn": (
        made(params=drawn, seed=0),
        made("numbers of their generators", params=drawn, seed=1),
    ),
    "made": (
        made(params=partial(filled, 0.0)),
        made("operator 0", params=partial(filled, 1.0)),
    ),
    "made of what was given": (
        made(params=partial(made_of, torch.ones(1))),
        made("tensor 0", params=partial(made_of, torch.zeros(1))),
    ),
    "schedule": (Case(schedule=one_f), Case("F0 F1 F2", schedule=gpipe)),
    "batch of a pipeline": (
        Case(schedule=one_f), Case("[9, 4]", schedule=one_f, x=torch.ones(9, 4)),
    ),
}  # fmt: skip


# One of each way to differ: of units, leaves, values given, drawn and made, schedules.
OVER_PROCESSES = [
    "order", "leaves", "values", "values, whole", "drawn", "made", "schedule",
]  # fmt: skip


def alike(mesh):
    """What ranks may choose for themselves."""
    rank = mesh.rank
    return {
        "lengths": Case(x=torch.ones(6 + rank, 4)),
        "other dims": Case(x=torch.ones(2, 1 + rank, 4)),
        "lengths, and init": Case(x=torch.ones(rank, 4), params=drawn, seed=0,
                                  how="init_state"),
        "own copies": Case(params=params_of()),
        "whole": Case(how="whole"),
    }  # fmt: skip


def told(mesh, name):
    """True where the process raised and was told of all, else what happened."""
    most, odd = UNLIKE[name]
    last = mesh.size - 1
    try:
        found = run(mesh, odd if mesh.rank == last else most)
    except ValueError as error:
        text = str(error)
        named = all(s in text for s in ("ranks 0, 1: ", f"rank {last}: ", odd.odd))
        return type(error) is RanksDiffer and named or text
    return f"returned {found}"


def cost(mesh):
    """Bytes of the messages that one call of place sends."""
    sizes, send = [], Channel.send

    def noted(self, x, *rest, **how):
        sizes.append(x.nbytes)
        return send(self, x, *rest, **how)

    Channel.send = noted
    try:
        run(mesh, Case())
    finally:
        Channel.send = send
    return sorted(sizes)


def main():
    mesh = ff.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, timeout=60)
    found = {n: ff.spmd(lambda n=n: told(mesh, n), mesh)()[0] for n in OVER_PROCESSES}
    for name, case in ff.spmd(lambda: alike(mesh), mesh)()[0].items():
        ff.spmd(lambda case=case: run(mesh, case), mesh)()
        found[f"may differ: {name}"] = True
    sent = ff.spmd(lambda: cost(mesh), mesh)()[0]
    others = mesh.size - 1
    # Digests of program and values, of what is computed, of how it ended; headers.
    due = [16] * 2 * others + [32] * others + [512] * 3 * others
    found["cost"] = sent == due or sent
    for name, right in found.items():
        print(f"{name}: {'right' if right is True else right}", flush=True)


@pytest.mark.processes
def test_processes_are_told_before_they_compute(processes):
    lines = processes(Path(__file__), 3).splitlines()
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


class Odd(Exception):
    """An error that other ranks do not know by its name."""


@pytest.mark.parametrize("error", [FileExistsError("there"), Odd("there")], ids=repr)
def test_one_ranks_error_is_raised_on_all_ranks_of_its_group(error):
    """The others' are of the same kind where Python has it; other groups go on."""
    mesh = ff.make_mesh({"model": 2, "data": 3}, "simulated")

    def act():
        if mesh.rank == 4:
            raise error
        return mesh.rank

    def main():
        with ff.ledger() as log:
            try:
                found = run_everywhere(act, get_group("data"), LookupError)
            except Exception as raised:
                found = raised
        return found, log.table(mesh.rank)

    found, logs = ff.spmd(main, mesh)().unzip()
    assert found[:3] == [0, 1, 2] and found[4] is error
    assert all(log == [("all_gather", "data", 1, 16)] for log in logs[:3])
    kind = FileExistsError if type(error) is FileExistsError else LookupError
    for rank in (3, 5):
        assert type(found[rank]) is kind
        assert str(found[rank]) == "rank 4 could not go on: there"
        text = f"{type(error).__name__}: there"
        assert logs[rank] == [("all_gather", "data", 2, 2 * (8 + len(text)))]
    assert run_everywhere(lambda: 5, None) == 5
    with pytest.raises(Odd):
        raise_everywhere(Odd(), None)


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_that_agree_are_told_what_each_has(waits):
    """And in no ledger. Only who does not wait is told nothing before all are there."""
    mesh = ff.make_mesh({"data": 3}, "simulated")

    def main(odd):
        mine = Section("numbers differ", [("n", str(odd and mesh.rank))], "Set n.")
        with ff.ledger() as log:
            try:
                found = agree(
                    get_group("data"), bytes([mesh.rank] * 16), mine, waits=waits
                )
            except RanksDiffer as error:
                found = str(error)
        assert not log.records
        return found

    *some, last = ff.spmd(lambda: main(0), mesh)()
    assert last == [[bytes([r] * 16) for r in range(3)], [last[1][0]] * 3]
    assert some == [last] * 2 if waits else not any(some)
    found = ff.spmd(lambda: main(1), mesh)()
    lines = "numbers differ:\n  n: rank 0: 0; rank 1: 1; rank 2: 2\nSet n."
    if waits:
        assert found == [lines] * 3
    else:  # with the first that came
        said = [lines.replace("; rank 2: 2", ""), lines.replace("rank 1: 1; ", "")]
        assert found == [[], *said]


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


if __name__ == "__main__":
    main()


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 130])
def test_a_device_sums_more_rows_at_once_and_has_the_same_checksums(monkeypatch, rows):
    """Other pieces, and products in place of a matrix's, of the same whole numbers."""
    draw = torch.Generator().manual_seed(rows)
    tensors = [torch.randn(rows * 2048 + more, generator=draw) for more in (0, 1, 2047)]
    near = checksums(tensors)
    summed, pieces = descriptions._WeightedSum._sum_rows, []

    def counted(self, rows, weights):
        pieces.append(len(rows))
        return summed(self, rows, weights)

    monkeypatch.setattr(descriptions._WeightedSum, "_sum_rows", counted)
    monkeypatch.setattr(descriptions, "_on_host", lambda x: False)
    assert checksums(tensors) == near
    assert rows < 2 or rows in pieces  # all of them at once
    monkeypatch.setattr(descriptions, "_FAR_ROWS", 100)
    assert checksums(tensors) == near
