"""What is done with split leaves is what one device does, in a step and around it.

Over "model" the axis splits the work of one loss, and gradients are summed over the
axes of ``shard`` alone. Over "expert", one of these, every rank has experts of its own:
their gradients are those of the mean over all ranks, summed over the other axes.
"""

import pytest
import torch
from torch.func import grad, jvp

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.comm.shard_linear_maps import LawError
from fsfunc.nn import column_linear, row_linear
from fsfunc.sharded.leaf import is_sharded
from tests.checks import close, refusals, refused, same, simulated
from tests.models import floats, train_step

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
DIM, EXPERTS, ROWS = 4, 4, 8


def wide(*shape, seed):
    return floats(*shape, seed=seed, dtype=torch.float64)


@ff.unit
def dense(p, x):
    h = torch.tanh(column_linear(x * p["gain"], p["up"], p["bias"]))
    return x + row_linear(h, p["down"])


@ff.unit
def experts(p, x):
    """``x``: [experts, rows, DIM], in queues by expert."""
    h, w = x * p["gain"], p["up"]
    if not (is_sharded(w) and w.layout.splits):
        return x + torch.tanh(torch.bmm(h, w))
    h = ff.all_to_all(h, "expert", split_dim=0, concat_dim=1)
    h = torch.tanh(torch.bmm(h, w.local))
    return x + ff.all_to_all(h, "expert", split_dim=1, concat_dim=0)


def chain(unit):
    def loss(params, x):
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    return loss


class Tensors:
    """A model whose weights are split over an axis that splits its work."""

    loss = staticmethod(chain(dense))
    axes, over = {"data": 2, "model": 2}, "data"
    layouts = {
        "*/up": ff.Split(0, "model"),
        "*/bias": ff.Split(0, "model"),
        "*/down": ff.Split(1, "model"),
    }
    params = [
        {
            "gain": wide(DIM, seed=k),
            "up": wide(8, DIM, seed=k + 1),
            "bias": wide(8, seed=k + 2),
            "down": wide(DIM, 8, seed=k + 3),
        }
        for k in (0, 10, 20)
    ]
    batch = wide(ROWS, DIM, seed=5)

    @staticmethod
    def part(x):
        return x.chunk(2)[ff.axis_index("data")]


class Experts:
    """A model whose experts are split over an axis of the data."""

    loss = staticmethod(chain(experts))
    axes, over = {"data": 2, "expert": 2}, ("data", "expert")
    layouts = {"*/up": ff.Split(0, "expert")}
    params = [
        {"gain": wide(DIM, seed=k), "up": wide(EXPERTS, DIM, DIM, seed=k + 1)}
        for k in (0, 10, 20)
    ]
    batch = wide(EXPERTS, ROWS, DIM, seed=5)

    @staticmethod
    def part(x):
        return x.chunk(4, 1)[ff.axis_index(("data", "expert"))]


KINDS = [Tensors, Experts]


def squares(values):
    return tree.map(lambda x: x * x, values)


def gradients(loss, w, x):
    return ff.value_and_grad(loss)(w, x)[1]


def adapted(loss, w, x):
    return tree.map(lambda a, b: a - 0.1 * b, w, gradients(loss, w, x))


