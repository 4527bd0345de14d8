"""A folded mesh is two meshes of the same ranks: an axis of either is as it was there.

Against the two meshes, each made by itself: the same groups of ranks, in the same
order, whatever the sizes; or no mesh at all, where no finest axes exist.
"""

import math
from itertools import accumulate, pairwise
from operator import mul

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.folding import fold_axes
from fsfunc.comm.launch import Backend
from fsfunc.comm.typed_maps import LawError
from tests.checks import all_refused, close, same
from tests.covering import examples

ATTENTION = {"data": 4, "model": 2}
EXPERTS = {"expert_data": 2, "expert": 4}
BACKENDS: list[Backend] = ["simulated", "vmap"]


def folded_mesh(axes=ATTENTION, folded=EXPERTS, backend: Backend = "simulated"):
    return ff.make_mesh(axes, backend, folded=folded)


def has_finest_axes(*views):
    """Whether the slices of all views, in one row, divide each other."""
    cuts = sorted({n for view in views for n in accumulate(view.values(), mul)} | {1})
    return all(b % a == 0 for a, b in pairwise(cuts))


@st.composite
def two_views(draw):
    """Two ways to write one number of ranks as a product; sizes of 1 too."""
    size = draw(st.sampled_from([4, 8, 12, 24]))

    def view(letter):
        sizes, left = [], size
        while left > 1 and len(sizes) < 3:
            sizes.append(
                draw(st.sampled_from([n for n in range(1, left + 1) if not left % n]))
            )
            left //= sizes[-1]
        return {f"{letter}{i}": n for i, n in enumerate([*sizes, left])}

    return view("a"), view("b")


@settings(max_examples=examples(60))
@given(views=two_views())
def test_each_axis_has_the_ranks_of_its_own_view(views):
    if not has_finest_axes(*views):
        with pytest.raises(ValueError, match="choose sizes of which one divides"):
            folded_mesh(*views)
        return
    mesh = folded_mesh(*views)
    assert math.prod(mesh.axes.values()) == mesh.size
    for view in views:
        own = ff.make_mesh(view, "simulated")
        for axis in [*view, tuple(view), tuple(reversed(view))]:
            assert mesh.axis_size(axis) == own.axis_size(axis)
            for rank in range(mesh.size):
                assert mesh.members(axis, rank) == own.members(axis, rank)
                assert mesh.coordinate(axis, rank) == own.coordinate(axis, rank)


