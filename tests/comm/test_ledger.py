"""The ledger: what each rank sends, ring-counted, on whose behalf, and from where."""

import threading
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.attribution import label, source_line


def mesh_of(backend="simulated", **sizes):
    return ff.make_mesh(sizes, backend)


def run(main, mesh):
    with ff.ledger() as log:
        ff.spmd(main, mesh)()
    return log


# A ring of n ranks, and b bytes of a rank's own input: what that rank sends.
RING = {
    "psum": (
        lambda x, n: ff.psum(x, "data"),
        lambda b, n: Fraction(2 * b * (n - 1), n),
    ),
    "pmax": (
        lambda x, n: ff.pmax(x, "data"),
        lambda b, n: Fraction(2 * b * (n - 1), n),
    ),
    "all_gather": (lambda x, n: ff.all_gather(x, "data"), lambda b, n: b * (n - 1)),
    "psum_scatter": (
        lambda x, n: ff.psum_scatter(x, "data"),
        lambda b, n: Fraction(b * (n - 1), n),
    ),
    "all_to_all": (
        lambda x, n: ff.all_to_all(x, "data", split_dim=0, concat_dim=0),
        lambda b, n: Fraction(b * (n - 1), n),
    ),
    "pbroadcast": (
        lambda x, n: ff.pbroadcast(x, "data", source=0),
        lambda b, n: Fraction(b * (n - 1), n),
    ),
    "ppermute": (
        lambda x, n: ff.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)]),
        lambda b, n: b,
    ),
}


@pytest.mark.parametrize("op", RING)
@given(
    n=st.integers(1, 6),
    rows=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    backend=st.sampled_from(["simulated", "vmap", "abstract"]),
)
def test_bytes_are_the_closed_forms(op, n, rows, dtype, backend):
    call, formula = RING[op]
    x = torch.ones(rows * n, 3, dtype=dtype)
    log = run(lambda: call(x, n), mesh_of(backend, data=n))
    if n == 1:
        assert log.records == [] and log.bytes() == log.count() == 0
        return
    for rank in range(1 if backend == "abstract" else n):
        assert log.count(rank=rank) == log.count(op, axis="data", rank=rank) == 1
        sent = formula(x.numel() * dtype.itemsize, n)
        assert Fraction(log.bytes("data", rank=rank)) == sent
        assert log.of(rank)[0].dtype == dtype


def test_only_sources_send_in_a_ppermute():
    pairs = [(0, 1), (2, 2)]
    log = run(lambda: ff.ppermute(torch.ones(5), "data", pairs), mesh_of(data=3))
    assert [log.bytes(rank=r) for r in range(3)] == [20, 0, 0]
    assert [log.count("ppermute", rank=r) for r in range(3)] == [1, 1, 1]


def test_bytes_that_a_ring_cannot_halve_stay_exact():
    log = run(lambda: ff.psum(torch.ones(1), "data"), mesh_of(data=3))
    assert log.records[0].bytes == Fraction(16, 3)
    assert log.bytes() == 16 / 3 and isinstance(log.bytes(), float)
    whole = run(lambda: ff.psum(torch.ones(3), "data"), mesh_of(data=3))
    assert whole.bytes() == 16 and isinstance(whole.bytes(), int)


def two_axes():
    ff.psum(torch.ones(2), "a")
    ff.psum(torch.ones(2), "b")
    ff.psum(torch.ones(2), ("a", "b"))
    ff.all_gather(torch.ones(2), ("b", "a"))


@pytest.mark.parametrize("backend", ["simulated", "vmap", "abstract"])
def test_what_is_asked_by_axis(backend):
    log = run(two_axes, mesh_of(backend, a=2, b=2))
    assert log.count() == 4 and log.count("psum") == 3
    assert log.count(axis="a") == log.count(axis=("a",)) == 1
    assert log.count(axis=("a", "b")) == log.count(axis=("b", "a")) == 1
    assert log.bytes("b") == 8 and log.bytes(("a", "b")) == 12
    assert log.bytes(("b", "a"), op="all_gather") == 24 == log.bytes(op="all_gather")
    assert log.table() == [
        ("psum", "a", 1, 8),
        ("psum", "b", 1, 8),
        ("psum", "a, b", 1, 12),
        ("all_gather", "b, a", 1, 24),
    ]


def test_a_rank_is_chosen():
    def main():
        if ff.axis_index("b") == 1:
            ff.psum(torch.ones(2), "a")

    log = run(main, mesh_of(a=2, b=2))
    assert [log.count(rank=r) for r in range(4)] == [0, 1, 0, 1]
    assert log.count() == 1 and log.of() == log.of(1)  # the lowest that sent


def test_ledgers_nest_and_end():
    mesh = mesh_of(data=2)
    gather = lambda: ff.all_gather(torch.ones(1), "data")  # noqa: E731
    with ff.ledger() as outer:
        ff.spmd(gather, mesh)()
        with ff.ledger() as inner:
            ff.spmd(gather, mesh)()
        ff.spmd(gather, mesh)()
    ff.spmd(gather, mesh)()
    assert (outer.count(), inner.count()) == (3, 1)
    assert all(record in outer.records for record in inner.records)


