"""A recompute ends where its backward reads nothing more, and nothing else changes.

What is not computed is NaN here, so that whoever reads it is found out.
"""

import copy
import ctypes
import pickle
import weakref
from array import array

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc._torch import DispatchMode
from fsfunc.planning.events import Ran
from fsfunc.testing.comparing import assert_equal
from fsfunc.transforms import unread_tail
from tests.checks import same
from tests.models import floats

D = 4
X = floats(2, 3, D, seed=1)
P = {"a": floats(D, D, seed=2), "b": floats(D, D, seed=3)}


@pytest.fixture(autouse=True)
def nothing_written(monkeypatch):
    def nan(size, stride, dtype, device):
        x = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return x.fill_(torch.nan) if dtype.is_floating_point else x

    monkeypatch.setattr(unread_tail, "unwritten", nan)


class Products(DispatchMode):
    """Counts the products that are computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Saving(torch.autograd.Function):
    """A function of the user's, which saves what it returns where it is told to."""

    @staticmethod
    def forward(ctx, x, saves):
        y = x.sin()
        ctx.save_for_backward(y if saves else x.new_ones(()))
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 + y.detach()), None


def loss_of(body, calls=2):
    unit = ff.unit(body)

    def loss(p, x):
        for _ in range(calls):
            x = unit(p, x)
        return (x * x).sum()

    return unit, loss


def differentiated(loss, p=P, x=X, wrap=lambda f: f):
    torch.manual_seed(5)
    return wrap(ff.value_and_grad(loss))(p, x)


def block(p, x):
    return x + F.linear(F.gelu(F.linear(x, p["a"])), p["b"])


@pytest.mark.parametrize("policy", [None, ff.SaveOnly("none")])
def test_the_last_product_of_a_block_is_not_computed_again(policy):
    unit, loss = loss_of(block, calls=3)
    want = differentiated(loss)
    for _ in range(2):
        with Products() as made:
            got = differentiated(loss, wrap=lambda f: ff.remat(f, policy=policy))
        same(got, want)
        # Forward 6, backward 12 but for the one by the input, and one a recompute.
        assert made.count == 6 + 11 + 3, made.count
    assert [len(tail.ops) for tail in unit.tails.values()] == [3, 3], unit.tails


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
    "own": lambda p, x, h: Saving.apply(h, True),
    "told": lambda p, x, h: h * 2 if h.detach().sum() > 0 else h.sin(),
    "picked": lambda p, x, h: h.index_select(-1, h.detach()[0, 0].argsort()),
    "scale": lambda p, x, h: h * 0.5,
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
    for _ in range(2):
        # A leaf that one unit uses twice is added up in another order.
        assert_equal(found(ff.remat), want, 1e-13)


def switched(turn):
    """Bodies that do something else once ``turn`` is on, after the same operators."""
    return {
        "more": lambda p, x: (lambda y: y.sin() if turn else y)(block(p, x)),
        "other": lambda p, x: (torch.sub if turn else torch.add)(x, block(p, x)),
        "saves": lambda p, x: Saving.apply(block(p, x), bool(turn)),
        "no tail": lambda p, x: block(p, x) if not turn else x * p["a"][0].exp(),
        "shorter": lambda p, x: block(p, x)[:, : 3 if turn else 2] * 2,
        "listened": lambda p, x: turn[0](block(p, x)) if turn else block(p, x),
    }


@pytest.mark.parametrize("kind", switched([]))
def test_a_unit_that_does_something_else_later_is_run_as_a_whole(kind):
    turn, heard = [], []

    def listen(y):
        heard.append(y.detach().sum().item())
        return y

    unit, loss = loss_of(switched(turn)[kind])
    for step in range(4):
        turn[:] = [listen] if step > 1 else []
        want = differentiated(loss)
        told = list(heard)
        heard.clear()
        same(differentiated(loss, wrap=ff.remat), want)
        assert set(heard) == set(told), "a value was told that was not computed"


@pytest.mark.parametrize("what", [lambda y: y, lambda y: y.detach(), lambda y: y[0]])
def test_what_somebody_keeps_was_computed(what):
    kept = []

    def body(p, x):
        y = block(p, x)
        kept.append(what(y))
        return y

    _, loss = loss_of(body, calls=1)
    for _ in range(2):
        differentiated(loss, wrap=ff.remat)
    assert len(kept) == 4 and all(x.isfinite().all() for x in kept), kept


