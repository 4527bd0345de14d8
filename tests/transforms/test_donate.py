"""`donate`: the same bits in less memory, and no way to use what is gone."""

import hashlib

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.runtime.save_guard import hold
from tests.checks import same
from tests.models import train_step
from tests.probes import LiveBytes

D = 4
GENERATOR = torch.Generator().manual_seed(0)
P = {
    "blocks": [torch.randn(D, D, generator=GENERATOR) for _ in range(2)],
    "bias": torch.randn(3, generator=GENERATOR),
}
X = torch.randn(4, D, generator=GENERATOR)
MESH = ff.make_mesh({"data": 2}, "simulated")
OPTIMIZERS = {
    "adam": lambda: ff.sharded_adam(0.1, weight_decay=0.01),
    "clipped": lambda: ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.1)),
    "momentum": lambda: ff.sgd(0.1, momentum=0.9),
    "sgd": lambda: ff.sgd(0.1),
}


@ff.unit
def block(w, x):
    return torch.tanh(x @ w)


def loss(p, x):
    for w in p["blocks"]:
        x = block(w, x)
    return (x**2).mean() + (p["bias"] ** 2).sum()


def fresh():
    return tree.map(torch.clone, P)


def step_of(optimizer):
    return train_step(loss, optimizer)


def sharded(step, zero):
    return step if zero is None else ff.shard(step, MESH, "data", zero=zero)


def everywhere(main, zero):
    """What ``main`` returns on each rank, or alone where nothing is sharded."""
    return [main()] if zero is None else list(ff.spmd(main, MESH)())


def digest(state):
    """Of all bytes of a state, in order."""
    found = hashlib.sha256()
    for x in tree.leaves(state):
        data = x.contiguous().numpy().tobytes() if isinstance(x, torch.Tensor) else x
        found.update(repr(data).encode())
    return found.hexdigest()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_donated_equals_not_donated_and_only_it_changes_its_input(name, zero) -> None:
    def train(donated):
        optimizer = OPTIMIZERS[name]()
        step = sharded(step_of(optimizer), zero)
        step = ff.donate(step) if donated else step
        state = ff.init_state(step, fresh, optimizer, X)
        values = []
        for _ in range(3):
            before = digest(state)
            old = state
            state, value = step(state, X)
            if not donated:
                assert digest(old) == before
            values.append(value)
        return ff.unshard(state), values

    def main():
        return train(False), train(True)

    for plain, donated in everywhere(main, zero):
        same(donated, plain)


@pytest.mark.parametrize("zero", [None, 3])
def test_donate_inside_and_outside_of_the_other_transforms(zero) -> None:
    optimizer = ff.sharded_adam(0.1)

    def train(around):
        step = around(step_of(optimizer))
        state = ff.init_state(step, fresh, optimizer, X)
        for _ in range(2):
            state, _ = step(state, X)
        return ff.unshard(state.params)

    orders = [
        lambda f: ff.remat(sharded(f, zero)),
        lambda f: ff.donate(ff.remat(sharded(f, zero))),
        lambda f: sharded(ff.remat(ff.donate(f)), zero),
        lambda f: ff.remat(ff.donate(sharded(f, zero))),
    ]
    pure, *donated = everywhere(lambda: [train(o) for o in orders], zero)[0]
    same(donated, [pure] * 3)


def test_it_takes_less_memory() -> None:
    optimizer = ff.sharded_adam(0.1)
    w = torch.ones(256, 256)
    size = w.nbytes
    step = optimizer(ff.value_and_grad(lambda w: (w * 2).sum()))
    state = ff.TrainState(w, optimizer.init(w))

    def peak(step):
        with LiveBytes(state) as memory:
            step(state)
        return memory.peak / size

    plain, donated = peak(step), peak(ff.donate(step))
    assert plain - donated > 1.9, (plain, donated)  # parameters and moments anew


def test_a_donated_plain_state_is_refused_by_its_path() -> None:
    optimizer = ff.sharded_adam(0.1)
    step = ff.donate(step_of(optimizer))
    state = ff.TrainState(fresh(), None)
    state = state.replace(opt_state=optimizer.init(state.params))
    new, _ = step(state, X)
    with pytest.raises(RuntimeError, match="'params/bias'.*donated.*go on with"):
        step(state, X)
    step(new, X)
    mixed = new.replace(params=fresh())
    with pytest.raises(RuntimeError, match="'opt_state/.*donated"):
        step(mixed, X)


def test_a_plain_state_that_ranks_share_is_donated_once() -> None:
    optimizer = ff.sgd(1.0)
    state = ff.TrainState(fresh(), optimizer.init(fresh()))
    donated = ff.donate(ff.shard(step_of(optimizer), MESH, "data"))
    with pytest.raises(RuntimeError, match="'params/bias'.*a state of its own"):
        ff.spmd(lambda: donated(state, ff.local_batch(X, MESH, "data")), MESH)()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_donated_sharded_state_is_refused_everywhere(zero) -> None:
    optimizer = ff.sharded_adam(0.1)

    def main():
        plain = ff.shard(step_of(optimizer), MESH, "data", zero=zero)
        state = ff.init_state(plain, fresh, optimizer, X)
        ff.donate(plain)(state, X)
        uses = [
            lambda: ff.donate(plain)(state, X),
            lambda: plain(state, X),
            lambda: ff.unshard(state),
            lambda: tree.map(lambda x: x, state),
            lambda: torch.utils._pytree.tree_map(lambda x: x, state.params["blocks"]),
            lambda: ff.global_norm(state.params["blocks"]),
            lambda: state.params["blocks"][0].local,
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match=r"(blocks/0|bias).*donated"):
                use()

    ff.spmd(main, MESH)()