# name: (params, batch) -> a result, whatever the loss
PROGRAMS = {
    "value and gradient": lambda f, w, x: ff.value_and_grad(f)(w, x),
    "stock gradient": lambda f, w, x: grad(f)(w, x),
    "penalty": lambda f, w, x: gradients(
        lambda w, x: f(w, x) + 0.1 * ff.tree_sum(squares(w)), w, x
    ),
    "scaled by a norm": lambda f, w, x: gradients(
        lambda w, x: f(w, x) * ff.global_norm(w), w, x
    ),
    "gradient penalty": lambda f, w, x: gradients(
        lambda w, x: ff.global_norm(gradients(f, w, x)), w, x
    ),
    "stock gradient penalty": lambda f, w, x: grad(
        lambda w: ff.global_norm(grad(f)(w, x))
    )(w),
    "adaptation": lambda f, w, x: gradients(lambda w, x: f(adapted(f, w, x), x), w, x),
    "curvature": lambda f, w, x: jvp(
        grad(lambda w: f(w, x)), (w,), (tree.map(torch.cos, w),)
    )[1],
    "one unit around": lambda f, w, x: gradients(ff.unit(f), w, x),
    "whole": lambda f, w, x: ff.unshard(w),
    "noise": lambda f, w, x: ff.randn_like(
        w, generator=torch.Generator().manual_seed(3)
    ),
}
# What takes whole tensors apart again knows of one axis with means.
WHOLE_AND_BACK = {
    "whole in a loss": lambda f, w, x: gradients(
        lambda w, x: f(w, x) + (ff.unshard(w)[0]["up"] ** 3).sum(), w, x
    ),
    "whole and laid again": lambda f, w, x: gradients(
        lambda w, x: f(ff.lay_like(squares(ff.unshard(w)), like=w), x), w, x
    ),
    "whole and reduced": lambda f, w, x: ff.reduce_like(squares(ff.unshard(w)), like=w),
}
CASES = [(kind, name) for kind in KINDS for name in PROGRAMS]
CASES += [(Tensors, name) for name in WHOLE_AND_BACK]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_program_gives_what_it_gives_on_one_device(kind, name, zero):
    program = {**PROGRAMS, **WHOLE_AND_BACK}[name]

    def f(w, x):
        return program(kind.loss, w, x)

    expected, mesh = f(kind.params, kind.batch), simulated(**kind.axes)

    def main():
        step, x = ff.shard(f, mesh, kind.over, zero=zero), kind.part(kind.batch)
        loss = ff.shard(kind.loss, mesh, kind.over, zero=zero)
        placed = ff.place(loss, kind.params, x, layouts=kind.layouts)
        assert sum(bool(w.layout.splits) for w in tree.leaves(placed, is_sharded)) >= 3
        return ff.unshard(step(placed, x))

    for found in ff.spmd(main, mesh)():
        close(found, expected, 1e-10)


# Training

OPTIMIZER = ff.chain(ff.clip_by_global_norm(0.1), ff.sharded_adam(0.01))


def trained(kind, step, x, **more):
    state = ff.init_state(step, kind.params, OPTIMIZER, x, **more)
    for _ in range(2):
        state, loss = step(state, x)
    return ff.unshard((state.params, state.opt_state)), loss


WHOLE = {
    kind: trained(kind, train_step(kind.loss, OPTIMIZER), kind.batch) for kind in KINDS
}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("axes", "over", "replicate"),
    [
        ({"expert": 4}, "expert", None),
        ({"data": 1, "expert": 2}, ("data", "expert"), None),
        ({"expert": 2, "data": 2}, ("data", "expert"), None),
        ({"data": 2, "expert": 2}, "data", "expert"),
        ({"data": 2, "expert": 2}, "expert", "data"),
        ({"copy": 2, "data": 2, "expert": 2}, ("data", "expert"), "copy"),
    ],
    ids=str,
)
def test_experts_train_as_on_one_device(axes, over, replicate, zero):
    mesh, names = simulated(**axes), sorted(axes)

    def main():
        step = train_step(Experts.loss, OPTIMIZER)
        step = ff.shard(ff.remat(step), mesh, over, zero=zero, replicate=replicate)
        part = Experts.batch.chunk(mesh.size, 1)[ff.axis_index(tuple(names))]
        return trained(Experts, ff.donate(step), part, layouts=Experts.layouts)

    for found in ff.spmd(main, mesh)():
        close(found, WHOLE[Experts], 1e-10)


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_split_leaves_share_buffers_among_themselves(min_bytes):
    mesh = simulated(data=2, model=2)

    def main():
        step = train_step(Tensors.loss, OPTIMIZER)
        step = ff.shard(step, mesh, "data", min_bytes=min_bytes)
        x = Tensors.part(Tensors.batch)
        placed = ff.place(
            ff.shard(Tensors.loss, mesh, "data", min_bytes=min_bytes),
            Tensors.params,
            x,
            layouts=Tensors.layouts,
        )
        buffers = {w.packed.buffer for w in tree.leaves(placed, is_leaf=is_sharded)}
        return len(buffers), trained(Tensors, step, x, layouts=Tensors.layouts)

    for count, found in ff.spmd(main, mesh)():
        assert count == (2 if min_bytes else 6)
        close(found, WHOLE[Tensors], 1e-10)


