"""What is damaged, or does not match: a clear error, on every rank."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.checkpoint.blocks import prove
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.tree.structure import TreeMismatch
from tests.checkpoint.trees import (
    PAIR,
    empty,
    laid_out,
    on,
    save_on_two,
    split,
    tree_of,
)
from tests.checks import same


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A small checkpoint of two files, and one whose files have several blocks."""
    folder = tmp_path_factory.mktemp("kept")
    return {n: (folder / str(n), save_on_two(folder / str(n), n)) for n in (6, 3 << 18)}


class Changed:
    """A checkpoint while one of its files has other bytes (None: is gone)."""

    def __init__(self, file, data):
        self.file, self.data, self.before = file, data, file.read_bytes()

    def __enter__(self):
        self.file.unlink()
        if self.data is not None:
            self.file.write_bytes(self.data)

    def __exit__(self, *_):
        self.file.write_bytes(self.before)


@settings(max_examples=120)
@given(
    st.sampled_from([6, 6, 6, 3 << 18]),
    st.integers(0),
    st.integers(0, 1 << 40),
    st.integers(0, 7),
)
def test_a_flipped_bit_is_found(kept, n, which, where, bit):
    path, state = kept[n]
    files = sorted(path.iterdir())
    file = files[which % len(files)]
    data = bytearray(file.read_bytes())
    where %= len(data)
    data[where] ^= 1 << bit
    torch.manual_seed(5)
    random = torch.get_rng_state()
    with Changed(file, data):
        with pytest.raises(CheckpointError, match="damaged") as raised:
            ff.load(path, empty(state))
        assert str(file) in str(raised.value)
        assert torch.equal(torch.get_rng_state(), random)
        if file.name != "fsfunc.json":
            with pytest.raises(CheckpointError, match="damaged between bytes"):
                prove(ff.metadata(path))


@settings(max_examples=30)
@given(st.integers(0), st.integers(0, 1 << 40), st.booleans())
def test_a_file_of_another_length_is_found(kept, which, length, longer):
    path, state = kept[6]
    files = sorted(path.iterdir())
    file = files[which % len(files)]
    data = file.read_bytes()
    data = data + bytes(1 + length % 9) if longer else data[: length % len(data)]
    with Changed(file, data), pytest.raises(CheckpointError) as raised:
        ff.load(path, empty(state))
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("which", range(3))
def test_a_missing_file_is_named_on_every_rank(kept, which):
    """Also where one rank alone would have read it."""
    path, state = kept[6]
    file = sorted(path.iterdir())[which]

    def load(mesh):
        target = laid_out(empty(state), split(6), mesh)
        with pytest.raises(CheckpointError) as raised:
            ff.load(path, target)
        same(target, laid_out(empty(state), split(6), mesh))
        return str(raised.value)

    with Changed(file, None):
        for said in on(PAIR, load):
            assert file.name in said
    on(PAIR, lambda mesh: ff.load(path, laid_out(state, split(6), mesh)))


def altered(path, **changes):
    """Rewrites a manifest, with a checksum that suits it."""
    file = path / "fsfunc.json"
    body = json.loads(file.read_bytes())["body"] | changes
    text = json.dumps(body, separators=(",", ":"))
    sum_ = zlib.crc32(text.encode())
    file.write_text(f'{{"crc32": {sum_}, "body":\n{text}\n}}\n')


@pytest.mark.parametrize("version", [0, 2, 99, None, "1"])
def test_another_version_is_told(tmp_path, version):
    path = tmp_path / "a"
    ff.save(path, tree_of())
    altered(path, version=version)
    with pytest.raises(CheckpointError, match="reads version 1") as raised:
        ff.load(path, tree_of())
    assert f"format version {version!r}" in str(raised.value)
    with pytest.raises(CheckpointError, match="version"):
        ff.metadata(path)


