"""What is damaged, or does not match: a clear error, on every rank."""

import re
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.checkpoint import tasks
from fsfunc.checkpoint.reading import prove
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.tree.structure import TreeMismatch
from tests.checkpoint.trees import (
    PAIR,
    empty,
    on,
    save_on_two,
)
from tests.checks import same
from tests.covering import examples

SIZES = [6, 3 << 18]  # the files of the larger one have several blocks


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """By size, a checkpoint of two files; and one file, as `consolidate` writes it."""
    folder, found = tmp_path_factory.mktemp("kept"), Kept()
    for n in SIZES:
        found[n] = folder / str(n), save_on_two(folder / str(n), n)
        state = {"w": torch.randn(n), "n": torch.arange(5), "step": 3}
        ff.save(folder / f"{n}-saved", state)
        one = ff.consolidate(folder / f"{n}-saved", folder / f"{n}.safetensors")
        found[-n] = one, state
    return found


class Kept(dict):
    def __repr__(self):  # which hypothesis prints
        return "kept"


@contextmanager
def changed(file, data):
    """While one of a checkpoint's files has other bytes (None: is gone)."""
    before = file.read_bytes()
    file.unlink()
    try:
        if data is not None:
            file.write_bytes(data)
        yield
    finally:
        file.write_bytes(before)


@settings(max_examples=examples(60))
@given(
    st.sampled_from([6, 6, *SIZES, -6, -SIZES[1]]),
    st.sampled_from(["a bit", "a bit", "of its head", "shorter", "longer"]),
    st.integers(0),
    st.integers(0, 1 << 40),
    st.integers(0, 7),
)
def test_a_changed_byte_or_length_is_found(kept, which, how, file, where, bit):
    path, state = kept[which]
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    file = files[file % len(files)]
    data = bytearray(file.read_bytes())
    if how == "shorter":
        del data[where % len(data) :]
    elif how == "longer":
        data += bytes(1 + where % 9)
    else:
        head = 8 + int.from_bytes(data[:8], "little")
        head = head if how == "of its head" and file.name != "fsfunc.json" else 1 << 60
        data[where % min(head, len(data))] ^= 1 << bit
    torch.manual_seed(5)
    random = torch.get_rng_state()
    with changed(file, data), pytest.raises(CheckpointError) as raised:
        ff.load(path, empty(state))
    assert str(file) in str(raised.value)
    assert "damaged" in str(raised.value) or "bit" not in how or which < 0
    assert torch.equal(torch.get_rng_state(), random)
    if file.name != "fsfunc.json":
        with changed(file, data), pytest.raises(CheckpointError):
            prove(ff.metadata(path))


def test_a_checksum_that_reads_alike_is_no_other_text(kept):
    path, state = kept[-6]
    data = path.read_bytes()
    assert prove(ff.metadata(path)) == len(data)
    same(ff.load(path, empty(state)), state)
    start = data.index(b'fsfunc.sums":"') + 14
    at = next(i for i in range(start, len(data)) if data[i : i + 1].isalpha())
    other = data[:at] + data[at : at + 1].upper() + data[at + 1 :]
    with changed(path, other):
        with pytest.raises(CheckpointError, match="damaged.*written in another way"):
            ff.metadata(path)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("pattern", "other"), [(rb'"F32"', b'"I32"'), (rb"\[0, \d\]", b"[0, 1]")]
)
def test_a_file_that_is_damaged_as_it_is_written_is_never_a_checkpoint(
    tmp_path, monkeypatch, rank, pattern, other
):
    """The first rank reads the headers of all files before it says what they hold."""
    write = tasks.write_parts

    def damaged(folder, me, parts):
        files = write(folder, me, parts)
        for name in files if me == rank else ():
            data = (folder / name).read_bytes()
            (folder / name).write_bytes(re.sub(pattern, other, data))
        return files

    monkeypatch.setattr(tasks, "write_parts", damaged)
    with pytest.raises(CheckpointError, match="not written as|do not make it up"):
        save_on_two(tmp_path / "a")
    assert not list(tmp_path.iterdir())


