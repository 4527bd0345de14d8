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
from fsfunc.comm.typed_maps import LawError
from fsfunc.nn import column_linear, row_linear
from fsfunc.sharded.leaf import is_sharded
from tests import checks
from tests.checks import all_refused, close, simulated
from tests.models import chain, floats, train_step

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
EVERY = PROGRAMS | WHOLE_AND_BACK


@pytest.mark.parametrize("name", EVERY)
def test_a_program_gives_what_it_gives_on_one_device(name):
    """Programs meet models and ``zero`` by turns."""
    program, at = EVERY[name], list(EVERY).index(name)
    kind = Tensors if name in WHOLE_AND_BACK else KINDS[at % 2]
    zero = (0, 1, 3)[at % 3]

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


def marked(values):
    """Times a number of each element's own, so that none may change places."""
    return tree.map(lambda x: x * torch.linspace(1, 2, x.numel()).view(x.shape), values)


OVER_TWO = {k: EVERY[k] for k in ("value and gradient", "gradient penalty", "noise")}
OVER_TWO |= {
    "whole in a loss": lambda f, w, x: gradients(
        lambda w, x: f(w, x) + marked(ff.unshard(w)[0])["up"].sum(), w, x
    ),
    "whole and laid again": lambda f, w, x: gradients(
        lambda w, x: f(ff.lay_like(marked(ff.unshard(w)), like=w), x), w, x
    ),
    "whole and reduced": lambda f, w, x: ff.reduce_like(marked(ff.unshard(w)), like=w),
}


@pytest.mark.parametrize("name", OVER_TWO)
def test_a_name_for_two_axes_splits_as_one(name):
    """Blocks of blocks; and what is whole again is joined in their order."""
    kind, program = Tensors, OVER_TWO[name]
    view, folded = {"data": 2, "a": 2, "b": 2}, {"data": 2, "model": 4}
    mesh = ff.make_mesh(view, "simulated", folded=folded)

    def f(w, x):
        return program(kind.loss, w, x)

    def main():
        step, x = ff.shard(f, mesh, "data"), kind.part(kind.batch)
        loss = ff.shard(kind.loss, mesh, "data")
        placed = ff.place(loss, kind.params, x, layouts=kind.layouts)
        assert placed[0]["up"].layout.split_axes == ("a", "b")
        return ff.unshard(step(placed, x))

    for found in ff.spmd(main, mesh)():
        close(found, f(kind.params, kind.batch), 1e-10)


# Training

OPTIMIZER = ff.chain(ff.clip_by_global_norm(0.1), ff.sharded_adam(0.01))


def trained(kind, step, mesh, **how):
    """Parameters, moments and the last loss, and the first step's ledger, by rank."""

    def part(x):  # of samples, wherever they are
        axes = tuple(sorted(mesh.axes.keys() - {"model", "pipe"}))
        return x.chunk(mesh.axis_size(axes), x.ndim - 2)[ff.axis_index(axes)]

    how |= {"mesh": mesh, "over": part}
    how["look"] = lambda state: ff.unshard(state.opt_state)
    runs = checks.trained(step, kind.params, OPTIMIZER, kind.batch, **how)
    return [(((r.params, r.seen[-1]), r.outs[-1]), r.logs[0]) for r in runs]


ONE = simulated(1)
WHOLE = {
    kind: trained(kind, train_step(kind.loss, OPTIMIZER), ONE)[0][0] for kind in KINDS
}


GRID, CUBE = {"data": 2, "expert": 2}, {"copy": 2, "data": 2, "expert": 2}
TRAININGS = [  # (model, axes, those of shard, its options)
    (Experts, {"expert": 4}, "expert", {"zero": 3}),
    (Experts, GRID, ("data", "expert"), {"zero": 3}),
    (Experts, GRID, "data", {"zero": 2, "replicate": "expert"}),
    (Experts, GRID, "expert", {"zero": 0, "replicate": "data"}),
    (Experts, CUBE, ("data", "expert"), {"zero": 3, "replicate": "copy"}),
    (Tensors, Tensors.axes, "data", {"zero": 0}),
    (Tensors, Tensors.axes, "data", {"zero": 3, "min_bytes": 1 << 20}),
    (Tensors, {"pipe": 3, "data": 2, "model": 2}, "data", {"zero": 2}),
    (Tensors, {"pipe": 3, "data": 1, "model": 2}, None, {}),
]


