"""A recompute ends with the last value that its backward reads.

And nothing else changes: numbers, what Python reads, what a unit derives itself.
"""

import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import _torch
from fsfunc._torch import DispatchMode
from fsfunc.planning.events import Ran
from fsfunc.testing.comparing import assert_equal
from tests.checks import same
from tests.models import floats

D = 4
X = floats(2, 3, D, seed=1)
P = {"a": floats(D, D, seed=2), "b": floats(D, D, seed=3)}


class Products(DispatchMode):
    """Counts the products that are computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Saving(torch.autograd.Function):
    """A function of the user's, which saves what it returns."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 + y.detach())


def loss_of(body, calls=2):
    unit = ff.unit(body)

    def loss(p, x):
        for _ in range(calls):
            x = unit(p, x)
        return (x * x).sum()

    return loss


def differentiated(loss, p=P, x=X, wrap=lambda f: f):
    torch.manual_seed(5)
    return wrap(ff.value_and_grad(loss))(p, x)


def block(p, x):
    return x + F.linear(F.gelu(F.linear(x, p["a"])), p["b"])


@pytest.mark.parametrize("policy", [None, ff.SaveOnly("none")])
def test_the_last_product_of_a_block_is_not_computed_again(policy):
    loss = loss_of(block, calls=3)
    want = differentiated(loss)
    for _ in range(2):
        with Products() as made:
            got = differentiated(loss, wrap=lambda f: ff.remat(f, policy=policy))
        same(got, want)
        # Forward 6, backward 12 but for the one by the input, and one a recompute.
        assert made.count == 6 + 11 + 3, made.count


OPS = {
    "a": lambda p, x, h: F.linear(h, p["a"]),
    "b": lambda p, x, h: h @ p["b"],
    "residual": lambda p, x, h: x + h,
    "in place": lambda p, x, h: (h * 1).add_(x),
    "gelu": lambda p, x, h: F.gelu(h),
    "exp": lambda p, x, h: (h / 8).exp(),
    "view": lambda p, x, h: h.reshape(-1).view(h.shape),
    "turned": lambda p, x, h: h.transpose(0, 1).contiguous().transpose(0, 1),
    "halves": lambda p, x, h: torch.cat(h.chunk(2, -1)[::-1], -1),
    "dropped": lambda p, x, h: F.dropout(h, 0.5),
    "noise": lambda p, x, h: h + torch.rand_like(h),
    "detached": lambda p, x, h: h + h.detach(),
    "own": lambda p, x, h: Saving.apply(h),
    "told": lambda p, x, h: h * 2 if h.detach().sum() > 0 else h.sin(),
    "picked": lambda p, x, h: h.index_select(-1, h.detach()[0, 0].argsort()),
    "mapped": lambda p, x, h: torch.func.vmap(lambda r: (r @ p["a"]).sin())(h),
    "derived": lambda p, x, h: h + torch.func.grad(lambda y: y.sin().sum())(h),
    "penalised": lambda p, x, h: h + ff.value_and_grad(lambda y: y.exp().mean())(h)[1],
}
RETURNS = {
    "h": lambda h: (h, h),
    "two": lambda h: ((h, h * 2), h),
    "unused": lambda h: ({"h": h, "other": h @ h.mT}, h),
    "twice": lambda h: ([h, h], h),
    "with a sum": lambda h: ((h, h.sum()), h),
    "seen": lambda h: ((h, h.view(h.shape)), h),
}


@given(
    st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=6),
    st.sampled_from(sorted(RETURNS)),
    st.booleans(),
)
def test_gradients_are_those_without_remat(names, returned, frozen):
    def body(p, x):
        h = x
        for name in names:
            h = OPS[name](p, x, h)
        return RETURNS[returned](h)[0]

    unit = ff.unit(body)

    def loss(p, x):
        for _ in range(2):
            leaves = ff.tree.leaves(unit(p, x))
            x = x + leaves[0]
            if len(leaves) > 1 and returned != "unused":
                x = x + leaves[-1].sum()
        return (x * x).sum()

    def trained(a, b, x):
        return loss({"a": a, "b": b}, x)

    p, x = {k: w.double() for k, w in P.items()}, X.double()
    args = 0 if frozen else (0, 1)  # the matrix b is differentiated, or is not

    def found(wrap):
        torch.manual_seed(5)
        return ff.value_and_grad(wrap(trained), args)(p["a"], p["b"], x)

    want = found(lambda f: f)
    assume(all(bool(x.isfinite().all()) for x in ff.tree.leaves(want)))
    for _ in range(2):
        # A leaf that one unit uses twice is added up in another order.
        assert_equal(found(ff.remat), want, 1e-13)