W, B = "params/layers/0/w", "params/layers/0/b"


def first(**other):
    return lambda s: s["params"]["layers"][0].update(other)


def kept_alone(s):
    s["params"]["h"] = s["params"]["h"].to("meta")


# What is done to a target of what was saved, how it is loaded, and what is said of it.
CHANGES = {
    "a leaf too many": (
        lambda s: s["params"]["layers"][1].update(c=torch.ones(1)), {},
        TreeMismatch, ["has no 'params/layers/1/c'"]),
    "a leaf too few": (lambda s: s["params"]["layers"][0].pop("b"), {},
                       TreeMismatch, ["holds 'params/layers/0/b'"]),
    "a subtree too few": (lambda s: s["params"]["layers"].pop(), {},
                          TreeMismatch, ["params/layers"]),
    "a leaf for a subtree": (lambda s: s["params"].update(layers=torch.ones(1)), {},
                             TreeMismatch, ["params/layers"]),
    "another shape": (first(w=torch.zeros(3, 2)), {}, ValueError,
                      [W, "f32[2, 3]", "f32[3, 2]", "give a target"]),
    "another dtype": (first(w=torch.zeros(2, 3).half()), {}, ValueError,
                      [W, "f32[2, 3]", "f16[2, 3]"]),
    "a number for a tensor": (lambda s: s["params"].update(h=1), {}, ValueError,
                              ["params/h", "bf16[2]", "int"]),
    "a tensor for a number": (lambda s: s.update(step=torch.ones(())), {}, ValueError,
                              ["step", "f32[]", "int"]),
    "another kind of number": (lambda s: s.update(step=1.0), {}, ValueError,
                               ["step", "float", "int"]),
    "a subtree that is not there": (None, {"at": "model"}, KeyError,
                                    ["holds nothing at 'model'", "params"]),
    "a pattern that fits nothing": (None, {"only": "params/layer"}, ValueError,
                                    ["fits no path", W]),
    "one pattern of two": (None, {"only": ["step", "stop"]}, ValueError,
                           ["'stop'", "step"]),
    "nobody chosen": (None, {"only": lambda _: False}, ValueError, ["chooses none"]),
    "nobody named": (None, {"only": []}, ValueError, ["chooses none"]),
    "a name that is not there": (None, {"rename": {W: "params/layers/0/v"}},
                                 TreeMismatch, [W, "params/layers/0/v", B]),
    "no such names": (None, {"rename": {"parms": "params"}}, ValueError,
                      ["rename= names 'parms'", "params"]),
    "two for one": (None, {"rename": {W: "params/layers/1/w"}}, ValueError,
                    ["would both take 'params/layers/1/w'"]),
    "another kind": (None, {"rename": {W: B, B: W}, "cast": True}, ValueError,
                     [B, f"there {W!r}", "f32[3]", "f32[2, 3]"]),
    "one that nobody takes": (
        lambda s: s["params"].pop("h"), {"rename": lambda p: p}, TreeMismatch,
        ["params/h", "no leaf of the target takes", "strict=False"]),
    "one kept without a value": (kept_alone, {"only": "params/layers"}, ValueError,
                                 ["'params/h' is not read", "no value"]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_target_that_does_not_match_is_told_by_path(kept, change):
    path, state = kept[6]
    act, options, kind, words = CHANGES[change]
    target = empty(state)
    if act:
        act(target)

    def main(mesh):
        with pytest.raises(kind) as raised:
            ff.load(path, target, **options)
        for word in [*words, *([] if options else [str(path)])]:
            assert word in str(raised.value), f"{word!r} is not in: {raised.value}"

    on(PAIR, main)


def test_a_missing_checkpoint_is_told_on_every_rank(tmp_path):
    def load(mesh):
        with pytest.raises(FileNotFoundError, match="no checkpoint at .*nowhere"):
            ff.load(tmp_path / "nowhere", torch.ones(1))
        return True

    assert on(PAIR, load) == [True, True]
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        ff.load(tmp_path, torch.ones(1))
