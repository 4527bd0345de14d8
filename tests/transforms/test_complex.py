"""Complex parameters (spectral layers, state spaces) train as in torch on any mesh."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.typed_maps import LawError
from tests.checks import close, on_ranks, same, simulated, trained
from tests.covering import examples
from tests.models import floats

pytestmark = [  # of torch.compile
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
WIDTH, MODES, ROWS = 8, 5, 12  # 8 real numbers have 5 frequencies


def spectral_layer(p, x):
    """A layer of an FNO: weights of frequencies, beside real ones."""
    y = torch.fft.irfft(torch.fft.rfft(x) * p["w"], n=WIDTH) * p["scale"]
    return x + torch.tanh(y)


def readout(p, x):
    z = x.to(p["w"].dtype) @ p["w"] + p["shift"]
    return z.abs().mean(-1) + (z * z.conj()).real.mean(-1)


spectral, last = ff.unit(spectral_layer), ff.unit(readout)


def model(dtype=torch.complex64, depth=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape, dtype=dtype: torch.randn(  # noqa: E731
        shape, dtype=dtype, generator=generator
    )
    real = dtype.to_real()
    layers = [{"w": draw(MODES), "scale": draw(1, dtype=real)} for _ in range(depth)]
    return {"layers": layers, "last": {"w": draw(WIDTH, 3), "shift": draw()}}


def loss_of(layer, end):
    def loss(params, x):
        for p in params["layers"]:
            x = layer(p, x)
        return (end(params["last"], x) - 1).square().mean()

    return loss


loss, plain = loss_of(spectral, last), loss_of(spectral_layer, readout)


def by_torch(make, params, x, steps, loss=plain, clip=None):
    """The parameters after steps of a ``torch.optim`` optimizer on one device."""
    leaves, treedef = tree.flatten(params)
    leaves = [torch.nn.Parameter(x.clone()) for x in leaves]
    optimizer = make(leaves)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(tree.unflatten(treedef, leaves), x).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        optimizer.step()
    return tree.unflatten(treedef, [x.detach() for x in leaves])


ADAM = ff.sharded_adam(0.01)
STEP = ADAM(ff.value_and_grad(loss))
DATA = floats(ROWS, WIDTH, seed=1)


@pytest.fixture(scope="module")
def expected():
    return by_torch(lambda ps: torch.optim.AdamW(ps, lr=0.01), model(), DATA, 2)


# Drawn trees: leaves of any size and dtype in a few units

DTYPES = [torch.complex64, torch.complex128, torch.float32, torch.float64]
LEAF = st.tuples(
    st.lists(st.integers(0, 5), max_size=2), st.sampled_from(DTYPES), st.booleans()
)
UNITS = st.lists(st.lists(LEAF, min_size=1, max_size=3), min_size=1, max_size=3)
OPTIMIZERS = {
    "sgd": (ff.sgd(0.1), lambda ps: torch.optim.SGD(ps, lr=0.1)),
    "adam": (ADAM, lambda ps: torch.optim.AdamW(ps, lr=0.01)),
    "clipped momentum": (
        ff.chain(ff.clip_by_global_norm(0.1), ff.sgd(0.1, momentum=0.9)),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    ),
    "torch's": (
        ff.from_torch(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1),
    ),
}


def mixing(p, x):
    """Rows times what real and complex leaves give together."""
    for w in p:
        w = w * w.conj() + (1 + 2j) * w if w.is_complex() else w.sin()
        x = x + (w.real - w.imag if w.is_complex() else w).mean() * (1 + x.cos())
    return x


mixing_unit = ff.unit(mixing)


def through(unit):
    def loss(params, x):
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    return loss


@settings(max_examples=examples(8))
@given(
    units=UNITS,
    seed=st.integers(0, 99),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    zero=st.integers(0, 3),
    ranks=st.integers(2, 4),
    donates=st.booleans(),
)
def test_drawn_trees_train_as_in_torch(units, seed, name, zero, ranks, donates):
    generator = torch.Generator().manual_seed(seed)
    params = [
        [
            torch.randn(s, dtype=d, generator=generator) / 2
            for s, d, _ in u
            if 0 not in s
        ]
        for u in units
    ]
    params = [p or [torch.ones(1)] for p in params]
    x, (optimizer, make) = floats(ROWS, dtype=torch.float64), OPTIMIZERS[name]
    clip = 0.1 if "clipped" in name else None
    expected = by_torch(make, params, x, 2, through(mixing), clip)
    step = optimizer(ff.value_and_grad(through(mixing_unit)))
    step = ff.shard(step, mesh := simulated(ranks), "data", zero=zero)
    step = ff.donate(step) if donates else step
    for run in trained(step, params, optimizer, x, mesh=mesh):
        close(run.params, expected, 1e-5)
        for leaf in tree.leaves(run.state, ff.is_sharded):
            if ff.is_sharded(leaf) and leaf.packed is not None:
                assert leaf.packed.flat.dtype == leaf.dtype  # no buffer of its own kind


def test_a_complex_buffer_is_cut_between_its_numbers():
    """Five numbers over two ranks: three and two, and the moments lie as they do."""
    runs = trained(ff.shard(STEP, simulated(), "data"), model(), ADAM, DATA)
    for run, mine in zip(runs, (3, 2), strict=True):
        for t in (run.state.params, run.state.opt_state.mu, run.state.opt_state.nu):
            w = t["layers"][0]["w"]
            assert (w.shape, w.dtype) == ((MODES,), torch.complex64)
            assert w.local.shape == (mine,) and w.local.is_complex()


# Under every transform, on any stack

TRANSFORMS = {
    "shard(remat)": lambda f, mesh: ff.shard(ff.remat(f), mesh, "data"),
    "remat(shard)": lambda f, mesh: ff.remat(ff.shard(f, mesh, "data")),
    "shard(accumulate)": lambda f, mesh: ff.shard(ff.accumulate(f, 3), mesh, "data"),
    "accumulate(shard)": lambda f, mesh: ff.accumulate(
        ff.shard(f, mesh, "data", zero=2), 3
    ),
    "small units share": lambda f, mesh: ff.shard(f, mesh, "data", min_bytes=1 << 20),
    "in host memory": lambda f, mesh: ff.offload(
        ff.shard(f, mesh, "data"), params="host", moments="host", activations="host"
    ),
    "precision": lambda f, mesh: ff.shard(
        ff.precision(f, torch.float32, torch.float64, gradients=torch.float32),
        mesh,
        "data",
    ),
    "jit": lambda f, mesh: ff.jit(ff.shard(f, mesh, "data"), backend="aot_eager"),
}
GRIDS = {
    "HSDP": lambda f, mesh: ff.shard(f, mesh, "data", replicate="node"),
    "HSDP, zero=1": lambda f, mesh: ff.shard(f, mesh, "data", zero=1, replicate="node"),
    "two axes": lambda f, mesh: ff.shard(f, mesh, ("data", "node")),
    "in levels": lambda f, mesh: ff.shard(
        f,
        mesh,
        ("data", "node"),
        gather=ff.HierarchicalGather("node", keep=True),
        reduction=ff.HierarchicalReduction("node"),
    ),
}
PIPES = {
    "pipeline": lambda f, mesh: ff.pipeline(f, mesh, "pipe", n_microbatches=3),
    "shard(pipeline)": lambda f, mesh: ff.shard(
        ff.pipeline(f, mesh, "pipe", n_microbatches=3), mesh, "data"
    ),
}
MESHES = dict.fromkeys(TRANSFORMS, {"data": 2})
MESHES |= dict.fromkeys(GRIDS, {"node": 2, "data": 2})
MESHES |= {"pipeline": {"pipe": 2}, "shard(pipeline)": {"data": 2, "pipe": 2}}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("donates", [False, True])
def test_transforms_leave_complex_numbers_right(name, donates, expected):
    mesh = simulated(**MESHES[name])
    step = (TRANSFORMS | GRIDS | PIPES)[name](STEP, mesh)
    step = ff.donate(step) if donates else step
    for run in trained(step, model(), ADAM, DATA, mesh=mesh):
        close(run.params, expected)


@pytest.mark.parametrize(
    "optimizer",
    [
        ff.loss_scale(ADAM, 8.0),
        ff.step_in_backward(ADAM),
        ff.ema(ff.swa(ADAM), 0.9),
        ff.master_weights(ADAM),
        ff.apply_if_finite(ADAM),
    ],
    ids=lambda optimizer: optimizer.called,
)
def test_what_stands_around_an_optimizer(optimizer, expected):
    step = ff.shard(optimizer(ff.value_and_grad(loss)), simulated(3), "data")
    for run in trained(step, model(), optimizer, DATA, mesh=simulated(3)):
        close(run.params, expected)


def test_encodings_are_for_real_numbers():
    """A unit of complex leaves alone travels as it is; so nothing of it is owed."""
    only = ff.unit(lambda p, x: (x * (1 + 1j) @ p["w"]).abs().sum(-1))
    loss = lambda p, x: only(p, x).square().mean()  # noqa: E731
    init = {"w": torch.randn(8, 8, dtype=torch.complex64)}
    sent, found = [], []
    ways: list[dict] = [
        {},
        {"gather": ff.QuantizedGather(4), "reduction": ff.QuantizedReduction(4)},
    ]
    for how in ways:
        low_rank = lambda f: ff.powersgd(f, 1, 0.1)  # noqa: E731
        for around in (lambda f: f, ff.error_feedback if how else low_rank):
            optimizer = around(ff.sgd(0.1))
            step = optimizer(ff.value_and_grad(loss))
            step = ff.shard(step, simulated(), "data", **how)
            runs = trained(step, init, optimizer, floats(6, 8))
            found.append(runs[0].params)
            sent.append(runs[0].sent)
    for one, log in zip(found[1:], sent[1:], strict=True):
        same(one, found[0])
        assert log == sent[0]


def test_gradients_by_torch_func_and_of_gradients():
    """Both have torch's convention; leaves that no unit reads too."""
    params = model(torch.complex128) | {"glue": torch.tensor([0.3 + 0.2j] * ROWS)}
    x = floats(ROWS, WIDTH, dtype=torch.float64)

    def penalized(inner, norm):
        def total(p, x):
            glue = (p["glue"].mean() * inner(p, x)).abs()
            return glue + norm(ff.value_and_grad(inner)(p, x)[1]) ** 2

        return total

    def norm(grads):
        squares = [g.abs().square().sum() for g in tree.leaves(grads) if g is not None]
        return sum(squares).sqrt()

    whole = torch.func.grad(penalized(plain, norm))(params, x)
    mesh = simulated(1)
    for by in (
        lambda f: lambda p, x: ff.value_and_grad(f)(p, x)[1],
        lambda f: torch.func.grad(f),
    ):
        step = ff.shard(by(penalized(loss, ff.global_norm)), mesh, "data")

        def main(step=step):
            return ff.unshard(step(ff.place(step, params, x), x))

        close(ff.spmd(main, mesh)()[0], whole, 1e-9)
    first = torch.func.grad(plain)({k: params[k] for k in ("layers", "last")}, x)
    mesh = simulated(3)
    step = ff.shard(lambda p, x: ff.value_and_grad(loss)(p, x)[1], mesh, "data")

    def main():
        mine = ff.local_batch(x, mesh, "data")
        placed = ff.place(step, {k: params[k] for k in ("layers", "last")}, mine)
        return ff.unshard(step(placed, mine))

    for found in ff.spmd(main, mesh)():
        close(found, first, 1e-9)


