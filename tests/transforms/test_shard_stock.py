"""Sharded units under plain torch: stock autograd, errors, leaks, evaluation."""

from dataclasses import replace

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.typed_maps import LawError
from fsfunc.sharded.leaf import is_sharded
from tests.checks import close, held, on_ranks, refused, same, simulated
from tests.models import chain, floats, layer, layers, train_step

MESH = ff.make_mesh({"data": 2}, "simulated")
loss_fn = chain(layer)


def params_of(n=3):
    """The first layer's nine elements are uneven over two ranks."""
    made = layers(n, 3, make=floats, dtype=torch.float64)
    del made[0]["b"]
    return made


X = floats(4, 3, seed=99, dtype=torch.float64)
EXPECTED = ff.value_and_grad(loss_fn)(params_of(), X)[1]


def tracked(placed):
    """The same leaves, each part requiring grad, as a user of torch.autograd would."""
    return tree.map(lambda x: x.detach().clone().requires_grad_(), placed)


def parts(t):
    return [x.local for x in tree.leaves(t, is_leaf=is_sharded)]


def ranks(zero, use, remat=False, **options):
    """``use(sharded loss, tracked params, this rank's x)`` on each rank."""

    def main():
        mine = ff.local_batch(X, MESH, "data")
        loss = ff.remat(loss_fn) if remat else loss_fn
        loss = ff.shard(loss, MESH, "data", zero=zero, **options)
        return use(loss, tracked(ff.place(loss, params_of(), mine)), mine)

    return ff.spmd(main, MESH)()


def whole(params, grads):
    leaves = tree.leaves(params, is_leaf=is_sharded)
    made = [x.with_local(g) for x, g in zip(leaves, grads, strict=True)]
    treedef = tree.flatten(params, is_leaf=is_sharded)[1]
    return ff.unshard(tree.unflatten(treedef, made))


MERGED = {"min_bytes": 10**6}


@pytest.mark.parametrize(
    ("zero", "remat", "options"),
    [
        (0, False, MERGED),
        (1, True, {}),
        (2, False, {}),
        (3, True, MERGED),
        (3, False, {}),
    ],
)
def test_a_graph_may_be_pulled_back_twice_and_fills_the_parts(
    poisoned, zero, remat, options
):
    def use(loss, params, x):
        value = loss(params, x)
        first = torch.autograd.grad(value, parts(params), retain_graph=True)
        value.backward()
        return whole(params, first), whole(params, [p.grad for p in parts(params)])

    for first, again in ranks(zero, use, remat, **options):
        close(first, EXPECTED, 1e-9)
        same(again, first)


@pytest.mark.parametrize(("zero", "remat"), [(0, True), (2, False), (3, True)])
def test_create_graph_gives_the_second_derivative(zero, remat):
    def second(value, leaves):
        """Parts' penalties add up over the ranks, as the parts make up the whole."""
        grads = torch.autograd.grad(value, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(3).sum() for g in grads), leaves)

    params = tree.map(lambda x: x.requires_grad_(), params_of())
    expected = second(loss_fn(params, X), tree.leaves(params))
    use = lambda loss, p, x: whole(p, second(loss(p, x), parts(p)))  # noqa: E731
    for found in ranks(zero, use, remat):
        close(tree.leaves(found), list(expected), 1e-9)


@pytest.mark.parametrize("in_a_unit", [False, True])
def test_a_hook_that_differentiates_units_is_a_unit_with_them(in_a_unit):
    """A deep equilibrium model: its hook pulls back through what no loss uses."""
    cell = ff.unit(lambda w, z: torch.tanh(z @ w))

    def settled(w, x):
        z = cell(w, x)
        fixed = z.detach().requires_grad_()
        again = cell(w, fixed)

        def pull(g):
            return torch.autograd.grad(again, fixed, g, retain_graph=True)[0]

        if z.requires_grad:
            z.register_hook(lambda g: g + pull(pull(g)))
        return z

    layer = ff.unit(settled, whole=True) if in_a_unit else settled
    grad = ff.value_and_grad(lambda w, x: layer(w, x).square().mean())
    w, x, mesh = torch.eye(2) / 2, torch.ones(4, 2), simulated()
    if in_a_unit:
        for found in on_ranks(ff.shard(grad, mesh, "data"), w, x, mesh=mesh):
            close(found, grad(w, x))
    else:
        with pytest.raises(RuntimeError, match="make one unit of the hook and of"):
            on_ranks(ff.shard(grad, mesh, "data"), w, x, mesh=mesh)


