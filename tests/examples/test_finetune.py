"""The fine-tuning of a Hugging Face model, beside the plain torch loop it replaces."""

import json
import math
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.examples.programs import ROOT, launched

pytest.importorskip("transformers", reason="the extra hf is not installed")

SCRIPT = ROOT / "examples" / "finetune.py"
NAMES = "finetune", "instructions", "lora", "progress"
# Rounding is that of float32, and few steps let it grow by little.
SHORT = "--fp32 --answer 1 --eval-every 99 --epochs 1 --steps".split()


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The script and the modules beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield {name: __import__(name) for name in NAMES}
        for name in NAMES:
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows whose completions are of very unequal lengths."""
    draw, words = random.Random(0), "one two three four five six".split()
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = []
    for i in range(40):
        said = " ".join(draw.choices(words, k=draw.choice((1, 1, 2, 6))))
        rows.append({"prompt": f"Say {i}", "completion": said})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lines(out: Path, kind: str) -> list[dict]:
    """The lines of a log that have this entry."""
    rows = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [row for row in rows if kind in row]


def numbers(out: Path) -> dict[str, list[float]]:
    """What a run found: of its steps, and of its evaluations."""
    found = {
        name: [row[name] for row in lines(out, name)]
        for name in ("loss", "norm", "rate", "tokens", "eval_loss")
    }
    return found | {"samples": [row["sample"] for row in lines(out, "sample")]}


def run(example: dict, out: Path, *options: object) -> dict[str, list[float]]:
    example["finetune"].main(["--out", str(out), *map(str, options)])
    return numbers(out)


# The loop that it replaces


def torch_loop(example: dict, data: Path, *options: object) -> tuple[dict, nn.Module]:
    """What a plain loop finds, and its model: no fsfunc but for the order of rows."""
    finetune, instructions = example["finetune"], example["instructions"]
    args = finetune.parse(list(map(str, options)))
    torch.manual_seed(args.seed)
    model, tokenizer = finetune.load_model(args)
    rows = instructions.tokenized(instructions.read_pairs(data), tokenizer, args.length)
    length = max(len(row.tokens) for row in rows)
    held_out = instructions.Instructions(rows[::10], length, tokenizer.pad_token_id)
    rows = [row for i, row in enumerate(rows) if i % 10]
    train = instructions.Instructions(rows, length, tokenizer.pad_token_id)
    batches = ff.batches(train, None, None, args.batch, seed=args.seed)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = torch.arange(length) < batch["tokens"][:, None]
        asked = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        return model(**asked, attention_mask=mask.long(), use_cache=False).loss

    @torch.no_grad()
    def evaluated() -> float:
        return loss_of(torch.utils.data.default_collate(list(held_out))).item()

    def rate(count: int) -> float:
        warmup = max(1, args.steps // 10)
        if count < warmup:
            return args.lr * (0.1 + 0.9 * count / warmup)
        share = (count - warmup) / (args.steps + 1 - warmup)
        return args.lr * (1 + math.cos(math.pi * share)) / 2

    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": args.decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    found: dict[str, Any] = {"loss": [], "norm": [], "rate": [], "tokens": []}
    found["eval_loss"] = [evaluated()]
    for _ in range(args.steps):
        batch = next(batches)
        loss = loss_of(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, args.clip)
        found["loss"].append(loss.item())
        found["norm"].append(norm.item())
        found["rate"].append(scheduler.get_last_lr()[0])
        found["tokens"].append(batch["tokens"].sum().item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    found["eval_loss"].append(evaluated())
    return found, model


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ("--lr 1e-3", ["", "--ranks 4"]),
        ("--lora 4 --lr 1e-2", ["--ranks 2 --accumulate 2"]),
    ],
)
def test_a_plain_loop_finds_the_same(
    options: str, splits: list[str], example: dict, data: Path, tmp_path: Path
) -> None:
    """Losses, norms, rates and evaluations; and transformers loads the same model.

    Each rank has another number of tokens that are learned.
    """
    from transformers import AutoModelForCausalLM

    how = [*SHORT, 4, "--data", data, *options.split()]
    expected, model = torch_loop(example, data, *how)
    assert expected["loss"][-1] < expected["loss"][0]
    tokens = torch.arange(12)[None] + 64
    for i, split in enumerate(splits):
        found = run(example, out := tmp_path / str(i), *how, *split.split())
        found.pop("samples")
        assert found == {k: pytest.approx(x, rel=1e-6) for k, x in expected.items()}
        loaded = AutoModelForCausalLM.from_pretrained(out / "model")
        logits = loaded(tokens).logits
        torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-5, atol=1e-6)


def test_adapters_are_all_that_is_reduced_and_saved(
    example: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is in bfloat16, a part of it on each rank, and stays what it was."""
    seen, donate = [], ff.donate

    def watched(step: Any) -> Any:
        def watching(state: ff.TrainState, batch: Any) -> Any:
            with ff.ledger() as log:
                result = donated(state, batch)
            if not ff.recording():
                seen.append((result[0].extra, log))
            return result

        donated = donate(step)
        return watching

    monkeypatch.setattr(ff, "donate", watched)
    how = "--lora 4 --ranks 2 --answer 1 --eval-every 9 --steps 1".split()
    run(example, tmp_path, *how)
    frozen = [extra for extra, _ in seen]
    weights = [name for name in frozen[0] if name.endswith(".layer.weight")]
    assert len(weights) == 14  # of two layers seven
    for name in weights:
        leaves = [extra[name] for extra in frozen]
        assert all(ff.is_sharded(x) and x.local.dtype == torch.bfloat16 for x in leaves)
        assert sum(x.local.numel() for x in leaves) == leaves[0].shape.numel()
    for _, log in seen:
        assert log.count("psum_scatter") == 2  # layers; embedding, norm, head have none
    saved = ff.metadata(tmp_path / "step-000001").leaves
    params = [k for k in saved if k.startswith("train/params/")]
    assert len(params) == 2 * 14 and not any("layer.weight" in k for k in saved)
    assert {saved[k][1] for k in params} == {torch.float32}


