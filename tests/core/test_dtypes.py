"""Every collective on every dtype and layout: right, or refused alike, everywhere.

``sweep`` is what one rank finds: tensors, or the message of a refusal, by name.
``expected`` is the same for all ranks, computed on lists of their inputs.
"""

import functools

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.launch import PerRank

WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *WHOLE, *REAL, *COMPLEX]
REFUSED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64]


def drawn(n, rank):
    """What a rank has of each dtype: dense tensors, whose dim 0 ``n`` divides."""
    generator, found = torch.Generator().manual_seed(rank), {}
    draw = lambda *shape: torch.randint(-9, 9, shape, generator=generator)  # noqa: E731
    for dtype in (*DTYPES, *REFUSED):
        for shape in ((6,), (6, 2 * n), (3, 6), (12, 2), (1, 3), (1200, n)):
            x = draw(*shape)
            if dtype.is_complex:
                x = torch.complex(x.double(), draw(*shape).double())
            found[dtype, shape] = x.to(dtype)
    return found


def kinds(dtype, n, given, views=True):
    """Tensors of one dtype, by how they lie (a vmap has no negative views)."""
    of = lambda *shape: given[dtype, shape]  # noqa: E731
    found = {
        "vector": of(6),
        "matrix": of(6, 2 * n),
        "scalar": of(6)[0],
        "empty": of(6)[:0].view(0, 3),
        "narrow": of(12, 2)[:6, :0],
        "transposed": of(3, 6).T,
        "every other": of(12, 2)[::2],
        "expanded": of(1, 3).expand(6, 3),
        "long": of(1200, n),
    }
    if dtype.is_complex:
        found["conjugate"] = of(12, 2).conj()
        found["conjugate, transposed"] = of(3, 6).mH
        if views:
            found["negative"] = of(12, 2).conj().imag
    return found


def calls(axis, n):
    """Collectives by name."""
    ring = [(i, (i + 1) % n) for i in range(n)]
    return {
        "psum": lambda x: ff.psum(x, axis),
        "pmean": lambda x: ff.pmean(x, axis),
        "pmax": lambda x: ff.pmax(x, axis),
        "pmin": lambda x: ff.pmin(x, axis),
        "all_gather": lambda x: ff.all_gather(x, axis),
        "all_gather, last": lambda x: ff.all_gather(x, axis, dim=-1),
        "psum_scatter": lambda x: ff.psum_scatter(x, axis),
        "all_to_all": lambda x: ff.all_to_all(x, axis, split_dim=0, concat_dim=-1),
        "ring": lambda x: ff.ppermute(x, axis, ring),
        "one way": lambda x: ff.ppermute(x, axis, [(0, n - 1)]),
        "pbroadcast": lambda x: ff.pbroadcast(x, axis, source=n - 1),
        "two phases": lambda x: ff.start(ff.psum, x, axis).wait(),
    }


def plain(name, xs):
    """What each rank gets of all ranks' inputs; None where it is refused."""
    n, dtype = len(xs), xs[0].dtype
    xs = [x.resolve_conj().resolve_neg().contiguous() for x in xs]
    if dtype in REFUSED or (name in ("pmax", "pmin") and dtype.is_complex):
        return None
    if not xs[0].ndim and name not in (
        "psum", "pmean", "pmax", "pmin", "ring", "one way", "pbroadcast", "two phases"
    ):  # fmt: skip
        return None
    if name in ("psum", "two phases", "pmean", "psum_scatter"):
        counts = dtype == torch.bool or name == "pmean" and not (
            dtype.is_floating_point or dtype.is_complex
        )  # fmt: skip
        total = xs[0].to(torch.int64 if counts else dtype, copy=True)
        for x in xs[1:]:
            total += x
        if name == "psum_scatter":
            return list(total.tensor_split(n))
        return [total / n if name == "pmean" else total] * n
    if name in ("pmax", "pmin"):
        stacked = torch.stack(xs)
        return [stacked.amax(0) if name == "pmax" else stacked.amin(0)] * n
    if name.startswith("all_gather"):
        return [torch.cat(xs, -1 if "last" in name else 0)] * n
    if name == "all_to_all":
        return [torch.cat([x.tensor_split(n)[r] for x in xs], -1) for r in range(n)]
    if name == "ring":
        return [xs[r - 1] for r in range(n)]
    if name == "one way":
        return [xs[0] if r == n - 1 else torch.zeros_like(xs[r]) for r in range(n)]
    return [xs[n - 1]] * n


def sweep(axis, given, views=True, only=None):
    """{name: tensor or message} of this rank."""
    n, found = ff.axis_size(axis), {}
    for dtype in (*DTYPES, *REFUSED):
        for kind, x in kinds(dtype, n, given, views).items():
            if only is not None and kind not in only:
                continue
            for name, call in calls(axis, n).items():
                try:
                    y = call(x)
                except (TypeError, ValueError) as error:
                    y = str(error)
                found[f"{name} of {dtype}, {kind}"] = y
    return found


def expected(n, views=True):
    """{name: what each rank gets, or None} on plain lists."""
    found, given = {}, [drawn(n, rank) for rank in range(n)]
    for dtype in (*DTYPES, *REFUSED):
        by_rank = [kinds(dtype, n, each, views) for each in given]
        for kind in by_rank[0]:
            xs = [each[kind] for each in by_rank]
            for name in calls("data", n):
                found[f"{name} of {dtype}, {kind}"] = plain(name, xs)
    return found


def wrong(found, expected, rank, values=True):
    """What of a rank's findings is neither right nor refused as it should be."""
    lines = []
    for name, by_rank in expected.items():
        y, kind = found[name], name.split(" of ")[1].split(",")[0]
        if by_rank is None:
            if not isinstance(y, str) or not any(
                s in y for s in (kind, "has shape ()", "complex")
            ):
                lines.append(f"{name}: not refused by name: {y}")
            continue
        x = by_rank[rank]
        if isinstance(y, str):
            lines.append(f"{name}: {y}")
        elif (x.dtype, x.shape) != (y.dtype, y.shape):
            lines.append(f"{name}: {y.dtype} {y.shape}, not {x.dtype} {x.shape}")
        elif values and not torch.equal(x, y.resolve_conj().resolve_neg()):
            lines.append(f"{name}: {y}, not {x}")
    return lines


FEW = {"scalar", "empty", "transposed", "long", "conjugate", "negative"}


def over_processes(n):
    """What is wrong of this process's findings, pair by pair or, of two, natively."""
    mesh, lines = ff.make_mesh({"data": n, "one": 1}), []
    rank, axes = mesh.rank, {"data": n, "one": 1}
    mesh.link.paired = n > 2  # or as on NCCL
    for axis, size in axes.items():
        at = rank if size > 1 else 0
        given = drawn(size, at)
        found = ff.spmd(lambda a=axis, x=given: sweep(a, x, only=FEW), mesh)()[0]
        kind = lambda name: name.partition(" of ")[2].partition(", ")[2]  # noqa: E731
        lists = {k: v for k, v in expected(size).items() if kind(k) in FEW}
        lines += [f"over {axis}, {line}" for line in wrong(found, lists, at)]
    return lines


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
