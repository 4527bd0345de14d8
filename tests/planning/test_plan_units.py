"""A plan of units of any kind is what runs: records, and bytes held at most."""

import pytest
import torch

import fsfunc as ff
from tests.core.test_units import BODIES, three_calls
from tests.models import chain, floats, layer, layers
from tests.planning.comparing import planned_and_run

pytestmark = pytest.mark.usefixtures("uncollected")

MESH = ff.make_mesh({"data": 2}, "simulated")
X = torch.ones(3, 3)


def part_of_new(w, x):
    """An output that keeps a larger memory alive."""
    return (x @ w.repeat(1, 2))[:, :3]


def differentiating(w, x):
    """A gradient inside, which is differentiated again."""
    return x + torch.func.grad(lambda x: torch.tanh(x @ w).sum())(x)


UNITS = BODIES | {
    "part of new": part_of_new,
    "a gradient inside": differentiating,
    "a collective inside": lambda w, x: torch.tanh(ff.pmean(x @ w, "data")),
}
AGAIN = ("dropout", "old-style Function", "units inside", "a gradient inside")


def alike(loss, params, x=X, transform=lambda f: f):
    """The plan of a sharded step, and its real run, agree."""
    step = ff.shard(transform(ff.value_and_grad(loss)), MESH, "data")
    torch.manual_seed(0)
    main = lambda: planned_and_run(step, ff.place(step, params, x), x)  # noqa: E731
    ff.spmd(lambda: main().check(), MESH)()


@pytest.mark.parametrize(
    "name, remat", [*((n, False) for n in UNITS), *((n, True) for n in AGAIN)]
)
def test_a_unit_of_any_kind(name, remat):
    loss = three_calls(ff.unit(UNITS[name]))
    params = [floats(3, 3, seed=k) / 4 for k in range(2)]
    alike(loss, params, transform=ff.remat if remat else lambda f: f)


def test_branches_on_python_values_are_seen():
    """Whether an argument is a bool or a number; a mode; a dtype."""

    @ff.unit
    def branching(p, x, how):
        if how is True:
            return x @ p["w"]
        if isinstance(how, int):
            return (x @ p["w"]) @ p["w"]
        if how == "none":
            return x * p["b"]
        return x.to(how).float() @ p["w"]

    def loss(params, x):
        for p in params:
            for how in True, 1, "none", torch.float64, torch.bfloat16:
                x = branching(p, x, how)
        return x.sum()

    alike(loss, layers(2, make=floats), floats(3, 4))


def test_policies_that_name_values():
    @ff.unit
    def named(p, x):
        return torch.tanh(ff.checkpoint_name(x @ p["w"], "product")) @ p["w"]

    for policy in ff.SaveOnly("product"), ff.SaveAllBut("product"):
        remat = lambda f, policy=policy: ff.remat(f, policy)  # noqa: E731
        alike(chain(named), layers(2, make=floats), floats(3, 4), remat)


loss_of = chain(layer)


def hessian_by_autograd(params, x):
    leaves = [p["w"].detach().requires_grad_() for p in params]
    made = [{**p, "w": w} for w, p in zip(leaves, params, strict=True)]
    grads = torch.autograd.grad(loss_of(made, x), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)


ALONE = {
    "jvp": lambda p, x: torch.func.jvp(lambda x: loss_of(p, x), (x,), (x,)),
    "vmap": lambda p, x: torch.func.vmap(loss_of, (None, 0))(p, torch.stack([x, x])),
    "jacrev": lambda p, x: torch.func.jacrev(loss_of)(p, x),
    "hessian": torch.enable_grad()(hessian_by_autograd),
    "inference": torch.inference_mode()(loss_of),
}


# torch scripts its own forward-mode decompositions, and warns of it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("how", ALONE)
def test_derivatives_on_one_device(how):
    params = layers(3, 16, make=floats)
    planned_and_run(ALONE[how], params, torch.ones(6, 16)).check(memory=0.02)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("zero", (1, 3))
def test_a_direction_in_memory_of_its_own(zero):
    """A tangent is laid out as its primal, which may begin within a larger tensor."""
    unit = ff.unit(lambda w, x: torch.tanh(x @ w))

    def product(ws, x):
        slope = torch.func.grad(lambda ws: unit(ws[1], unit(ws[0], x)).square().mean())
        return torch.func.jvp(slope, (ws,), (ff.tree.map(torch.ones_like, ws),))[1]

    def main():
        step = ff.shard(product, MESH, "data", zero=zero)
        ws = ff.place(step, [floats(3, 3, seed=k) / 4 for k in range(2)], X)
        return planned_and_run(step, ws, X)

    ff.spmd(main, MESH)()[0].check(memory=0.1)
