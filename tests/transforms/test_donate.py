"""`donate`: less memory, and no way to use what is gone.

That it gives the same bits is held by `test_donate_reads` and `test_shard_laws`.
"""

import hashlib

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.donated import lock
from tests.checks import close, same, simulated, trained
from tests.models import WIDTH, chain, floats, layer, layers, train_step
from tests.probes import LiveBytes

X, MESH = floats(4, WIDTH, seed=5), simulated(2)
OPTIMIZERS = {
    "adam": lambda: ff.sharded_adam(0.1, weight_decay=0.01),
    "sgd": lambda: ff.sgd(0.1),
    "torch's": lambda: ff.from_torch(torch.optim.RMSprop, lr=0.1),
}
SOME = pytest.mark.parametrize(
    ("name", "zero"), [("adam", None), ("adam", 2), ("sgd", 0), ("adam", 3)]
)


def loss(p, x):
    return chain()(p["blocks"], x) + (p["bias"] ** 2).sum()


def fresh():
    return {"blocks": layers(make=floats, bias=False), "bias": floats(3)}


def sharded(step, zero):
    return step if zero is None else ff.shard(step, MESH, "data", zero=zero)


def rows_of(zero):
    """The rank's rows, or all where nothing is sharded."""
    return X if zero is None else ff.local_batch(X, MESH, "data")


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


def test_it_takes_less_memory():
    optimizer, w = ff.sharded_adam(0.1), torch.ones(256, 256)
    size = w.nbytes
    step = optimizer(ff.value_and_grad(lambda w: (w * 2).sum()))
    state = ff.TrainState(w, optimizer.init(w))

    def peak(step):
        with LiveBytes(state) as memory:
            step(state)
        return memory.peak / size

    plain, donated = peak(step), peak(ff.donate(step))
    assert plain - donated > 1.9, (plain, donated)  # parameters and moments anew


def test_a_donated_plain_state_is_refused_by_its_path():
    optimizer = ff.sharded_adam(0.1)
    step = ff.donate(train_step(loss, optimizer))
    state = ff.TrainState(fresh(), optimizer.init(fresh()))
    new, _ = step(state, X)
    with pytest.raises(RuntimeError, match="'params/bias'.*donated.*go on with"):
        step(state, X)
    step(new, X)
    with pytest.raises(RuntimeError, match="'opt_state/.*donated"):
        step(new.replace(params=fresh()), X)
    step = ff.donate(ff.shard(lambda state: state, MESH, "data"))
    state = ff.TrainState(fresh(), optimizer.init(fresh()))
    shared = ff.spmd(lambda: ff.place(step, state), MESH)()[0]
    with pytest.raises(RuntimeError, match="'params/bias'.*a state of its own"):
        ff.spmd(lambda: step(shared), MESH)()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_donated_sharded_state_is_refused_everywhere(zero):
    optimizer = ff.sharded_adam(0.1)

    def main():
        plain = ff.shard(train_step(loss, optimizer), MESH, "data", zero=zero)
        x = rows_of(zero)
        state = ff.init_state(plain, fresh, optimizer, x)
        ff.donate(plain)(state, x)
        for use in (
            lambda: ff.donate(plain)(state, x),
            lambda: plain(state, x),
            lambda: ff.unshard(state),
            lambda: tree.map(lambda x: x, state),
            lambda: torch.utils._pytree.tree_map(lambda x: x, state.params["blocks"]),
            lambda: ff.global_norm(state.params["blocks"]),
            lambda: state.params["blocks"][0]["w"].local,
        ):
            with pytest.raises(RuntimeError, match=r"(blocks/0|bias).*donated"):
                use()

    ff.spmd(main, MESH)()