def test_a_ledger_inside_a_rank_sees_that_rank():
    def main():
        with ff.ledger() as log:
            ff.psum(torch.ones(1), "data")
        return {record.rank for record in log.records}, log.count()

    assert ff.spmd(main, mesh_of(data=3))() == [({r}, 1) for r in range(3)]


def test_a_ledger_ends_with_an_error():
    with pytest.raises(KeyError), ff.ledger() as log:
        raise KeyError
    run(lambda: ff.psum(torch.ones(1), "data"), mesh_of(data=2))
    assert log.records == []


def line(marker):
    """``file:line`` of the line of this file that ends in a comment of this name."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, text in enumerate(lines, 1) if text.endswith("# " + marker))
    return f"{__file__}:{number}"


@pytest.mark.parametrize("backend", ["simulated", "vmap", "abstract"])
def test_where_it_was_called(backend):
    def main():
        x = torch.ones(2)
        ff.psum({"a": x, "b": x}, "data")  # here
        pending = ff.start(ff.psum, x, "data")  # started here
        pending.wait()

    log = run(main, mesh_of(backend, data=2))
    lines = [record.where for record in log.of(0)]
    assert lines == [line("here"), line("here"), line("started here")]


def test_only_our_own_files_are_passed_over():
    """``fsfunc_project/train.py`` lies outside ``fsfunc/``; so does a typed-in line."""
    home = str(Path(ff.__file__).parent)
    for name in (
        f"{home}_project/train.py",
        f"{Path(torch.__file__).parent}x/a.py",
        "<stdin>",
    ):
        scope = {"source_line": source_line}
        exec(compile("\nfound = source_line()", name, "exec"), scope)
        assert scope["found"] == f"{name}:2"
    scope = {"source_line": source_line}
    exec(compile("found = source_line()", f"{home}/a.py", "exec"), scope)
    assert scope["found"].startswith(__file__)
    scope["found"] = []
    source = "def probe(): found.append(source_line())"
    exec(compile(source, f"{home}/a.py", "exec"), scope)
    thread = threading.Thread(target=scope["probe"])
    thread.start()
    thread.join()
    assert scope["found"] == ["?"]  # and not threading.py


def test_labels_follow_into_the_backward_pass():
    def main(v):
        x = torch.ones(4, requires_grad=True)
        with label("blocks/0", "forward"):
            y = ff.all_gather(x, "data")
            z = ff.start(ff.all_gather, x * 1, "data").wait()
        with label("head", "forward"):
            w = ff.psum_scatter(y * z, "data")
        w.sum().backward()

    log = run(lambda: main(0), mesh_of(data=2))
    assert [(r.op, r.unit, r.phase) for r in log.of(0)] == [
        ("all_gather", "blocks/0", "forward"),
        ("all_gather", "blocks/0", "forward"),
        ("psum_scatter", "head", "forward"),
        ("all_gather", "head", "backward"),
        ("psum_scatter", "blocks/0", "backward"),
        ("psum_scatter", "blocks/0", "backward"),
    ]


def test_what_a_unit_sends_itself_bears_its_name():
    @ff.unit
    def layer(w, x):
        return ff.psum(ff.pcast(w * x, "model", to="V").sin(), "model")

    def main():
        step = ff.remat(ff.value_and_grad(lambda w, x: layer(w, layer(w, x)).sum()))
        with ff.ledger() as log:
            step(torch.ones(2), torch.ones(2))
        return [(r.op, r.unit, r.phase) for r in log.of(ff.axis_index("model"))]

    phases = ["forward"] * 2 + ["recompute", "backward"] * 2
    sent = [("psum", "layer", phase) for phase in phases]
    assert ff.spmd(main, mesh_of(model=2))() == [sent] * 2


@pytest.mark.parametrize("order", [1, 2])
def test_backends_agree(order):
    def loss(x):
        y = ff.all_gather(x, ("a", "b")).sin()
        z = ff.psum_scatter(y * y, "a", dim=0)
        ring = ff.ppermute(z, "b", [(0, 1), (1, 0)])
        return ff.pmean((ring * z).sum(), ("b", "a"))

    f = loss
    for _ in range(order):
        f = (lambda inner: lambda x: torch.func.grad(inner)(x).sin().sum())(f)
    main = lambda: f(torch.ones(4, 2))  # noqa: E731
    logs = [run(main, mesh_of(k, a=2, b=2)) for k in ("simulated", "vmap", "abstract")]
    said = [[(r.op, r.axis, r.bytes, r.dtype) for r in log.of(0)] for log in logs]
    assert said[0] == said[1] == said[2]
    ranks = [[(r.op, r.axis, r.bytes) for r in logs[0].of(k)] for k in range(4)]
    assert ranks == [[(r.op, r.axis, r.bytes) for r in logs[1].of(k)] for k in range(4)]