# Runs that go on


def test_it_goes_on_bitwise(example: dict, tmp_path: Path) -> None:
    """With its log and model; a run with other options is refused."""
    how = "--ranks 2 --answer 2 --steps 6 --eval-every 3 --log-every 4".split()
    expected = run(example, tmp_path / "a", *how, "--save-every", 2)
    model = (tmp_path / "a/model/model.safetensors").read_bytes()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/step-000006")
    assert run(example, tmp_path / "b", *how) == expected
    assert (tmp_path / "b/model/model.safetensors").read_bytes() == model
    with pytest.raises(SystemExit, match=r"step-000006 is of another run \(--lr 0.003"):
        run(example, tmp_path / "b", *how, "--lr", 1)
    assert numbers(tmp_path / "b") == expected


@pytest.mark.processes
def test_killed_under_torchrun_it_goes_on(
    example: dict, data: Path, tmp_path: Path
) -> None:
    how = "--fp32 --answer 1 --steps 14 --log-every 3 --eval-every 7".split()
    how += ["--save-every", "2", "--data", str(data), "--lora", "2"]
    expected = run(example, tmp_path / "whole", *how, "--ranks", 2)
    out = tmp_path / "killed"
    how += ["--out", str(out)]
    with launched(tmp_path, *how, nproc=2, script=SCRIPT, limit=300) as launch:
        launch.until(lambda: ff.latest(out, "step-*") if out.exists() else None)
        launch.kill(1)
        assert launch.ended() == 0, launch.printed()
        assert launch.attempts() == 2
        printed = launch.printed()
    assert numbers(out) == {
        name: x if name == "samples" else pytest.approx(x, rel=1e-6)
        for name, x in expected.items()
    }
    assert printed.count("peak_memory_GB") == 1 and "it/s" not in printed


# The data


def test_prompts_are_read_and_completions_learned(
    example: dict, tmp_path: Path
) -> None:
    instructions = example["instructions"]
    tokenizer = instructions.Bytes()
    (row,) = instructions.tokenized([("ab", "c")], tokenizer, 9)
    both = instructions.Instructions([row], 6, tokenizer.pad_token_id, multiple=2)
    assert both[0]["input_ids"].tolist() == [*b"ab\nc", 256, 257]
    assert both[0]["labels"].tolist() == [-100, -100, -100, *b"c", 256, -100]
    assert len(both) == 2 and both[1]["labels"].tolist() == [-100] * 6
    (cut,) = instructions.tokenized([("ab", "cdefgh")], tokenizer, 5)
    assert cut.tokens == [*b"ab\ncd"]
    with pytest.raises(ValueError, match="the prompt 'abcdefgh'.* --length 5"):
        instructions.tokenized([("abcdefgh", "c")], tokenizer, 5)
    file = tmp_path / "rows"
    file.write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="rows:3 is no"):
        instructions.read_pairs(file)


def test_a_model_with_a_tokenizer_of_its_own(example: dict, tmp_path: Path) -> None:
    """Prompts in the words of its chat template; the export has the tokenizer too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers import PreTrainedTokenizerFast as Fast

    words = ["<end>", "<ask>", "<say>", "+", "=", *map(str, range(19))]
    rules = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<end>"))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Fast(tokenizer_object=rules, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}<ask> {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} <say>{% endif %}"
    )
    prompt = example["instructions"].prompt_tokens(tokenizer, "3 + 4 =")
    assert tokenizer.decode(prompt) == "<ask> 3 + 4 = <say>"
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    how = ["--model", tmp_path / "model", "--answer", 1, "--steps", 1]
    run(example, tmp_path / "out", *how)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out/model")) == 24
    with pytest.raises(SystemExit, match="knows 24 tokens, 258 are made"):
        run(example, tmp_path / "out", *how, "--bytes")


def test_a_killed_run_s_log_is_cut_to_its_checkpoint(
    example: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """And where the output is no terminal there is no bar."""
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    log = example["progress"].Progress(file, 1, 3, lambda count: 0.5)
    log.step({"loss": torch.tensor(2.0), "tokens": torch.tensor(7)})
    summary = log.close(model="here")
    rows = list(map(json.loads, file.read_text().splitlines()))
    assert [row.get("step") for row in rows] == [0, 1, 2, None]
    assert rows[2]["loss"] == summary["loss"] == 2 and rows[2]["rate"] == 0.5
    assert "it/s" not in capsys.readouterr().err
