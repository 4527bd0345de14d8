"""``python -m fsfunc plan --hf config.json``: a model's plan without a script."""

import json
import re

import pytest
import torch

import fsfunc as ff
from fsfunc.__main__ import main
from fsfunc.cli.build_scripts import Refused
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
        causal = {r.op.causal for r in ran if "_attention" in r.op.name}
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


def plan_facts(path, axes, *passed, hardware="h100"):
    """What the command writes of one plan."""
    out = path.parent / "plan.json"
    where = ["--hf", str(path), "--mesh", axes, "--hardware", hardware]
    assert not main(["plan", *where, "--json", str(out), "--", *passed])
    return json.loads(out.read_text())["plans"][0]


def test_axes_of_other_names_are_told(config):
    """They do what axes of the usual names do."""
    names = ["--data", "dp", "--tensor", "tp", "--stages", "pp", "--replicate", "hosts"]
    usual = plan_facts(config(), "node=2,data=2,pipe=2,model=2")
    told = plan_facts(config(), "hosts=2,dp=2,pp=2,tp=2", *names)
    for field in ("flops", "peak_bytes", "offloaded_bytes"):
        assert told[field] == usual[field]
    used = {tuple(c["axes"]) for p in usual["programs"] for c in p["collectives"]}
    assert {("data",), ("node",), ("pipe",), ("model",)} <= used
    crossed = plan_facts(config(), "model=2", "--data", "model")
    assert {tuple(c["axes"]) for c in crossed["programs"][0]["collectives"]} == {
        ("model",)
    }
    assert "model=2 cuts the batch" in crossed["model"]["lines"]["axes"]


@pytest.mark.parametrize("passed", [[], ["--no-remat"]])
def test_layers_are_split_where_no_axis_cuts_the_batch(passed, config):
    """As beside an axis of one rank: the step sends and computes the same."""
    alone, beside = (
        plan_facts(config(), axes, *passed) for axes in ("model=2", "data=1,model=2")
    )
    sent, expected = (
        [p["collectives"] for p in facts["programs"]] for facts in (alone, beside)
    )
    assert alone["flops"] == beside["flops"] and sent == expected
    assert all({tuple(c["axes"]) for c in each} == {("model",)} for each in sent)


AXES_REFUSED = {
    "dtaa=2": ([], 'axis dtaa .*did you mean "data".* model splits layers'),
    "data=2,tp=2": ([], "axis tp .*--tensor tp"),
    "pipes=2": ([], 'did you mean "pipe"'),
    "data=2": (["--tensor", "dat"], 'no axis dat .did you mean "data"'),
    "data=2,model=2": (["--data", "data,model", "--tensor", "model"], "by --data and"),
    "node=2": ([], "whole copies of what an axis of the data shards"),
    "data=2,pipe=2": (["--sequences", "2"], "cut into 8 microbatches"),
}


@pytest.mark.parametrize("axes", AXES_REFUSED)
def test_an_axis_of_which_nobody_says_what_it_does_is_refused(axes, config, capsys):
    passed, said = AXES_REFUSED[axes]
    path = config(num_hidden_layers=1, tie_word_embeddings=True)
    assert main(["plan", "--hf", str(path), "--mesh", axes, "--", *passed]) == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v"])
def test_stages_are_cut_from_the_layers_of_the_models_plan(schedule, config):
    passed = ["--schedule", schedule, "--microbatches", "4", "--sequences", "8"]
    facts = plan_facts(config(num_hidden_layers=4), "pipe=2", *passed)
    lines = facts["model"]["lines"]
    assert lines["stages"].startswith(f"{schedule}, 4 microbatches")
    assert "model.layers, model.norm" in lines["stages"]
    programs = facts["programs"]
    assert len(programs) == 2
    assert all(any("pipe" in c["axes"] for c in p["collectives"]) for p in programs)


