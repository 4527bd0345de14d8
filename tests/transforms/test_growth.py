"""Steps leave nothing behind, with Python's garbage collector switched off.

A circle of objects in which a tensor hangs waits for the collector's last generation:
hundreds of steps, of which each leaves its gradients. So there is none.
"""

import gc

import pytest
import torch

import fsfunc as ff
from fsfunc._torch import FakeTensor
from tests.checks import simulated
from tests.models import chain, train_step
from tests.probes import LiveBytes

DATA, PIPE, BOTH = simulated(2), simulated(pipe=2), simulated(data=2, pipe=2)
WIDTH = 8
STEPS, WARM = 10, 6  # what a call learns of its step, it has learnt by `WARM`
# Both even: ranks take turns to come first.
OPTIMIZER = ff.sharded_adam(1e-3)
X = torch.ones(4, WIDTH)

layer = ff.unit(lambda p, x: x + torch.tanh(x @ p))


@ff.unit
def pair(p, x):
    """A unit around two, with a leaf of its own."""
    return layer(p["b"], layer(p["a"], x)) * p["own"]


LOSS = chain(layer)


def flat():
    return [torch.zeros(WIDTH, WIDTH) for _ in range(2)]


def nested():
    a, b = flat()
    return [{"a": a, "b": b, "own": torch.ones(WIDTH)}]


def begin():
    """Lets go of the circles there are; those to come are kept in `gc.garbage`."""
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)


@pytest.fixture
def no_collector():
    """Runs the test without the collector; then no tensor hung in a circle."""
    gc.disable()
    begin()
    try:
        yield
        gc.collect()
        held = [x for x in gc.garbage if isinstance(x, torch.Tensor)]
        assert not [
            x for x in held if x.device.type != "meta" and not isinstance(x, FakeTensor)
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def warm(collected):
    """Modules that torch imports late hold the frames that asked for them."""
    step = ff.shard(train_step(LOSS, OPTIMIZER), DATA, "data")
    ff.spmd(lambda: ff.init_state(step, flat, OPTIMIZER, X), DATA)()


def leaves_nothing(step, init=flat, mesh=DATA, call=None, optimizer=OPTIMIZER):
    """On each rank as many bytes live after `STEPS` steps as after `WARM`.

    ``call(state, x)`` is called in place of the step, whose state it is.
    """

    def main():
        state = ff.init_state(step, init, optimizer, X)
        with LiveBytes() as seen:
            for i in range(STEPS):
                state = step(state, X)[0] if call is None else call(state, X)
                ff.psum(torch.ones(()), tuple(mesh.axes))  # nobody runs ahead
                if i + 1 == WARM:
                    early = seen.live
        return seen.live, early

    for late, early in ff.spmd(main, mesh)():
        assert late == early and (late or call is not None)


def shard(f, mesh=DATA, **how):
    return ff.shard(f, mesh, "data", **how)


def pipe(f, mesh=BOTH, n=2, **how):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=n, **how)


def stock(state, x):
    grads = torch.func.grad(LOSS)(state.params, x)
    return state.apply_gradients(grads, OPTIMIZER), 0.0


def local(wrap, **how):
    return lambda f: wrap(shard(f, NODES), NODES, "node", **how)


