"""Each collective is what its formula says, for one device that holds all ranks' data.

So are its derivatives of every kind and order, and a batch of calls is one collective.
"""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fsfunc as ff
from fsfunc.comm.launch import PerRank

# The first jvp of a process lets torch compile its own decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

N = 3  # ranks
RING = [(0, 1), (1, 2), (2, 0)]
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
    "all_gather": (
        lambda x: ff.all_gather(x, "data", dim=1),
        lambda x: same(torch.cat(x.unbind(), 1)),
        False,
    ),
    "all_gather to I": (
        lambda x: ff.all_gather(x, "data", to="I"),
        lambda x: same(torch.cat(x.unbind())),
        True,
    ),
    "psum_scatter": (
        lambda x: ff.psum_scatter(x, "data", dim=1),
        lambda x: list(x.sum(0).tensor_split(N, 1)),
        False,
    ),
    "all_to_all": (
        lambda x: ff.all_to_all(x, "data", split_dim=1, concat_dim=0),
        exchanged,
        False,
    ),
    "ppermute": (lambda x: ff.ppermute(x, "data", CHAIN), shifted, False),
    "pbroadcast": (
        lambda x: ff.pbroadcast(x, "data", source=1),
        lambda x: same(x[1]),
        False,
    ),
    "pbroadcast to I": (
        lambda x: ff.pbroadcast(x, "data", source=2, to="I"),
        lambda x: same(x[2]),
        True,
    ),
}
MESHES = {kind: ff.make_mesh({"data": N}, kind) for kind in ("simulated", "vmap")}


def in_two_phases(call):
    f, formula, once = call
    return lambda x: ff.start(lambda x, axis: f(x), x, "data").wait(), formula, once


@pytest.fixture(params=[*CALLS, *[f"{name}, split" for name in CALLS]])
def call(request):
    name, _, split = request.param.partition(", ")
    return in_two_phases(CALLS[name]) if split else CALLS[name]


@pytest.fixture(params=MESHES)
def mesh(request):
    return MESHES[request.param]


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, *shape, generator=generator, dtype=torch.float64)


X, T, V = data(2, N), data(2, N, seed=1), data(2, N, seed=2)


def on_ranks(main, mesh, *stacks):
    """The ranks' results, each given its own rows of the stacks."""
    out = ff.spmd(main, mesh)(*[PerRank(s.unbind()) for s in stacks])
    return torch.stack(list(out))


def loss(y, scale=1.0):
    return (scale * y.sin()).sum()


def whole_loss(call, x):
    """The loss over all ranks' data at once: one value is taken once."""
    _, formula, once = call
    each = [loss(y) for y in formula(x)]
    return each[0] if once else sum(each)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_values(call, mesh):
    close(on_ranks(call[0], mesh, X), torch.stack(call[1](X)))


def test_grad(call, mesh):
    actual = on_ranks(grad(lambda x: loss(call[0](x))), mesh, X)
    close(actual, grad(lambda x: whole_loss(call, x))(X))


def test_plain_autograd_twice(call):
    def main(x, v):
        x = x.requires_grad_()
        (g,) = torch.autograd.grad(loss(call[0](x)), x, create_graph=True)
        return torch.autograd.grad((v * g).sum(), x)[0]

    def whole(x):
        return (V * grad(lambda x: whole_loss(call, x))(x)).sum()

    close(on_ranks(main, MESHES["simulated"], X.clone(), V), grad(whole)(X))


def test_grad_of_grad(call, mesh):
    def main(x, v):
        return grad(lambda x: (v * grad(lambda x: loss(call[0](x)))(x)).sum())(x)

    def whole(x):
        return (V * grad(lambda x: whole_loss(call, x))(x)).sum()

    close(on_ranks(main, mesh, X, V), grad(whole)(X))


def test_jvp(call, mesh):
    actual = on_ranks(lambda x, t: jvp(call[0], (x,), (t,))[1], mesh, X, T)
    close(actual, jvp(lambda x: torch.stack(call[1](x)), (X,), (T,))[1])


def test_jvp_of_jvp(call, mesh):
    def twice(f, x, t):
        return jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))[1]

    actual = on_ranks(lambda x, t: twice(lambda x: call[0](x.sin()), x, t), mesh, X, T)
    close(actual, twice(lambda x: torch.stack(call[1](x.sin())), X, T))


@pytest.mark.parametrize(
    "second", [hessian, lambda f: jacrev(jacrev(f))], ids=["forward", "reverse"]
)
def test_hessian(call, second):
    """The ranks go through the basis together: a column is the sum of their moves."""
    actual = on_ranks(second(lambda x: loss(call[0](x))), MESHES["simulated"], X)
    every = hessian(lambda x: whole_loss(call, x))(X)
    if second is hessian:
        close(actual, every.sum(3))
    else:  # and here the cotangents of the first pass are the ranks' basis vectors
        close(actual, every.sum(0).movedim(2, 0))


def test_jacfwd(call, mesh):
    every = jacfwd(lambda x: torch.stack(call[1](x)))(X)
    close(on_ranks(jacfwd(call[0]), mesh, X), every.sum(3))


