"""Runs that end early, by a crash or because they are asked to, and go on."""

import json
import random
import shutil
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import ModuleType

import pytest
import torch

import fsfunc as ff
from tests.examples.launches import launched
from tests.examples.programs import SCRIPT, check_losses

SIZES = "--dim 32 --layers 2 --heads 2 --seq 16 --batch 8 --lr 1e-2 --sample 4".split()
STEPS = 60
OPTIONS = [*SIZES, "--steps", str(STEPS), "--text", str(SCRIPT.parent)]

_NOBODY = Event()  # asks a run to leave

Run = Callable[..., dict]


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The script and the modules beside it."""
    names = ("train_gpt", "options", "restart", "text")
    beside = {path.stem for path in SCRIPT.parent.glob("*.py")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield {name: __import__(name) for name in names}
        for name in beside & set(sys.modules):
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def run(example: dict[str, ModuleType]) -> Run:
    """run(*more options, leaving=) -> the results, of simulated ranks here."""
    script = example["train_gpt"]

    def run(*more: str | Path, leaving: object = _NOBODY) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(SCRIPT), *OPTIONS, *map(str, more)])
            args: Namespace = script.settings()
        args.leaving = leaving
        torch.manual_seed(args.seed)
        axes = {"data": args.data} | ({"pipe": args.pipe} if args.pipe > 1 else {})
        mesh = ff.make_mesh(axes, "simulated")
        corpus = example["text"].read_corpus(args.text)
        results, *_ = ff.spmd(script.train, mesh)(args, corpus, mesh)
        return results._asdict()

    return run


def saved(folder: Path) -> list[int]:
    """The steps after which there is a checkpoint."""
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def forget(folder: Path, after: int) -> None:
    """Takes away what was saved later, as though the run had died before."""
    for step in saved(folder):
        if step > after:
            shutil.rmtree(folder / f"step-{step:06}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--zero 3", "--zero 1 --no-donate --pipe 2"])
def test_it_goes_on_bitwise(how: str, run: Run, tmp_path: Path) -> None:
    how = ["--ranks", "4", *how.split(), "--steps", "7"]
    kept = ["--checkpoints", tmp_path, "--every", "2", "--keep", "3"]
    expected = run(*how)
    assert run(*how, *kept) == expected
    assert saved(tmp_path) == [4, 6, 7]
    for step in (4, 6, 7):
        found = ff.metadata(tmp_path / f"step-{step:06}").metadata["results"]
        assert found["train"] == expected["train"][:step]
    last = files_of(tmp_path / "step-000007")
    forget(tmp_path, after=4)
    assert run(*how, *kept) == expected
    assert files_of(tmp_path / "step-000007") == last


def test_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    kept = ["--ranks", "1", "--steps", "2", "--checkpoints", tmp_path]
    expected = run(*kept)
    assert run(*kept) == expected  # it had ended, and tells its results once more
    with pytest.raises(SystemExit, match="its --lr is 0.01, and here it is 0.02; name"):
        run(*kept, "--lr", "2e-2")
    with pytest.raises(SystemExit, match="its --text is"):
        run(*kept, "--text", __file__)
    assert saved(tmp_path) == [2]


def test_one_rank_is_asked_and_all_leave(run: Run, tmp_path: Path) -> None:
    calls: Counter[int] = Counter()

    class Asked:
        def is_set(self) -> bool:
            rank = ff.axis_index("data")
            calls[rank] += 1
            return rank == 1 and calls[rank] == 2

    how = ["--ranks", "2", "--steps", "4"]
    expected, kept = run(*how), ["--checkpoints", tmp_path]
    found = run(*how, *kept, leaving=Asked())
    assert saved(tmp_path) == [2]
    assert found["train"] == expected["train"][:2]
    assert found["samples"] == []
    assert run(*how, *kept) == expected


@pytest.mark.processes
def test_ranks_are_killed_and_nothing_is_lost(run: Run, tmp_path: Path) -> None:
    expected = run("--ranks", "2", "--checkpoints", tmp_path / "whole")
    kept, losses = tmp_path / "kept", tmp_path / "losses.json"
    mine = ["--checkpoints", kept, "--every", "2", "--losses", losses]
    chance = random.Random(5)
    with launched(tmp_path, *OPTIONS, *mine, nproc=2) as launch:
        for killed, step in enumerate((2, STEPS // 3)):
            launch.until(lambda step=step: saved(kept)[-1:] >= [step])
            assert launch.attempts() == killed + 1
            time.sleep(chance.uniform(0, 0.1))  # a few steps
            launch.kill(chance.randrange(2))
            launch.until(lambda killed=killed: launch.attempts() == killed + 2)
        assert launch.ended() == 0, launch.printed()
    check_losses(json.loads(losses.read_text()), expected, 0)
    last = f"step-{STEPS:06}"
    assert files_of(kept / last) == files_of(tmp_path / "whole" / last)


@pytest.mark.processes
def test_asked_to_leave_it_goes_on_over_fewer_ranks(run: Run, tmp_path: Path) -> None:
    slow = "--lr", "5e-4"  # rounding grows with the rate
    expected, kept = run(*slow, "--ranks", "4"), tmp_path / "kept"
    mine = [*slow, "--checkpoints", kept, "--every", "3"]
    left = [0]
    for place, nproc in (("--ranks=4", 0), ("--ranks=2", 2)):
        with launched(tmp_path, *OPTIONS, *mine, place, nproc=nproc) as launch:
            launch.until(lambda: saved(kept)[-1:] > left[-1:])
            launch.terminate()
            status = launch.ended()
            printed = launch.printed()
        left.append(saved(kept)[-1])
        assert left[-2] < left[-1] < STEPS
        assert f"asked to leave: saved after step {left[-1]}" in printed
        assert nproc or status == 0, printed  # torchrun itself ends by the signal
    found = run(*mine, "--ranks", "1")
    check_losses(found, expected, 1e-6 * expected["train"][-1])
