"""Running the example as its user does, and reading what it prints."""

import contextlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import ROOT, forked

SCRIPT = ROOT / "examples" / "train_gpt.py"
SIZES = "--dim 32 --layers 2 --heads 2 --seq 32 --batch 8 --lr 1e-2 --sample 2".split()


class Run(NamedTuple):
    out: str
    losses: dict


def program(
    *args: str | Path, check: bool = True, start: tuple[str, ...] = (str(SCRIPT),)
) -> subprocess.CompletedProcess:
    done = forked(*start, *args, COLUMNS="100")
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def train(folder: Path, *args: str | Path) -> Run:
    """The script in this process: a program of its own takes seconds to start."""
    path, out = folder / "losses.json", io.StringIO()
    given = [SCRIPT, *SIZES, "--losses", path, *args]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", list(map(str, given)))
        patch.setenv("COLUMNS", "100")
        patch.syspath_prepend(SCRIPT.parent)
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        finally:
            for module in SCRIPT.parent.glob("*.py"):
                sys.modules.pop(module.stem, None)
    return Run(out.getvalue(), json.loads(path.read_text()))


def train_as_program(folder: Path, *args: str | Path) -> Run:
    path = folder / "losses.json"
    out = program(*SIZES, "--losses", path, *args).stdout
    return Run(out, json.loads(path.read_text()))


def planned(folder: Path, mesh: str, *args: str) -> list[dict[tuple[str, str], int]]:
    """How often each program of a plan sends, by op and axis, as numbers_sent says."""
    path, start = folder / "plan.json", ("-m", "fsfunc", "plan", str(SCRIPT))
    program("--mesh", mesh, "--json", path, "--", *SIZES, *args, start=start)
    found: list[dict[tuple[str, str], int]] = []
    for one in json.loads(path.read_text())["plans"][0]["programs"]:
        counts: dict[tuple[str, str], int] = {}
        for row in one["collectives"]:
            key = row["op"], ", ".join(row["axes"])
            counts[key] = counts.get(key, 0) + row["count"]
        found.append({**counts, ("all", ""): sum(counts.values())})
    return found


def table_below(out: str, title: str) -> list[list[str]]:
    """The cells of the rows of the table with this title."""
    body = out.split(title, 1)[1].split("└", 1)[0]
    return [
        [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in body.splitlines()
        if line.startswith("│")
    ]


def numbers_held(rows: list[list[str]]) -> list[list[int]]:
    """How many numbers a rank holds of each kind, from cells like 1,024 (4.0 KiB)."""
    return [[int(c.split()[0].replace(",", "")) for c in row[1:]] for row in rows]


def numbers_sent(out: str) -> list[dict[tuple[str, str], int]]:
    """How often each rank sent, by op and axis, from cells like 4 (16.0 KiB)."""
    rows = table_below(out, "sent in one step")
    columns = zip(*(row[2:] for row in rows), strict=True)
    kinds = [(op, axis) for op, axis, *_ in rows]
    return [
        {kind: int(cell.split()[0]) for kind, cell in zip(kinds, column, strict=True)}
        for column in columns
    ]


def check_losses(found: dict, expected: dict, tolerance: float) -> None:
    assert found["train"] == pytest.approx(expected["train"], abs=tolerance)
    for (step, loss), (at, other) in zip(
        found["validation"], expected["validation"], strict=True
    ):
        assert step == at
        assert loss == pytest.approx(other, abs=tolerance)
