"""The knobs of a trainer as configured elsewhere: none changes what is trained."""

import functools
import json
import re
import runpy
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.examples.programs import ROOT

SCRIPT = ROOT / "examples" / "trainer.py"
STEPS, RATE = 3, 0.03
TRAINER = runpy.run_path(str(SCRIPT))
WRAPPED = ["blocks\\.[0-9]+", "regression_head"]
LINEAR = {"type": "linear", "end": 0.003, "steps": 2}


def config(fsdp: Any = None, checkpoint: Any = False, wrap: Any = (), **engine: Any):
    model = {"modules_to_wrap": list(wrap or WRAPPED), "fsdp_config": fsdp}
    optimizer = {"optimizer": {"type": "torch::AdamW", "lr": RATE}}
    given = {
        "model": {**model, "activation_checkpointing": checkpoint},
        "training_engine": {**optimizer, **engine},
        "train_steps": STEPS,
    }
    return TRAINER["read"](TRAINER["Config"], given)


def run(settings: Any, ranks: int = 2) -> tuple[list[float], float]:
    """The losses, the same on every rank, and the bytes that rank 0 gathered."""
    mesh = ff.make_mesh({"data": ranks}, "simulated")

    def main() -> tuple[list[float], float]:
        with ff.ledger() as log:
            losses = TRAINER["train"](settings, mesh)
        return losses, log.bytes("data", "all_gather")

    first, *others = ff.spmd(main, mesh)()
    assert all(other == first for other in others)
    return first


@functools.cache
def plain(
    clip: float | None = None, linear: bool = False, half: torch.dtype | None = None
) -> list[float]:
    """What torch finds by itself, without ranks and without us."""
    torch.manual_seed(0)
    model = TRAINER["SimpleRegressionModel"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16)
    draw = torch.Generator().manual_seed(0)
    x, losses = torch.randn(STEPS * 16, 4, generator=draw), []
    for count, rows in enumerate(x.split(16)):
        if linear:
            optimizer.param_groups[0]["lr"] = RATE + (0.003 - RATE) * min(count / 2, 1)
        with torch.autocast("cpu", half, enabled=half is not None):
            loss = model(rows, rows.sum(-1).abs())["loss"]
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


SHARDED = {"reshard_after_forward": True}
KNOBS = {
    "nothing": {},
    "the engine's fsdp_config": {"fsdp_config": SHARDED},
    "the same twice": {"fsdp": SHARDED, "fsdp_config": SHARDED},
    "reshard_after_forward=False": {"fsdp": {"reshard_after_forward": False}},
    "activation_checkpointing": {"checkpoint": True},
    "modules_to_wrap": {"wrap": ["blocks"], "fsdp": SHARDED, "checkpoint": True},
    "move_params_to_cpu": {"fsdp": {"move_params_to_cpu": True}},
    "whole on the device": {
        "fsdp": {"move_params_to_cpu": True, "reshard_after_forward": False}
    },
    "move_grads_to_cpu=False": {
        "fsdp": {"move_params_to_cpu": True, "move_grads_to_cpu": False}
    },
}


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_gives_the_losses_of_one_device(knob: str) -> None:
    assert run(config(**KNOBS[knob]))[0] == pytest.approx(plain(), abs=2e-6)


def test_clipping_and_schedules_are_those_of_torch() -> None:
    settings = config(SHARDED, max_grad_norm=0.5, lr_scheduler=LINEAR)
    expected = plain(clip=0.5, linear=True)
    assert run(settings)[0] == pytest.approx(expected, abs=2e-6)
    assert expected != pytest.approx(plain(), abs=1e-3)


MIXED = {"mixed_precision": True}
BOTH = {"mixed_precision": True, "move_params_to_cpu": True}