STEP = train_step(LOSS, OPTIMIZER)
NESTED = train_step(chain(pair), OPTIMIZER)
NODES = simulated(node=2, data=1)
S = ff.schedules
STACKS = {
    "plain": shard,
    "remat": lambda f, **how: shard(ff.remat(f), **how),
    "reduced once": lambda f, **how: shard(ff.accumulate(f, 2), **how),
    "reduced each": lambda f, **how: ff.accumulate(shard(f, **how), 2),
}
CASES = {
    **{f"zero={z}": (shard(STEP, zero=z),) for z in (0, 2)},
    **{f"zero={z}, donated": (ff.donate(shard(STEP, zero=z)),) for z in (1, 3)},
    "zero=3, reduced once": (STACKS["reduced once"](STEP),),
    "zero=1, reduced each": (STACKS["reduced each"](STEP, zero=1),),
    "units within units, remat": (ff.remat(shard(NESTED)), nested),
    "merged and kept": (shard(STEP, min_bytes=1 << 20, reshard_after_forward=False),),
    "another precision": (ff.precision(shard(ff.remat(STEP)), torch.bfloat16),),
    "stock, zero=1": (shard(stock, zero=1),),
    "shard(pipeline(remat)), in halves": (
        shard(pipe(ff.remat(STEP), schedule=S.zb_h1), BOTH, zero=1), flat, BOTH
    ),
    "updated in between": (
        pipe(LOSS, PIPE, 4, schedule=S.asynchronous, update=OPTIMIZER), flat, PIPE
    ),
    "slowmo": (local(ff.slowmo, every=1, lr=0.1)(STEP), flat, NODES),
    "gossip": (local(ff.gossip, graph=ff.graphs.ring(2))(STEP), flat, NODES),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_step_leaves_nothing(no_collector, case):
    leaves_nothing(*CASES[case])


OPTIMIZERS = {
    "clipped, 8 bits": lambda: ff.chain(
        ff.clip_by_global_norm(0.1), ff.sharded_adam(0.1, moment_dtype=torch.uint8)
    ),
    "loss_scale": lambda: ff.loss_scale(ff.sharded_adam(0.1), 8.0),
    "master_weights": lambda: ff.master_weights(ff.sharded_adam(0.1)),
    "muon": lambda: ff.muon(0.1, ns_dtype=torch.float32),
    "powersgd": lambda: ff.powersgd(ff.sgd(0.1), 1, 0.1),
    "step_in_backward": lambda: ff.step_in_backward(ff.sharded_adam(0.1)),
    "torch's": lambda: ff.from_torch(torch.optim.Adagrad, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nor_does_an_optimizer(no_collector, name):
    optimizer = OPTIMIZERS[name]()
    begin()  # torch's are tried when they are made, and are circles themselves
    init = (lambda: [w.bfloat16() for w in flat()]) if "master" in name else flat
    wide = chain(ff.unit(lambda p, x: x + torch.tanh(x @ p.float())))
    step = shard(optimizer(ff.value_and_grad(wide)), zero=2)
    leaves_nothing(step, init, optimizer=optimizer)


class Stop(Exception):
    pass


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise Stop


def breaking(where):
    @ff.unit
    def broken(p, x):
        if where == "forward":
            raise Stop
        return Breaks.apply(x @ p)

    def loss(params, x):
        return broken(params[1], layer(params[0], x)).mean() + layer(params[0], x).sum()

    return train_step(loss, OPTIMIZER)


@pytest.mark.parametrize(
    "zero, stack, where", [(0, "reduced each", "backward"), (3, "plain", "forward")]
)
def test_nor_does_one_that_raises(no_collector, zero, stack, where):
    broken, step = STACKS[stack](breaking(where), zero=zero), shard(STEP, zero=zero)

    def call(state, x):
        with pytest.raises(Stop):
            broken(state, x)
        return step(state, x)[0]

    leaves_nothing(step, call=call)


def by_hand(loss, state, x):
    params = ff.tree.map(lambda a: a.detach().requires_grad_(), state.params)
    loss(params, x).backward()


def never_pulled(loss, state, x):
    loss(state.params, x.clone().requires_grad_())


def of_weights_made_of_gradients(params, x):
    """A unit's weights have a history in which the same sharded call stands."""
    parts, treedef = ff.tree.flatten(params)
    grads = torch.autograd.grad(LOSS(params, x), parts, create_graph=True)
    new = [p - g for p, g in zip(parts, grads, strict=True)]
    return LOSS(ff.tree.unflatten(treedef, new), x)


def of_scaled_buffers(params, x):
    """The same with leaves that stay packed: their buffer has the history."""
    return LOSS(ff.tree_scale(params, ff.pmean(LOSS(params, x), "data")), x)


LOSSES = {
    "by hand, remat": (by_hand, STACKS["remat"](LOSS), 3),
    "never pulled": (never_pulled, shard(LOSS, zero=1), 1),
    "never pulled, remat": (never_pulled, STACKS["remat"](LOSS), 3),
    "weights made of gradients": (by_hand, shard(of_weights_made_of_gradients), 3),
    "buffers that a unit scaled": (never_pulled, shard(of_scaled_buffers), 3),
}


@pytest.mark.parametrize("case", LOSSES)
def test_nor_does_a_loss_alone(no_collector, case):
    use, loss, zero = LOSSES[case]

    def call(state, x):
        use(loss, state, x)
        return state

    leaves_nothing(shard(STEP, zero=zero), call=call)


@pytest.mark.processes
def test_processes_keep_their_memory(processes):
    """After 60 steps of half a MiB of parameters as after 20."""
    out = processes(
        """
        import gc, torch, fsfunc as ff

        gc.disable()
        mesh = ff.make_mesh({"data": 2})
        unit = ff.unit(lambda p, x: x + x @ p)

        def loss(params, x):
            for p in params:
                x = unit(p, x)
            return x.square().mean()

        optimizer = ff.sgd(1e-9)
        step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data", zero=1)
        x = torch.ones(1, 128)
        init = lambda: [torch.zeros(128, 128) for _ in range(8)]
        state = ff.init_state(step, init, optimizer, x)
        page, held = 4096, []
        for i in range(60):
            state, _ = step(state, x)
            if i + 1 in (20, 60):
                held.append(int(open("/proc/self/statm").read().split()[1]) * page)
        print("grew", (held[1] - held[0]) >> 20)
        """,
        2,
    )
    grew = [int(line.split()[1]) for line in out.splitlines() if "grew" in line]
    assert len(grew) == 2 and max(grew) < 8, out