# Planned, saved, loaded elsewhere


@pytest.mark.parametrize("zero", range(4))
def test_a_plan_is_the_run(zero):
    optimizer, mesh = ff.chain(ff.clip_by_global_norm(1.0), ADAM), simulated(3)
    step = optimizer(ff.value_and_grad(loss))
    step = ff.shard(step, mesh, "data", zero=zero)

    def main():
        mine = ff.local_batch(DATA, mesh, "data")
        state = ff.init_state(step, model, optimizer, mine)
        plan = ff.plan(step, state, mine)
        with ff.ledger() as log, ff.testing.live_bytes(state, mine) as live:
            step(state, mine)
        rank = ff.axis_index("data")
        assert plan[rank].ledger.table() == log.table(rank)
        assert plan.flops and ff.estimate(plan, ff.hardware.H100).seconds > 0
        return plan.peak_bytes, live.peak_bytes

    for planned, measured in ff.spmd(main, mesh)():
        assert planned == measured


def test_a_checkpoint_loads_on_another_mesh(tmp_path):
    optimizer = ff.ema(ADAM, 0.9)
    step = lambda mesh, zero: ff.shard(  # noqa: E731
        optimizer(ff.value_and_grad(loss)), mesh, "data", zero=zero
    )

    def go_on(state, f, mesh, steps):
        mine = ff.local_batch(DATA, mesh, "data")
        for _ in range(steps):
            state, _ = f(state, mine)
        return state

    def first():
        f = step(mesh, 3)
        mine = ff.local_batch(DATA, mesh, "data")
        state = go_on(ff.init_state(f, model(), optimizer, mine), f, mesh, 1)
        ff.save(tmp_path / "a", state)
        return ff.unshard(go_on(state, f, mesh, 1))

    mesh = simulated(3)
    expected = ff.spmd(first, mesh)()[0]
    for ranks, zero in ((2, 1), (4, 3), (2, 0)):
        mesh = simulated(ranks)

        def second(mesh=mesh, zero=zero):
            f, mine = step(mesh, zero), ff.local_batch(DATA, mesh, "data")
            empty = ff.abstract_state(f, model(), optimizer, mine)
            return ff.unshard(go_on(ff.load(tmp_path / "a", empty), f, mesh, 1))

        for found in ff.spmd(second, mesh)():
            close(found, expected)
    # Of such numbers safetensors has none: they lie there as pairs.
    wide = ff.load(tmp_path / "a", model(torch.complex128), at="params", cast=True)
    ff.save(tmp_path / "wide", wide)
    ff.consolidate(tmp_path / "wide", tmp_path / "wide.safetensors")
    for path in ("wide", "wide.safetensors"):
        same(ff.load(tmp_path / path, model(torch.complex128, seed=1)), wide)
    narrow = ff.load(tmp_path / "a", model(), at="params")
    same(tree.map(lambda x, y: x.to(y.dtype), wide, narrow), narrow)


