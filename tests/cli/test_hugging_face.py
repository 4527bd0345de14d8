"""``python -m fsfunc plan --hf config.json``: a model's plan without a script."""

import json

import pytest
import torch

import fsfunc as ff
from fsfunc.__main__ import main
from fsfunc.cli.hugging_face import HuggingFaceStep
from fsfunc.planning.events import Ran

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(LLAMA | changes))
        return path

    return write


def parameters():
    width, inner, kv = 32, 48, 16
    layer = 2 * width * width + 2 * width * kv + 3 * width * inner + 2 * width
    return 2 * 64 * width + 2 * layer + width


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}])
def test_a_config_is_planned_as_the_step_that_it_describes(axes, config, tmp_path):
    """Every number is that of a plan by hand; attention keeps no scores."""
    out = tmp_path / "plan.json"
    mesh = ",".join(f"{k}={v}" for k, v in axes.items())
    passed = ["--sequences", "3", "--length", "8"]
    path = config()
    assert not main(
        ["plan", "--hf", str(path), "--mesh", mesh, "--hardware", "h100"]
        + ["--json", str(out), "--", *passed]
    )
    (found,) = json.loads(out.read_text())["plans"]
    build = HuggingFaceStep(path, passed)
    abstract = ff.make_mesh(axes, "abstract")
    step, init, optimizer, batch, layouts = build(abstract)
    how = {"mesh": abstract, "layouts": layouts, "device": "cuda"}
    plan = ff.plan(step, init, optimizer, batch, **how)
    assert found["peak_bytes"] == plan.peak_bytes
    assert found["flops"] == plan.flops
    assert build.tokens(abstract) == axes["data"] * 3 * 8
    assert batch.shape == (3, 8) and batch.dtype == torch.int64
    assert sum(x.numel() for x in init().values()) == parameters()
    ops = [e.op for e in plan[0].events if isinstance(e, Ran)]
    names = {op.name for op in ops}
    attention = [op for op in ops if "flash_attention" in op.name]
    assert attention and all(op.causal for op in attention)
    assert not any("softmax" in n and "log" not in n for n in names)
    assert (plan.count("psum", axis="model") > 0) == ("model" in axes)


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}


@pytest.mark.parametrize(
    ("axes", "changes"), [("data=4", {}), ("data=2,model=2", {}), ("data=4", MIXTRAL)]
)
def test_the_best_stack_is_searched_for(axes, changes, config, capsys):
    mesh = ["--mesh", axes, "--hardware", "h100"]
    assert not main(["plan", "--hf", str(config(**changes)), *mesh, "--search"])
    said = capsys.readouterr().out
    assert "stacks planned, of which" in said
    code = said.partition("The fastest, around train_step:")[2]
    assert "step = ff.precision(train_step, compute=torch.bfloat16" in code
    assert ("layouts=layouts" in code) == ("model" in axes)


def test_all_meshes_of_a_number_of_ranks_are_searched(config, capsys):
    """Split over those sizes alone that divide its tensors."""
    three = ["--mesh", "3", "--hardware", "h100", "--search"]
    assert not main(["plan", "--hf", str(config()), *three])
    said = capsys.readouterr().out
    assert "cannot split" in said and "of size 3: 64 is not a multiple" in said
    assert "mesh = ff.make_mesh({" in said
    assert main(["plan", "--hf", str(config()), "--mesh", "3"]) == 2
    assert "--mesh 3 names no axes" in capsys.readouterr().err


def test_a_window_that_is_shorter_than_the_batch_is_a_mask(config):
    mesh = ff.make_mesh({"data": 2}, "abstract")
    for window, masked in ((8, True), (17, False)):
        path = config(model_type="mistral", sliding_window=window)
        step, init, optimizer, batch, _ = HuggingFaceStep(path, [])(mesh)
        ran = ff.plan(step, init, optimizer, batch, mesh=mesh, device="cuda")[0].ran
        causal = {r.op.causal for r in ran if "flash_attention" in r.op.name}
        assert causal == {not masked}


@pytest.mark.parametrize("packed", [False, True])
def test_a_module_of_ones_own_is_planned_without_a_mask(packed, config):
    """As a real call has none, of positions that the model counts itself."""
    transformers = pytest.importorskip("transformers")
    fields = json.loads(config(num_hidden_layers=1).read_text())
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    apply, params, buffers = ff.from_module(
        transformers.AutoModelForCausalLM.from_config(made).eval()
    )
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    more = {"position_ids": torch.arange(16).repeat(2, 1)} if packed else {}

    def loss(params, tokens):
        given = {"input_ids": tokens, "labels": tokens, "use_cache": False, **more}
        return apply(params, buffers, **given).loss

    mesh = ff.make_mesh({"data": 2}, "abstract")
    step = ff.shard(ff.value_and_grad(loss), mesh, "data", zero=3)
    main = lambda: ff.plan(step, ff.place(step, params, tokens), tokens, device="cuda")  # noqa: E731
    ran = ff.spmd(main, mesh)()[0][0].ran
    causal = {r.op.causal for r in ran if "attention" in r.op.name}
    assert causal == {not packed}


REFUSED = {
    "search without hardware": ({}, ["--search"], "--search is of an estimate"),
    "no such model": ({"model_type": "pelican"}, [], "'pelican' is no model"),
    "no language model": ({"model_type": "vit"}, [], "config.json"),
    "no file": (None, [], "is no config.json of a model"),
    "both": ({}, ["script.py"], "one of the two"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused(case, config, tmp_path, capsys):
    changes, more, said = REFUSED[case]
    path = tmp_path / "nothing" if changes is None else config(**changes)
    assert main(["plan", *more, "--hf", str(path), "--mesh", "data=2"])
    assert said in capsys.readouterr().err