def test_what_changes_after_it_was_saved_is_refused():
    """By autograd itself without remat; with it there is no graph that looks."""

    def body(p, x):
        h = (x @ p["a"]).exp()
        y = h * 2
        h.add_(1)  # exp saved it
        return (y + h).sin()

    for wrap in (lambda f: f, ff.remat):
        with pytest.raises(RuntimeError, match="in.?place"):
            differentiated(loss_of(body), wrap=wrap)


@pytest.mark.parametrize(
    "other", [lambda p, x: x * p["a"][0], lambda p, x: (x[:1] @ p["a"]).exp() + x]
)
def test_a_unit_that_does_something_else_the_second_time_is_refused(other):
    runs = []

    def body(p, x):
        runs.append(1)
        return (x @ p["a"]).exp() + x if len(runs) < 3 else other(p, x)

    with pytest.raises(RuntimeError, match="must do the same again"):
        differentiated(loss_of(body), wrap=ff.remat)


def by_a_counter(h, p, runs):
    return (h * len(runs)).exp()


def by_a_row(h, p, runs):
    """What is saved of it has the same shape each time."""
    return h.exp() * p["a"][len(runs) % 2]


def by_a_sign(h, p, runs):
    """By which norms do not differ."""
    return h * (-1) ** len(runs) * p["a"][0]


def by_an_order(h, p, runs):
    """By which sums do not differ either."""
    return h.roll(len(runs), -1) * p["a"][0]


def by_an_order_of_rows(h, p, runs):
    return h.roll(len(runs), 0) * p["a"][0]


def by_torch_func(h, p, runs):
    """Which allows no hooks while it runs."""
    return torch.func.vmap(lambda row: (row * len(runs)).exp())(h)


BY = [by_a_counter, by_a_row, by_a_sign, by_an_order, by_an_order_of_rows]


@pytest.mark.parametrize("other", [*BY, by_torch_func])
def test_a_unit_that_counts_its_runs_is_refused(other):
    runs = []

    def body(p, x):
        runs.append(1)
        return other(x @ p["a"], p, runs)

    with pytest.raises(RuntimeError, match="whatever a counter"):
        differentiated(loss_of(body), wrap=ff.remat)


def test_a_recompute_asks_once_if_its_values_are_near(monkeypatch):
    """Each answer is a wait for a GPU."""
    asked, all_true = [], _torch.all_true

    def noted(answers):
        asked.append(len(answers))
        return all_true(answers)

    monkeypatch.setattr(_torch, "all_true", noted)

    def body(p, x):
        return ((x @ p["a"]).exp().sin() @ p["b"]).exp()

    differentiated(loss_of(body, calls=1), wrap=ff.remat)
    assert len(asked) == 1 and asked[0] > 3


@pytest.mark.parametrize("less", [False, True])
def test_values_that_are_not_near_are_given_to_nobody(less):
    """Nor where the second run saves less than the first, and so never ends early."""
    runs, caught = [], []

    def body(p, x):
        runs.append(1)
        h = (x @ p["a"] * len(runs)).exp()
        return h if less and len(runs) > 1 else h.sin().cos()

    value = ff.remat(loss_of(body, calls=1))({k: grown(x) for k, x in P.items()}, X)
    for _ in range(2):
        try:
            value.backward(retain_graph=True)
        except RuntimeError as error:
            caught.append(str(error))
    assert len(caught) == 2 and all("must do the same again" in x for x in caught)


def grown(x):
    return x.clone().requires_grad_()


