"""A load that is given its target's memory writes there, and the target is spent."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.runtime.memory import hold
from tests.checkpoint.stacks import STACKS, made
from tests.checkpoint.trees import on
from tests.checks import same


def whole(state):
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def at(state):
    return [x.data_ptr() for x in tree.leaves(state) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(
    "name",
    ["one device", "zero=0 on 2", "zero=1 on 3", "zero=3 on 2", "HSDP zero=1",
     "merged", "shard(pipeline)", "pipeline(shard)"],
)  # fmt: skip
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
    assert torch.equal(LAZY[view](memory), x)


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


def test_a_target_that_is_being_saved_is_refused(tmp_path):
    state = {"w": torch.arange(3.0)}
    ff.save(tmp_path / "a", state)
    release = hold([state["w"]])
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
