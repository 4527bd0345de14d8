"""Units looked at once are as units looked at each time, whatever they do."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fsfunc as ff
from fsfunc.planning.events import Ran, Segment
from tests.planning.comparing import planned_and_run

pytestmark = pytest.mark.usefixtures("uncollected")

MESH = ff.make_mesh({"data": 2}, "simulated")
WIDTH, ROWS = 16, 6
MASK = torch.arange(WIDTH) % 2 == 0


class Doubled(torch.autograd.Function):
    """A gradient of its own, of what it saves."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * (x @ w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g @ w.t(), 2 * x.t() @ g


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
def masked_attention(p, x):
    q = (x @ p["w"]).view(1, 2, ROWS, WIDTH // 2)
    mask = torch.ones(ROWS, ROWS).tril() > 0
    mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    return mixed.reshape(ROWS, WIDTH)


@kind
def embedding(p, x):
    rows = torch.arange(ROWS) % WIDTH
    return x + F.embedding(rows, p["w"])


@kind
def captured_mask(p, x):
    return torch.where(MASK, x @ p["w"], 0.0)


@kind
def checkpointed(p, x):
    body = lambda w, x: torch.tanh(torch.tanh(x @ w) @ w)  # noqa: E731
    return checkpoint(body, p["w"], x, use_reentrant=False)


@kind
def own_function(p, x):
    return Doubled.apply(x, p["w"])


@kind
def keeping_function(p, x):
    return Kept.apply(x * 0.1, p["w"])


@kind
def in_autocast(p, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.tanh(x @ p["w"])
    return y.float() + p["b"]


@kind
def casting(p, x):
    return (x.bfloat16() @ p["w"].bfloat16()).float()


@kind
def detached(p, x):
    """A parameter that is read, and gets no gradient."""
    return torch.tanh(x @ p["w"].detach()) * p["b"]


@kind
def in_no_grad(p, x):
    with torch.no_grad():
        scale = (x @ p["w"]).std()
    return x * p["b"] / scale


@kind
def ignoring(p, x):
    """Neither parameter is read."""
    return torch.relu(x) * 2


@kind
def twice(p, x):
    """A parameter of two uses."""
    return torch.tanh(torch.tanh(x @ p["w"]) @ p["w"].t() + p["b"])


@kind
def in_place(p, x):
    y = x @ p["w"]
    y.add_(p["b"]).relu_()
    return y


@kind
def normal(p, x):
    return F.layer_norm(x @ p["w"], (WIDTH,), p["b"])


@kind
def wide(p, x):
    return F.gelu(x @ p["w"].repeat(1, 8)) @ p["w"].repeat(8, 1)


@kind
def convolution(p, x):
    return F.conv1d(x[None], p["w"][:ROWS, :ROWS, None])[0] + p["b"]


@kind
def given(p, x):
    """An output that is an input."""
    return x


@kind
def view(p, x):
    """An output that is a view of an input."""
    return x.flatten().view(ROWS, WIDTH)


@kind
def transposed_view(p, x):
    """An output that is a view of something new."""
    return (x.t().contiguous() * p["b"][:, None]).t()


@kind
def part_of_new(p, x):
    """An output that keeps a larger memory alive."""
    return (x @ p["w"].repeat(1, 2))[:, :WIDTH]


@kind
def expanded(p, x):
    return x + (p["b"] * 2).expand(ROWS, WIDTH)


@kind
def sorting(p, x):
    values, places = (x @ p["w"]).sort(-1)
    return values + places


@kind
def hooked(p, x):
    y = x @ p["w"]
    if y.requires_grad:
        y.register_hook(lambda g: g * 2)
    return torch.tanh(y)


@kind
def offloading(p, x):
    pack, unpack = lambda t: t.clone(), lambda t: t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return torch.tanh(x @ p["w"])


inner = ff.unit(lambda p, x: torch.tanh(x @ p["w"]))


@kind
def calling_units(p, x):
    return inner(p, inner(p, x)) + p["b"]


@kind
def second_derivative(p, x):
    """A gradient inside, which is differentiated again."""
    return x + torch.func.grad(lambda x: torch.tanh(x @ p["w"]).sum())(x)


def params(count, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "w": torch.randn(WIDTH, WIDTH, generator=draw, dtype=dtype) / 4,
            "b": torch.ones(WIDTH, dtype=dtype),
        }
        for _ in range(count)
    ]


def alike(
    loss,
    layers,
    *rest,
    transform=lambda f: f,
    slack=2,
    replays=None,
    captured=0,
    memory=0.0,
):
    """Plans with and without repetition, and the real run, agree."""
    step = ff.value_and_grad(loss)
    step = ff.shard(transform(step), MESH, "data")

    def main():
        placed = ff.place(step, layers, *rest)
        both = planned_and_run(step, placed, *rest)
        both.peak -= captured  # what is captured is nobody's argument
        both.check(memory, slack=slack * ROWS * WIDTH * 4)
        return both

    torch.manual_seed(0)
    found = ff.spmd(main, MESH)()
    events = found[0].plan.ranks[0].events
    count = sum(map(is_replay, events))
    if replays is not None:
        assert count == replays, f"{count} replays"
    plain = found[0].plain.ranks[0].events
    assert not any(map(is_replay, plain))
    return found[0]


def is_replay(event):
    return isinstance(event, Ran) and isinstance(event.op, Segment)


LAYERS = 3
PLAIN = {  # what runs plainly every time
    "given", "view", "calling_units", "offloading", "checkpointed",
}  # fmt: skip


def through(unit):
    def loss(params, x):
        for p in params:
            x = product_(p, unit(p, x))
        return x.square().mean()

    return loss


product_ = ff.unit(product)


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize("name", UNITS)
def test_a_unit_of_any_kind(name, remat):
    transform = ff.remat if remat else (lambda f: f)
    captured = MASK.numel() if name == "captured_mask" else 0
    loss = through(UNITS[name])
    alike(loss, params(LAYERS), rows(), transform=transform, captured=captured)


@pytest.mark.parametrize("name", ["product", "dropout", "attention", *sorted(PLAIN)])
def test_what_is_replayed(name):
    """Each unit forward and backward; fallbacks are exceptions, and few."""
    replays = 2 * LAYERS * (1 + (name not in PLAIN))
    if name == "calling_units":
        replays = 2 * LAYERS * 3
    alike(through(UNITS[name]), params(LAYERS), rows(), replays=replays)


def rows(count=ROWS):
    return torch.ones(count, WIDTH)


def test_outputs_of_every_kind():
    @ff.unit
    def many(p, x):
        y = x @ p["w"]
        return {"y": y, "rest": (y.argmax(-1), 3, None, "text"), "unread": y * 2}

    @ff.unit
    def using(p, x, places, scale=1):
        return torch.tanh(x)[places % ROWS] * p["b"] * scale

    def loss(params, x):
        for p in params:
            out = many(p, x)
            places, three, none, text = out["rest"]
            assert none is None and text == "text"
            x = using(p, out["y"], places, scale=three)
        return x.sum()

    alike(loss, params(LAYERS), rows(), replays=4 * LAYERS)


def test_an_unread_output_and_a_unit_that_nobody_reads():
    @ff.unit
    def two(p, x):
        return torch.tanh(x @ p["w"]), torch.exp(x @ p["w"])

    def loss(params, x):
        for k, p in enumerate(params):
            two(p, x)
            x = two(p, x)[k % 2]
        return x.sum()

    alike(loss, params(LAYERS), rows())


def test_one_unit_on_several_shapes_and_arguments():
    unit = ff.unit(lambda p, x, *, k=1, flag=None: torch.tanh(x @ p["w"]) * k)

    def loss(params, x):
        total = 0.0
        for k, p in enumerate(params):
            total = total + unit(p, x[: k + 1], k=k % 2).sum()
            total = total + unit(p, x, k=2, flag="a").sum()
            total = total + unit(p, x.t()[:, :ROWS].t(), k=2).sum()
            unread = x.detach().requires_grad_() * 1  # leads to nothing asked for
            total = total + unit(p, unread, k=2).sum()
        return total

    alike(loss, params(LAYERS), rows(WIDTH), slack=WIDTH)


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
            for how in True, 1, 1.0 and "none", torch.float64, torch.bfloat16:
                x = branching(p, x, how)
        return x.sum()

    both = alike(loss, params(2), rows())
    assert both.plan.flops == both.plain.flops


def test_grad_mode_and_requires_grad_are_seen():
    unit = ff.unit(product)

    def loss(params, x):
        with torch.no_grad():
            y = unit(params[0], x)
        for p in params:
            y = unit(p, y)
        return y.sum()

    alike(loss, params(LAYERS), rows())


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)])
def test_frozen_parameters(frozen):
    unit = ff.unit(product)

    def loss(params, held, x):
        at = {**dict(enumerate(held)), **params}
        for k in range(LAYERS):
            x = unit(at[str(k)] if str(k) in at else held[k], x)
        return x.sum()

    layers = params(LAYERS)
    trained = {str(k): p for k, p in enumerate(layers) if k not in frozen}
    trained["extra"] = params(1)[0]

    def total(trained, held, x):
        return unit(trained["extra"], loss(trained, held, x) * x).sum()

    alike(total, trained, layers, rows())


