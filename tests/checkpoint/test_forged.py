"""A manifest and a header are data from outside: right, or refused at once."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import fsfunc as ff
from fsfunc.checkpoint.reading import prove
from fsfunc.checkpoint.stored import CheckpointError
from tests.checkpoint.forging import Victim, body_of, fuzz, in_time
from tests.checkpoint.test_other_readers import weights, write_hub
from tests.checkpoint.trees import PAIR, laid_out, on, split, tree_of
from tests.checks import same

W = "params/layers/0/w"  # f32[2, 3] in two boxes, one on each rank
V = "params/layers/1/w"
H = "carried"  # f32[3], each rank's own: a stack of two


def times(k):
    return ff.tree.map(lambda x: x * k if torch.is_tensor(x) else x, tree_of(6))


def ours(path, k=1.0):
    state, own = times(k), k * torch.arange(6.0).view(2, 3)

    def save(mesh):
        ff.save(path, laid_out(state, split(6), mesh) | {H: own[mesh.rank]})

    on(PAIR, save)
    return state | {H: own}


def one_file(path, k=1.0):
    """A folder that holds a consolidated file, and no manifest."""
    ff.save(path.with_name(f"{path.name}-saved"), times(k))
    path.mkdir()
    ff.consolidate(path.with_name(f"{path.name}-saved"), path / "model.safetensors")
    return times(k)


def hub(path, k=1.0):
    write_hub(path)
    return weights()


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    return Victim(tmp_path_factory.mktemp("forged"), ours)


def leaf(path=W, **said):
    return lambda body: body["leaves"][path].update(said)


def box(i, value, which=0, path=W):
    def change(body):
        body["leaves"][path]["chunks"][which][i] = value

    return change


def swapped(body):
    """Two leaves that are alike, in each other's places."""
    a, b = body["leaves"][W]["chunks"], body["leaves"][V]["chunks"]
    for mine, theirs in zip(a, b, strict=True):
        mine[1], theirs[1] = theirs[1], mine[1]


def named(name):
    return lambda body: body["files"][0].update(name=name)


def deep(n):
    return b'{"version":1,"metadata":' + b"[" * n + b"]" * n + b"}"


def at_the_top(**said):
    return lambda body: body.update(said)


def many_leaves(n):
    said = b'{"shape":[0],"dtype":"float32","chunks":[]}'
    leaves = b",".join(b'"%d":%s' % (i, said) for i in range(n))
    rest = b',"values":{},"files":[],"metadata":{},"random":{},"mesh":{}}'
    return b'{"version":1,"leaves":{' + leaves + b"}" + rest


def two_axes_turned(body):
    body["mesh"] = {"data": 2, "model": 1}
    body["leaves"][H]["own"] = {"model": 1, "data": 2}


def last_bytes(body):
    body["files"][0]["bytes"] += 8