def test_per_sample_gradients(call, mesh):
    batch = data(4, 2, N)
    actual = on_ranks(vmap(grad(lambda x: loss(call[0](x)))), mesh, batch)
    close(actual, vmap(grad(lambda x: whole_loss(call, x)), 1, 1)(batch))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_is_one_collective(call, depth):
    batch, f = data(2, N, *[4] * depth), call[0]
    for _ in range(depth):
        f = vmap(f, in_dims=-1, out_dims=-1)
    expected = torch.stack(call[1](batch))
    with ff.ledger() as log:
        close(on_ranks(f, MESHES["simulated"], batch), expected)
    with ff.ledger() as one:
        on_ranks(call[0], MESHES["simulated"], X)
    assert log.count() == one.count() == 1
    assert log.bytes() == 4**depth * one.bytes()


def test_a_vmapped_gradient_is_one_collective_each_way(call):
    batch = data(4, 2, N)
    with ff.ledger() as log, ff.ledger() as other:
        on_ranks(vmap(grad(lambda x: loss(call[0](x)))), MESHES["simulated"], batch)
        inner = len(other.records)
    assert log.count() <= 2 and inner == len(log.records)


def test_what_is_equal_on_all_ranks_has_a_slice_of_its_own():
    """Under vmap a cotangent may not be batched; each rank's part differs still."""
    w = torch.arange(2.0 * N)

    def main(x):
        _, pull = vjp(lambda x: ff.all_gather(x, "data", to="I"), x)
        return pull(w)[0]

    for mesh in MESHES.values():
        close(on_ranks(main, mesh, torch.ones(N, 2)), w.view(N, 2))


def test_grad_from_outside_a_vmap_mesh(call):
    def total(x):
        out = ff.spmd(call[0], MESHES["vmap"])(PerRank(x.unbind()))
        return sum(loss(y) for y in out)

    expected = grad(lambda x: sum(loss(y) for y in call[1](x)))(X)
    close(grad(total)(X), expected)


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


@pytest.mark.parametrize("kind", MESHES)
def test_a_pytree_goes_leaf_by_leaf(kind):
    mesh = MESHES[kind]
    state = {"a": torch.ones(2), "b": (torch.ones(()), None)}
    out = ff.spmd(lambda s: ff.psum(s, "data"), mesh)(state)
    assert out[1]["a"].tolist() == [3, 3] and out[1]["b"][0].item() == 3
    assert out[1]["b"][1] is None


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("forward", [False, True])
def test_pmax_has_no_derivative_that_could_be_lost(kind, forward):
    def main(x):
        f = lambda x: (x * ff.pmax(x, "data")).sum()  # noqa: E731
        return jvp(f, (x,), (x,))[1] if forward else grad(f)(x)

    with pytest.raises(RuntimeError, match=r"give it x.detach\(\)"):
        on_ranks(main, MESHES[kind], X)


def test_softmax_over_a_sharded_vocabulary():
    """Axes, dims and types together: a loss no rank can compute alone."""

    def main(x):
        def f(x):
            shift = ff.pmax(x.detach().amax(1), "data")
            return (
                shift + ff.psum((x - shift[:, None]).exp().sum(1), "data").log()
            ).sum()

        return grad(f)(x)

    expected = grad(lambda x: torch.cat(x.unbind(), 1).logsumexp(1).sum())(X)
    for mesh in MESHES.values():
        close(on_ranks(main, mesh, X), expected)


def test_vjp_pulled_back_twice(call):
    def main(x, v):
        y, pull = vjp(call[0], x)
        first, second = pull(torch.ones_like(y))[0], pull(2 * torch.ones_like(y))[0]
        return second - 2 * first

    close(on_ranks(main, MESHES["simulated"], X, V), torch.zeros_like(X))


MOVES = {
    "psum": lambda x: ff.psum(x, "data"),
    "psum_scatter": lambda x: ff.psum_scatter(x, "data"),
    "pmean": lambda x: ff.pmean(x, "data"),
    "pmax": lambda x: ff.pmax(x, "data"),
    "all_gather": lambda x: ff.all_gather(x, "data"),
    "all_to_all": lambda x: ff.all_to_all(x, "data", split_dim=0, concat_dim=0),
    "ppermute": lambda x: ff.ppermute(x, "data", []),
    "pbroadcast": lambda x: ff.pbroadcast(x, "data", source=0),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("name", MOVES)
def test_what_is_summed_is_counted_and_what_moves_keeps_its_dtype(name, dtype, mesh):
    (found,) = {
        y.dtype for y in on_ranks(MOVES[name], mesh, torch.ones(N, N, dtype=dtype))
    }
    if name == "pmean" and not dtype.is_floating_point:
        assert found == torch.float32
    elif name in ("psum", "psum_scatter") and dtype == torch.bool:
        assert found == torch.int64
    else:
        assert found == dtype


@pytest.mark.parametrize(
    "pairs", [[(0, 1), (0, 2)], [(0, 1), (2, 1)], [(0, 3)], [(-1, 0)]]
)
def test_a_ppermute_has_each_source_and_target_once(pairs, mesh):
    with pytest.raises(ValueError, match=r"each source and target once, each in 0..2"):
        on_ranks(lambda x: ff.ppermute(x, "data", pairs), mesh, X)


@pytest.mark.parametrize("source", [-1, N])
def test_a_pbroadcast_reads_a_rank_that_is_there(source, mesh):
    with pytest.raises(ValueError, match=f"source={source} is off the axis 'data'"):
        on_ranks(lambda x: ff.pbroadcast(x, "data", source=source), mesh, X)