def test_a_parameter_twice_in_one_unit():
    unit = ff.unit(lambda p, x: torch.tanh(x @ p["a"]) @ p["b"].t())

    def loss(params, x):
        for p in params:
            x = unit({"a": p["w"], "b": p["w"]}, x)
        return x.sum()

    alike(loss, params(LAYERS), rows())


def test_an_input_twice_and_an_input_that_is_a_view_of_another():
    unit = ff.unit(lambda p, x, y: torch.tanh(x @ p["w"]) * y)

    def loss(params, x):
        for p in params:
            x = unit(p, x, x)
            x = unit(p, x, x.view(-1).view(ROWS, WIDTH))
            x = unit(p, x[:1], x)
        return x.sum()

    alike(loss, params(LAYERS), rows())


def test_collectives_inside_units():
    @ff.unit
    def mixing(p, x):
        return torch.tanh(ff.psum(x @ p["w"], "data"))

    def loss(params, x):
        for p in params:
            x = mixing(p, x)
        return x.sum()

    step = ff.value_and_grad(loss)

    def main():
        both = planned_and_run(step, params(LAYERS), rows())
        both.check(slack=2 * ROWS * WIDTH * 4)
        return both.plan.count("psum")

    assert ff.spmd(main, MESH)() == [LAYERS] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_precision_and_autocast_around(dtype):
    unit = ff.unit(product)

    def loss(params, x):
        with torch.autocast("cpu", torch.bfloat16):
            for p in params[:2]:
                x = unit(p, x)
        for p in params:
            x = unit(p, x.float())
        return x.float().sum()

    alike(loss, params(LAYERS), rows())
    precise = lambda f: ff.precision(f, dtype, torch.float32)  # noqa: E731
    # A simulated rank that comes last need not hold what it sends: a cast of its part.
    how = {"transform": precise, "slack": 4, "memory": 0.025}
    alike(through(unit), params(LAYERS), rows(), **how)