@pytest.mark.parametrize("zero", [0, 2, 3, None])
def test_a_pipeline_trains_split_layers_as_one_device_does(zero):
    mesh = simulated(pipe=3, data=1 if zero is None else 2, model=2)

    def main():
        step = train_step(Tensors.loss, OPTIMIZER)
        step = ff.pipeline(step, mesh, "pipe", n_microbatches=2)
        if zero is not None:
            step = ff.shard(step, mesh, "data", zero=zero)
        x = ff.local_batch(Tensors.batch, mesh, "data")
        return trained(Tensors, step, x, layouts=Tensors.layouts)

    for found in ff.spmd(main, mesh)():
        close(found, WHOLE[Tensors], 1e-10)


@pytest.mark.parametrize("axes", [{"model": 2}, {"data": 1, "model": 2}])
def test_split_leaves_are_computed_with_in_the_narrow_dtype(axes):
    mesh, found = simulated(**axes), {}

    def main():
        step = ff.precision(Tensors.loss, compute=torch.bfloat16)
        if "data" in axes:
            step = ff.shard(step, mesh, "data")
        params = tree.map(lambda x: x.float(), Tensors.params)
        x = Tensors.batch.float()
        placed = ff.place(step, params, x, layouts=Tensors.layouts)
        return step(placed, x).float()

    found = ff.spmd(main, mesh)()
    assert found[0].item() == pytest.approx(
        Tensors.loss(Tensors.params, Tensors.batch).item(), rel=0.05
    )
    same(found[0], found[1])


# On disk, and on paper


def test_a_state_with_split_leaves_goes_on_on_other_meshes(tmp_path):
    def run(axes, path, saves):
        mesh = simulated(**axes)
        layouts = Tensors.layouts if "model" in axes else None

        def main():
            step = ff.shard(train_step(Tensors.loss, OPTIMIZER), mesh, "data")
            x = ff.local_batch(Tensors.batch, mesh, "data")
            state = ff.init_state(step, Tensors.params, OPTIMIZER, x, layouts=layouts)
            if not saves:
                state = ff.load(path, state)
            state, loss = step(state, x)
            if saves:
                ff.save(path, state)
            return ff.unshard((state.params, state.opt_state)), loss

        return ff.spmd(main, mesh)()

    run({"data": 2, "model": 2}, tmp_path / "split", True)
    run({"data": 2}, tmp_path / "whole", True)
    for folder in ("split", "whole"):
        for axes in ({"data": 1, "model": 4}, {"data": 4}, {"model": 2, "data": 2}):
            for found in run(axes, tmp_path / folder, False):
                close(found, WHOLE[Tensors], 1e-10)


