"""States: laid out, trained, put together again; a user's own as well as ours."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.testing.drawn_models import rows
from fsfunc.testing.strategies import models
from tests.checks import close, held, same
from tests.covering import examples
from tests.models import chain, floats, layers

MESH = ff.make_mesh({"data": 2}, "simulated")


optimizer = ff.sharded_adam(0.1)


def loss_fn(params, x):
    return chain()(params["layers"], x)


def params_of(seed=0):
    return {"layers": layers(2, 3, make=floats, seed=seed, dtype=torch.float64)}


X = floats(4, 3, seed=8, dtype=torch.float64)


def mine():
    return ff.local_batch(X, MESH, "data")


def on_each_rank(main):
    return ff.spmd(main, MESH)()


MESHES = st.sampled_from(
    [({"data": n}, "data", None) for n in (2, 1, 3)]
    + [({"a": 2, "b": 2}, axis, copies) for axis, copies in
       [(("a", "b"), None), (("b", "a"), None), ("a", "b"), ("b", "a"), ("b", None)]]
)  # fmt: skip


@given(
    models(), MESHES, st.integers(0, 3), st.sampled_from([0, 60, 10**6]), st.booleans()
)
@settings(max_examples=examples(8))
def test_unshard_undoes_place(spec, where, zero, min_bytes, with_moments):
    axes, axis, replicate = where
    mesh = ff.make_mesh(axes, "simulated")
    params, frozen, batch = spec.params(3), spec.frozen_params(3), rows(2, 0)
    grad = ff.value_and_grad(spec.loss)

    def main():
        step = ff.shard(
            grad, mesh, axis, zero=zero, replicate=replicate, min_bytes=min_bytes
        )
        call = lambda p, *rest: step(p, *rest)  # noqa: E731
        tree_of, t, like = call, params, {}
        if with_moments:
            like = {"mu": "params"}
            t = {"mu": tree.map(lambda x: x + 1, params), "params": params}
            tree_of = lambda t, *rest: step(t["params"], *rest)  # noqa: E731
        given = held(t)
        placed = ff.place(tree_of, t, frozen, batch, like=like)
        again = ff.place(tree_of, placed, frozen, batch)
        same(held(t), given)
        if with_moments:  # laid out alike, so an elementwise update just works
            layouts = [
                [x.layout if is_sharded(x) else None for x in leaves_of(placed[k])]
                for k in ("mu", "params")
            ]
            assert layouts[0] == [a if real(a) else None for a in layouts[1]]
        return ff.unshard(placed), ff.unshard(again)

    expected = params
    if with_moments:
        expected = {"mu": tree.map(lambda x: x + 1, params), "params": params}
    for found, again in ff.spmd(main, mesh)():
        same(found, expected)
        same(again, expected)


def real(layout):
    return layout is not None and layout.dtype.is_floating_point


def leaves_of(t):
    return tree.leaves(t, is_leaf=is_sharded)


def test_the_state_shares_no_memory_with_what_it_was_made_of():
    """A donated step writes into it; on simulated ranks, into each rank's own."""
    params = {**params_of(), "gain": torch.ones(3, dtype=torch.float64)}
    before = held(params)

    def loss(p, x):
        return (loss_fn(p, x) * p["gain"]).sum()

    def main():
        step = ff.donate(ff.shard(optimizer(ff.value_and_grad(loss)), MESH, "data"))
        state = ff.init_state(step, params, optimizer, mine())
        for _ in range(3):
            state, _ = step(state, mine())
        return ff.unshard(state.params)

    one = optimizer(ff.value_and_grad(loss))
    state = ff.TrainState(params, optimizer.init(params))
    for _ in range(3):
        state, _ = one(state, X)
    for found in on_each_rank(main):
        close(found, state.params, 1e-9)
    same(held(params), before)


def test_unshard_for_one_rank_and_to_a_dtype_of_device():
    def main():
        step = ff.shard(ff.value_and_grad(loss_fn), MESH, "data")
        placed = ff.place(step, params_of(), mine())
        return ff.unshard(placed, only=1), ff.unshard(placed, to="cpu")

    (none, every), (one, _) = on_each_rank(main)
    assert tree.leaves(none) == []
    same(one, params_of())
    same(every, params_of())