W = "params/layers/0/w"
CHANGES = {
    "a leaf too many": (
        lambda s: s["params"]["layers"][1].update(c=torch.ones(1)),
        TreeMismatch, ["params/layers/1", "'c'"],
    ),
    "a leaf too few": (
        lambda s: s["params"]["layers"][0].pop("b"),
        TreeMismatch, ["params/layers/0", "'b'"],
    ),
    "a subtree too few": (
        lambda s: s["params"]["layers"].pop(), TreeMismatch, ["params/layers"]
    ),
    "a leaf for a subtree": (
        lambda s: s["params"].update(layers=torch.ones(1)),
        TreeMismatch, ["params/layers"],
    ),
    "another shape": (
        lambda s: s["params"]["layers"][0].update(w=torch.zeros(3, 2)),
        ValueError, [W, "f32[2, 3]", "f32[3, 2]", "give a target"],
    ),
    "another dtype": (
        lambda s: s["params"]["layers"][0].update(w=torch.zeros(2, 3).half()),
        ValueError, [W, "f32[2, 3]", "f16[2, 3]"],
    ),
    "a number for a tensor": (
        lambda s: s["params"].update(h=1), ValueError, ["params/h", "bf16[2]", "int"]
    ),
    "a tensor for a number": (
        lambda s: s.update(step=torch.ones(())), ValueError, ["step", "f32[]", "int"]
    ),
    "another kind of number": (
        lambda s: s.update(step=1.0), ValueError, ["step", "float", "int"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_target_that_does_not_match_is_told_by_path(kept, change):
    path, state = kept[6]
    target = empty(state)
    act, kind, words = CHANGES[change]
    act(target)
    with pytest.raises(kind) as raised:
        ff.load(path, target)
    for word in [*words, str(path)]:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


def test_a_subtree_that_is_not_there_is_told(kept):
    with pytest.raises(KeyError, match="holds nothing at 'model'.*params"):
        ff.load(kept[6][0], torch.ones(1), at="model")


def test_a_missing_checkpoint_is_told_on_every_rank(tmp_path):
    def load(mesh):
        with pytest.raises(FileNotFoundError, match="no checkpoint at .*nowhere"):
            ff.load(tmp_path / "nowhere", torch.ones(1))
        return True

    assert on(PAIR, load) == [True, True]
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        ff.load(tmp_path, torch.ones(1))


@settings(max_examples=80)
@given(st.integers(0, 1 << 40), st.integers(0, 255))
def test_a_foreign_file_with_any_other_head_is_refused(foreign, where, value):
    """Or read: without checksums nobody can tell numbers from other numbers."""
    path, data = foreign
    data = bytearray(data)
    length = 8 + int.from_bytes(data[:8], "little")
    data[where % length] = value
    path.write_bytes(data)
    try:
        found = ff.load(path, {"step": 0, "w": torch.zeros(2, 3), "z": torch.zeros(2)})
    except (CheckpointError, TreeMismatch, ValueError):
        return
    assert found["w"].shape == (2, 3)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    ff.save(folder / "a", {"w": torch.ones(2, 3), "z": torch.ones(2), "step": 3})
    path = ff.consolidate(folder / "a", folder / "a.safetensors")
    return Path(path), Path(path).read_bytes()


@pytest.fixture(scope="module", params=[6, 3 << 18])
def single(request, tmp_path_factory):
    """One file of tensors of up to 3 MiB, as `consolidate` writes it."""
    folder = tmp_path_factory.mktemp("single")
    state = {"w": torch.randn(request.param), "n": torch.arange(5), "step": 3}
    ff.save(folder / "a", state)
    path = ff.consolidate(folder / "a", folder / "a.safetensors")
    return Single(path, state, path.read_bytes())


class Single:
    """Of a short ``repr``, which hypothesis prints."""

    def __init__(self, *known):
        self.known = known


def test_a_single_file_is_proven(single):
    path, state, data = single.known
    path.write_bytes(data)
    found = ff.load(
        path, {"w": torch.zeros_like(state["w"]), "n": state["n"], "step": 0}
    )
    same(found, state)
    length = 8 + int.from_bytes(data[:8], "little")
    assert prove(ff.metadata(path)) == len(data)
    assert ff.metadata(path).files[path.name].origin == length
    assert set(safetensors_of(path)) == {"w", "n"}


def safetensors_of(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).keys() - {"__metadata__"}


@settings(max_examples=150)
@given(st.integers(0, 1 << 40), st.booleans(), st.integers(0, 7))
def test_a_flipped_bit_of_a_single_file_is_found(single, where, in_head, bit):
    path, state, data = single.known
    data = bytearray(data)
    head = 8 + int.from_bytes(data[:8], "little")
    where %= head if in_head else len(data)
    data[where] ^= 1 << bit
    path.write_bytes(data)
    target = {"w": torch.zeros_like(state["w"]), "n": torch.zeros(5).long(), "step": 0}
    with pytest.raises(CheckpointError):
        ff.load(path, target)
    with pytest.raises(CheckpointError):
        prove(ff.metadata(path))


@pytest.mark.parametrize(
    "text", [b"__metadata__", b'"fsfunc"', b"fsfunc.crc32", b"fsfunc.sums", b'"w"']
)
def test_a_flipped_bit_of_what_a_single_file_calls_things_is_found(single, text):
    path, state, data = single.known
    at = data.index(text) + 2
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CheckpointError):
        ff.metadata(path)


def test_a_checksum_that_reads_alike_is_no_other_text(single):
    path, state, data = single.known
    start = data.index(b'fsfunc.sums":"') + 14
    end = data.index(b'"', start)
    at = next(i for i in range(start, end) if data[i : i + 1].isalpha())
    path.write_bytes(data[:at] + data[at : at + 1].upper() + data[at + 1 :])
    with pytest.raises(CheckpointError, match="damaged.*written in another way"):
        ff.metadata(path)