class Boom(Exception):
    pass


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("zero", [None, 0, 1, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_raises_leaves_the_state_or_says_that_it_is_spoiled(
    name, zero, when
) -> None:
    """Before it writes: the state is as it was. After: whoever uses it is told."""

    def main():
        optimizer, armed = OPTIMIZERS[name](), []

        def step(state, x):
            value, grads = ff.value_and_grad(loss)(state.params, x)
            if armed and when == "before":
                raise Boom
            state = state.apply_gradients(grads, optimizer)
            if armed:
                raise Boom
            return state, value

        step = ff.donate(sharded(step, zero))
        state = ff.init_state(step, fresh, optimizer, X)
        expected = ff.unshard(step(ff.init_state(step, fresh, optimizer, X), X))
        before = digest(state)
        armed.append(True)
        with pytest.raises(Boom) as info:
            step(state, X)
        armed.clear()
        if when == "before":
            assert digest(state) == before
            return same(ff.unshard(step(state, X)), expected)
        assert "neither the old one nor the new one" in info.value.__notes__[0]
        with pytest.raises(RuntimeError, match="neither the old one nor the new"):
            step(state, X)

    everywhere(main, zero)


@pytest.mark.parametrize("zero", [None, 0, 2, 3])
@pytest.mark.parametrize("alias", ["itself", "mapped", "view"])
def test_what_lies_in_the_state_twice_changes_once(zero, alias) -> None:
    """An average that starts as the parameters themselves is not the parameters."""
    optimizer = ff.sgd(0.1)

    def step(state, x):
        value, grads = ff.value_and_grad(loss)(state.params, x)
        new = state.apply_gradients(grads, optimizer)
        ema = tree.map(lambda a, b: a + b, state.extra, new.params)
        return new.replace(extra=ema), value

    def train(around):
        f = around(sharded(step, zero))

        def start(p, x):
            return f(ff.TrainState(p, optimizer.init(p), extra=p), x)

        first = ff.place(start, fresh(), X)
        again = {
            "itself": first,
            "mapped": tree.map(lambda x: x, first),
            "view": tree.map(lambda x: x.view(x.shape), first),
        }[alias]
        state = ff.TrainState(first, optimizer.init(first), extra=again)
        for _ in range(2):
            state, _ = f(state, X)
        return ff.unshard((state.params, state.extra))

    everywhere(lambda: same(train(ff.donate), train(lambda f: f)), zero)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_held_memory_is_left_as_it_is(name, zero) -> None:
    """What somebody reads in the background a donated step does not write into."""

    def main():
        optimizer = OPTIMIZERS[name]()
        step = sharded(step_of(optimizer), zero)
        state = ff.init_state(step, fresh(), optimizer, X)
        expected = digest(ff.unshard(step(step(state, X)[0], X)[0]))
        parts = [x.detach() for x in tree.leaves(state) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in parts]
        release = hold(parts)
        donated = ff.donate(step)
        new, _ = donated(state, X)
        assert all(map(torch.equal, parts, before))
        with pytest.raises(RuntimeError, match="donated"):
            donated(state, X)
        release()
        where = [x.data_ptr() for x in tree.leaves(new.params)]
        newer, _ = donated(new, X)  # held no more: in place again
        assert [x.data_ptr() for x in tree.leaves(newer.params)] == where
        return digest(ff.unshard(newer)) == expected

    assert all(everywhere(main, zero))


MASKED = {
    **OPTIMIZERS,
    "torch's": lambda: ff.from_torch(torch.optim.RMSprop, lr=0.1),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("zero", [1, 2])
def test_ranks_agree_on_what_to_gather_where_one_of_them_wrote_nothing(name, zero):
    """A leaf that is not trained fills the first rank's whole range."""
    params = {"a": torch.ones(D, D), "b": torch.eye(D)}

    @ff.unit
    def both(p, x):
        return torch.tanh(x @ p["a"]) @ p["b"]

    def train(step, optimizer):
        state = ff.init_state(step, params, optimizer, X)
        for _ in range(3):
            state, _ = step(state, X)
        return ff.unshard(state.params)

    def main(zero):
        trained = ff.masked(MASKED[name](), lambda path, leaf: path == "b")
        gradients = ff.value_and_grad(lambda p, x: both(p, x).square().mean())
        return train(ff.donate(sharded(trained(gradients), zero)), trained)

    expected = main(None)
    for found in ff.spmd(lambda: main(zero), MESH)():
        assert torch.equal(found["a"], expected["a"])
        assert torch.allclose(found["b"], expected["b"], atol=1e-6)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("first", ["pure", "donated"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_graph_over_weights_of_a_donated_state_is_right(zero, first, compute):
    """Or raises: whether the state lies in the gathered buffer, or beside it."""
    unit = ff.unit(lambda w, x: x @ w)
    optimizer, x = ff.sharded_adam(0.1), torch.ones(2, 4)
    loss = lambda w, x: unit(w, x).float().sum()  # noqa: E731
    train = optimizer(ff.precision(ff.value_and_grad(loss), compute))
    train = sharded(train, zero)
    call = sharded(ff.precision(lambda w, x: unit(w, x), compute), zero)

    def main():
        state = ff.init_state(train, lambda: torch.ones(4, 4), optimizer, x)
        state, _ = (train if first == "pure" else ff.donate(train))(state, x)
        call(state.params, x)
        over = x.clone().requires_grad_()
        y = call(state.params, over)
        expected = ff.unshard(state.params).to(compute).float().sum(1).expand(2, 4)
        state, _ = ff.donate(train)(state, x)
        call(state.params, x)
        if first == "donated" and compute == torch.float32:
            # The graph holds the state's own memory, which was left as it is.
            assert torch.equal(torch.autograd.grad(y.sum(), over)[0], expected)
            return
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), over)

    ff.spmd(main, MESH)()