def test_a_state_that_carries_a_graph_is_unsharded_as_the_error_says():
    """A batch that requires grad makes the state that it trains differentiable."""

    def main():
        step = ff.shard(optimizer(ff.value_and_grad(loss_fn)), MESH, "data")
        state = ff.init_state(step, params_of(), optimizer, mine())
        plain, _ = step(state, mine())
        state, _ = step(state, mine().requires_grad_())
        with pytest.raises(ValueError, match="graph, as .*no_grad"):
            ff.unshard(state)
        with pytest.raises(ValueError, match="lay_like outside of .*no shard .*ff.pl"):
            ff.lay_like(ff.unshard(plain.params), plain.params)
        with torch.no_grad():
            return ff.unshard(state), ff.unshard(plain)

    for found, plain in on_each_rank(main):
        close(found, plain, 1e-12)


@pytest.mark.parametrize(
    ("optimizer", "origin"),
    [
        (ff.chain(ff.clip_by_global_norm(1.0), ff.master_weights(optimizer)), "master"),
        (ff.schedule_free(ff.sgd(0.5), 0.5), "z"),
    ],
)
def test_parameters_are_not_replaced_where_a_step_makes_them_anew(optimizer, origin):
    dtype = torch.bfloat16 if origin == "master" else torch.float32
    params = {"w": torch.ones(3, dtype=dtype)}
    state = ff.TrainState(params, optimizer.init(params))
    for other in (
        lambda params: state.replace(params=params),
        lambda params: replace(state, params=params, step=5),
        lambda params: ff.TrainState(params, state.opt_state),
    ):
        assert other({**params}).step < 6  # the same tensors, in another dictionary
        with pytest.raises(ValueError, match=f"{origin}/w' in itself.*Give state.rep"):
            other({"w": -params["w"]})
    new = state.replace(params={"w": -params["w"]}, opt_state=state.opt_state)
    assert new.replace(step=3).params["w"][0] == -1
    wide = {"w": torch.ones(3)}
    plain = ff.TrainState(wide, ff.master_weights(optimizer).init(wide))
    assert plain.replace(params=params).params is params  # these are their own masters


def test_gradients_of_another_tree_are_refused():
    state = ff.TrainState(params_of(), optimizer.init(params_of()))
    grads = params_of()
    del grads["layers"][1]["b"]
    with pytest.raises(ValueError, match="gradients do not match.*layers/1"):
        state.apply_gradients(grads, optimizer)


@pytest.mark.processes
def test_where_one_process_cannot_lay_out_all_raise(processes):
    """In the step, in the function that makes parameters, in the optimizer's init."""
    found = processes(Path(__file__).with_name("failing_ranks.py"), 2).split("\n")
    said = [line for line in found if line]
    raised = {"step": "KeyError", "function": "OSError", "optimizer": "MemoryError"}
    for rank, kinds in enumerate([dict.fromkeys(raised, "RanksDiffer"), raised]):
        mine = said[7 * rank : 7 * rank + 7]
        for i, (name, kind) in enumerate(kinds.items()):
            assert mine[2 * i : 2 * i + 2] == [f"{name} {kind}", "4.0"]
        assert mine[6] == "unlike True"


@pytest.mark.parametrize("made, turned", [("given", True), ("by a function", False)])
def test_one_tensor_at_two_paths_is_refused(made, turned):
    """The first update would untie them: of one that is read twice gradients add up."""
    unit = ff.unit(lambda p, x: x @ p["a"] @ p["b"])
    step = optimizer(ff.value_and_grad(lambda p, x: unit(p, x).sum()))

    def init():
        w = torch.ones(3, 3)
        return {"a": w, "b": w.T if turned else w}

    def main():
        params = init if made == "by a function" else init()
        ff.init_state(ff.shard(step, MESH, "data"), params, optimizer, torch.ones(2, 3))

    with pytest.raises(ValueError, match="one tensor is at '.*a' and at '.*b'.*clone"):
        ff.spmd(main, MESH)()