def test_policies_that_name_values():
    @ff.unit
    def named(p, x):
        return torch.tanh(ff.checkpoint_name(x @ p["w"], "product")) @ p["w"]

    for policy in ff.SaveOnly("product"), ff.SaveAllBut("product"):
        alike(
            through(named),
            params(LAYERS),
            rows(),
            transform=lambda f, policy=policy: ff.remat(f, policy),
        )


def test_a_backward_that_is_differentiated_runs_plainly():
    unit = ff.unit(product)

    def loss(params, x):
        for p in params:
            x = unit(p, x)
        return x.square().sum()

    def product_with_hessian(params, x):
        leaves = [p["w"].detach().requires_grad_() for p in params]
        layers = [{"w": w, "b": p["b"]} for w, p in zip(leaves, params, strict=True)]
        grads = torch.autograd.grad(loss(layers, x), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    with torch.enable_grad():
        both = planned_and_run(product_with_hessian, params(LAYERS), rows())
    both.check(slack=2 * ROWS * WIDTH * 4)


# torch scripts its own forward-mode decompositions, and warns of it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("how", ["grad", "jvp", "vmap", "jacrev"])
def test_units_under_torch_func(how):
    unit = ff.unit(product)

    def loss(params, x):
        for p in params:
            x = unit(p, x)
        return x.square().sum()

    layers, x = params(LAYERS), rows()
    f = {
        "grad": lambda p, x: torch.func.grad(loss)(p, x),
        "jvp": lambda p, x: torch.func.jvp(lambda x: loss(p, x), (x,), (x,)),
        "vmap": lambda p, x: torch.func.vmap(loss, (None, 0))(p, torch.stack([x, x])),
        "jacrev": lambda p, x: torch.func.jacrev(loss)(p, x),
    }[how]
    planned_and_run(f, layers, x).check(memory=0.02, slack=2 * ROWS * WIDTH * 4)


def test_inference_mode():
    with torch.inference_mode():
        both = planned_and_run(through(product_), params(LAYERS), rows())
    both.check()
