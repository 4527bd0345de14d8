"""One program over every collective, for ranks of any backend to agree upon.

Of floats: what else travels is `tests.core.test_dtypes`'s.
"""

import torch

import fsfunc as ff
from fsfunc.comm.backends.processes import ProcessLink
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.groups import get_group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import here

SHAPES = [(0, 2), (6, 1), (12, 5), (6, 700)]  # the last is past the one-hop sum
FLOATS = [torch.float32, torch.bfloat16, torch.float64]


def inputs(shape, dtype, rank):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


def every_collective(x, axis):
    """Each on ``x`` (dim 0 a multiple of the axis), by name."""
    n = ff.axis_size(axis)
    ring = [(i, (i + 1) % n) for i in range(n)]
    few = len(x) // (n + 1)
    most = len(x) - few * (n - 1)
    sizes = tuple(
        tuple(most if d == (s + 1) % n else few for d in range(n)) for s in range(n)
    )
    unequal = LinearMap("all_to_all", sizes=sizes)
    return {
        "psum": ff.psum(x, axis),
        "pmean": ff.pmean(x, axis),
        "pmax": ff.pmax(x.detach(), axis),
        "pmin": ff.pmin(x.detach(), axis),
        "all_gather": ff.all_gather(x, axis, dim=-1),
        "psum_scatter": ff.psum_scatter(x, axis),
        "psum_scatter, not contiguous": ff.psum_scatter(x.t(), axis, dim=1),
        "all_to_all": ff.all_to_all(x, axis, split_dim=0, concat_dim=1),
        "all_to_all, unequal": apply_map(x, unequal, get_group(axis)),
        "ring": ff.ppermute(x, axis, ring),
        "one way": ff.ppermute(x, axis, ring[:1]),
        "stay": ff.ppermute(x, axis, [(0, 0)]),
        "first": ff.pbroadcast(x, axis, source=0),
        "last": ff.pbroadcast(x, axis, source=n - 1),
        "two phases": ff.start(ff.all_gather, x, axis).wait(),
        "scalar": ff.psum(x.sum(), axis),
        "scalar, ring": ff.ppermute(x.sum(), axis, ring),
    }


def derivatives(x, axis):
    """Gradients through all of them, once and twice; and a batch."""

    def loss(x):
        out = every_collective(x, axis)
        out.pop("scalar")
        return sum((y.sin() * y).sum() for y in out.values())

    def second(x):
        return torch.func.grad(loss)(x).square().sum()

    batched = torch.func.vmap(lambda x: ff.psum_scatter(x, axis))
    return {
        "first": torch.func.grad(loss)(x),
        "second": torch.func.grad(second)(x),
        "vmap": batched(torch.stack([x, 2 * x])),
    }


def out_of_order(axis):
    """Ranks that wait for two sums, each of two hops, in different orders."""
    x = torch.full((3000,), ff.axis_index(axis) + 1.0)
    a, b = (ff.start(ff.psum, k * x, axis) for k in (1, 10))
    pair = (a, b) if ff.axis_index(axis) else (b, a)
    c = None
    for i, pending in enumerate(pair):
        pending.wait()
        if i == 0 and ff.axis_index(axis):
            c = ff.start(ff.all_gather, x[:2], axis)
    c = c or ff.start(ff.all_gather, x[:2], axis)
    found = {"a": a.wait(), "b": b.wait(), "c": c.wait()}

    where = get_group(axis)  # a sum in two hops; something else in between
    total = where.start("psum", x)
    if where.index:
        d = where.start("psum", 3 * x, any_order=True)
        found |= {"e": total.wait(), "d": d.wait()}
    else:
        found["e"] = total.wait()
        found["d"] = where.start("psum", 3 * x, any_order=True).wait()
    return found


def into_buffers(axis):
    """Links write into the buffer that they are given."""
    where = get_group(axis)
    n, x = where.size, inputs((6, 2), torch.float32, where.rank)
    found = {}
    for op, rows in {
        "psum": 6,
        "pmax": 6,
        "pmin": 6,
        "all_gather": 6 * n,
        "psum_scatter": 6 // n,
        "all_to_all": 6,
        "ppermute": 6,
        "pbroadcast": 6,
    }.items():
        how = {"ppermute": {"pairs": ((0, 1),)}, "pbroadcast": {"source": 0}}.get(
            op, {}
        )
        out = torch.full((rows, 2), 7.0)
        result = where.start(op, x, out=out, **how).wait()
        found[op] = out
        found[op + " is out"] = torch.tensor(result.data_ptr() == out.data_ptr())
    return found


def main(axis, deep=True):
    """{name: tensor} of this rank, and its ledger's records without their lines."""
    rank, found = here().rank, {}
    with ff.ledger() as log:
        for shape in SHAPES:
            for dtype in FLOATS:
                x = inputs(shape, dtype, rank)
                for name, y in every_collective(x, axis).items():
                    found[f"{name} of {dtype} {shape}"] = y
        if deep:
            x = inputs((6, 2), torch.float64, rank)
            found |= {f"derivative {k}": y for k, y in derivatives(x, axis).items()}
            found |= {f"late {k}": y for k, y in out_of_order(axis).items()}
            found |= {f"into {k}": y for k, y in into_buffers(axis).items()}
    sent = [(r.op, r.axis, r.bytes, r.dtype, r.unit, r.phase) for r in log.of(rank)]
    return found, sent


def compare(actual, expected):
    """Raises unless two backends found the same, bit by bit, and sent the same."""
    for name, y in expected[0].items():
        x = actual[0][name]
        if x.dtype != y.dtype or x.shape != y.shape or not torch.equal(x, y):
            raise AssertionError(f"{name}: {x} is not {y}")
    if actual[1] != expected[1]:
        raise AssertionError(f"sent {actual[1]}, not {expected[1]}")


def against_simulated(sizes, axes, shared_memory=True):
    """Runs on real processes and on simulated ranks in each of them, and compares."""
    real = ff.make_mesh(sizes, "processes", shared_memory=shared_memory)
    simulated = ff.make_mesh(sizes, "simulated")
    if not isinstance(real.link, ProcessLink):
        raise AssertionError(f"{real} has no processes behind it")
    for axis in axes:
        mine = ff.spmd(main, real)(axis)
        all_ranks = ff.spmd(main, simulated)(axis)
        if len(mine) != 1:
            raise AssertionError(f"one process returned {len(mine)} results")
        compare(mine[0], all_ranks[real.rank])
    return real
