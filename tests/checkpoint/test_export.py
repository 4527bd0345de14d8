"""A folder of whole tensors for other libraries, written while training goes on."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fsfunc as ff
from fsfunc import tree
from fsfunc.checkpoint import exporting, folders
from fsfunc.comm.comparison import RanksDiffer
from tests.checkpoint.stacks import STACKS, made
from tests.checkpoint.trees import on
from tests.checks import same
from tests.interop.models import gpt2, hugging_face, language_loss, llama, mixtral, text

PAIR = {"data": 2}
ROWS = ff.Layout((4, 2), torch.float32, (ff.Split(0, "data", 2),), "w")
WHOLE = torch.arange(8.0).view(4, 2)


def part_of(mesh):
    return ff.Sharded(WHOLE[2 * mesh.rank : 2 * mesh.rank + 2].clone(), ROWS)


def by_path(t):
    return dict(zip(tree.paths(t), tree.leaves(t), strict=True))


def read(folder):
    """All tensors of a folder, as safetensors reads its files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("name", ["zero=3 on 4", "HSDP zero=1", "shard(pipeline)"])
def test_the_parameters_of_a_stack_are_read_by_safetensors_and_by_load(name, tmp_path):
    def main(mesh):
        step, state, mine = made(name, mesh)
        state, _ = step(state, mine[0])
        ff.export(tmp_path / "a", state.params)
        empty = tree.map(torch.zeros_like, state.params)
        same(ff.unshard(ff.load(tmp_path / "a", empty)), ff.unshard(state.params))
        return by_path(ff.unshard(state.params))

    for whole in on(STACKS[name][0], main):
        same(read(tmp_path / "a"), whole)
    assert os.listdir(tmp_path / "a") == ["model.safetensors"]
    with safe_open(tmp_path / "a/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers insists on


def test_files_hold_at_most_so_many_bytes_and_an_index_says_which(tmp_path):
    """Within a file wide elements come first, so that all are aligned."""
    t = {
        "a": torch.ones(3, dtype=torch.int8), "b": torch.ones(4), "c": torch.ones(9),
        "d": torch.ones(2, dtype=torch.bfloat16), "e": torch.ones(0),
    }  # fmt: skip
    ff.export(tmp_path / "a", t, max_bytes=20)
    name = "model-{:05}-of-00003.safetensors".format
    index = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 3 + 16 + 36 + 4},
        "weight_map": dict(zip("abcde", map(name, (1, 1, 2, 3, 3)), strict=True)),
    }
    assert sorted(os.listdir(tmp_path / "a")) == [
        *map(name, (1, 2, 3)), "model.safetensors.index.json",
    ]  # fmt: skip
    assert list(load_file(tmp_path / "a" / name(1))) == ["b", "a"]
    same(read(tmp_path / "a"), t)
    same(ff.load(tmp_path / "a", tree.map(torch.zeros_like, t)), t)


def test_names_and_dtypes_are_told(tmp_path):
    def rename(path):
        return None if path == "skipped" else f"model.{path.replace('/', '.')}"

    def main(mesh):
        t = {"layers": [{"w": part_of(mesh)}], "skipped": part_of(mesh), "step": 3}
        with ff.ledger() as log:
            ff.export(tmp_path / "a", t, rename=rename, dtype=torch.bfloat16)
        return [(r.op, r.bytes) for r in log.of(mesh.rank) if r.op == "all_to_all"]

    costs = on(PAIR, main)  # of one leaf: rank 1 sends its part, in two bytes each
    assert costs == [[("all_to_all", 0)], [("all_to_all", 4 * 2)]]
    same(read(tmp_path / "a"), {"model.layers.0.w": WHOLE.bfloat16()})