def test_torch_func_on_a_leaf_outside_units_is_refused():
    scaled = torch.func.grad(lambda p, x: loss_fn(p["layers"], x) * p["s"])
    params = {"layers": params_of(), "s": torch.ones((), dtype=torch.float64)}
    call = lambda: on_ranks(ff.shard(scaled, MESH, "data"), params, X)  # noqa: E731
    refused(call, ValueError, "gradient by 's'.*ff.value_and_grad of")


@pytest.mark.parametrize(
    ("zero", "where"), [(3, "forward"), (1, "backward"), (3, "backward"), (0, "after")]
)
def test_a_call_that_raises_leaves_nothing_behind(zero, where):
    """In the middle of either pass; then the same call gives the same bits."""

    class Trip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("tripped in backward")

    def loss(params, x, trip):
        x = layer(params[0], x)
        if trip and where == "forward":
            raise ValueError("tripped in forward")
        x = layer(params[1], Trip.apply(x) if trip and where == "backward" else x)
        return layer(params[2], x).square().mean()

    def step(params, x, trip):
        found = ff.value_and_grad(loss)(params, x, trip)
        if trip:
            raise ValueError("tripped after")
        return found

    def main():
        mine = ff.local_batch(X, MESH, "data")
        sharded = ff.shard(step, MESH, "data", zero=zero)
        params = ff.place(lambda p, x: sharded(p, x, False), params_of(), mine)
        before = held(params)
        first = sharded(params, mine, False)
        with pytest.raises(ValueError, match="tripped"):
            sharded(params, mine, True)
        again = sharded(params, mine, False)
        same(held(params), before)
        return first[1], again[1]

    for first, again in ff.spmd(main, MESH)():
        same(parts(again), parts(first))


@pytest.mark.parametrize(("zero", "updated"), [(1, False), (2, True)])
def test_training_goes_on_from_an_evaluation_in_inference_mode(zero, updated):
    """Which is the first to gather: what a step made, or a user's own update."""
    sgd = ff.sgd(0.5)
    train = train_step(loss_fn, sgd)

    def main():
        mine = ff.local_batch(X, MESH, "data")
        shard = lambda f: ff.shard(f, MESH, "data", zero=zero)  # noqa: E731
        step, evaluate = shard(train), shard(loss_fn)
        state, _ = step(ff.init_state(step, params_of(), sgd, mine), mine)
        params = tree.map(torch.clone, state.params) if updated else state.params
        with torch.inference_mode():
            evaluate(params, mine)
        return ff.unshard(step(replace(state, params=params), mine)[0].params)

    expected = params_of()
    for _ in range(2):
        grads = ff.value_and_grad(loss_fn)(expected, X)[1]
        expected = tree.map(lambda p, g: p - 0.5 * g, expected, grads)
    for params in ff.spmd(main, MESH)():
        close(params, expected, 1e-12)


TRANSFORMS = {
    "grad": torch.func.grad,
    "jvp": lambda f: lambda p, *xs: torch.func.jvp(lambda p: f(p, *xs), (p,), (p,)),
    "vmap within": lambda f: torch.func.jacrev(f),
    "vmap": lambda f: lambda p, x: torch.func.vmap(lambda x: f(p, x))(x[:, None]),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize("how", TRANSFORMS)
def test_a_function_that_is_first_called_under_a_transform_is_checked(how):
    def scaled(params, x):  # parts by what differs from rank to rank
        return loss_fn(tree.map(lambda w: w * x.mean(), params), x)

    def use(f):
        def main():
            mine = ff.local_batch(X, MESH, "data")
            placed = ff.place(ff.shard(loss_fn, MESH, "data"), params_of(), mine)
            return TRANSFORMS[how](ff.shard(f, MESH, "data"))(placed, mine)

        return ff.spmd(main, MESH)()

    use(loss_fn)
    with pytest.raises(LawError, match="puts together this rank's part"):
        use(scaled)