STATE = {"states": [{"cpu": "AAAA"}], "of": [0]}
FORGED = {
    "a way up": (named("../outside/a.safetensors"), "is called"),
    "an absolute name": (named("/etc/passwd"), "is called"),
    "a name that ends early": (named("a\0.safetensors"), "is called"),
    "a name for two files": (
        lambda b: b["files"][1].update(name=b["files"][0]["name"]), "is called"
    ),
    "file -1": (box(0, -1), "no number from 0 on"),
    "a file too far": (box(0, 2), "file 2 of 2"),
    "half a place": (box(1, 0.5), "no number from 0 on"),
    "a place past the end": (box(1, 1 << 40), "begins at byte"),
    "an offset past the end": (box(2, [0, 2]), "a box of"),
    "a box that overlaps": (box(2, [0, 0], which=1), "do not make it up once"),
    "a box of three": (lambda b: b["leaves"][W]["chunks"][0].pop(), "a list of 3"),
    "a box too few": (lambda b: b["leaves"][W]["chunks"].pop(), "do not make it up"),
    "a box too many": (
        lambda b: b["leaves"][W]["chunks"].append(b["leaves"][W]["chunks"][0]),
        "do not make it up",
    ),
    "two leaves swapped": (swapped, "or its manifest: of"),
    "a dtype that is a function": (leaf(dtype="load"), "is of dtype 'load'"),
    "a shape past counting": (leaf(shape=[1 << 62, 1 << 62]), "is of shape"),
    "a shape of many dims": (leaf(shape=[1] * 99), "is of shape"),
    "trailing bytes": (last_bytes, "ends at byte"),
    "checksums too few": (lambda b: b["files"][0].update(crc32=""), "0 checksums"),
    "checksums that are none": (
        lambda b: b["files"][0].update(crc32="+1234567"), "checksums that are none"
    ),
    "300,000 leaves": (many_leaves(300_000), "leaves, and a checkpoint has"),
    "a path without end": (
        at_the_top(values={"x/" * 99_999 + "x": 1}), "levels deep"
    ),
    "a path of no text": (at_the_top(values={"\ud800": 1}), "no Unicode"),
    "a value that is a list": (at_the_top(values={"step": [3]}), "the value 'step'"),
    "a tensor and a value": (at_the_top(values={W: 3}), "a tensor and a value"),
    "a mesh of nobody": (at_the_top(mesh={"data": 0}), "axis 'data'"),
    "generators that are none": (at_the_top(random={"states": 1, "of": []}), "no list"),
    "a rank's generator too far": (
        at_the_top(random={"states": [{}], "of": [1]}), "ranks' generators"
    ),
    "a generator of no state": (at_the_top(random=STATE), "state of the cpu generator"),
    "own of another axis": (leaf(H, own={"model": 2}), "each rank has a row"),
    "own of True": (leaf(H, own={"data": True}), "each rank has a row"),
    "own in another order": (two_axes_turned, "each rank has a row"),
    "own of other rows": (leaf("params/h", own=PAIR | {"x": 1}), "each rank has a row"),
    "own of a scalar": (leaf("params/layers/1/b", own=PAIR), "each rank has a row"),
    "something more": (at_the_top(code="x"), "it says"),
    "deep JSON": (deep(100_000), "nested too deeply"),
    "deep metadata": (
        at_the_top(metadata={"x": json.loads("[" * 300 + "]" * 300)}), "levels deep"
    ),
    "much JSON": (b"[" + b"0," * (9 << 20) + b"0]", "more than any checkpoint says"),
    "one thing twice": (b'{"version":1,"version":1}', "something twice"),
    "no JSON": (b"{1}", "no JSON"),
    **{
        f"version {v!r}": (
            at_the_top(version=v), f"format version {v!r}.*reads version 1"
        ) for v in (True, 0, 2, 99, None, "1")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_makes_no_sense_is_refused_at_once(victim, name):
    change, words = FORGED[name]
    body = change
    if callable(change):
        change(body := body_of(victim.path))
    with victim.saying(body), pytest.raises(CheckpointError, match=words) as raised:
        ff.load(victim.path, victim.target)
    said = str(raised.value)
    assert len(said) < 1000 and "state of" in said or str(victim.path) in said


def test_own_rows_that_are_none_are_no_others_values(victim):
    """Whoever says of two rows that they are ranks' own, or of ranks' own that they are
    rows: a target of the shape that was saved is given what was saved, or nothing."""
    for change, path in (
        (leaf(W, own=PAIR), W),
        (lambda b: b["leaves"][H].pop("own"), H),
    ):
        change(body := body_of(victim.path))
        with victim.saying(body):
            assert victim.judge(proven=True) is None
            with pytest.raises(ValueError, match="cannot load"):
                ff.load(victim.path, torch.zeros(3), at=path)


def test_what_the_manifest_alone_says_is_not_believed(victim):
    """The files say it too: here of a dtype as wide, for which the target asks."""
    body = body_of(victim.path)
    body["leaves"][W]["dtype"] = "int32"
    with victim.saying(body):
        with pytest.raises(CheckpointError, match="or its manifest: of 'params/layers"):
            ff.load(victim.path, torch.zeros(2, 3).int(), at=W)
        with pytest.raises(CheckpointError, match="or its manifest: of 'params/layers"):
            prove(ff.metadata(victim.path))


def a_link(file, outside):
    file.symlink_to(outside / file.name)


def a_link_beside(file, outside):
    (file.parent / "elsewhere").write_bytes((outside / file.name).read_bytes())
    file.symlink_to("elsewhere")


IN_ITS_PLACE = {
    "a link out of the folder": a_link,
    "a link beside it": a_link_beside,
    "a link to itself": lambda file, _: file.symlink_to(file.name),
    "a link to a device": lambda file, _: file.symlink_to("/dev/zero"),
    "a pipe": lambda file, _: os.mkfifo(file),
    "a folder": lambda file, _: file.mkdir(),
    "nothing": lambda file, _: None,
}


@pytest.mark.parametrize("thing", IN_ITS_PLACE)
@pytest.mark.parametrize("name", ["fsfunc.json", "shard"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(victim, thing, name):
    file = next(victim.path.glob(f"{name}*"))
    file.unlink()
    IN_ITS_PLACE[thing](file, victim.outside)
    try:
        with in_time(60), pytest.raises(CheckpointError) as raised:
            ff.load(victim.path, victim.target)
    finally:
        victim.restore()
    if (thing, name) != ("nothing", "fsfunc.json"):  # parts without their manifest
        assert str(file) in str(raised.value)


def test_a_path_of_the_users_may_be_a_link(tmp_path):
    state = ours(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    same(ff.load(tmp_path / "link", state), state)
    one = ff.consolidate(tmp_path / "link", tmp_path / "one")
    (tmp_path / "two").symlink_to("one")
    same(ff.load(tmp_path / "two", state), state)
    os.mkfifo(tmp_path / "pipe")
    with in_time(60), pytest.raises(CheckpointError, match="no regular file"):
        ff.load(tmp_path / "pipe", state)
    assert load_file(one).keys() < set(ff.tree.paths(state))


def test_a_hubs_cache_is_a_folder_of_links(tmp_path):
    """Into its blobs, and nowhere else."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(weights(), blobs / "1234")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    zeros = ff.tree.map(torch.zeros_like, weights())
    same(ff.load(snapshot, zeros), weights())
    shutil.move(blobs, tmp_path / "other")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../other/1234")
    with pytest.raises(CheckpointError, match="out of the folder"):
        ff.load(snapshot, zeros)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "no", 3])
def test_an_index_names_only_what_lies_beside_it(tmp_path, name):
    write_hub(tmp_path / "hub")
    save_file(weights(), tmp_path / "outside.safetensors")
    index = tmp_path / "hub" / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["head"] = name
    index.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="index"):
        ff.load(tmp_path / "hub", weights())


@pytest.mark.slow
@pytest.mark.parametrize("save", [ours, one_file, hub])
def test_thousands_of_changes_give_no_wrong_value_no_other_error_and_no_hang(
    tmp_path, save
):
    """Where there are no checksums, other numbers are not told from wrong ones."""
    victim = Victim(tmp_path, save)
    assert victim.judge(save is not hub) is None
    count = 400 if save is ours else 200
    assert fuzz(victim, range(count), proven=save is not hub) > count / 2


def test_some_of_these_changes(tmp_path):
    victim = Victim(tmp_path, ours)
    assert victim.judge(True) is None
    fuzz(victim, range(5000, 5040), proven=True)
