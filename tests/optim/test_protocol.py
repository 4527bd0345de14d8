"""An optimizer of one's own with a fused kernel, by the protocol alone.

Heavy ball, written after `fsfunc.optim.optimizer`: its equation as ``update``, and a
kernel of torch's as ``apply``. The rate is a power of 2, so both have the same bits.
"""

from types import SimpleNamespace

import pytest
import torch

import fsfunc as ff
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import zeros_like
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import GradientScope
from tests.checks import close, same, unchanged
from tests.optim.steps import ALONE, WS, X, data, loss, trained
from tests.optim.trees import donated

RATE, BETA = 0.25, 0.875


def heavy_ball(apply=None):
    """m = beta m + g, p = p - rate m."""

    def step(p, g, m, decay):
        m = BETA * m + g
        return -RATE * m, m

    def update(grads, m, params=None):
        like = grads if params is None else params
        return tuple(Matched.of(like, grads, m).map_rule(step))

    return ff.Optimizer(zeros_like, update, apply, elementwise=True)


def by_kernel(calls):
    """Its ``apply``; ``calls`` are of how many tensors each call of the kernel is."""

    def kernel(params, grads, momenta):
        calls.append(len(params))
        assert all(x.is_contiguous() for x in (*params, *grads, *momenta))
        torch._foreach_mul_(momenta, BETA)
        torch._foreach_add_(momenta, grads)
        torch._foreach_add_(params, momenta, alpha=-RATE)

    def apply(grads, m, params):
        matched = Matched.of(params, grads, m)
        yield
        return tuple(run_kernel(matched, kernel))

    return apply


STACKS = {
    "alone": (lambda s, mesh: s, ALONE),
    "donated": (lambda s, mesh: ff.donate(s), ALONE),
    "zero=1": (lambda s, mesh: data(s, mesh, zero=1), None),
    "zero=2": (lambda s, mesh: data(s, mesh, zero=2), None),
    "zero=3": (lambda s, mesh: data(s, mesh, zero=3), None),
    "donated shard": (lambda s, mesh: ff.donate(data(s, mesh)), None),
    "remat": (lambda s, mesh: data(ff.remat(s), mesh), None),
    "accumulate": (lambda s, mesh: data(ff.accumulate(s, 2), mesh), None),
    "offload": (
        lambda s, mesh: ff.offload(data(s, mesh), params="host", moments="host"),
        None,
    ),
    "moments offloaded": (
        lambda s, mesh: ff.donate(ff.offload(data(s, mesh), moments="host")),
        None,
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_kernel_is_its_equation_in_every_stack(name):
    calls, (stack, mesh) = [], STACKS[name]
    mesh = mesh or ff.make_mesh({"data": 2}, "simulated")
    batches = X, X.flip(0), -X
    mine, plain = [
        trained(stack, heavy_ball(apply), batches=batches, mesh=mesh)
        for apply in (by_kernel(calls), None)
    ]
    for found, expected in zip(mine, plain, strict=True):
        same((found.params, found.losses), (expected.params, expected.losses))
        same(ff.tree.map(_held, found.state), ff.tree.map(_held, expected.state))
    assert calls and max(calls) <= len(WS)

    params, m = [w.clone() for w in WS], [torch.zeros_like(w) for w in WS]
    for x in batches:  # the plain program
        _, grads = ff.value_and_grad(loss)(params, x)
        m = [BETA * m + g for m, g in zip(m, grads, strict=True)]
        params = [p - RATE * m for p, m in zip(params, m, strict=True)]
    close(mine[0].params, params, 1e-5)


def _held(x):
    return x.local if isinstance(x, ff.Sharded) else x


def test_it_writes_what_is_donated_and_nothing_else():
    optimizer, p, g = heavy_ball(by_kernel([])), torch.ones(3), torch.ones(3)
    m = optimizer.init(p)
    with unchanged(p, g, m):
        pure = optimizer.apply(g, m, p)
    with unchanged(g), donated():
        kept = optimizer.apply(g, m, p)
    same(pure, kept)
    assert kept[0] is p and kept[1] is m


def test_what_has_no_gradient_stays_as_it_is():
    params = {"w": torch.ones(3), "still": torch.ones(2), "n": 4}
    grads = {"w": torch.ones(3), "still": None, "n": None}
    m = zeros_like(params)
    mine, plain = [
        heavy_ball(apply).apply(grads, m, params) for apply in (by_kernel([]), None)
    ]
    same(mine, plain)
    assert mine[0]["still"] is params["still"] and mine[1]["n"] is None


def late(grads, state, params):
    raise RuntimeError("a collective failed")
    yield


def at_once(grads, state, params):
    params["a"].zero_()
    return params, state


@pytest.mark.parametrize("first", [by_kernel([]), at_once], ids=["phases", "at once"])
def test_of_two_that_share_a_step_none_writes_before_both_are_ready(first):
    both = {"a": heavy_ball(first), "b": heavy_ball(late)}
    optimizer = ff.ema(ff.partition(both, lambda path, leaf: path))
    w = {"a": torch.ones(2), "b": torch.ones(2)}
    state, grads = optimizer.init(w), ff.tree.map(torch.clone, w)
    with donated(), unchanged(w, state), pytest.raises(RuntimeError, match="a collect"):
        optimizer.apply(grads, state, w)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (ff.step_in_backward(ff.sgd(1.0)), "did not see these gradients"),
        (ff.sgd(1.0)._replace(init=ff.lion().init), "another optimizer has made"),
    ],
    ids=["step_in_backward", "replaced"],
)
def test_what_shares_a_step_refuses_before_another_writes(second, message):
    both = {"a": ff.sgd(1.0), "b": second}
    optimizer = ff.partition(both, lambda path, leaf: path)
    w = {"a": torch.ones(2), "b": torch.ones(2)}
    state, grads = optimizer.init(w), ff.tree.map(torch.clone, w)
    with donated(), unchanged(w, state), pytest.raises(ValueError, match=message):
        optimizer.apply(grads, state, w)


