"""On CUDA a backward pass runs in a thread without a context; inside ours it does not.

Every test runs its backward passes as on CUDA (``tests/threaded.py``).
"""

import asyncio
import threading
from contextvars import ContextVar

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import frame
from fsfunc.runtime.scopes import Scoped
from tests import threaded
from tests.models import chain, floats, layers, train_step
from tests.planning.comparing import facts

pytestmark = pytest.mark.usefixtures("as_on_cuda")
ADAM = ff.sharded_adam(1e-3)
NAME = ContextVar("name", default="nobody")


def is_on():
    return torch._C._is_multithreading_enabled()


def asked_for(x):
    return x.detach().requires_grad_()


# The second thread is what autograd's own is


@pytest.mark.parametrize(
    ("around", "look"),
    [
        (lambda: torch.autocast("cpu"), lambda: torch.is_autocast_enabled("cpu")),
        (lambda: torch.device("meta"), lambda: torch.empty(1).device.type),
        (torch.no_grad, torch.is_grad_enabled),
    ],
)
def test_the_second_thread_has_torchs_state_and_an_empty_context(around, look):
    seen = []

    def note():
        seen.append((look(), NAME.get(), threading.get_ident()))

    with Scoped(NAME, "somebody"), around():
        note()
        threaded.in_another_thread(note)
    (here, name, mine), (there, nobody, another) = seen
    assert here == there and mine != another
    assert (name, nobody) == ("somebody", "nobody")


def fails(_):
    raise LookupError("in a hook")


def test_what_a_hook_raises_comes_as_it_is():
    y = asked_for(torch.ones(2)) * 2
    y.register_hook(fails)
    with pytest.raises(LookupError, match="in a hook"):
        y.sum().backward()


# Whatever runs a user's code runs its backward passes there


def called(look):
    """A function of one tensor, that calls ``look``."""
    return lambda x: (look(), x * 2)[1]


def total(look):
    return lambda x: called(look)(x).sum()


def within(context, look):
    with context:
        look()


X = torch.ones(2)
ABSTRACT = ff.make_mesh({"data": 2}, "abstract")
WITHIN = {
    "a transform": lambda look: ff.remat(called(look))(X),
    "jit": lambda look: ff.jit(called(look))(X),
    "a whole step": lambda look: ff.jit(ff.remat(called(look)), whole_step=True)(X),
    "precision": lambda look: ff.precision(called(look), torch.bfloat16)(X),
    "donate": lambda look: ff.donate(called(look))(X.clone()),
    "a gradient call": lambda look: ff.value_and_grad(total(look))(X),
    "a unit": lambda look: ff.unit(called(look))(X),
    "a unit that is checked": lambda look: ff.remat(ff.unit(called(look)))(X),
    "spmd": lambda look: ff.spmd(look, ABSTRACT)(),
    "a ledger": lambda look: within(ff.ledger(), look),
    "live bytes": lambda look: within(ff.testing.live_bytes(), look),
    "a plan": lambda look: ff.plan(called(look), X),
    "a program": lambda look: ff.program(called(look), X),
    "a program in a step": lambda look: ff.remat(lambda x: ff.program(called(look), x))(
        X
    ),
}


@pytest.mark.parametrize("where", WITHIN)
def test_a_backward_pass_has_the_context_of_its_caller(where):
    seen = []

    def look():
        with torch.enable_grad():
            y = asked_for(torch.ones(2)) * 2
        y.register_hook(lambda g: seen.append((NAME.get(), threading.get_ident())))
        with Scoped(NAME, "somebody"):
            y.sum().backward()

    WITHIN[where](look)
    assert set(seen) == {("somebody", threading.get_ident())}
    assert is_on()


