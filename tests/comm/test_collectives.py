"""Each collective is what its formula says, for one device that holds all ranks' data.

So are its derivatives of every kind and order, and a batch of calls is one collective.
"""

from functools import partial

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fsfunc as ff
from fsfunc.comm.launch import PerRank
from tests.checks import refusals

# The first jvp of a process lets torch compile its own decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

N = 3  # ranks
CHAIN = [(0, 1), (1, 2)]  # nobody sends to rank 0


def same(y):
    return [y] * N


def shifted(x):
    return [torch.zeros_like(x[0]), x[0], x[1]]


def exchanged(x):
    cut = [part.tensor_split(N, 1) for part in x.unbind()]
    return [torch.cat([cut[s][r] for s in range(N)]) for r in range(N)]


# name: (call, what each rank gets from the stack of all inputs, is it one value?)
CALLS = {
    "psum": (lambda x: ff.psum(x, "data"), lambda x: same(x.sum(0)), True),
    "pmean": (lambda x: ff.pmean(x, "data"), lambda x: same(x.mean(0)), True),
    "all_gather": (lambda x: ff.all_gather(x, "data", dim=1),
                   lambda x: same(torch.cat(x.unbind(), 1)), False),
    "all_gather to I": (lambda x: ff.all_gather(x, "data", to="I"),
                        lambda x: same(torch.cat(x.unbind())), True),
    "psum_scatter": (lambda x: ff.psum_scatter(x, "data", dim=1),
                     lambda x: list(x.sum(0).tensor_split(N, 1)), False),
    "all_to_all": (lambda x: ff.all_to_all(x, "data", split_dim=1, concat_dim=0),
                   exchanged, False),
    "ppermute": (lambda x: ff.ppermute(x, "data", CHAIN), shifted, False),
    "pbroadcast": (lambda x: ff.pbroadcast(x, "data", source=1),
                   lambda x: same(x[1]), False),
    "pbroadcast to I": (lambda x: ff.pbroadcast(x, "data", source=2, to="I"),
                        lambda x: same(x[2]), True),
}  # fmt: skip
MESHES = {kind: ff.make_mesh({"data": N}, kind) for kind in ("simulated", "vmap")}


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, *shape, generator=generator, dtype=torch.float64)


X, T, V = data(2, N), data(2, N, seed=1), data(2, N, seed=2)


def on_ranks(main, mesh, *stacks):
    """The ranks' results, each given its own rows of the stacks."""
    out = ff.spmd(main, mesh)(*[PerRank(s.unbind()) for s in stacks])
    return torch.stack(list(out))


def loss(y):
    return y.sin().sum()


def whole_loss(call, x):
    """The loss over all ranks' data at once: one value is taken once."""
    _, formula, once = call
    each = [loss(y) for y in formula(x)]
    return each[0] if once else sum(each)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def pushed_twice(f, x, t):
    return jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))[1]


def slope_of_slope(f):
    """``(x, v) -> d<v, df(x)>``."""
    return lambda x, v: grad(lambda x: (v * grad(f)(x)).sum())(x)


def plainly_twice(f):
    """The same by ``torch.autograd``."""

    def main(x, v):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad((v * g).sum(), x)[0]

    return main


def stacked(call):
    return lambda x: torch.stack(call[1](x))


BATCH = data(4, 2, N)


def laws(f, call, plainly):
    """(what a rank runs, its data, the same of one device)."""
    mine, one, whole = lambda x: loss(f(x)), stacked(call), partial(whole_loss, call)
    yield f, [X], one(X)
    yield grad(mine), [X], grad(whole)(X)
    yield slope_of_slope(mine), [X, V], slope_of_slope(whole)(X, V)
    pushed = jvp(one, (X,), (T,))[1]
    yield lambda x, t: jvp(f, (x,), (t,))[1], [X, T], pushed
    pushed = pushed_twice(lambda x: one(x.sin()), X, T)
    yield lambda x, t: pushed_twice(lambda x: f(x.sin()), x, t), [X, T], pushed
    # the ranks go through the basis together: a column is the sum of their moves
    yield jacfwd(f), [X], jacfwd(one)(X).sum(3)
    yield vmap(grad(mine)), [BATCH], vmap(grad(whole), 1, 1)(BATCH)
    if plainly:  # each rank has an autograd of its own
        yield plainly_twice(mine), [X, V], slope_of_slope(whole)(X, V)
        every = hessian(whole)(X)
        yield hessian(mine), [X], every.sum(3)
        # the cotangents of the first pass are the ranks' basis vectors
        yield jacrev(jacrev(mine)), [X], every.sum(0).movedim(2, 0)