@pytest.mark.parametrize("states", [1, 3])
def test_a_chain_that_takes_gradients_refuses_a_state_of_another_length(states):
    scaled = ff.loss_scale(ff.sgd(1.0))
    optimizer = ff.chain(scaled, ff.scale(0.5))
    step = optimizer(ff.value_and_grad(lambda w: w.sum()))
    w = torch.ones(2)
    state = ff.TrainState(w, (scaled.init(w), (), ())[:states])
    with pytest.raises(ValueError, match="a chain of 2 was given a state of"):
        step(state)


@pytest.mark.parametrize(
    "around",
    [
        lambda o: o,
        lambda o: ff.partition({"w": o}, lambda path, leaf: path),
        ff.master_weights,
        lambda o: ff.schedule_free(o, 0.5),
        lambda o: ff.chain(ff.scale(0.5), o),
    ],
    ids=["alone", "partition", "master_weights", "schedule_free", "chain"],
)
def test_what_has_nothing_to_write_may_end_at_once(around):
    def apply(grads, state, params):
        if not any(grads["w"]):
            return params, state
        yield
        return ff.tree.map(torch.sub, params, grads), state

    still = lambda grads, state, params=None: (ff.tree.map(lambda g: -g, grads), state)  # noqa: E731
    optimizer = around(ff.Optimizer(lambda params: (), still, apply))
    w, g = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    same(optimizer.apply(g, optimizer.init(w), w)[0], w)


def test_a_generator_that_a_plain_function_returns_is_run():
    apply = by_kernel([])
    hidden = heavy_ball(lambda *args: apply(*args))
    p, g = torch.ones(3), torch.ones(3)
    shown = heavy_ball(apply).apply(g, zeros_like(p), p)
    same(hidden.apply(g, zeros_like(p), p), shown)


def test_what_sees_gradients_taken_reads_it_in_the_step():
    class Seen(ff.Interpretation):
        count = 0

        def gradient(self, run):
            def counted(call):
                self.count += 1
                return run(call)

            return counted

    def counting(seen=None):  # its rate is how many gradient calls it saw
        def update(grads, state, params=None):
            return ff.tree_scale(grads, -float(seen.count)), state + seen.count

        def interprets(state):
            seen = Seen()
            return GradientScope((seen,), counting(seen))

        return ff.Optimizer(lambda params: 0, update, interprets=interprets)

    optimizer = ff.chain(ff.scale(0.5), ff.master_weights(counting()))
    step = optimizer(ff.value_and_grad(lambda w, x: (w * x).sum()))
    w, x = torch.zeros(2), torch.tensor([2.0, 4.0])
    state = SimpleNamespace(
        params=w,
        opt_state=optimizer.init(w),
        apply_gradients=lambda g, o: o.apply(g, optimizer.init(w), w),
    )
    (params, after), _ = step(state, x)
    same(params, torch.tensor([-1.0, -2.0]))
    assert after[1].inner == 1


def test_an_optimizer_is_its_functions_and_one_can_be_replaced():
    optimizer = heavy_ball(by_kernel([]))
    init, update, apply = optimizer
    assert (init, update, apply) == (optimizer.init, optimizer[1], optimizer.apply)
    frozen = optimizer._replace(init=lambda params: None)
    assert frozen.init(torch.ones(3)) is None and frozen.elementwise
    p, g = torch.ones(3), torch.ones(3)
    same(frozen.apply(g, zeros_like(p), p), optimizer.apply(g, zeros_like(p), p))