def everything(mesh, axis):
    """What collectives over an axis give this rank, and a derivative through them.

    Of numbers of the rank's own, on any mesh of these ranks.
    """
    x = torch.arange(8.0) + 10 * ff.axis_index(tuple(mesh.axes))
    n = ff.axis_size(axis)

    def moved(x):
        sent = ff.psum(x, axis), ff.all_gather(x, axis), ff.psum_scatter(x, axis)
        swapped = ff.all_to_all(x, axis, split_dim=0, concat_dim=0)
        passed = ff.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
        return torch.cat([*sent, swapped, passed, ff.pbroadcast(x, axis, source=1)])

    return moved(x), torch.func.grad(lambda x: (moved(x) ** 2).sum())(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", ["expert", "expert_data", "data", ("model", "data")])
def test_collectives_over_either_view(axis, backend):
    """Equal to those of the view alone, and as many bytes are sent."""
    view = EXPERTS if axis[:6] == "expert" else ATTENTION
    own = ff.make_mesh(view, "simulated")
    with ff.ledger() as expected_log:
        expected = ff.spmd(everything, own)(own, axis)
    mesh = folded_mesh(backend=backend)
    with ff.ledger() as log:
        found = ff.spmd(everything, mesh)(mesh, axis)
    close(list(found), list(expected), 1e-6)
    if backend == "simulated":
        assert log.count(axis=axis) == expected_log.count(axis=axis) > 0
        assert log.bytes(axis) == expected_log.bytes(axis)


def test_a_plan_runs_each_program_once() -> None:
    """Ranks that read their place along one view are told apart along its axes."""
    mesh = folded_mesh(backend="abstract")
    out = ff.spmd(lambda: ff.axis_index("expert"), mesh)()
    assert list(out) == [0, 1, 2, 3] and out.of(6, mesh) == 2
    assert list(ff.spmd(lambda: ff.axis_size("expert"), mesh)()) == [4]


def test_finest_axes_bear_the_names_that_are_whole() -> None:
    cases = [
        (({"data": 8}, EXPERTS), EXPERTS),
        ((ATTENTION, EXPERTS), {"expert_data": 2, "data&expert": 2, "model": 2}),
        (({"pipe": 2, "one": 1, "data": 2}, {"pipe": 2, "expert": 2}),
            {"pipe": 2, "one": 1, "data": 2}),
    ]  # fmt: skip
    for views, finest in cases:
        assert fold_axes(*views)[0] == finest
        assert list(fold_axes(*views)[0]) == list(finest)
    mesh = folded_mesh({"data": 2}, {"expert": 2})
    assert mesh.names == {"expert": ("data",)} and "expert" in repr(mesh)


def making(folded, **axes):
    return lambda: ff.make_mesh(axes or ATTENTION, "simulated", folded=folded)


def on_ranks(call, *views):
    return lambda: ff.spmd(call, folded_mesh(*views))()


ONE = torch.ones(8)
V = ValueError
test_bad_input_is_refused = all_refused({
    "no mapping": (making(["expert"]), TypeError, "needs axes as {name: size}"),
    "another number of ranks": (making({"expert": 4}), V,
        "counts 4 ranks, and the mesh .* has 8: .* named in both"),
    "no size": (making({"expert": 0, "expert_data": 8}), V, "size of at least 1"),
    "no name": (making({"": 8}), V, "needs a name"),
    "one name, two sets of ranks": (making({"model": 4, "expert": 2}), V,
        '"model" is an axis of .* its ranks are others there'),
    "no whole rows": (making({"c": 3, "d": 2}, a=2, b=3), V,
        r'its "c" and "b" .* overlap, but not in whole rows .*one divides the other'),
    "axes that share ranks": (on_ranks(lambda: ff.psum(ONE, ("data", "expert"))), V,
        r"got \('data', 'expert'\), of .*'data&expert', 'data&expert', 'model'\)"),
    "an axis, and a part of it": (
        on_ranks(lambda: ff.axis_size(("data", "expert_data"))), V,
        r"of \('expert_data', 'data&expert', 'expert_data'\)"),
    "an unknown axis": (on_ranks(lambda: ff.psum(ONE, "experts")), V,
        r'unknown axis "experts" \(did you mean "expert"\?\)'),
}, sent=True)  # fmt: skip


def test_over_means_and_others_at_once_only_own_values_are_moved() -> None:
    """One value over both would have two derivatives at once."""
    mesh = folded_mesh({"data": 2, "model": 2}, {"expert": 4})

    def asked(call):
        @ff.unit
        def work(p, x):
            return call(ff.pcast(p * x, "model", to="V")).sum()

        def main():
            f = ff.shard(ff.value_and_grad(work), mesh, "data")
            x = 1.0 + torch.arange(4.0) + ff.axis_index("data")
            p = ff.place(f, torch.tensor(1.0), x)
            return ff.unshard(f(p, x))

        return ff.spmd(main, mesh)()

    def whole(x):
        return ff.all_gather(x, "expert", to="I")

    for call in (whole, lambda x: ff.pcast(x, "expert", to="V"),
                 lambda x: ff.pbroadcast(x, "expert", source=0, to="I"),
                 lambda x: ff.psum_scatter(x, "expert", of="P")):  # fmt: skip
        with pytest.raises(ValueError, match="averages over some alone"):
            asked(call)
    # One after the other is right: ranks see 4, 5, 6, 7 twice, of which L is the sum.
    value, grads = asked(
        lambda x: ff.all_gather(ff.all_gather(x, "model", to="I"), "data")
    )[0]
    expected = 2 * sum(1.0 + i + d for d in range(2) for i in range(4))
    same((value, grads), (torch.tensor(expected), torch.tensor(expected)))


def scaling(axis):
    """Gradients times a number that is another one on each rank of an axis."""
    mesh = folded_mesh({"data": 2, "model": 2}, {"expert": 4})
    work = ff.unit(lambda p, x: (p * x).sum())

    def step(p, x):
        _, grads = ff.value_and_grad(work)(p, x)
        share = ff.psum_scatter(ff.global_norm(grads) * torch.arange(1.0, 5.0), axis)
        return tree.map(lambda g: g * share[0], grads)

    def main():
        f, x = ff.shard(step, mesh, "data"), torch.ones(4) + ff.axis_index("data")
        return f(ff.place(f, torch.ones(4), x), x)

    return lambda: ff.spmd(main, mesh)()


differing = "which differs from rank to rank: the parts would be of no one tensor"
test_a_part_of_one_value_is_each_ranks_own = all_refused({
    axis: (scaling(axis), LawError, differing) for axis in ("data", "expert")
}, sent=True)  # fmt: skip


def test_a_recorded_call_runs_again_over_the_other_names(tmp_path) -> None:
    mesh = folded_mesh()
    work = ff.unit(lambda w, x: (w * x).sum())

    def call(w, x):
        return ff.remat(ff.value_and_grad(lambda w: ff.psum(work(w, x), "expert")))(w)

    recorded_call = ff.remat(call)
    with ff.testing.recorded(tmp_path):
        main = lambda: recorded_call(ONE, ONE * (1.0 + ff.axis_index("expert")))  # noqa: E731
        outs = ff.spmd(main, mesh)()
    for rank in (0, 5):
        same(ff.testing.replay(tmp_path, recorded_call, rank=rank), outs[rank])
