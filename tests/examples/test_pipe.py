"""The example under --pipe: as one rank trains, on simulated ranks and processes."""

import inspect
import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fsfunc as ff
from tests.examples.programs import (
    SCRIPT,
    SIZES,
    Run,
    check_losses,
    numbers_held,
    table_below,
    train,
)

STEPS = ["--steps", "2"]
EMBED, BLOCK, HEAD = 256 * 32 + 32 * 32, 12 * 32 * 32 + 2 * 32, 256 * 32 + 32


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on one rank, without a pipeline."""
    return train(tmp_path_factory.mktemp("alone"), "--ranks", "1", *STEPS)


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two pipelines of two simulated ranks each."""
    options = "--ranks 4 --pipe 2 --zero 3".split()
    return train(tmp_path_factory.mktemp("piped"), *options, *STEPS)


def test_pipelines_train_like_one_rank(piped: Run, alone: Run) -> None:
    check_losses(piped.losses, alone.losses, 1e-5)
    assert piped.losses["samples"] == alone.losses["samples"] * 4
    assert "stage 0 on rank 0: embed, block\nstage 1 on rank 1: block, head\n" in (
        piped.out
    )
    rows = [line for line in piped.out.splitlines() if line.startswith("rank ")]
    assert rows[:2] == [
        "rank 0 │F0│F1│░░░░░│B0   │F2│B1   │F3│B2   │░░│B3   │",
        "rank 1 │··│F0│B0   │F1│B1   │F2│B2   │F3│B3   │·····│",
    ]
    rows = table_below(piped.out, "what each rank holds")
    assert [row[:2] for row in rows] == [[str(r), str(r % 2)] for r in range(4)]
    first, last = (EMBED + BLOCK) // 2, (BLOCK + HEAD) // 2
    # the column after the rank's is its place in the pipeline
    held = [numbers[1:] for numbers in numbers_held(rows)]
    assert held == [[first, first, 2 * first], [last, last, 2 * last]] * 2


@pytest.mark.processes
def test_processes_run_the_same_pipeline(processes, tmp_path: Path) -> None:
    there, here = tmp_path / "there.json", tmp_path / "here.json"
    options = ["--pipe", "2", *STEPS]
    run = train(tmp_path, "--ranks", "2", *options, "--trace", here)
    path = tmp_path / "processes.json"
    given = [*SIZES, *options, "--trace", str(there), "--losses", str(path)]
    out = processes(SCRIPT, 2, *given)
    check_losses(json.loads(path.read_text()), run.losses, 1e-6)
    for title in ("what each rank holds", "sent in one step"):
        assert table_below(out, title) == table_below(run.out, title)
    assert actions_traced(there) == actions_traced(here)
    assert actions_traced(here)[1, "B3@1"] == 1
    kinds = Counter((rank, name[:2]) for rank, name in actions_traced(here).elements())
    assert kinds[0, "SF"] == kinds[0, "RB"] == kinds[1, "RF"] == kinds[1, "SB"] == 4


def actions_traced(path: Path) -> Counter[tuple[int, str]]:
    """How often each (rank, action) is in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter((e["pid"], e["name"]) for e in events if e["ph"] == "X")


def test_every_schedule_can_be_asked_for(examples: dict[str, ModuleType]) -> None:
    sizes = {"vocab": 256, "seq": 8, "dim": 16, "layers": 3, "heads": 2}
    params = examples["gpt"].init_params(torch.Generator(), **sizes)
    tokens = torch.zeros(4, 8, dtype=torch.long)
    batch = {"tokens": tokens, "targets": tokens}
    for name, chunks in examples["options"].STAGES_OF_A_RANK.items():
        options = f"--ranks 2 --pipe 2 --layers 3 --schedule {name}".split()
        args: Namespace = examples["options"].parse("", options)
        stages = examples["stages"].make_stages(args, lambda _: params, lambda _: batch)
        ff.verify(stages.schedule, n_microbatches=4)
        assert len(stages.schedule) == 2
        assert len(ff.schedules.owners(stages.schedule)) == 2 * chunks
        assert sum(stages.units, []) == ["embed", *["block"] * 3, "head"]
        # as many as pipeline() itself would give a rank
        known = inspect.signature(getattr(ff.schedules, name)).parameters.get("chunks")
        assert chunks == (known.default if known else 1)