MASKED = {"model_type": "bert", "hidden_act": "gelu"}
LOSSES = {
    "a masked model": (MASKED, [], "BertForMaskedLM", "masked-lm: cross entropy of m"),
    "as its architectures say": (
        MASKED | {"architectures": ["BertForTokenClassification"]}, [],
        "BertForTokenClassification", "token-classification",
    ),
    "as the caller says": (
        MASKED | {"architectures": ["BertModel"]}, ["--task", "question-answering"],
        "BertForQuestionAnswering", "question-answering",
    ),
    "a decoder": (MASKED | {"is_decoder": True}, [], "BertLMHeadModel", "causal-lm"),
    "labels": (
        MASKED, ["--task", "sequence-classification"], "BertForSequenceClassification",
        "single label classification",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_a_model_is_planned_as_what_it_is_and_says_its_loss(case, config, capsys):
    changes, passed, name, loss = LOSSES[case]
    lines = plan_facts(config(**changes), "data=2", *passed)["model"]["lines"]
    assert lines["model"].startswith(f"{name}, ") and loss in lines["loss"]
    said = capsys.readouterr().out
    assert lines["loss"] in said and lines["model"] in said and lines["axes"] in said


def test_a_model_without_a_loss_is_refused_with_those_of_its_kind(config, capsys):
    path = config(**MASKED, architectures=["BertModel"])
    assert main(["plan", "--hf", str(path), "--mesh", "data=2"]) == 2
    assert "--task masked-lm or causal-lm or" in capsys.readouterr().err
    passed = ["--", "--task", "seq2seq-lm"]
    assert main(["plan", "--hf", str(path), "--mesh", "data=2", *passed]) == 2
    assert "no such bert; it has masked-lm" in capsys.readouterr().err


@pytest.mark.parametrize("offset, usual", [(None, 16), (1, 14)])
def test_positions_that_no_token_has_are_not_counted(offset, usual, config):
    """RoBERTa's begin behind the index of padding."""
    kind = {"model_type": "roberta", "pad_token_id": 1} if offset else MASKED
    assert HuggingFaceStep(config(**kind), []).length == usual
    with pytest.raises(Refused, match=f"positions for {usual}"):
        HuggingFaceStep(config(**kind), ["--length", str(usual + 1)])


def test_the_rule_of_thumb_of_a_mixture_counts_what_a_token_passes(config, capsys):
    path = config(**MIXTRAL, num_experts_per_tok=1)
    facts = plan_facts(path, "data=4")
    model, times = facts["model"], facts["estimate"]
    expert = 3 * 32 * 48
    assert model["parameters"] == parameters() + 2 * (3 * expert + 4 * 32)
    assert model["active"] == model["parameters"] - 2 * 3 * expert
    rate = ff.hardware.H100.peak["bfloat16"] * ff.hardware.H100.utilisation * 4
    tokens = 4 * 16
    assert times["rule_of_thumb"] == pytest.approx(6 * model["active"] * tokens / rate)
    assert "active per token" in capsys.readouterr().out


@pytest.mark.parametrize("word, named", [("1", "fa1"), ("fa3", "fa3"), ("2.4", "fa2")])
def test_the_generation_of_attention_is_told_and_printed(word, named, config, capsys):
    out = config().parent / "plan.json"
    line = ["--mesh", "data=2", "--hardware", "h100", "--json", str(out)]
    assert not main(["plan", "--hf", str(config()), *line, "--attention", word])
    assert json.loads(out.read_text())["plans"][0]["estimate"]["attention"] == named
    said = capsys.readouterr().out
    assert f"generation of FlashAttention-{named[-1]}" in said
    assert main(["plan", "--hf", str(config()), *line, "--attention", "x2"]) == 2
    assert "it knows: fa2, fa3, fa1" in capsys.readouterr().err


REFUSED = {
    "search without hardware": ({}, ["--search"], "--search is of an estimate"),
    "no such model": ({"model_type": "pelican"}, [], "'pelican' is no model"),
    "no loss that is known": ({"model_type": "wav2vec2"}, [], "config.json"),
    "no file": (None, [], "is no config.json of a model"),
    "both": ({}, ["script.py"], "one of the two"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused(case, config, tmp_path, capsys):
    changes, more, said = REFUSED[case]
    path = tmp_path / "nothing" if changes is None else config(**changes)
    assert main(["plan", *more, "--hf", str(path), "--mesh", "data=2"])
    assert said in capsys.readouterr().err