def test_one_tensor_is_made_at_a_time(tmp_path):
    n, count = 1 << 14, 8

    def main(mesh):
        flat = ff.Flat(("data",), 2, "u", 0, n // 2)
        layouts = [
            ff.Layout((n,), torch.float32, (flat,), f"w{i}") for i in range(count)
        ]
        state = [ff.Sharded(torch.full((n // 2,), 1.0), x) for x in layouts]
        with ff.testing.live_bytes(state) as seen:
            ff.export(tmp_path / "a", state, max_bytes=9 * n)
        return seen.peak_bytes - 2 * n * count

    first, second = on(PAIR, main)
    assert first <= 4 * n + 256 and second <= 256
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 4


# From a checkpoint, while training goes on


def test_a_checkpoint_is_exported_without_a_mesh_as_its_state_is(tmp_path):
    how = {"rename": "m.{}".format, "dtype": torch.bfloat16, "max_bytes": 150}

    def main(mesh):
        step, state, mine = made("shard(pipeline)", mesh)
        task = ff.save_async(tmp_path / "step-0", state)
        step(state, mine[0])
        task.wait()
        ff.export(tmp_path / "a", state.params, **how)

    on(STACKS["shard(pipeline)"][0], main)
    ff.export(tmp_path / "b", tmp_path / "step-0", at="params", **how)
    assert len(names(tmp_path / "b")) > 2 and names(tmp_path / "a") == names(
        tmp_path / "b"
    )
    for name in names(tmp_path / "b"):
        one, other = (tmp_path / folder / name for folder in "ab")
        assert one.read_bytes() == other.read_bytes()


def test_of_a_checkpoint_too_one_tensor_is_made_at_a_time(tmp_path):
    n = 1 << 19
    ff.save(tmp_path / "step-0", [torch.full((n,), 1.0 * i) for i in range(6)])
    with ff.testing.live_bytes() as seen:
        ff.export(tmp_path / "a", tmp_path / "step-0")
    assert seen.peak_bytes <= 2 * 4 * n + 4096  # a leaf, and its meta tensor
    same(read(tmp_path / "a"), {str(i): torch.full((n,), 1.0 * i) for i in range(6)})


def test_what_is_each_ranks_own_in_a_checkpoint_is_refused(tmp_path):
    def save(mesh):
        ff.save(tmp_path / "step-0", {"h": torch.ones(2) * mesh.rank, "w": WHOLE})

    on(PAIR, save)
    with pytest.raises(ValueError, match="'h' is each rank's own"):
        ff.export(tmp_path / "a", tmp_path / "step-0")
    ff.export(tmp_path / "a", tmp_path / "step-0", rename={"w": "x"}.get)
    same(read(tmp_path / "a"), {"x": WHOLE})
    with pytest.raises(ValueError, match="at='w' is of a checkpoint"):
        ff.export(tmp_path / "b", {"w": WHOLE}, at="w")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        ff.export(tmp_path / "b", tmp_path / "step-1")


# A model of transformers


EXPERTS = {"num_local_experts": 4, "experts_implementation": "batched_mm"}
SPLIT = {"data": 2, "model": 2}
# By name: the model, its units, the mesh, and the plan by which layers are split.
MODELS = {
    "llama tied": (llama, {"tie_word_embeddings": True}, PAIR, None),
    "llama split": (llama, {"vocab_size": 32}, SPLIT, "auto"),
    "gpt2": (gpt2, {}, PAIR, None),
    "mixtral spread": (mixtral, EXPERTS, SPLIT, {"**.mlp.experts": "expert"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_training_left_and_training_goes_on(name, tmp_path):
    """Equal logits, of a donated state that is trained further after the export."""
    transformers = pytest.importorskip("transformers")
    make, options, axes, plan = MODELS[name]
    module, batch = hugging_face(make, **options), text()
    units = "transformer.h.*" if make is gpt2 else "model.layers.*"
    how = {} if plan is None else {"plan": plan, "axis": "model"}
    apply, params, buffers = ff.from_module(module, units=units, **how)
    optimizer = ff.sharded_adam(1e-2)

    def loss_fn(params, batch):
        return language_loss(apply(params, buffers, **batch).logits, batch)

    def main(mesh):
        step = ff.donate(ff.shard(optimizer(ff.value_and_grad(loss_fn)), mesh, "data"))
        mine, losses, whole = ff.local_batch(batch, mesh, "data"), [], None
        state = ff.init_state(step, params, optimizer, mine, layouts=apply.layouts)
        for i in range(3):
            if i == 1:
                whole = ff.unshard(state.params)
                ff.export(
                    tmp_path / "model-1",
                    state.params,
                    beside=[module.config.save_pretrained],
                    max_bytes=20_000,
                )
            state, loss = step(state, mine)
            losses.append(loss["loss"].item())
        return whole, losses

    whole, losses = on(axes, main)[0]
    assert len(set(losses)) == 3
    expected = ff.to_module(module, whole).eval()(**batch).logits
    folder = tmp_path / "model-1"
    assert (folder / "config.json").exists() and len(list(folder.iterdir())) > 3
    kept = {k: x for k, x in options.items() if k == "experts_implementation"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, **kept
    )
    same(loaded.eval()(**batch).logits, expected)


# A folder appears whole or not at all


def names(folder):
    return sorted(os.listdir(folder))


def fails(tmp_path, error, said, **how):
    """An export of two ranks raises on both, and leaves nothing behind."""

    def main(mesh):
        with pytest.raises(error, match=said):
            ff.export(tmp_path / "a", {"w": part_of(mesh), "x": part_of(mesh)}, **how)
        return ff.psum(torch.ones(()), "data").item()

    assert on(PAIR, main) == [2, 2]
    assert names(tmp_path) == []


def test_an_error_of_the_writer_is_raised_on_all_and_nothing_is_left(
    tmp_path, monkeypatch
):
    write = exporting.write_file

    def full(path, *args):
        if "00002" in path.name:
            raise OSError(28, "no space left on device")
        return write(path, *args)

    monkeypatch.setattr(exporting, "write_file", full)
    fails(tmp_path, OSError, "no space left", max_bytes=40)


def test_another_ones_folder_that_appears_meanwhile_is_left_alone(
    tmp_path, monkeypatch
):
    def publish(part, path):
        raise FileExistsError(f"{path} exists by now")

    def config(folder):
        with open(f"{folder}/config.json", "x") as file:
            file.write("{}")

    monkeypatch.setattr(folders, "publish", publish)
    fails(tmp_path, FileExistsError, "exists by now", beside=[config])


def test_an_error_of_what_writes_beside_comes_before_anything_is_sent(tmp_path):
    def broken(folder):
        raise KeyError("no such tokenizer")

    def weights(folder):
        open(f"{folder}/model.safetensors", "x").close()

    def cannot_be_called(*_):
        raise AssertionError

    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr(exporting, "stream", cannot_be_called)
        fails(tmp_path, KeyError, "no such tokenizer", beside=[broken])
        fails(tmp_path, ValueError, "beside= writes 'model.safe.*not that of the model",
              beside=[weights])  # fmt: skip


def test_what_cannot_be_written_is_refused_on_every_rank(tmp_path):
    fails(tmp_path, ValueError, "at least one byte", max_bytes=0)
    fails(tmp_path, ValueError, "'w' and 'x' would both be called 'n'",
          rename=lambda path: "n")  # fmt: skip
    fails(tmp_path, ValueError, "__metadata__", rename=lambda path: "__metadata__")

    def differ(mesh):
        with pytest.raises(TypeError, match="'z', of dtype complex128"):
            ff.export(tmp_path / "a", {"z": torch.ones(1, dtype=torch.complex128)})
        with pytest.raises(RanksDiffer, match="'w': rank 0.*; rank 1"):
            ff.export(tmp_path / "a", {"w": torch.ones(1) * mesh.rank})
        ff.export(tmp_path / "b", {"w": part_of(mesh)})
        with pytest.raises(FileExistsError, match="nothing is ever written over"):
            ff.export(tmp_path / "b", {"w": part_of(mesh)})

    on(PAIR, differ)
    assert names(tmp_path) == ["b"]


def test_what_a_killed_export_left_is_removed_by_the_next_one(tmp_path):
    host = f"{folders._host():08x}"
    left = tmp_path / f".model-1.saving-{host}{'0' * 7}1{'0' * 16}"
    left = left.with_name(left.name.replace("00000001", f"{2**31 - 1:08x}", 1))
    left.mkdir()
    (left / "model-00001-of-00002.safetensors").write_bytes(b"half")
    ff.export(tmp_path / "model-2", {"w": WHOLE})
    assert names(tmp_path) == ["model-2"]


def test_a_users_file_in_a_checkpoint_stays_when_that_makes_room(tmp_path):
    """Of the name that an export would give it, too."""
    ff.save(tmp_path / "step-1", {"w": WHOLE})
    ff.consolidate(tmp_path / "step-1", tmp_path / "step-1/model.safetensors")
    ff.save(tmp_path / "step-2", {"w": WHOLE}, keep=1)
    assert names(tmp_path / "step-1") == ["model.safetensors"]