@pytest.mark.parametrize("around", ["shard(remat)", "remat(shard)"])
@pytest.mark.parametrize("end", ["sum", "psum"])
def test_over_ranks(around, end):
    mesh = ff.make_mesh({"data": 2, "model": 2}, "simulated")

    def body(p, x):
        y = F.linear(F.gelu(F.linear(x, p["a"])), p["b"])
        each = ff.pcast(y, "model", to="V")
        return x + (ff.psum(each, "model") if end == "psum" else y)

    loss = loss_of(body, calls=3)

    def step(f):
        one, other = ff.remat, lambda f: ff.shard(f, mesh, "data")
        return one(other(f)) if around == "remat(shard)" else other(one(f))

    def main(stack):
        f = stack(ff.value_and_grad(loss))
        p = ff.place(f, P, X)
        found, logs = [], []
        for _ in range(2):
            with ff.ledger() as log:
                value, grads = f(p, X)
            found.append((value, ff.unshard(grads)))
            logs.append([(r.op, r.axis) for r in log.of()])
        return found, logs

    alone = lambda f: ff.shard(f, mesh, "data", reshard_after_forward=False)  # noqa: E731
    (want, _), *_ = ff.spmd(lambda: main(alone), mesh)()
    for got, logs in ff.spmd(lambda: main(step), mesh)():
        same(got, want)
        assert logs[0] == logs[1], "a warm step does what the first one did"


def test_a_plan_ends_recomputes_as_well():
    loss = loss_of(block, calls=3)
    plans = [
        ff.plan(ff.remat(ff.value_and_grad(loss)), P, X),
        ff.plan(ff.value_and_grad(loss), P, X),
    ]
    flops = [
        sum(e.op.flops for e in p.ranks[0].events if isinstance(e, Ran)) for p in plans
    ]
    product = 2 * X.numel() * D
    assert flops[0] - flops[1] == 3 * product, (
        "of two products a unit computes one again"
    )


def test_second_derivatives_are_whole():
    loss = loss_of(block)

    def twice(wrap):
        p = {k: v.double().requires_grad_() for k, v in P.items()}
        value = wrap(loss)(p, X.double())
        grads = torch.autograd.grad(value, list(p.values()), create_graph=True)
        total = sum(g.sin().sum() for g in grads)
        return torch.autograd.grad(total, list(p.values()))

    want = twice(lambda f: f)
    for _ in range(2):
        torch.testing.assert_close(twice(ff.remat), want, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own
def test_functions_that_are_compiled_inside_a_unit_stay_so():
    ran = []

    def noted(graph, inputs):
        return lambda *args: (ran.append(1), graph(*args))[1]

    inner = torch.compile(lambda y: y.sin() + y.cos(), backend=noted)

    torch._dynamo.reset()  # it compiles a function a few times, and then no more
    loss = loss_of(lambda p, x: x + F.linear(inner(F.linear(x, p["a"])), p["b"]))
    want = differentiated(loss)
    count = len(ran)
    for _ in range(2):
        ran.clear()
        same(differentiated(loss, wrap=ff.remat), want)
        assert len(ran) == 2 * count, "a recompute ran what was compiled plainly"
    torch._dynamo.reset()


def test_a_first_run_holds_nothing_that_its_backward_would_read():
    held = []

    @ff.unit
    def f(p, x):
        y = (x * p).exp()
        at = weakref.ref(y)
        z = y.sin()
        del y
        held.append(at() is not None)
        return z.sin().sum()

    step = ff.remat(ff.value_and_grad(f))
    for _ in range(2):
        step(torch.ones(3), torch.ones(3))
    assert held == [False] * 4 or held[2] is False, held


@pytest.mark.parametrize("caught", [False, True])
def test_a_unit_that_computes_gradients_itself_at_its_second_call_is_refused(caught):
    inner = []

    @ff.unit
    def f(p, x):
        y = (x * p).exp() + torch.randn(3)
        if not inner:
            return y.sum()
        try:
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        except RuntimeError:
            if not caught:
                raise
            g = torch.zeros(3)
        return (y * g).sum()

    def loss(p, x):
        return f(p, x.detach().requires_grad_())

    x, p = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 0.5, 0.2])
    step = ff.remat(ff.value_and_grad(loss))
    step(p, x)
    inner.append(1)
    with pytest.raises(RuntimeError, match="did not when first called"):
        step(p, x)


def test_rrelu_is_refused_by_its_name_and_that_of_the_unit():
    """Of the noise that torch saves, a part was never written."""

    @ff.unit
    def leaky(w):
        return torch.nn.functional.rrelu(w, training=True)

    step = ff.remat(ff.value_and_grad(lambda w: leaky(w).sum()))
    with pytest.raises(RuntimeError, match="unit 'leaky' under remat .* rrelu"):
        step(torch.linspace(-1, 1, 64))