@pytest.mark.parametrize(("kind", "axes", "over", "how"), TRAININGS, ids=str)
def test_training_is_that_of_one_device_as_planned(kind, axes, over, how):
    mesh, step = simulated(**axes), train_step(kind.loss, OPTIMIZER)
    if "pipe" in axes:
        step = ff.pipeline(step, mesh, "pipe", n_microbatches=2)
    else:
        step = ff.donate(ff.remat(step))
    step = ff.shard(step, mesh, over, **how) if over else step
    ranks = trained(kind, step, mesh, layouts=kind.layouts)
    for found, _ in ranks:
        close(found, WHOLE[kind], 1e-10)
    dim, n = kind.batch.ndim - 2, mesh.size // axes.get("model", 1)
    x = kind.batch.chunk(n // axes.get("pipe", 1), dim)[0]
    given = step, lambda: kind.params, OPTIMIZER, x
    planned = ff.plan(*given, mesh=mesh, layouts=kind.layouts)
    log = ranks[0][1]
    assert all(planned.bytes(axis) == log.bytes(axis) for axis in axes)


def test_a_state_with_split_leaves_goes_on_on_other_meshes(tmp_path):
    def run(axes, path, saves):
        mesh = simulated(**axes)
        layouts = Tensors.layouts if "model" in axes else None

        def main():
            step = ff.shard(train_step(Tensors.loss, OPTIMIZER), mesh, "data")
            x = ff.local_batch(Tensors.batch, mesh, "data")
            state = ff.init_state(step, Tensors.params, OPTIMIZER, x, layouts=layouts)
            state = state if saves else ff.load(path, state)
            state, loss = step(state, x)
            if saves:
                ff.save(path, state)
            return ff.unshard((state.params, state.opt_state)), loss

        return ff.spmd(main, mesh)()

    first, other = {"data": 2, "model": 2}, [{"data": 1, "model": 4}, {"data": 4}]
    run(first, tmp_path / "split", True)
    run({"data": 2}, tmp_path / "whole", True)
    for path, axes in [*(("split", axes) for axes in other), ("whole", first)]:
        for found in run(axes, tmp_path / path, False):
            close(found, WHOLE[Tensors], 1e-10)


# What is refused


UP = ff.Split(0, "model")


def placing(layouts, params=Tensors.params, f=Tensors.loss, **axes):
    mesh = simulated(**(axes or Tensors.axes))

    def main():
        step = ff.shard(f, mesh, "data") if "data" in mesh.axes else f
        if "pipe" in mesh.axes:
            step = ff.pipeline(f, mesh, "pipe", n_microbatches=2)
        ff.place(step, params, Tensors.batch, layouts=layouts)

    return lambda: ff.spmd(main, mesh)()


def by_up(w, x):
    return (w[0]["up"] @ x.T).square().mean()


V, T = ValueError, TypeError
THREE = {"data": 1, "model": 3}


test_a_bad_table_is_refused = all_refused(
    {
        "no path": (placing({"*/upp": UP}), V, "no leaf's path.*there are './up'"),
        "two patterns": (placing({"*/up": UP, "0/*": UP}), V, "both match '0/up': let"),
        "an axis": (placing({"*/up": ff.Split(0, "modle")}), V, 'unknown axis "modle"'),
        "twice": (placing({"*/up": (UP, ff.Split(1, "model"))}), V, "already used by"),
        "a dim": (placing({"*/up": ff.Split(2, "model")}), V, "pass a dim from 0 to 1"),
        "a length": (placing({"*/up": UP}, **THREE), V, "8 is not a multiple of it"),
        "a size": (placing({"*/up": ff.Split(0, "model", 4)}), V, "leave the size out"),
        "no split": (placing({"*/up": "model"}), T, r"ff.Split\(dim, axis\), a tuple"),
        "stages": (
            placing({"*/up": ff.Split(0, "pipe")}, pipe=2, model=2), V, "of a pipeline"
        ),
        "no unit": (placing({"*/up": UP}, f=by_up), V, "no unit takes '0/up' as a"),
        "no tensor": (
            placing({"n": UP}, {"n": 3}, lambda w, x: x.sum(), model=2), T, "is a int"
        ),
    }
)  # fmt: skip


def at(zero):
    return lambda f, mesh: ff.shard(f, mesh, "data", zero=zero)


def pipelined(f, mesh):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=2)


ENTERING = {  # axes, what is around the gradient call, whether it enters
    "plain": ({"model": 2}, lambda f, mesh: f, True),
    "zero=1": ({"data": 2, "model": 2}, at(1), True),
    "zero=0": ({"data": 2, "model": 2}, at(0), False),
    "zero=3": ({"data": 2, "model": 2}, at(3), False),
    "accumulate": ({"model": 2}, lambda f, mesh: ff.accumulate(ff.remat(f), 2), False),
    "pipeline": ({"pipe": 1, "model": 2}, pipelined, False),
}


@pytest.mark.parametrize("how", ENTERING)
def test_a_whole_parameter_must_enter_where_activations_vary(how):
    """Else its gradient is a part of the sum, another one on each rank.

    And integers beside them have no gradient to be compared.
    """
    axes, wrap, enters = ENTERING[how]
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


def unlike_along_a_split():
    mesh, x = simulated(data=2, model=2), wide(4, DIM, seed=3)
    layer = ff.unit(lambda p, x: ff.nn.column_linear(x, p["up"]).square().mean())
    f = ff.shard(lambda p, x: layer(p, x), mesh, "data")
    params = lambda: {"up": wide(4, DIM, seed=ff.axis_index("model"))}  # noqa: E731
    ff.spmd(lambda: ff.place(f, params(), x, layouts={"up": UP}), mesh)()


def whole_experts():
    mesh, of = simulated(**Experts.axes), WHOLE_AND_BACK["whole in a loss"]
    step = ff.shard(lambda w, x: of(Experts.loss, w, x), mesh, Experts.over)

    def main():
        x = Experts.part(Experts.batch)
        step(ff.place(step, Experts.params, x, layouts=Experts.layouts), x)

    ff.spmd(main, mesh)()


test_parts_that_do_not_meet_are_refused = all_refused({
    "unlike along a split": (
        unlike_along_a_split, RanksDiffer, "whole parameters differ"),
    "whole experts in a loss": (
        whole_experts, ValueError, "whole or split evenly over other axes"),
}, sent=True)  # fmt: skip
