"""Steps leave nothing behind, with Python's garbage collector switched off.

A circle of objects in which a tensor hangs waits for the collector's last generation:
hundreds of steps, of which each leaves its gradients. So there is none.
"""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsfunc as ff

DATA = ff.make_mesh({"data": 2}, "simulated")
PIPE = ff.make_mesh({"pipe": 2}, "simulated")
BOTH = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")
WIDTH, STEPS = 8, 50
OPTIMIZER = ff.sharded_adam(1e-3)

layer = ff.unit(lambda p, x: x + torch.tanh(x @ p))


@ff.unit
def pair(p, x):
    """A unit around two, with a leaf of its own."""
    return layer(p["b"], layer(p["a"], x)) * p["own"]


@ff.unit
def named(p, x):
    return x + ff.checkpoint_name(torch.tanh(x @ p), "kept")


def flat():
    return [torch.zeros(WIDTH, WIDTH) for _ in range(2)]


def nested():
    one = lambda: {"a": torch.zeros(WIDTH, WIDTH), "b": torch.zeros(WIDTH, WIDTH)}  # noqa: E731
    return [one() | {"own": torch.ones(WIDTH)} for _ in range(2)]


def loss_of(unit):
    def loss(params, x):
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    return loss


def step_of(gradient):
    def step(state, x):
        value, grads = gradient(state.params, x)
        return state.apply_gradients(grads, OPTIMIZER), {"loss": value}

    return step


def stock(params, x):
    return 0.0, torch.func.grad(loss_of(layer))(params, x)


@pytest.fixture
def no_collector():
    """Runs the test without the collector; then no tensor hung in a circle."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        held = [x for x in gc.garbage if isinstance(x, torch.Tensor)]
        assert not [x for x in held if x.device.type != "meta" and not is_fake(x)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def is_fake(x):
    return isinstance(x, torch._subclasses.FakeTensor)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Modules that torch imports late hold the frames that asked for them."""
    step = ff.shard(step_of(ff.value_and_grad(loss_of(layer))), DATA, "data")
    main = lambda: ff.init_state(step, flat, OPTIMIZER, torch.ones(4, WIDTH))  # noqa: E731
    ff.spmd(main, DATA)()


class Storages(TorchDispatchMode):
    """The bytes of each storage that an operator of this thread gave, while it lives.

    Those that only C++ holds too, as the saved tensors of a forgotten graph.
    """

    def __init__(self):
        super().__init__()
        self.held = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.watch(x.untyped_storage())
        return out

    def watch(self, storage):
        key, held = storage._cdata, self.held
        if key not in held:
            gone = weakref.ref(storage, lambda _: held.pop(key))
            held[key] = gone, storage.nbytes()

    @property
    def bytes(self):
        return sum(size for _, size in self.held.values())


def grows(step, init=flat, mesh=DATA, call=None, steps=STEPS, laid=None):
    """By rank: bytes that live after ``steps`` steps, less those after ten."""

    def main():
        x = torch.ones(4, WIDTH)
        state = ff.init_state(laid or step, init, OPTIMIZER, x)
        with Storages() as live:
            for i in range(steps):
                state = step(state, x)[0] if call is None else call(state, x)
                ff.psum(torch.ones(()), tuple(mesh.axes))  # nobody runs ahead
                if i == 9:
                    early = live.bytes
        return live.bytes - early

    return list(ff.spmd(main, mesh)())


SHARDED = {
    "plain": lambda f, **how: ff.shard(f, DATA, "data", **how),
    "remat": lambda f, **how: ff.shard(ff.remat(f), DATA, "data", **how),
    "reduced once": lambda f, **how: ff.shard(ff.accumulate(f, 2), DATA, "data", **how),
    "reduced each": lambda f, **how: ff.accumulate(ff.shard(f, DATA, "data", **how), 2),
}


@pytest.mark.parametrize("donate", [lambda f: f, ff.donate], ids=["pure", "donated"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_sharded_step_leaves_nothing(no_collector, zero, donate):
    step = step_of(ff.value_and_grad(loss_of(layer)))
    assert grows(donate(ff.shard(step, DATA, "data", zero=zero))) == [0, 0]


@pytest.mark.parametrize("stack", ["remat", "reduced once", "reduced each"])
@pytest.mark.parametrize("zero", [1, 3])
def test_nor_does_one_under_other_transforms(no_collector, zero, stack):
    step = SHARDED[stack](step_of(ff.value_and_grad(loss_of(layer))), zero=zero)
    assert grows(step) == [0, 0]


@pytest.mark.parametrize("zero, remat", [(1, lambda f: f), (3, ff.remat)])
def test_nor_do_units_within_units(no_collector, zero, remat):
    step = step_of(ff.value_and_grad(loss_of(pair)))
    step = remat(ff.shard(step, DATA, "data", zero=zero))
    assert grows(step, nested) == [0, 0]


@pytest.mark.parametrize(
    "how",
    [
        dict(reshard_after_forward=False),
        dict(min_bytes=1 << 20),
        dict(min_bytes=1 << 20, reshard_after_forward=False),
    ],
    ids=["kept", "merged", "merged and kept"],
)
def test_nor_do_buffers_that_are_kept_or_merged(no_collector, how):
    step = step_of(ff.value_and_grad(loss_of(layer)))
    assert grows(ff.shard(step, DATA, "data", **how)) == [0, 0]


def test_nor_does_another_precision_or_a_policy(no_collector):
    step = step_of(ff.value_and_grad(loss_of(named)))
    step = ff.shard(ff.remat(step, ff.SaveOnly("kept")), DATA, "data")
    assert grows(ff.precision(step, compute=torch.bfloat16)) == [0, 0]


@pytest.mark.parametrize("zero", [1, 3])
def test_nor_does_stock_grad(no_collector, zero):
    assert grows(ff.shard(step_of(stock), DATA, "data", zero=zero)) == [0, 0]


def piped(f, mesh=BOTH, **how):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=2, **how)


@pytest.mark.parametrize(
    "stack, mesh",
    [
        (lambda f: piped(ff.remat(f), PIPE), PIPE),
        (lambda f: piped(ff.shard(f, BOTH, "data")), BOTH),
        (
            lambda f: ff.shard(
                piped(ff.remat(f), schedule=ff.schedules.zb_h1), BOTH, "data", zero=1
            ),
            BOTH,
        ),
    ],
    ids=["remat", "shard", "remat in halves in shard"],
)
def test_nor_does_a_pipeline(no_collector, stack, mesh):
    step = stack(step_of(ff.value_and_grad(loss_of(layer))))
    assert grows(step, mesh=mesh) == [0] * mesh.size


def test_nor_does_a_pipeline_that_updates_in_between(no_collector):
    how = dict(schedule=ff.schedules.asynchronous, update=OPTIMIZER)
    step = ff.pipeline(loss_of(layer), PIPE, "pipe", n_microbatches=4, **how)
    assert grows(step, mesh=PIPE) == [0, 0]


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

    return step_of(ff.value_and_grad(loss))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "zero, stack",
    [(0, "reduced each"), (1, "plain"), (2, "reduced once"), (3, "remat")],
)
def test_nor_does_one_that_raises(no_collector, zero, stack, where):
    broken = SHARDED[stack](breaking(where), zero=zero)
    step = ff.shard(step_of(ff.value_and_grad(loss_of(layer))), DATA, "data", zero=zero)

    def call(state, x):
        with pytest.raises(Stop):
            broken(state, x)
        return step(state, x)[0]

    assert grows(step, call=call, steps=30) == [0, 0]