def test_an_init_function_makes_each_rank_its_own_block():
    seed = torch.Generator()

    def init():
        seed.manual_seed(3)
        return tree.map(
            lambda x: torch.randn(x.shape, generator=seed, dtype=x.dtype),
            Tensors.params,
        )

    mesh, x = simulated(data=2, model=2), Tensors.batch
    step = train_step(Tensors.loss, OPTIMIZER)
    expected = ff.init_state(step, init, OPTIMIZER, x).params

    def main():
        made = []
        for f in (step, ff.shard(step, mesh, "data")):
            mine = Tensors.part(x)
            state = ff.init_state(f, init, OPTIMIZER, mine, layouts=Tensors.layouts)
            made.append(ff.unshard(state.params))
        return made

    for made in ff.spmd(main, mesh)():
        for found in made:
            same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_sends_what_the_step_sends(kind):
    def build(backend):
        mesh = ff.make_mesh(kind.axes, backend)

        def main():
            step = ff.shard(train_step(kind.loss, OPTIMIZER), mesh, kind.over)
            x = kind.batch
            x = x.narrow(x.ndim - 2, 0, ROWS // (4 if kind is Experts else 2))
            state = ff.init_state(step, kind.params, OPTIMIZER, x, layouts=kind.layouts)
            if backend == "abstract":
                return ff.plan(step, state, x)
            with ff.ledger() as log:
                step(state, x)
            return log

        return ff.spmd(main, mesh)()[0]

    planned, log = build("abstract"), build("simulated")
    mine = [(r.op, r.axis, r.bytes) for r in log.records if r.rank == 0]
    assert [(r.op, r.axis, r.bytes) for r in planned.ranks[0].records] == mine


# What is refused


def placing(layouts, params=None, f=None, **axes):
    mesh = simulated(**(axes or {"data": 2, "model": 2}))
    params = Tensors.params if params is None else params
    f = Tensors.loss if f is None else f

    def main():
        step = ff.shard(f, mesh, "data") if "data" in mesh.axes else f
        if "pipe" in mesh.axes:
            step = ff.pipeline(f, mesh, "pipe", n_microbatches=2)
        ff.place(step, params, Tensors.batch, layouts=layouts)

    return lambda: ff.spmd(main, mesh)()


UP = ff.Split(0, "model")


@refusals(
    {
        "no path": (
            placing({"*/upp": UP}),
            ValueError,
            "no leaf's path matches '\\*/upp'; there are './up'",
        ),
        "two patterns": (
            placing({"*/up": UP, "0/*": UP}),
            ValueError,
            "'\\*/up' and '0/\\*' both match '0/up': let one pattern name it",
        ),
        "an axis": (
            placing({"*/up": ff.Split(0, "modle")}),
            ValueError,
            'unknown axis "modle"',
        ),
        "an axis twice": (
            placing({"*/up": (UP, ff.Split(1, "model"))}),
            ValueError,
            'axis "model" is already used by another part',
        ),
        "a dim": (
            placing({"*/up": ff.Split(2, "model")}),
            ValueError,
            "along dim 2: it has 2 dims; pass a dim from 0 to 1",
        ),
        "a length": (
            placing({"*/up": UP}, data=1, model=3),
            ValueError,
            "size 3: 8 is not a multiple of it; make it 6 or 9, or the axis 2 or 4",
        ),
        "a size": (
            placing({"*/up": ff.Split(0, "model", 4)}),
            ValueError,
            'says size 4 for axis "model", which has 2: leave the size out',
        ),
        "no split": (
            placing({"*/up": "model"}),
            TypeError,
            "give ff.Split\\(dim, axis\\), or a tuple of them",
        ),
        "the pipeline's axis": (
            placing({"*/up": ff.Split(0, "pipe")}, pipe=2, model=2),
            ValueError,
            'the axis of a pipeline: split over another one',
        ),
        "no unit": (
            placing({"*/up": UP}, f=lambda w, x: (w[0]["up"] @ x.T).square().mean()),
            ValueError,
            "no unit takes '0/up' as a parameter",
        ),
        "no tensor": (
            placing({"n": UP}, params={"n": 3}, f=lambda w, x: x.sum(), model=2),
            TypeError,
            "'n' is a int, not a whole tensor",
        ),
    }
)  # fmt: skip
def test_a_bad_table_is_refused(call, error, way_out):
    refused(call, error, way_out)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("enters", [True, False])
def test_a_whole_parameter_must_enter_where_activations_vary(zero, enters):
    """Else its gradient is a part of the sum, another one on each rank."""
    mesh, x = simulated(data=2, model=2), wide(4, DIM, seed=3)

    @ff.unit
    def norm(p, x):
        gain = ff.pcast(p["gain"], "model", to="V") if enters else p["gain"]
        mine = x.chunk(2)[ff.axis_index("model")] * gain
        return ff.all_gather(mine, "model", to="I")

    def main():
        step = ff.value_and_grad(lambda p, x: norm(p, x).square().mean())
        step, mine = ff.shard(step, mesh, "data", zero=zero), Tensors.part(x)
        placed = ff.place(step, {"gain": torch.ones(DIM, dtype=x.dtype)}, mine)
        return ff.unshard(step(placed, mine)[1])["gain"]

    if enters:
        for found in ff.spmd(main, mesh)():
            close(found, 2 * x.square().mean(0) / DIM, 1e-12)
        return
    enters = True
    ff.spmd(main, mesh)()
    enters = False  # the same loss, under another shard: it is compared anew
    with pytest.raises(LawError, match="by 'gain' differs along \"model\".*ff.pcast"):
        ff.spmd(main, mesh)()


@pytest.mark.parametrize(
    ("axes", "wrap"),
    [
        ({"model": 2}, lambda f, mesh: f),
        ({"model": 2}, lambda f, mesh: ff.accumulate(ff.remat(f), 2)),
        (
            {"pipe": 1, "model": 2},
            lambda f, mesh: ff.pipeline(f, mesh, "pipe", n_microbatches=2),
        ),
        ({"data": 2, "model": 2}, lambda f, mesh: ff.shard(f, mesh, "data")),
    ],
    ids=["plain", "accumulate", "pipeline", "shard"],
)
@pytest.mark.parametrize("enters", [True, False])
def test_so_it_must_without_shard_where_others_are_split(axes, wrap, enters):
    """And integers beside them have no gradient to be compared."""
    mesh, x = simulated(**axes), wide(4, DIM, seed=3)
    params = {"up": wide(6, DIM, seed=4), "down": wide(DIM, 6, seed=5)}
    params |= {"gain": wide(1, seed=6), "ids": torch.arange(3)}

    @ff.unit
    def layer(p, x):
        gain = ff.pcast(p["gain"], "model", to="V") if split and enters else p["gain"]
        return ff.nn.row_linear(ff.nn.column_linear(x, p["up"]) * gain, p["down"])

    call = ff.value_and_grad(lambda p, x: layer(p, x).square().mean())
    split = False
    _, expected = call(params, x)
    split = True
    layouts = {"up": ff.Split(0, "model"), "down": ff.Split(1, "model")}

    def main():
        step = wrap(call, mesh)
        placed = ff.place(step, params, x, layouts=layouts)
        for _ in range(0 if enters else 11):  # however often that tells nothing
            step(placed, x)
        return ff.unshard(step(placed, x)[1])

    if enters:
        for found in ff.spmd(main, mesh)():
            close(found, expected, 1e-12)
        return
    params["down"] *= 0  # as it may begin: then no gradient tells
    ff.spmd(main, mesh)()
    params["down"] += 1
    with pytest.raises(LawError, match="by 'gain' differs along \"model\".*ff.pcast"):
        ff.spmd(main, mesh)()
    with pytest.raises(LawError):  # again, where somebody caught it
        ff.spmd(main, mesh)()


@pytest.mark.parametrize("axes", [{"model": 2}, {"data": 2, "model": 2}])
def test_ranks_along_a_split_begin_alike(axes):
    mesh, x = simulated(**axes), wide(4, DIM, seed=3)
    layer = ff.unit(lambda p, x: ff.nn.column_linear(x, p["up"]))

    def main():
        f = lambda p, x: layer(p, x).square().mean()  # noqa: E731
        f = ff.shard(f, mesh, "data") if "data" in axes else f
        params = {"up": wide(4, DIM, seed=ff.axis_index("model"))}
        return ff.place(f, params, x, layouts={"up": UP})

    with pytest.raises(RanksDiffer, match="whole parameters differ"):
        ff.spmd(main, mesh)()


def test_ranks_that_never_meet_may_have_gradients_of_their_own():
    mesh = simulated(data=2, member=2)

    def main():
        step = ff.shard(ff.value_and_grad(Tensors.loss), mesh, "data")
        x = Tensors.batch * (1 + ff.axis_index("member"))
        placed = ff.place(step, Tensors.params, x)
        return step(placed, x)[0]

    losses = ff.spmd(main, mesh)()
    assert losses[0] != losses[1]
    assert losses[0] == losses[2]


def test_whole_experts_in_a_loss_are_refused():
    mesh = simulated(**Experts.axes)

    def main():
        def f(w, x):
            return WHOLE_AND_BACK["whole in a loss"](Experts.loss, w, x)

        step, x = ff.shard(f, mesh, Experts.over), Experts.part(Experts.batch)
        placed = ff.place(step, Experts.params, x, layouts=Experts.layouts)
        with pytest.raises(ValueError, match="whole or split evenly over other axes"):
            step(placed, x)

    ff.spmd(main, mesh)()
