"""A plan of units of any kind is what runs: records, and bytes held at most."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fsfunc as ff
from tests.planning.comparing import planned_and_run

pytestmark = pytest.mark.usefixtures("uncollected")

MESH = ff.make_mesh({"data": 2}, "simulated")
WIDTH, ROWS, LAYERS = 16, 6, 2


class Kept(torch.autograd.Function):
    """Memory kept in ctx, which no saved tensor tells of."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.y = torch.exp(x @ w)
        ctx.save_for_backward(x, w)
        return ctx.y + 1

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = g * ctx.y
        return g @ w.t(), x.t() @ g


UNITS = {}


def kind(fn):
    UNITS[fn.__name__] = ff.unit(fn)
    return fn


@kind
def product(p, x):
    return torch.tanh(x @ p["w"]) + p["b"]


@kind
def dropout(p, x):
    return F.dropout(torch.relu(x @ p["w"]), 0.25) + p["b"]


@kind
def attention(p, x):
    q = (x @ p["w"]).view(1, 2, ROWS, WIDTH // 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).view(ROWS, WIDTH)


@kind
def checkpointed(p, x):
    body = lambda w, x: torch.tanh(torch.tanh(x @ w) @ w)  # noqa: E731
    return checkpoint(body, p["w"], x, use_reentrant=False)


@kind
def keeping_function(p, x):
    return Kept.apply(x * 0.1, p["w"])


@kind
def in_autocast(p, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.tanh(x @ p["w"])
    return y.float() + p["b"]


@kind
def detached(p, x):
    """A parameter that is read, and gets no gradient."""
    return torch.tanh(x @ p["w"].detach()) * p["b"]


@kind
def in_place(p, x):
    y = x @ p["w"]
    y.add_(p["b"]).relu_()
    return y


@kind
def view(p, x):
    """An output that is a view of an input."""
    return x.flatten().view(ROWS, WIDTH)


@kind
def part_of_new(p, x):
    """An output that keeps a larger memory alive."""
    return (x @ p["w"].repeat(1, 2))[:, :WIDTH]


inner = ff.unit(lambda p, x: torch.tanh(x @ p["w"]))


@kind
def calling_units(p, x):
    return inner(p, inner(p, x)) + p["b"]


@kind
def mixing(p, x):
    """A collective inside."""
    return torch.tanh(ff.pmean(x @ p["w"], "data"))


@kind
def second_derivative(p, x):
    """A gradient inside, which is differentiated again."""
    return x + torch.func.grad(lambda x: torch.tanh(x @ p["w"]).sum())(x)


def params(count=LAYERS):
    draw = torch.Generator().manual_seed(0)
    return [
        {"w": torch.randn(WIDTH, WIDTH, generator=draw) / 4, "b": torch.ones(WIDTH)}
        for _ in range(count)
    ]


def rows(count=ROWS):
    return torch.ones(count, WIDTH)


first = ff.unit(product)


def through(unit):
    def loss(params, x):
        for p in params:
            x = first(p, unit(p, x))
        return x.square().mean()

    return loss


def alike(loss, *args, transform=lambda f: f, memory=0.0):
    """The plan of a sharded step, and its real run, agree."""
    step = ff.shard(transform(ff.value_and_grad(loss)), MESH, "data")

    def main():
        both = planned_and_run(step, ff.place(step, *args), *args[1:])
        both.check(memory)

    torch.manual_seed(0)
    ff.spmd(main, MESH)()


AGAIN = ("dropout", "keeping_function", "calling_units", "second_derivative")


@pytest.mark.parametrize(
    "name, remat", [*((n, False) for n in UNITS), *((n, True) for n in AGAIN)]
)
def test_a_unit_of_any_kind(name, remat):
    transform = ff.remat if remat else (lambda f: f)
    alike(through(UNITS[name]), params(), rows(), transform=transform)


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

    alike(loss, params(2), rows())


def test_policies_that_name_values():
    @ff.unit
    def named(p, x):
        return torch.tanh(ff.checkpoint_name(x @ p["w"], "product")) @ p["w"]

    for policy in ff.SaveOnly("product"), ff.SaveAllBut("product"):
        remat = lambda f, policy=policy: ff.remat(f, policy)  # noqa: E731
        alike(through(named), params(), rows(), transform=remat)


def loss_of(params, x):
    for p in params:
        x = first(p, x)
    return x.square().sum()


def hessian_by_autograd(params, x):
    leaves = [p["w"].detach().requires_grad_() for p in params]
    layers = [{"w": w, "b": p["b"]} for w, p in zip(leaves, params, strict=True)]
    grads = torch.autograd.grad(loss_of(layers, x), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)


def without_gradients(params, x):
    with torch.inference_mode():
        return loss_of(params, x)


ALONE = {
    "jvp": lambda p, x: torch.func.jvp(lambda x: loss_of(p, x), (x,), (x,)),
    "vmap": lambda p, x: torch.func.vmap(loss_of, (None, 0))(p, torch.stack([x, x])),
    "jacrev": lambda p, x: torch.func.jacrev(loss_of)(p, x),
    "hessian": torch.enable_grad()(hessian_by_autograd),
    "inference": without_gradients,
}


# torch scripts its own forward-mode decompositions, and warns of it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("how", ALONE)
def test_derivatives_on_one_device(how):
    planned_and_run(ALONE[how], params(3), rows()).check(memory=0.02)