@pytest.mark.parametrize("way", ["simulated", "vmap", "simulated, in two phases"])
@pytest.mark.parametrize("name", CALLS)
def test_a_collective_is_its_formula_and_so_are_its_derivatives(name, way):
    kind, _, split = way.partition(", ")
    f = at_once = CALLS[name][0]
    if split:
        f = lambda x: ff.start(lambda x, _: at_once(x), x, "data").wait()  # noqa: E731
    for run, given, expected in laws(f, CALLS[name], kind == "simulated"):
        close(on_ranks(run, MESHES[kind], *given), expected)


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_is_one_collective_each_way(name):
    f, mesh = CALLS[name][0], MESHES["simulated"]
    with ff.ledger() as one:
        on_ranks(f, mesh, X)
    for depth in (1, 2):
        batch, batched = data(2, N, *[4] * depth), f
        for _ in range(depth):
            batched = vmap(batched, in_dims=-1, out_dims=-1)
        with ff.ledger() as log:
            close(on_ranks(batched, mesh, batch), stacked(CALLS[name])(batch))
        assert log.count() == one.count() == 1
        assert log.bytes() == 4**depth * one.bytes()
    with ff.ledger() as log:
        on_ranks(vmap(grad(lambda x: loss(f(x)))), mesh, BATCH)
    assert log.count() <= 2


@pytest.mark.parametrize("name", CALLS)
def test_it_is_differentiated_from_outside_a_vmap_mesh_and_pulled_back_twice(name):
    def everywhere(x):
        out = ff.spmd(CALLS[name][0], MESHES["vmap"])(PerRank(x.unbind()))
        return sum(loss(y) for y in out)

    expected = grad(lambda x: sum(loss(y) for y in CALLS[name][1](x)))(X)
    close(grad(everywhere)(X), expected)

    def main(x):
        y, pull = vjp(CALLS[name][0], x)
        first, second = pull(torch.ones_like(y))[0], pull(2 * torch.ones_like(y))[0]
        return second - 2 * first

    close(on_ranks(main, MESHES["simulated"], X), torch.zeros_like(X))


@pytest.fixture(params=MESHES)
def mesh(request):
    return MESHES[request.param]


def test_what_is_equal_on_all_ranks_has_a_slice_of_its_own(mesh):
    """Under vmap a cotangent may not be batched; each rank's part differs still."""
    w = torch.arange(2.0 * N)

    def main(x):
        _, pull = vjp(lambda x: ff.all_gather(x, "data", to="I"), x)
        return pull(w)[0]

    close(on_ranks(main, mesh, torch.ones(N, 2)), w.view(N, 2))


@pytest.mark.parametrize("axis", ["a", ("a", "b"), ("b", "a")], ids=str)
def test_two_axes(axis):
    """Several names at once go through the mesh with the first varying slowest."""
    sizes = {"a": 2, "b": 3}

    def main(x):
        y = ff.all_gather(x, axis)
        parts = ff.psum_scatter(y, axis), ff.psum(x, axis), ff.pmax(x, axis)
        swapped = ff.all_to_all(y, axis, split_dim=0, concat_dim=0)
        n = ff.axis_size(axis)
        ring = ff.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
        return torch.cat([y, *parts, swapped, ring])

    x = torch.arange(6.0).view(6, 1)
    real, mapped = (on_ranks(main, ff.make_mesh(sizes, k), x) for k in MESHES)
    close(real, mapped)
    order = {
        "a": [[0, 3]],
        ("a", "b"): [list(range(6))],
        ("b", "a"): [[0, 3, 1, 4, 2, 5]],
    }
    assert real[0, : len(order[axis][0])].tolist() == order[axis][0]


def test_a_pytree_goes_leaf_by_leaf(mesh):
    state = {"a": torch.ones(2), "b": (torch.ones(()), None)}
    out = ff.spmd(lambda s: ff.psum(s, "data"), mesh)(state)
    assert out[1]["a"].tolist() == [3, 3] and out[1]["b"][0].item() == 3
    assert out[1]["b"][1] is None


def with_extreme(extreme, x):
    return (x * extreme(x, "data")).sum()


with_pmax, with_pmin = (partial(with_extreme, f) for f in (ff.pmax, ff.pmin))
PAIRS = [[(0, 1), (0, 2)], [(0, 1), (2, 1)], [(0, 3)], [(-1, 0)]]


class DTensor(torch.Tensor):
    """In the place of torch's own, which needs a process group."""


REFUSED = {
    "a DTensor": (lambda x: ff.all_gather(x.as_subclass(DTensor), "data"), TypeError,
        r"x.full_tensor\(\)"),
    "grad of pmax": (grad(with_pmax), RuntimeError, r"give it x.detach\(\)"),
    "grad of pmin": (grad(with_pmin), RuntimeError, r"pmin .* give it x.detach\(\)"),
    "jvp of pmax": (
        lambda x: jvp(with_pmax, (x,), (x,))[1], RuntimeError, r"give it x.detach\(\)",
    ),
} | {
    f"ppermute by {pairs}": (
        lambda x, pairs=pairs: ff.ppermute(x, "data", pairs),
        ValueError, r"each source and target once, each in 0..2",
    )
    for pairs in PAIRS
} | {
    f"pbroadcast from {source}": (
        lambda x, source=source: ff.pbroadcast(x, "data", source=source),
        ValueError, f"source={source} is off the axis 'data'",
    )
    for source in (-1, N)
}  # fmt: skip


@refusals(REFUSED)
def test_what_has_no_meaning_is_refused(call, error, way_out, mesh):
    with pytest.raises(error, match=way_out):
        on_ranks(call, mesh, X)