def test_nor_does_spmd_that_raises(no_collector):
    def main():
        x = torch.ones(WIDTH)
        if DATA.rank:
            raise Stop
        return ff.psum(x, "data")

    for _ in range(2):
        with pytest.raises(Stop):
            ff.spmd(main, DATA)()


def by_hand(loss, state, x):
    params = ff.tree.map(lambda a: a.detach().requires_grad_(), state.params)
    loss(params, x).backward()


def of_the_data(loss, state, x):
    x = x.clone().requires_grad_()
    torch.autograd.grad(loss(state.params, x), x)


def evaluated(loss, state, x):
    loss(state.params, x)
    with torch.no_grad():
        loss(state.params, x)


def never_pulled(loss, state, x):
    loss(state.params, x.clone().requires_grad_())


@pytest.mark.parametrize("zero, remat", [(1, lambda f: f), (3, ff.remat)])
@pytest.mark.parametrize("use", [by_hand, of_the_data, evaluated, never_pulled])
def test_nor_does_a_loss_alone(no_collector, use, remat, zero):
    how = dict(zero=zero)
    loss = ff.shard(remat(loss_of(layer)), DATA, "data", **how)
    laid = ff.shard(step_of(ff.value_and_grad(loss_of(layer))), DATA, "data", **how)

    def call(state, x):
        use(loss, state, x)
        return state

    assert grows(None, call=call, laid=laid, steps=30) == [0, 0]


def test_nor_do_weights_made_of_gradients(no_collector):
    """A unit's weights have a history in which the same sharded call stands."""

    inner = loss_of(layer)

    def loss(params, x):
        parts, treedef = ff.tree.flatten(params)
        grads = torch.autograd.grad(inner(params, x), parts, create_graph=True)
        new = [p - g for p, g in zip(parts, grads, strict=True)]
        return inner(ff.tree.unflatten(treedef, new), x)

    double = ff.shard(loss, DATA, "data")
    laid = ff.shard(step_of(ff.value_and_grad(inner)), DATA, "data")

    def call(state, x):
        by_hand(double, state, x)
        return state

    assert grows(None, call=call, laid=laid) == [0, 0]


def test_nor_do_buffers_scaled_by_what_a_unit_gave(no_collector):
    """The same with leaves that stay packed: their buffer has the history."""
    inner = loss_of(layer)

    def loss(params, x):
        gain = ff.pmean(inner(params, x), "data")
        return inner(ff.tree_scale(params, gain), x)

    scaled = ff.shard(loss, DATA, "data")
    laid = ff.shard(step_of(ff.value_and_grad(inner)), DATA, "data")

    def call(state, x):
        never_pulled(scaled, state, x)
        return state

    assert grows(None, call=call, laid=laid) == [0, 0]


def test_a_thousand_steps_are_as_twenty(no_collector):
    """Steps that are not donated: each makes parameters, moments and gradients."""
    step = ff.shard(step_of(ff.value_and_grad(loss_of(layer))), DATA, "data", zero=1)

    def main():
        x = torch.ones(4, WIDTH)
        state, lived = ff.init_state(step, flat, OPTIMIZER, x), {}
        with Storages() as live:
            for i in range(1, 1001):
                state, _ = step(state, x)
                if i in (20, 1000):
                    lived[i] = live.bytes
        return lived

    for lived in ff.spmd(main, DATA)():
        assert lived[20] == lived[1000] > 0


@pytest.mark.processes
def test_processes_keep_their_memory(torchrun):
    """After 100 steps of half a MiB of parameters as after 20."""
    out = torchrun(
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
        for i in range(100):
            state, _ = step(state, x)
            if i + 1 in (20, 100):
                held.append(int(open("/proc/self/statm").read().split()[1]) * page)
        print("grew", (held[1] - held[0]) >> 20)
        """,
        2,
    )
    grew = [int(line.split()[1]) for line in out.splitlines() if "grew" in line]
    assert len(grew) == 2 and max(grew) < 8, out
