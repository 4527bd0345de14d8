"""Runs that end early, by a crash or because they are asked to, and go on."""

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
from tests.examples.programs import SCRIPT, check_losses, launched

SIZES = "--dim 32 --layers 2 --heads 2 --seq 16 --batch 8 --lr 1e-2 --sample 2".split()
STEPS = 24
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
    ranks = "4" if "--pipe" in how else "2"
    how = ["--ranks", ranks, *how.split(), "--steps", "5"]
    kept = ["--checkpoints", tmp_path, "--every", "2", "--keep", "3"]
    expected = run(*how)
    assert run(*how, *kept) == expected
    assert saved(tmp_path) == [2, 4, 5]
    for step in (2, 4, 5):
        found = ff.metadata(tmp_path / f"step-{step:06}").metadata["results"]
        assert found["train"] == expected["train"][:step]
    last = files_of(tmp_path / "step-000005")
    forget(tmp_path, after=2)
    assert run(*how, *kept) == expected
    assert files_of(tmp_path / "step-000005") == last


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
    """And go on over fewer ranks."""
    calls: Counter[int] = Counter()

    class Asked:
        def is_set(self) -> bool:
            rank = ff.axis_index("data")
            calls[rank] += 1
            return rank == 1 and calls[rank] == 2

    how = ["--lr", "5e-4", "--steps", "4"]  # rounding grows with the rate
    expected, kept = run(*how, "--ranks", "2"), ["--checkpoints", tmp_path]
    found = run(*how, "--ranks", "2", *kept, leaving=Asked())
    assert saved(tmp_path) == [2]
    assert found["train"] == expected["train"][:2]
    assert found["samples"] == []
    found = run(*how, "--ranks", "1", *kept)
    check_losses(found, expected, 1e-6 * expected["train"][-1])


@pytest.mark.processes
def test_killed_or_asked_to_leave_it_goes_on(run: Run, tmp_path: Path) -> None:
    """Ranks of torchrun, of which one is killed, then simulated ranks: both leave."""
    expected = run("--ranks", "2", "--checkpoints", tmp_path / "whole")
    kept, chance = tmp_path / "kept", random.Random(5)
    mine = ["--checkpoints", kept, "--every", "2"]
    with launched(tmp_path, *OPTIONS, *mine, nproc=2) as launch:
        launch.until(lambda: saved(kept)[-1:] >= [2])
        assert launch.attempts() == 1
        time.sleep(chance.uniform(0, 0.1))  # a few steps
        launch.kill(chance.randrange(2))
        launch.until(lambda: launch.attempts() == 2)
        again = saved(kept)[-1]
        launch.until(lambda: saved(kept)[-1] > again)
        launch.terminate()
        launch.ended()  # torchrun itself by the signal
        printed = launch.printed()
    left = saved(kept)[-1]
    assert f"asked to leave: saved after step {left}" in printed
    with launched(tmp_path, *OPTIONS, *mine, "--ranks=2") as launch:
        launch.until(lambda: saved(kept)[-1] > left)
        launch.terminate()
        assert launch.ended() == 0, launch.printed()
        assert f"asked to leave: saved after step {saved(kept)[-1]}" in launch.printed()
    assert again < left < saved(kept)[-1] < STEPS
    check_losses(run("--ranks", "2", *mine), expected, 0)
    last = f"step-{STEPS:06}"
    assert files_of(kept / last) == files_of(tmp_path / "whole" / last)
