"""What others read of ours, and what we read of theirs: DCP, safetensors, hubs."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

import fsfunc as ff
from fsfunc import tree
from tests.checkpoint.stacks import STACKS, made
from tests.checkpoint.trees import (
    DTYPES,
    MESHES,
    alike,
    any_bits,
    laid_out,
    layouts,
    on,
    shapes,
)
from tests.checks import same
from tests.covering import examples

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)
# What HuggingFaceStorageReader itself knows.
UNKNOWN_TO_DCP = {torch.complex64, torch.uint16, torch.uint32, torch.uint64}


@st.composite
def leaves_of_one_mesh(draw):
    axes = draw(st.sampled_from(MESHES))
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=4))
    whole = {f"w{i}": any_bits(*kind, i) for i, kind in enumerate(kinds)}
    how = [draw(layouts(x.shape, x.dtype, axes, path)) for path, x in whole.items()]
    return axes, how, whole


@settings(max_examples=examples(10))
@given(leaves_of_one_mesh())
def test_dcp_and_safetensors_read_any_layout(drawn):
    axes, how, whole = drawn
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        on(axes, lambda mesh: ff.save(path, laid_out(whole, how, mesh)))
        seen = set()
        for file in path.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    seen.add(name)
                    assert opened.get_tensor(name).dtype == whole[name].dtype
        assert seen == set(whole)
        known = {k: x for k, x in whole.items() if x.dtype not in UNKNOWN_TO_DCP}
        if known and len(known) == len(whole):
            target = {k: torch.zeros_like(x) for k, x in known.items()}
            dcp.load(
                target, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True
            )
            for name, x in known.items():
                assert alike(target[name], x), name
        one = ff.consolidate(path, Path(folder, "one.safetensors"))
        together = load_file(one)
        assert together.keys() == whole.keys()
        assert all(alike(together[k], x) for k, x in whole.items())
        back = on(axes, lambda mesh: ff.load(one, laid_out(whole, how, mesh, True)))
        parts = on(axes, lambda mesh: laid_out(whole, how, mesh))
        for mine, expected in zip(back, parts, strict=True):
            assert all(map(alike, tree.leaves(mine), tree.leaves(expected)))


@pytest.mark.parametrize("name", ["HSDP zero=1", "shard(pipeline)"])
def test_a_state_becomes_one_file_and_comes_back(tmp_path, name):
    def save(mesh):
        step, state, mine = made(name, mesh)
        state, _ = step(state, mine[0])
        torch.manual_seed(6)
        ff.save(tmp_path / "a", state, metadata={"run": 1})
        return ff.unshard(state)

    axes = STACKS[name][0]
    whole = on(axes, save)[0]
    file = ff.consolidate(str(tmp_path / "a"), str(tmp_path / "a.safetensors"))
    assert file == tmp_path / "a.safetensors"
    assert ff.metadata(file).metadata == {"run": 1}
    tensors = {
        path: x
        for path, x in zip(tree.paths(whole), tree.leaves(whole), strict=True)
        if isinstance(x, torch.Tensor)
    }
    same(load_file(file), tensors)

    def load(mesh):
        _, target, _ = made(name, mesh, seed=8)
        torch.manual_seed(1)
        same(ff.unshard(ff.load(file, target)), whole)
        torch.manual_seed(6)
        expected = torch.rand(1)
        torch.manual_seed(1)
        ff.load(file, target)
        assert torch.equal(torch.rand(1), expected)

    on(axes, load)
    params = ff.consolidate(tmp_path / "a", tmp_path / "p.safetensors", at="params")
    nested = whole.params
    assert load_file(params).keys() == set(tree.paths(nested))
    _, target, _ = made("one device", None, seed=8)
    same(ff.load(params, target.params), nested)
    with pytest.raises(FileExistsError, match="p.safetensors exists"):
        ff.consolidate(tmp_path / "a", params)


def weights():
    draw = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(s, generator=draw)  # noqa: E731
    return {
        "model.layers.0.w": rand(5, 3),
        "model.layers.1.w": rand(5, 3).bfloat16(),
        "head": rand(7),
        "n": torch.tensor(3),
        "none": torch.zeros(0, 4),
    }


def write_hub(folder):
    """As Hugging Face writes a model of several files."""
    folder.mkdir()
    names, whole = list(weights()), weights()
    where = {}
    for i, part in enumerate((names[:2], names[2:])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({k: whole[k] for k in part}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


def write_more(folder):
    """A file of it holds another's tensor too, and one that nobody reads."""
    write_hub(folder)
    file = folder / "model-00002-of-00002.safetensors"
    more = {"model.layers.0.w": torch.zeros(5, 3), "old": torch.ones(2)}
    save_file({**{k: weights()[k] for k in list(weights())[2:]}, **more}, file)


def write_dcp(folder, **options):
    writer = HuggingFaceStorageWriter(str(folder), **options)
    dcp.save(weights(), storage_writer=writer, no_dist=True)


FOREIGN = {
    "one file": lambda f: (f.mkdir(), save_file(weights(), f / "model.safetensors")),
    "a hub": write_hub,
    "a hub with more": write_more,
    "DCP": lambda f: write_dcp(f, save_distributed=True),
    "DCP, consolidated": lambda f: write_dcp(
        f, fqn_to_index_mapping=dict.fromkeys(weights(), 1)
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_others_wrote_is_loaded_onto_any_mesh(tmp_path, kind):
    FOREIGN[kind](tmp_path / "theirs")
    path, whole = tmp_path / "theirs", weights()

    def load(mesh):
        how = [
            ff.Layout(x.shape, x.dtype, (ff.Split(0, "data", 2),) if x.ndim else (), p)
            for p, x in zip(tree.paths(whole), tree.leaves(whole), strict=True)
        ]
        expected = laid_out(whole, how, mesh)
        same(ff.load(path, laid_out(whole, how, mesh, abstract=True)), expected)

    on({"data": 2}, load)
    same(ff.load(path, tree.map(torch.zeros_like, whole)), whole)
    assert ff.metadata(path).leaves == {
        k: (tuple(x.shape), x.dtype) for k, x in whole.items()
    }
    if kind == "one file":
        file = next(path.glob("*.safetensors"))
        same(ff.load(file, tree.map(torch.zeros_like, whole)), whole)
    ff.consolidate(path, tmp_path / "one.safetensors")
    same(load_file(tmp_path / "one.safetensors"), whole)
