"""Recordings: what differs is told, and nothing is left behind."""

import gc
from pathlib import Path

import numpy
import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.sharded.leaf import is_sharded
from fsfunc.testing import recorded, replay
from fsfunc.testing.recordings.files import recorded_calls
from fsfunc.testing.recordings.tapes import RecordedMessage
from tests.programs import forked
from tests.testing.test_recordings import MESH, held

scaled = ff.remat(lambda w, x: w * x)


def plain(step):
    """The step under the transform that does nothing."""
    return ff.transformed(step, ff.Interpretation())


X = torch.arange(6.0)


@pytest.mark.parametrize(
    "before, now, said",
    [
        (0.2, 0.3, "in '': 0.2, and alone 0.3"),
        ({"lr": 1}, {"lr": True}, "in 'lr': 1, and alone True"),
        ({"a": X}, {"b": X}, r"'a': torch.float32\[6\], and alone nothing"),
        ([X], [X, X], r"'1': nothing, and alone torch.float32\[6\]"),
        (X, X.view(2, 3), r"float32\[6\], and alone torch.float32\[2, 3\]"),
        (X, X.view(torch.int32), "float32.*, and alone torch.int32"),
        (X, X + 1, "other bits in ''$"),
        ([X, 2.0], [X + 1, 2.0], "other bits in '0'$"),
    ],
)
def test_whatever_is_returned_is_compared(before, now, said, tmp_path):
    """Numbers, shapes, dtypes and paths too: a step may keep a count by itself."""
    returns = [before]
    step = plain(lambda: returns[0])
    with recorded(tmp_path):
        step()
    replay(tmp_path, step, rank=0)
    returns[0] = now
    with pytest.warns(RuntimeWarning, match=said):
        replay(tmp_path, step, rank=0)


def test_an_error_of_another_text_gets_a_note(tmp_path):
    said = ["one"]

    def fails():
        raise ValueError(*said)

    step = plain(fails)
    with pytest.raises(ValueError, match="one"), recorded(tmp_path):
        step()
    with pytest.raises(ValueError, match="one") as again:
        replay(tmp_path, step, rank=0)
    assert not hasattr(again.value, "__notes__")
    said[:] = ["two"]
    with pytest.raises(ValueError, match="two") as other:
        replay(tmp_path, step, rank=0)
    assert "raised ValueError: one" in other.value.__notes__[0]


def test_an_error_that_cannot_say_itself_stays_that_error(tmp_path):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fails():
        raise Mute

    step = plain(fails)
    with pytest.raises(Mute), recorded(tmp_path):
        step()
    with pytest.raises(Mute):
        replay(tmp_path, step, rank=0)


def test_blocks_that_write_to_one_folder_count_on_together(tmp_path):
    with recorded(tmp_path, calls=9):
        scaled(torch.ones(1), 0)
        with recorded(tmp_path, calls=9):
            scaled(torch.ones(1), 1)
        scaled(torch.ones(1), 2)
    calls = [one.call for one in recorded_calls(tmp_path)]
    assert calls == [0, 1, 2]
    assert [replay(tmp_path, scaled, rank=0, call=i).item() for i in calls] == calls


def test_a_note_names_the_last_call_that_is_kept(tmp_path):
    def errors(most, first):
        with pytest.raises(KeyError) as told, recorded(tmp_path, most=most):
            if first:
                scaled(torch.ones(1), 0)
            with pytest.warns(RuntimeWarning, match="is not recorded"):
                scaled(torch.ones(1 << 12), 0)
            raise KeyError
        return getattr(told.value, "__notes__", [])

    assert errors(1 << 13, first=False) == []
    assert errors(1 << 13, first=True)[0].startswith("the last call, 0, is recorded")
    assert [one.call for one in recorded_calls(tmp_path)] == [0]


def test_a_folder_stays_where_it_is_when_the_program_moves(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError) as told, recorded("tape"):
        monkeypatch.chdir(tmp_path / "elsewhere")
        scaled(torch.ones(1), 3)
        raise KeyError
    assert str(tmp_path / "tape") in told.value.__notes__[0]
    assert replay(tmp_path / "tape", scaled, rank=0).item() == 3
    assert not list(Path().iterdir())


