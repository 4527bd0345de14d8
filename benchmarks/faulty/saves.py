"""What a save might lose: each rank's own values, what a link leads to, a user's file.

Each is called by all ranks before the step in which it is due, and raises where
something that was there is gone. See faults.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsfunc as ff


def check(kept: bool, what: str) -> None:
    if not kept:
        raise AssertionError(f"lost: {what}")


def carry(rank: Any, mesh: Any, state: Any) -> None:
    """A hidden state that is each rank's own, beside the state of training."""
    rank.due(rank.fault.kind)
    path = Path(rank.file.name).with_name("saved")
    mine = {"hidden": torch.arange(4.0) + mesh.rank, "state": state}
    ff.save(path, mine)
    found = ff.load(path, mine)
    check(torch.equal(found["hidden"], mine["hidden"]), "what is each rank's own")


def link(rank: Any, mesh: Any, state: Any) -> None:
    """One of a run's checkpoints is a link to one in an archive."""
    folder = Path(rank.file.name).parent
    best, run = folder / "archive" / "best", folder / "run"
    ff.save(best, {"w": torch.ones(2)})
    if rank.due(rank.fault.kind):
        run.mkdir()
        (run / "step-1").symlink_to(best)
    ff.psum(torch.ones(1), "data")
    for i in (2, 3):
        ff.save(run / f"step-{i}", {"w": torch.ones(2)}, keep=1)
    found = ff.load(best, {"w": torch.zeros(2)})["w"]
    check(found.sum() == 2 and os.listdir(run) == ["step-3"], "what a link led to")


def consolidate(rank: Any, mesh: Any, state: Any) -> None:
    """A user's file has the name that a consolidated one would have on its way."""
    folder = Path(rank.file.name).parent
    ff.save(folder / "saved", {"w": torch.ones(2)})
    if rank.due(rank.fault.kind):
        mine = folder / ".one.saving"
        mine.write_text("mine")
        ff.consolidate(folder / "saved", folder / "one")
        check(mine.exists() and mine.read_text() == "mine", "a user's file")


# kind -> (what is due, what every rank does)
SAVES: dict[str, tuple[str, Callable[[Any, Any, Any], None]]] = {
    "saves what is its own": ("right", carry),
    "has a link among its saves": ("right", link),
    "has a file like consolidate's": ("right", consolidate),
}
