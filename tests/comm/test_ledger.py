"""The ledger: what each rank sends, ring-counted, on whose behalf, and from where."""

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


def ring(b, n):
    return Fraction(b * (n - 1), n)


# A ring of n ranks, and b bytes of a rank's own input: what that rank sends.
RING = {
    "psum": (lambda x, n: ff.psum(x, "data"), lambda b, n: 2 * ring(b, n)),
    "pmax": (lambda x, n: ff.pmax(x, "data"), lambda b, n: 2 * ring(b, n)),
    "pmin": (lambda x, n: ff.pmin(x, "data"), lambda b, n: 2 * ring(b, n)),
    "all_gather": (lambda x, n: ff.all_gather(x, "data"), lambda b, n: b * (n - 1)),
    "psum_scatter": (lambda x, n: ff.psum_scatter(x, "data"), ring),
    "all_to_all": (
        lambda x, n: ff.all_to_all(x, "data", split_dim=0, concat_dim=0), ring,
    ),
    "pbroadcast": (lambda x, n: ff.pbroadcast(x, "data", source=0), ring),
    "ppermute": (
        lambda x, n: ff.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)]),
        lambda b, n: b,
    ),
}  # fmt: skip


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


def test_who_sends_and_fractions_of_a_byte():
    pairs = [(0, 1), (2, 2)]
    log = run(lambda: ff.ppermute(torch.ones(5), "data", pairs), mesh_of(data=3))
    assert [log.bytes(rank=r) for r in range(3)] == [20, 0, 0]
    assert [log.count("ppermute", rank=r) for r in range(3)] == [1, 1, 1]
    log = run(lambda: ff.psum(torch.ones(1), "data"), mesh_of(data=3))
    assert log.records[0].bytes == Fraction(16, 3)
    assert log.bytes() == 16 / 3 and isinstance(log.bytes(), float)
    whole = run(lambda: ff.psum(torch.ones(3), "data"), mesh_of(data=3))
    assert whole.bytes() == 16 and isinstance(whole.bytes(), int)


def test_ledgers_nest_and_end_and_see_their_own_rank():
    mesh = mesh_of(data=2)
    gather = lambda: ff.all_gather(torch.ones(1), "data")  # noqa: E731

    def within():
        with ff.ledger() as log:
            gather()
        return {record.rank for record in log.records}, log.count()

    with ff.ledger() as outer:
        ff.spmd(gather, mesh)()
        with pytest.raises(KeyError), ff.ledger() as inner:
            assert ff.spmd(within, mesh)() == [({r}, 1) for r in range(2)]
            raise KeyError
        ff.spmd(gather, mesh)()
    ff.spmd(gather, mesh)()
    assert (outer.count(), inner.count()) == (3, 1)
    assert all(record in outer.records for record in inner.records)


def found_in(name, source):
    """What ``source_line`` says to code of a file of this name."""
    scope = {"source_line": source_line, "found": []}
    exec(compile(source, name, "exec"), scope)
    return scope["found"]


def test_only_our_own_files_are_passed_over():
    """``fsfunc_project/train.py`` lies outside ``fsfunc/``; so does a typed-in line."""
    home = str(Path(ff.__file__).parent)
    torchs = f"{Path(torch.__file__).parent}x/a.py"
    for name in f"{home}_project/train.py", torchs, "<stdin>":
        assert found_in(name, "\nfound.append(source_line())") == [f"{name}:2"]
    (here,) = found_in(f"{home}/a.py", "found.append(source_line())")
    assert here.startswith(__file__)
    apart = """
import threading
thread = threading.Thread(target=lambda: found.append(source_line()))
thread.start()
thread.join()"""
    assert found_in(f"{home}/a.py", apart) == ["?"]  # and not threading.py


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


def test_labels_follow_into_the_backward_pass():
    def main():
        x = torch.ones(4, requires_grad=True)
        with label("blocks/0", "forward"):
            y = ff.all_gather(x, "data")
            z = ff.start(ff.all_gather, x * 1, "data").wait()
        with label("head", "forward"):
            w = ff.psum_scatter(y * z, "data")
        w.sum().backward()

    log = run(main, mesh_of(data=2))
    there = [("all_gather", "blocks/0"), ("all_gather", "blocks/0")]
    there += [("psum_scatter", "head")]
    turned = {"all_gather": "psum_scatter", "psum_scatter": "all_gather"}
    assert [(r.op, r.unit, r.phase) for r in log.of(0)] == [
        *((op, unit, "forward") for op, unit in there),
        *((turned[op], unit, "backward") for op, unit in there[::-1]),
    ]
