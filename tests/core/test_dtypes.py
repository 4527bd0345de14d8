"""Every collective on every dtype and layout: right, or refused alike, everywhere."""

import functools

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.launch import PerRank
from tests.core.dtype_sweep import drawn, expected, sweep, wrong


@functools.cache
def found(backend, n):
    """What each rank finds; an abstract one stands for all."""
    mesh = ff.make_mesh({"data": n}, backend)
    given = PerRank(drawn(n, rank) for rank in range(n))
    given = given[0] if backend == "abstract" else given
    return ff.spmd(lambda x: sweep("data", x, backend != "vmap"), mesh)(given)


@pytest.mark.parametrize(
    ("backend", "n"),
    [
        ("simulated", 1),
        ("simulated", 2),
        ("simulated", 3),
        ("vmap", 2),
        ("abstract", 2),
    ],
)
def test_every_backend_is_as_plain_lists(backend, n):
    lists = expected(n, backend != "vmap")
    for rank, mine in enumerate(found(backend, n)):
        assert wrong(mine, lists, rank, values=backend != "abstract") == []


def test_refusals_read_alike():
    texts = [found(backend, 2)[0] for backend in ("simulated", "vmap", "abstract")]
    texts = [{k: v for k, v in t.items() if isinstance(v, str)} for t in texts]
    texts = [{k: v for k, v in t.items() if "negative" not in k} for t in texts]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) > 400


def test_what_is_counted_is_sent_as_a_number():
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        x = torch.tensor([True, mesh.rank > 0, False])
        with ff.ledger() as log:
            total, mean = ff.psum(x, "data"), ff.pmean(x, "data")
            largest = ff.pmean(torch.tensor([200, 100], dtype=torch.uint8), "data")
        sent = [(r.op, r.dtype, r.bytes) for r in log.of(mesh.rank)]
        return total.tolist(), mean.tolist(), largest.tolist(), sent

    for total, mean, largest, sent in ff.spmd(main, mesh)():
        assert (total, mean, largest) == ([2, 1, 0], [1.0, 0.5, 0.0], [200.0, 100.0])
        numbers = [("psum", torch.int64, 24)] * 2 + [("psum", torch.int64, 16)]
        assert sent == numbers


def test_a_mean_of_integers_is_in_the_default_dtype():
    mesh = ff.make_mesh({"data": 3}, "simulated")
    count = lambda: ff.pmean(torch.tensor(2**40 + mesh.rank), "data")  # noqa: E731
    assert ff.spmd(count, mesh)()[0].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert ff.spmd(count, mesh)()[0].item() == 2**40 + 1
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["simulated", "abstract"])
def test_layouts_that_do_not_travel_are_refused(backend):
    mesh = ff.make_mesh({"data": 2}, backend)
    for make, says in (
        (lambda: torch.eye(2).to_sparse(), 'over "data".*sparse_coo.*to_dense'),
        (lambda: torch.zeros(2).to(torch.float8_e4m3fn), "float8_e4m3fn.*view"),
        (lambda: torch.zeros(2, device="meta"), "meta tensor"),
    ):
        if backend == "simulated" or "meta" not in says:
            with pytest.raises(TypeError, match=says):
                ff.spmd(lambda make=make: ff.psum(make(), "data"), mesh)()


def test_a_vmap_mesh_keeps_the_sign_of_zero():
    x = PerRank([torch.tensor([-0.0]), torch.tensor([0.0])])
    ring = lambda x: ff.ppermute(x, "data", [(0, 1), (1, 0)])  # noqa: E731
    found = ff.spmd(ring, ff.make_mesh({"data": 2}, "vmap"))(x)
    assert [torch.signbit(y).item() for y in found] == [False, True]