def test_a_graph_that_is_kept_holds_no_messages(tmp_path):
    """The handle of a collective's backward knows the link, and that the tape."""
    layer = ff.unit(lambda w, x: (w * x).sum())
    step = ff.shard(lambda w, x: layer(w, x), MESH, "data")
    kept = []

    def main():
        x = torch.ones(4)
        w = ff.place(step, torch.ones(4), x)
        for leaf in ff.tree.leaves(w, is_leaf=is_sharded):
            leaf.packed.flat.requires_grad_()
        kept.append(step(w, x))

    with recorded(tmp_path):
        ff.spmd(main, MESH)()
    assert all(loss.requires_grad for loss in kept)
    gc.collect()
    assert not any(type(x) is RecordedMessage for x in gc.get_objects())


def test_an_object_that_is_there_twice_is_named(tmp_path):
    """The second, in the order of the keys, comes first in the dict."""
    x = torch.eye(2).to_sparse()
    step = plain(lambda tree: 1)
    with recorded(tmp_path):
        step({"b": x, "a": x})
    with pytest.raises(CheckpointError, match="hold a torch:Tensor, which is no"):
        replay(tmp_path, step, rank=0)


KINDS = """
import sys, torch
from torch.utils import _pytree

class Batch:
    def __init__(self, x, names):
        self.x, self.names = x, names

_pytree.register_pytree_node(
    Batch, lambda b: ([b.x], b.names), lambda x, names: Batch(x[0], names)
)

import fsfunc as ff
step = ff.transformed(lambda b: (b.x * 2, *b.names), ff.Interpretation())
if "record" in sys.argv:
    with ff.testing.recorded(sys.argv[1]):
        step(Batch(torch.ones(2), ["a", ("b", 3)]))
else:
    x, *names = ff.testing.replay(sys.argv[1], step, rank=0)
    assert x.tolist() == [2, 2] and names == ["a", ("b", 3)]
"""


def test_a_class_that_torch_knows_comes_again_in_a_new_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(KINDS)
    for action in ("record", "replay"):
        found = forked(program, tmp_path / "tape", action)
        assert found.returncode == 0, found


@pytest.mark.parametrize(
    "x",
    [numpy.float32(0.1), numpy.float64(0.1), numpy.bool_(True), numpy.int8(-3),
     numpy.complex64(1 + 2j), numpy.datetime64("2020-01-01")],
)  # fmt: skip
def test_numbers_of_numpy_come_again(x, tmp_path):
    step = plain(lambda x: [x, x.dtype])
    with recorded(tmp_path):
        step(x)
    (again, dtype), name = replay(tmp_path, step, rank=0), type(x)
    assert type(again) is name and again == x and dtype == x.dtype


@pytest.mark.filterwarnings("ignore:get_state and legacy")
@pytest.mark.parametrize("kind", [numpy.random.PCG64, numpy.random.Philox])
def test_another_default_generator_of_numpy(kind, tmp_path):
    before = numpy.random.get_bit_generator()
    step = plain(lambda: [numpy.random.normal(), numpy.random.normal()])
    try:
        numpy.random.set_bit_generator(kind(3))
        numpy.random.randint(5, size=3, dtype=numpy.uint8)  # part of a word
        with recorded(tmp_path):
            drawn = step()
        assert replay(tmp_path, step, rank=0) == drawn
    finally:
        numpy.random.set_bit_generator(before)


def test_an_exact_run_is_replayed_within_one(tmp_path):
    """Arguments that were made before it are floats still, and are read as these."""
    step, w = plain(lambda w: w / 3), torch.ones(2)
    with recorded(tmp_path), ff.testing.exact():
        out = held(step(w))
    with ff.testing.exact():
        assert held(replay(tmp_path, step, rank=0)) == out
    with pytest.warns(RuntimeWarning, match="returned other bits in ''"):
        replay(tmp_path, step, rank=0)
