"""A part of a checkpoint, under other names, in other dtypes, into given memory."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.donated import lock
from fsfunc.tree.structure import TreeMismatch
from tests.checkpoint.stacks import STACKS, made
from tests.checkpoint.trees import (
    MESHES,
    PAIR,
    alike,
    empty,
    laid_out,
    layouts,
    on,
    save_on_two,
    shapes,
)
from tests.checks import same
from tests.covering import examples

W = "params/layers/0/w"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    path = tmp_path_factory.mktemp("partial") / "a"
    return path, save_on_two(path)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@st.composite
def partial_loads(draw):
    """Leaves saved on one mesh; some of them asked for on another, in other dtypes."""
    axes = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    names = [f"w{i}" for i in range(draw(st.integers(2, 4)))]
    kinds = {n: (draw(shapes), draw(st.sampled_from(FLOATS))) for n in names}
    asked = {n: draw(st.sampled_from(FLOATS)) for n in names}
    only = draw(st.sets(st.sampled_from(names), min_size=1))
    sides = [
        [draw(layouts(kinds[n][0], kinds[n][1] if i == 0 else asked[n], axes[i], n))
         for n in names]
        for i in range(2)
    ]  # fmt: skip
    return axes, kinds, asked, only, sides


@settings(max_examples=examples(8))
@given(drawn=partial_loads(), donate=st.booleans(), seed=st.integers(0, 99))
def test_what_is_chosen_is_read_renamed_and_converted(
    tmp_path_factory, drawn, donate, seed
):
    axes, kinds, asked, only, sides = drawn
    path = tmp_path_factory.mktemp("drawn") / "a"
    draw = torch.Generator().manual_seed(seed)
    numbers = lambda n: torch.randn(kinds[n][0], generator=draw)  # noqa: E731
    saved = {n: numbers(n).to(kinds[n][1]) for n in kinds}
    mine = {n: numbers(n).to(asked[n]) for n in kinds}
    on(axes[0], lambda mesh: ff.save(path, {"m": laid_out(saved, sides[0], mesh)}))
    expected = {n: saved[n].to(asked[n]) if n in only else mine[n] for n in kinds}

    def load(mesh):
        target = {"to": laid_out(mine, sides[1], mesh)}
        found = ff.load(
            path,
            target,
            only=[f"to/{n}" for n in only],
            rename={"to": "m"},
            cast=True,
            donate=donate,
        )
        return tree.leaves(found), tree.leaves(laid_out(expected, sides[1], mesh))

    for found, right in on(axes[1], load):
        assert all(map(alike, found, right))


def test_what_is_on_one_side_alone_is_left_out_where_asked(kept):
    path, state = kept
    target = empty(state)
    target["params"]["new"] = torch.ones(3)
    del target["params"]["h"]
    with pytest.raises(TreeMismatch):
        ff.load(path, target)
    found = ff.load(path, target, strict=False)
    assert torch.equal(found["params"]["new"], torch.ones(3))
    assert found["params"]["new"] is not target["params"]["new"]
    same(found["params"]["layers"], state["params"]["layers"])
    with pytest.raises(TreeMismatch, match="has no 'x'.*near are"):
        ff.load(path, {"x": torch.ones(1)}, strict=False)  # nothing at all
    same(ff.load(path, target, strict=False, only=["**/w", "step"])["step"], 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_as_dcp_with_partial_loads(tmp_path, kept):
    """Its planner leaves alone what the checkpoint does not have, and so does this."""
    path, state = kept
    reader = dcp.HuggingFaceStorageReader(str(path))
    mine = {W: torch.zeros(2, 3), "other": torch.full((2,), 7.0)}
    ours = ff.load(path, dict(mine), strict=False, rename=lambda p: p)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(mine, storage_reader=reader, planner=planner, no_dist=True)
    same(ours, mine)


INTS = torch.arange(3)
CASTS = [
    (torch.ones(2), torch.zeros(2).half(), True),
    (torch.ones(2).bfloat16(), torch.zeros(2, dtype=torch.float64), True),
    (torch.tensor([1e30]), torch.zeros(1).bfloat16(), True),
    (torch.tensor([float("inf"), float("nan")]), torch.zeros(2).half(), True),
    (torch.tensor([1e6]), torch.zeros(1).half(), "does not fit into torch.float16"),
    (torch.tensor([500.0]), torch.zeros(1).to(torch.float8_e4m3fn), "does not fit"),
    (INTS.int(), INTS, True),
    (INTS, INTS.int(), "convert what comes back"),
    (INTS, INTS.float(), "convert what comes back"),
    (torch.ones(2), INTS[:2], "convert what comes back"),
    (torch.ones(2) > 0, torch.zeros(2), "convert what comes back"),
    (torch.ones(2).cfloat(), torch.zeros(2), "convert what comes back"),
    (torch.ones(2), torch.zeros(3).half(), "convert what comes back"),
]


@pytest.mark.parametrize("saved, target, right", CASTS)
def test_no_number_becomes_another(tmp_path, saved, target, right):
    ff.save(tmp_path / "a", {"w": saved})
    if right is not True:
        with pytest.raises(ValueError, match=right) as raised:
            ff.load(tmp_path / "a", {"w": target}, cast=True)
        assert "'w'" in str(raised.value)
        return
    found = ff.load(tmp_path / "a", {"w": target}, cast=True)["w"]
    assert found.dtype == target.dtype
    assert alike(found, saved.to(target.dtype))
    with pytest.raises(ValueError, match="cast=True converts"):
        ff.load(tmp_path / "a", {"w": target})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_it_is_converted_and_turned_in_any_mode(tmp_path, mode):
    """By threads, of which each has modes of its own."""
    x = torch.randn(3, 2)
    ff.save(tmp_path / "a", {"w": x, "v": x})
    with mode():
        target = {"w": torch.zeros(3, 2).bfloat16(), "v": torch.zeros(2, 3).t()}
        found = ff.load(tmp_path / "a", target, cast=True)
        same(found, {"w": x.bfloat16(), "v": x})


def test_ranks_that_choose_differently_are_told(kept):
    path, state = kept

    def main(mesh):
        only = "params" if mesh.rank else "params/layers"
        with pytest.raises(ValueError, match="the ranks read different leaves"):
            ff.load(path, empty(state), only=only)

    on(PAIR, main)


def test_chance_stays_where_a_part_is_read(kept):
    path, state = kept
    torch.manual_seed(4)
    expected = torch.get_rng_state()
    ff.load(path, empty(state), only="params")
    assert torch.equal(torch.get_rng_state(), expected)


# Into the target's own memory


def whole(state):
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def at(state):
    return [x.data_ptr() for x in tree.leaves(state) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(
    "name",
    ["one device", "zero=0 on 2", "zero=1 on 3", "zero=3 on 2", "shard(pipeline)"],
)
def test_it_lies_where_the_target_lay(tmp_path, name):
    def main(mesh):
        step, state, (batch, *_) = made(name, mesh)
        ff.save(tmp_path / "a", state)
        saved = whole(ff.unshard(state))
        for _ in range(2):
            state, _ = step(state, batch)
        old, where = state, at(state)
        state = ff.load(tmp_path / "a", state, donate=True)
        # What units last saw of it is gone too: the next step gathers anew.
        assert at(state) == where
        same(ff.unshard(state), saved)
        fresh = ff.load(tmp_path / "a", state)
        same(ff.unshard(step(state, batch)[0]), ff.unshard(step(fresh, batch)[0]))
        with pytest.raises(RuntimeError, match=r"given to ff\.load"):
            ff.unshard(old)
        return True

    assert all(on(STACKS[name][0], main))


LAZY = {"conjugate": lambda x: x.conj(), "negative": lambda x: x.conj().imag}


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
@pytest.mark.parametrize("view", LAZY)
def test_into_a_view_that_is_not_what_its_memory_says(tmp_path, view, shape):
    x = LAZY[view](torch.randn(shape, dtype=torch.complex64))
    ff.save(tmp_path / "a", {"x": x})
    memory = torch.zeros(shape, dtype=torch.complex64)
    found = ff.load(tmp_path / "a", {"x": LAZY[view](memory)}, donate=True)["x"]
    assert torch.equal(found, x)
    assert not memory.any()  # it is the caller's


def test_what_the_caller_has_a_view_of_is_not_written(tmp_path):
    unit = ff.unit(lambda p, x: x * p["w"])

    def main(mesh):
        f = ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
        x, new = torch.ones(3), {"w": torch.arange(3.0)}
        ff.save(tmp_path / "a", {"p": ff.place(f, new, x), "v": x + 1, "m": x + 2})
        mine = ff.place(f, {"w": torch.ones(3)}, x)
        kept, v, where = (
            tree.map(torch.detach, mine),
            x.clone(),
            (m := x + 3).data_ptr(),
        )
        row = v[1:]
        found = ff.load(tmp_path / "a", {"p": mine, "v": v, "m": m}, donate=True)
        assert found["m"].data_ptr() == where  # nobody has one of that
        same(ff.unshard(found), {"p": new, "v": x + 1, "m": x + 2})
        return ff.unshard(kept)["w"].tolist(), row.tolist()

    assert on({"data": 2}, main) == [([1, 1, 1], [1, 1])] * 2


def test_whole_tensors_and_what_is_refused(tmp_path):
    ff.save(tmp_path / "a", {"w": torch.arange(3.0), "n": 1})
    target = {"w": torch.zeros(3), "n": 0}
    where = target["w"].data_ptr()
    found = ff.load(tmp_path / "a", target, donate=True)
    assert found["w"].data_ptr() == where and found["n"] == 1
    with pytest.raises(RuntimeError, match=r"f32\[3\]: this state's memory was given"):
        target["w"] + 1
    with pytest.raises(RuntimeError, match=r"'w': this state's memory was given"):
        ff.load(tmp_path / "a", target)
    with pytest.raises(ValueError, match="cannot load into"):
        meta = {"w": torch.zeros(3, device="meta"), "n": 0}
        ff.load(tmp_path / "a", meta, donate=True)
    with pytest.raises(ValueError, match="stays on its device"):
        ff.load(tmp_path / "a", found, donate=True, device="cuda")


@pytest.mark.parametrize("name", ["", "w"])
@pytest.mark.parametrize(
    ("optimizer", "origin"),
    [
        (ff.master_weights(ff.sgd(0.5)), "master"),
        (ff.schedule_free(ff.sgd(0.5), 0.5), "z"),
    ],
)
def test_parameters_are_not_read_without_what_a_step_makes_them_of(
    tmp_path, name, optimizer, origin
):
    params = torch.ones(3) if origin == "z" else torch.ones(3).bfloat16()
    params = {name: params, "n": 3} if name else params
    state = ff.TrainState(params, ff.chain(optimizer).init(params))
    ff.save(tmp_path / "a", state)
    with pytest.raises(ValueError, match=f"'params.*is read, and .*/{origin}"):
        ff.load(tmp_path / "a", state, only="params")
    inner = "opt_state/*/count" if origin == "z" else "opt_state/*/inner"
    for only in (["params", f"opt_state/*/{origin}"], inner, "step"):
        same(ff.load(tmp_path / "a", state, only=only), state)


def test_copies_are_not_read_without_what_slow_momentum_makes_them_of(tmp_path):
    optimizer = ff.sgd(0.5)
    step = optimizer(ff.value_and_grad(lambda w, x: (w * x).sum()))

    def main(mesh):
        slow, x = ff.slowmo(step, mesh, "data", every=2, lr=0.5), torch.ones(3)
        state = ff.init_state(slow, x, optimizer, x)
        ff.save(tmp_path / "a", state)
        with pytest.raises(ValueError, match="'copies/params' is .* 'slow/anchor' is"):
            ff.load(tmp_path / "a", state, only="copies")
        for only in (["copies", "slow/anchor"], "count"):
            same(ff.load(tmp_path / "a", state, only=only), state)

    on(PAIR, main)


def test_a_target_that_is_being_saved_is_refused(tmp_path):
    state = {"w": torch.arange(3.0)}
    ff.save(tmp_path / "a", state)
    release = lock([state["w"]])
    with pytest.raises(ValueError, match="is being saved"):
        ff.load(tmp_path / "a", state, donate=True)
    release()
    ff.load(tmp_path / "a", state, donate=True)


def test_a_damaged_checkpoint_is_refused_before_the_target_is_touched(tmp_path):
    state = {"w": torch.arange(3.0)}
    ff.save(tmp_path / "a", state)
    next((tmp_path / "a").glob("*.safetensors")).unlink()
    with pytest.raises(ff.CheckpointError, match="is missing"):
        ff.load(tmp_path / "a", state, donate=True)
    assert state["w"].tolist() == [0, 1, 2]
    ff.save(tmp_path / "b", state)  # not spent


@pytest.mark.parametrize("only", [None, "w", "average"])
@pytest.mark.parametrize("of", [lambda x: x, lambda x: x[1:]])
def test_two_leaves_in_one_memory_come_apart(tmp_path, of, only):
    """An average that started as the parameters themselves."""

    def state(i):
        return {"w": torch.full((4,), i), "average": of(torch.full((4,), i + 1))}

    ff.save(tmp_path / "a", state(1.0))
    w = torch.full((4,), 7.0)
    found = ff.load(tmp_path / "a", {"w": w, "average": of(w)}, only=only, donate=True)
    for k, x in found.items():
        assert set(x.tolist()) == {state(1.0)[k][0].item() if only in (None, k) else 7}


def test_so_do_parts_in_one_buffer(tmp_path):
    unit = ff.unit(lambda p, x: x * p["w"] + p["b"])

    def main(mesh):
        loss = ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
        params = {"w": torch.arange(3.0), "b": torch.ones(3)}
        one = ff.place(loss, params, torch.ones(3))
        two = ff.place(loss, tree.map(lambda x: x + 5, params), torch.ones(3))
        ff.save(tmp_path / "b", {"mine": one, "average": two})
        target = {"mine": one, "average": dict(one)}
        found = ff.load(tmp_path / "b", target, donate=True, only="average")
        return ff.unshard(found)

    for found in on({"data": 2}, main):
        assert found["mine"]["w"].tolist() == [0, 1, 2]
        assert found["average"]["w"].tolist() == [5, 6, 7]