def test_a_message_says_of_which_numbers_it_encodes_buffers():
    """In one place: gathers and both ends of reductions go by that."""

    class Sums(ff.QuantizedReduction):
        def encodes(self, dtype):
            return False

    class Gathers(ff.QuantizedGather):
        def encodes(self, dtype):
            return False

    init, x = {"w": torch.randn(8, 8)}, floats(6, 8)
    only = ff.unit(lambda p, x: (x @ p["w"]).square().mean())
    step = ff.sgd(0.1)(ff.value_and_grad(only))
    hows: list[dict] = [{}, {"gather": Gathers(4), "reduction": Sums(4)}]
    plain, kept = (
        trained(ff.shard(step, simulated(), "data", **how), init, ff.sgd(0.1), x)
        for how in hows
    )
    same(kept[0].params, plain[0].params)
    assert kept[0].sent == plain[0].sent


WIDER = {
    "view_as_complex": torch.view_as_complex,
    "view": lambda w: w.view(torch.complex64),
    "view of a view": lambda w: torch.view_as_complex(w.view(2, 2, 2)).view(4, 1),
}


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("name", WIDER)
@pytest.mark.parametrize("wrap", [lambda f: f, ff.remat], ids=["plain", "remat"])
def test_a_wider_view_of_a_leaf_at_an_odd_place_is_refused_by_name(name, zero, wrap):
    """Of three elements the first leaf: the second one begins at the fourth."""
    params = {"a": torch.randn(3), "w": torch.randn(4, 2)}
    x, mesh = floats(6, 4), simulated()

    def layer(p, x, copied=False):
        w = p["w"].clone() if copied else p["w"]
        z = x.to(torch.complex64) @ WIDER[name](w)
        return z.abs().mean() + p["a"].sum()

    step = wrap(ff.value_and_grad(ff.unit(layer)))
    sharded = ff.shard(step, mesh, "data", zero=zero)
    told = r"(?s)unit 'layer' views .* 'w' at element 3\. .*w\.clone\(\)"
    with pytest.raises(RuntimeError, match=told):
        on_ranks(sharded, params, x, mesh=mesh)
    step = wrap(ff.value_and_grad(ff.unit(partial(layer, copied=True))))
    expected = ff.value_and_grad(layer)(params, x)
    for found in on_ranks(
        ff.shard(step, mesh, "data", zero=zero), params, x, mesh=mesh
    ):
        close(found, expected)
    even = params | {"a": torch.randn(2)}
    sharded = ff.shard(wrap(ff.value_and_grad(ff.unit(layer))), mesh, "data", zero=zero)
    expected = ff.value_and_grad(layer)(even, x)
    for found in on_ranks(sharded, even, x, mesh=mesh):
        close(found, expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["view_as_complex", "view"])
def test_a_wider_view_of_a_part_is_refused_by_name(name, size):
    params = {"a": torch.randn(size), "w": torch.randn(4, 2)}
    unit = ff.unit(lambda p, x: (x @ p["w"]).mean() + p["a"].sum())

    def step(p, x):
        return ff.tree.map(WIDER[name], p["w"]), unit(p, x)

    with pytest.raises(LawError, match=r"'w'.*ff\.unshard\(tree\)"):
        on_ranks(ff.shard(step, simulated(), "data"), params, floats(6, 4))
