"""The loop to copy: a plain torch loop's losses, and a run that goes on."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from examples import loop
from tests.checks import close
from tests.examples.programs import SCRIPT


def options(*more):
    return loop.parse(["--steps", "8", "--every", "4", *more])


def plain_losses(params, steps, rate):
    """The same by torch alone: the mean over the tokens of each whole batch."""
    params = ff.tree.map(lambda x: torch.nn.Parameter(x.clone()), params)
    leaves = ff.tree.leaves(params)
    adam, losses = torch.optim.AdamW(leaves, lr=1.0), []
    batches = ff.batches(loop.Counting(512, 2), None, None, 16, seed=1)
    for i in range(steps):
        batch = next(batches)
        adam.param_groups[0]["lr"] = rate(i)
        logits = loop.next_logits(params, batch["tokens"]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["targets"].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        adam.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_a_plain_loop(monkeypatch):
    # As values: a function that draws gives a state other numbers than a plain call.
    params = loop.init("cpu")
    monkeypatch.setattr(loop, "init", lambda device: ff.tree.map(torch.clone, params))
    rate = ff.warmup_cosine(1e-2, 1, 9, start=1e-3)
    expected = torch.tensor(plain_losses(params, 8, rate))
    for more in (["--ranks", "1", "--accumulate", "1"], ["--ranks", "4"]):
        losses, _ = loop.main(options(*more))[0]
        close(torch.tensor(losses), expected, 1e-5)


def test_a_run_that_ended_goes_on(tmp_path, monkeypatch, capsys):
    (expected, params), *_ = loop.main(options())
    write, keep = loop.Log.step, ["--folder", str(tmp_path)]

    def fails(self, number, numbers, **plain):
        if number == 6:
            raise OSError("the machine is wanted back")
        write(self, number, numbers, **plain)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="wanted back"):
        patch.setattr(loop.Log, "step", fails)
        loop.main(options(*keep))
    assert ff.latest(tmp_path, "step-*").name == "step-4"
    (losses, again), *_ = loop.main(options(*keep))
    assert losses == expected[4:]
    close(again, params, 0)
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    by_step = {x["step"]: x for x in lines}  # the later line of a number
    close(torch.tensor([by_step[i]["loss"] for i in range(8)]), torch.tensor(expected))
    names = {"step", "loss", "norm", "right", "tokens", "longest", "rate", "seconds"}
    assert set(lines[0]) == names and lines[0]["longest"] <= loop.LENGTH
    assert capsys.readouterr().out.count("step   8") == 2  # rank 0 alone prints


def test_a_writer_is_told_the_same(tmp_path):
    told = []

    class Writer:
        def add_scalar(self, name, value, step):
            told.append((name, value, step))

    log = loop.Log(tmp_path / "new" / "log.jsonl", Writer())
    log.step(3, {"loss": torch.tensor(0.5)}, rate=1.0)
    assert not told  # it is read one step later
    log.write()
    log.write()
    assert ("loss", 0.5, 3) in told and ("rate", 1.0, 3) in told and len(told) == 4


def test_in_bfloat16_the_losses_are_near(capsys):
    (expected, _), *_ = loop.main(options("--ranks", "2"))
    (losses, params), *_ = loop.main(options("--ranks", "2", "--bf16"))
    close(torch.tensor(losses), torch.tensor(expected), 0.05)
    assert losses != expected and params["head"]["vocab"].dtype == torch.float32
    assert capsys.readouterr().out.count("[3, 5, ") == 4


def test_it_counts_on(capsys):
    loop.main(loop.parse(["--ranks", "2", "--every", "120"]))
    assert "[3, 5, 7, 9, 11, 13, 15, 1]" in capsys.readouterr().out


@pytest.mark.processes
def test_under_torchrun_losses_are_the_same(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(SCRIPT.with_name("loop.py")), "--steps", "8"]
    subprocess.run([*command, "--folder", tmp_path], check=True, timeout=300)
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses, _ = loop.main(loop.parse(["--steps", "8"]))[0]
    close(torch.tensor([x["loss"] for x in lines]), torch.tensor(losses), 1e-5)