def test_a_recompute_that_nobody_is_around_has_one_too():
    """The second thread computes again, and takes a gradient: in that very thread."""
    seen = []

    @ff.unit
    def squared(w, x):
        y = (w * x).sin()
        y.register_hook(lambda g: seen.append(threading.get_ident()))
        (g,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        return g * y

    w = asked_for(X)
    ff.remat(squared)(w, X).sum().backward()
    expected = asked_for(X)
    (expected.cos() * expected.sin()).sum().backward()
    torch.testing.assert_close(w.grad, expected.grad)
    assert len(set(seen)) == 2


def test_threads_stay_off_under_torch_func():
    seen = []

    def loss(x):
        seen.append(is_on())
        return (x * x).sum()

    torch.func.grad(ff.remat(loss))(X)
    assert seen == [False] and is_on()


@pytest.mark.parametrize("where", WITHIN)
def test_after_an_error_threads_are_on_again(where):
    with pytest.raises(LookupError):
        WITHIN[where](lambda: fails(None))
    assert is_on()


def by_ours(loss):
    return lambda ps, x: ff.value_and_grad(loss)(ps, x)[0]


def by_stock(loss):
    def step(ps, x):
        ps = ff.tree.map(asked_for, ps)
        value = loss(ps, x)
        torch.autograd.grad(value, ff.tree.leaves(ps))
        return value.detach()

    return step


def by_backward(loss):
    def step(ps, x):
        value = loss(ff.tree.map(asked_for, ps), x)
        value.backward()
        return value.detach()

    return step


@pytest.mark.parametrize("gradient", (by_ours, by_stock, by_backward))
@pytest.mark.parametrize("remat", (False, True))
def test_a_hook_of_a_users_unit_sees_the_step(gradient, remat):
    """The transforms in force, and the mesh, both as the unit itself does."""
    seen, expected = [], []

    def look():
        return len(frame().handlers), maybe_here()

    @ff.unit
    def hooked(p, x):
        y = x @ p["w"]
        if y.requires_grad:
            expected.append(look())
            y.register_hook(lambda g: seen.append(look()))
        return torch.tanh(y)

    step = gradient(chain(hooked))
    step = ff.shard(ff.remat(step) if remat else step, ABSTRACT, "data")

    def main():
        ps, x = layers(2, bias=False), floats(2, 4)
        step(ff.place(step, ps, x), x)

    ff.spmd(main, ABSTRACT)()
    assert [at.mesh for _, at in seen] == [ABSTRACT] * len(seen)
    assert {n for n, _ in seen} == {n for n, _ in expected} == {1 + remat}


# Plans and ledgers


def planned(transforms):
    mesh = ff.make_mesh({"data": 4}, "abstract")
    step = ff.shard(transforms(train_step(chain(), ADAM)), mesh, "data")

    def main():
        x = floats(8, 4)
        state = ff.init_state(step, lambda: layers(3), ADAM, x)
        return ff.plan(step, state, x)

    return main, mesh


STACKS = {
    "plain": lambda f: f,
    "remat": ff.remat,
    "rows": lambda f: ff.accumulate(f, 2),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_plan_has_what_a_backward_pass_does(name):
    def plan():  # of a step of the calling process, as on a card
        main, mesh = planned(STACKS[name])
        (found,) = ff.spmd(main, mesh)()
        rank = found.ranks[0]
        flops = {key: work.flops for key, work in rank.work.items()}
        return facts(rank.records), rank.peak_bytes, flops

    found = plan()
    with torch.autograd.set_multithreading_enabled(False):
        expected = plan()
    assert found == expected
    assert {r[5] for r in found[0]} >= {"forward", "backward"}


def test_a_plan_on_one_device_has_what_a_backward_pass_does():
    def plan():
        found = ff.plan(ff.value_and_grad(chain()), layers(3), floats(8, 4))
        return found.flops, found.peak_bytes

    found = plan()
    with torch.autograd.set_multithreading_enabled(False):
        assert found == plan()


@pytest.mark.parametrize("how", ["inference mode is left", "another thread"])
def test_a_frame_within_a_frame_turns_threads_off_again(how):
    seen, inner = [], ff.value_and_grad(lambda w: (seen.append(is_on()), w.sum())[1])

    def within(w):
        if how == "another thread":
            asyncio.run(asyncio.to_thread(inner, w))
        else:
            with torch.inference_mode(False):
                inner(w)
                seen.append(is_on())
        seen.append(is_on())
        return w.sum()

    ff.value_and_grad(within)(torch.ones(3))
    assert seen[0] is seen[-1] is False
    assert is_on()


LEDGERS = """
    import torch, fsfunc as ff
    from tests import threaded
    from tests.models import chain, floats, layers, train_step

    adam, m = ff.sharded_adam(1e-3), 2
    data, pipe = (ff.make_mesh({axis: 2}) for axis in ("data", "pipe"))
    stacks = {
        "zero=3": lambda f: ff.shard(f, data, "data"),
        "zero=1": lambda f: ff.shard(f, data, "data", zero=1),
        "remat": lambda f: ff.shard(ff.remat(f), data, "data"),
        "accumulate": lambda f: ff.shard(ff.accumulate(f, m), data, "data"),
        "pipeline": lambda f: ff.pipeline(f, pipe, "pipe", n_microbatches=m),
    }

    def sent(transformed):
        step, x = transformed(train_step(chain(), adam)), floats(4, 4)
        state = ff.init_state(step, lambda: layers(4), adam, x)
        with ff.ledger() as log:
            state, loss = step(state, x)
        rows = [(r.op, r.axis, r.bytes, r.unit, r.phase) for r in log.records]
        return loss.item(), rows

    expected = {name: sent(f) for name, f in stacks.items()}
    threaded.begin()
    for name, f in stacks.items():
        assert sent(f) == expected[name], name
        print(name, [row[-1] for row in expected[name][1]].count("backward"))
"""


@pytest.mark.processes(slow=False)
def test_a_ledger_of_processes_has_what_a_backward_pass_sends(processes):
    said = [line.split() for line in processes(LEDGERS, 2).splitlines()]
    assert len(said) == 10
    assert all(name == "pipeline" or int(count) for name, count in said)