class Written(torch.autograd.Function):
    """Saves memory that it was given, and wrote by other means than torch's."""

    @staticmethod
    def forward(ctx, y, memory):
        memory.numpy()[...] = (y * 1).detach().numpy()
        ctx.save_for_backward(memory)
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y, None


def test_what_a_function_reads_by_other_means_was_computed():
    def body(p, x):
        memory = torch.zeros_like(x)
        return Written.apply(F.linear(x, p["a"] / 8), memory)

    _, loss = loss_of(body)
    want = differentiated(loss)
    for _ in range(2):
        same(differentiated(loss, wrap=ff.remat), want)


READ = {
    "numpy": lambda y: float(y.detach().numpy()[0, 0, 0]),
    "tolist": lambda y: y.tolist()[0][0][0],
    "dlpack": lambda y: float(np.from_dlpack(y.detach())[0, 0, 0]),
    "array": lambda y: float(np.asarray(y.detach())[0, 0, 0]),
    "memory": lambda y: array("f", ctypes.string_at(y.untyped_storage().data_ptr(), 4))[
        0
    ],
    "pickled": lambda y: float(pickle.loads(pickle.dumps(y.detach()))[0, 0, 0]),
    "copied": lambda y: float(copy.deepcopy(y.detach())[0, 0, 0]),
    "printed": lambda y: float(str(y.detach()[0, 0]).split("[")[1].split(",")[0]),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", READ)
def test_what_python_reads_past_the_operators_was_computed(how, turned):
    on = [not turned]  # or a later call is the first that reads

    def body(p, x):
        y = x @ p["a"]
        scale = READ[how](y) if on[0] else 1.0
        column = 3 if abs(scale) > 1e-9 else 0
        z = y + x
        z.register_hook(lambda g: g * scale)
        return z + x[..., column, None]

    _, loss = loss_of(body)
    for _ in range(2):
        want = differentiated(loss)
        same(differentiated(loss, wrap=ff.remat), want)
        on[0] = True


def test_memory_whose_address_a_gpu_s_library_asks_for_was_computed():
    """A tensor of the host has none to tell, and raises once it was asked."""

    def met(read):
        notes = unread_tail.TailNotes()
        with torch.enable_grad():
            notes(lambda x: (y := x.relu(), read(y)), X.clone().requires_grad_())
        return notes.start

    assert met(lambda y: None) < met(lambda y: hasattr(y, "__cuda_array_interface__"))


class Seen(ff.Interpretation):
    """Reads what units return; with ``reads_outputs`` False it says it does not."""

    def __init__(self, reads):
        self.reads_outputs, self.sums = reads, []

    def unit(self, run, call):
        def seen(*args):
            y = run(*args)
            self.sums.append(y.detach().sum().item())
            return y

        return seen


def test_a_transform_that_reads_outputs_is_given_them():
    unit, loss = loss_of(block)
    seen = Seen(True)
    for _ in range(2):
        seen.sums.clear()
        found = ff.remat(ff.transformed(ff.value_and_grad(loss), seen))(P, X)
        first, again = seen.sums[:2], seen.sums[2:]
        assert again == first[::-1], "a recompute told other values"
        same(found, differentiated(loss))
    assert not unit.tails, "a tail was noted that somebody reads"


def test_a_plan_leaves_the_tail_out_too():
    unit, loss = loss_of(block, calls=3)
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
    _, loss = loss_of(block)

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
    _, loss = loss_of(lambda p, x: x + F.linear(inner(F.linear(x, p["a"])), p["b"]))
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
        return z.sum()

    step = ff.remat(ff.value_and_grad(f))
    for _ in range(2):
        step(torch.ones(3), torch.ones(3))
    # Each step runs it twice; the very first run is noted.
    assert held == [True, True, False, True]


@pytest.mark.parametrize("caught", [False, True])
def test_a_unit_may_compute_gradients_itself_at_its_second_call(caught):
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
    for now in ([], [1], [1]):
        inner[:] = now
        found = []
        for step in (ff.value_and_grad(loss), ff.remat(ff.value_and_grad(loss))):
            torch.manual_seed(0)
            found.append(step(p, x))
        same(found[1], found[0])