@pytest.mark.parametrize(
    ("bf16", "knobs"),
    [
        (None, {"amp": True}),
        (False, {"amp": True, "fsdp": {"mixed_precision": True}, "checkpoint": True}),
        (None, {"fsdp": BOTH, "max_grad_norm": 0.5}),
        (False, {"fsdp": BOTH, "max_grad_norm": 0.5}),
    ],
)
def test_half_precision_is_near(knobs: dict, bf16: bool | None) -> None:
    half = torch.bfloat16 if bf16 is None else torch.float16  # whose scale overflows
    expected = plain(knobs.get("max_grad_norm"), half=half)
    losses, _ = run(config(amp_use_bfloat16=bf16, **knobs))
    assert losses == pytest.approx(expected, rel=0.01)
    assert losses != pytest.approx(plain(), abs=2e-6)


def test_what_is_sent_follows_the_knobs() -> None:
    """Parameters are gathered twice a step, once, or never; in half, half of them."""
    sent = [
        run(config(fsdp))[1] / STEPS
        for fsdp in ({}, {"reshard_after_forward": False}, None, MIXED)
    ]
    block, head = 20 * 4 // 2, 6 * 4 // 2  # of two ranks, the head's 5 numbers padded
    # The backward of the first block needs no weights, and the head is still there.
    twice, once = block + 2 * 2 * block + head, 3 * block + head
    assert sent == [twice, once, 0, twice / 2]


def test_it_runs_as_a_program_by_its_file(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TRAINER["EXAMPLE"] | {"train_steps": 30}))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(path)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    losses = [
        float(x) for x in re.findall(r"loss (\d+\.\d{4})", capsys.readouterr().out)
    ]
    assert len(losses) == 10
    assert sum(losses[-3:]) < sum(losses[:3]) / 1.5


@pytest.mark.processes
def test_processes_print_the_losses_of_simulated_ranks(processes, tmp_path) -> None:
    given, path = TRAINER["EXAMPLE"] | {"train_steps": 20}, tmp_path / "config.json"
    path.write_text(json.dumps(given))
    settings = TRAINER["read"](TRAINER["Config"], given)
    mesh = ff.make_mesh({"data": 2}, "simulated")
    losses = ff.spmd(TRAINER["train"], mesh)(settings, mesh)[0]
    shown = [f"step {i:3}  loss {losses[i]:.4f}" for i in range(0, len(losses), 2)]
    assert processes(SCRIPT, 2, str(path)).splitlines() == shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fsdp": {"reshard": True}}, r"fsdp_config.reshard: no .* reshard_after_for"),
        ({"fsdp": {"mixed_precision": "yes"}}, "mixed_precision is 'yes': .* bool"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1': it must be float or None"),
        ({"wrap": [3]}, r"modules_to_wrap\[0\] is 3"),
        ({"wrap": ["block\\.0"]}, "matches nothing; there are 'blocks.0'"),
        ({"wrap": ["("]}, "not a regular expression"),
        ({"amp_use_bfloat16": True}, "nothing is in half: set amp"),
        ({"fsdp": SHARDED, "fsdp_config": {"mixed_precision": True}}, "give it once"),
        ({"fsdp": {"move_grads_to_cpu": True}}, "without move_params_to_cpu"),
        ({"max_grad_norm": 0}, "max_norm is 0"),
        ({"optimizer": {"type": "torch::LBFGS"}}, "'torch::LBFGS': it is one of"),
        ({"optimizer": {"type": "torch::SGD"}, "lr_scheduler": LINEAR}, "needs .* lr"),
        ({"lr_scheduler": {"type": "exponential"}}, "lr_scheduler type 'exponential'"),
        ({"lr_scheduler": {"type": "linear", "step": 3}}, "lr_scheduler: .*'step'"),
        ({"type": "deepspeed"}, "'deepspeed': this script knows"),
    ],
    ids=str,
)
def test_wrong_knobs_are_refused(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(config(**given))


def test_checkpoints_of_nothing_are_refused() -> None:
    model = {"model": {"activation_checkpointing": True}}
    with pytest.raises(ValueError, match="what modules_to_wrap names"):
        run(TRAINER["read"](TRAINER["Config"], model))