class Boom(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "zero", "when"),
    [("adam", None, "after"), ("adam", 2, "before"), ("sgd", 0, "after"),
     ("adam", 3, "after"), ("adam", 3, "before")],
)  # fmt: skip
def test_a_step_that_raises_leaves_the_state_or_says_that_it_is_spoiled(
    name, zero, when
):
    """Before it writes: the state is as it was. After: whoever uses it is told."""

    def main():
        optimizer, armed, rows = OPTIMIZERS[name](), [], rows_of(zero)

        def step(state, x):
            value, grads = ff.value_and_grad(loss)(state.params, x)
            if armed and when == "before":
                raise Boom
            state = state.apply_gradients(grads, optimizer)
            if armed:
                raise Boom
            return state, value

        step = ff.donate(sharded(step, zero))
        state = ff.init_state(step, fresh, optimizer, rows)
        expected = ff.unshard(step(ff.init_state(step, fresh, optimizer, rows), rows))
        before = digest(state)
        armed.append(True)
        with pytest.raises(Boom) as info:
            step(state, rows)
        armed.clear()
        if when == "before":
            assert digest(state) == before
            return same(ff.unshard(step(state, rows)), expected)
        assert "neither the old one nor the new one" in info.value.__notes__[0]
        with pytest.raises(RuntimeError, match="neither the old one nor the new"):
            step(state, rows)

    everywhere(main, zero)


@pytest.mark.parametrize(
    ("zero", "alias"),
    [(None, "itself"), (0, "mapped"), (3, "view"), (3, "itself"), (None, "view")],
)
def test_what_lies_in_the_state_twice_changes_once(zero, alias):
    """An average that starts as the parameters themselves is not the parameters."""
    optimizer = ff.sgd(0.1)

    def step(state, x):
        value, grads = ff.value_and_grad(loss)(state.params, x)
        new = state.apply_gradients(grads, optimizer)
        ema = tree.map(lambda a, b: a + b, state.extra, new.params)
        return new.replace(extra=ema), value

    def train(around):
        f, rows = around(sharded(step, zero)), rows_of(zero)

        def start(p, x):
            return f(ff.TrainState(p, optimizer.init(p), extra=p), x)

        first = ff.place(start, fresh(), rows)
        again = {
            "itself": first,
            "mapped": tree.map(lambda x: x, first),
            "view": tree.map(lambda x: x.view(x.shape), first),
        }[alias]
        state = ff.TrainState(first, optimizer.init(first), extra=again)
        for _ in range(2):
            state, _ = f(state, rows)
        return ff.unshard((state.params, state.extra))

    everywhere(lambda: same(train(ff.donate), train(lambda f: f)), zero)


@SOME
def test_held_memory_is_left_as_it_is(name, zero):
    """What somebody reads in the background a donated step does not write into."""

    def main():
        optimizer, rows = OPTIMIZERS[name](), rows_of(zero)
        step = sharded(train_step(loss, optimizer), zero)
        state = ff.init_state(step, fresh(), optimizer, rows)
        expected = digest(ff.unshard(step(step(state, rows)[0], rows)[0]))
        parts = [x.detach() for x in tree.leaves(state) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in parts]
        release = lock(parts)
        donated = ff.donate(step)
        new, _ = donated(state, rows)
        assert all(map(torch.equal, parts, before))
        with pytest.raises(RuntimeError, match="donated"):
            donated(state, rows)
        release()
        where = [x.data_ptr() for x in tree.leaves(new.params)]
        newer, _ = donated(new, rows)  # held no more: in place again
        assert [x.data_ptr() for x in tree.leaves(newer.params)] == where
        return digest(ff.unshard(newer)) == expected

    assert all(everywhere(main, zero))


@pytest.mark.parametrize(("name", "zero"), [("adam", 1), ("sgd", 2), ("torch's", 2)])
def test_ranks_agree_on_what_to_gather_where_one_of_them_wrote_nothing(name, zero):
    """A leaf that is not trained fills the first rank's whole range."""
    params = {"b": torch.eye(WIDTH), "w": torch.ones(WIDTH, WIDTH)}
    some = ff.masked(OPTIMIZERS[name](), lambda path, leaf: path == "w")
    step = some(ff.value_and_grad(lambda p, x: layer(p, x).square().mean()))
    x = floats(2 * WIDTH, WIDTH, seed=5)  # by parts, to each of which "b" is added
    parts = ff.accumulate(step, 2)
    (one,) = trained(parts, params, some, x, mesh=simulated(1), steps=3)
    donated = ff.donate(sharded(step, zero))
    for run in trained(donated, params, some, x, steps=3):
        close(run.params, one.params)
        assert torch.equal(run.params["b"], params["b"])
