"""Reports of ranks in one save, and what all ranks of a checkpoint agree on.

`saving` and `loading` use this while the program waits for them: an error of one rank
is raised on all (`everywhere`), and texts are compared (`check_same_everywhere`). Both
are collectives.

A save in the background uses no collectives, which could be matched with those of the
training. A rank writes the list of its files to a file in the common folder
(`write_status`), and tells others by messages that it is done (`SavePeers`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsfunc.checkpoint.folders import MANIFEST
from fsfunc.checkpoint.stored import CheckpointError, StoredFile
from fsfunc.comm import comparison
from fsfunc.comm.attribution import label
from fsfunc.comm.comparison import Section, agree
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Here
from fsfunc.comm.watch.mailboxes import Board, Message, is_final

_T = TypeVar("_T")


def everywhere(here: Here | None, action: Callable[[], _T]) -> _T:
    """Returns ``action()``, or raises any rank's error on all; waits for all ranks."""
    with label("", "checkpoint"):
        return comparison.run_everywhere(action, all_ranks(here), CheckpointError)


def raise_everywhere(here: Here | None, error: BaseException | None) -> None:
    """Raises on every rank if any rank has an ``error``; also waits for all ranks."""
    with label("", "checkpoint"):
        comparison.raise_everywhere(error, all_ranks(here), CheckpointError)


def all_ranks(here: Here | None) -> RankGroup | None:
    """Returns the group of all ranks of the mesh; None without a mesh."""
    return None if here is None else get_group(tuple(here.mesh.axes), here)


def attempt(action: Callable[[], Any]) -> Exception | None:
    """Runs ``action()``, and returns the exception that it raised, or None."""
    try:
        action()
    except Exception as error:
        return error
    return None


def check_same_everywhere(
    here: Here | None, describe: Callable[[], str], fault: str
) -> None:
    """Raises on every rank if ``describe()`` is not the same on all of them.

    Raises:
        RanksDiffer: says that the ranks ``fault`` (such as "load different
            checkpoints"), and each one's text.
    """
    ranks = all_ranks(here)
    if ranks is not None and ranks.size > 1:
        title = f"the ranks {fault}, and every rank must name the same one"
        agree(ranks, Section(title, [("said", describe())]), waits=True)


_MAX_PAUSE = 5.0  # seconds between two looks at the messages


class RankStatus(NamedTuple):
    """The files that a rank has written, and the states of its random generators.

    Args:
        files: its files.
        random: its default generators' states, by device type.
    """

    files: Mapping[str, StoredFile]
    random: Mapping[str, str]


def write_status(folder: Path, rank: int, status: RankStatus) -> None:
    """Leaves what a rank has written for the first rank to read."""
    path = _status_path(folder, rank)
    # Under another name first: the file is there whole or not at all.
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(status._asdict()))
    os.rename(part, path)


def take_status(folder: Path, rank: int) -> RankStatus:
    """Reads what a rank reported, and removes the report from the folder.

    Raises:
        CheckpointError: it is not there.
    """
    try:
        status = json.loads(_status_path(folder, rank).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"rank {rank} wrote its part where rank 0 does not see it, in {folder}: "
            "all ranks need one shared file system"
        ) from error
    _status_path(folder, rank).unlink()
    files = {
        name: StoredFile(n, tuple(s)) for name, (n, s, *_) in status["files"].items()
    }
    return RankStatus(files, status["random"])


def _status_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


class SavePeers:
    """The ranks that one rank waits for in a save: rank 0 for all, and all for rank 0.

    Args:
        path: the path that the checkpoint will have.
    """

    board: Board
    rank: int
    path: Path

    def __init__(self, here: Here, path: Path):
        self.board, self.rank, self.path = here.link.board, here.rank, path
        self.ranks: list[int] = [0] if here.rank else [*range(1, here.mesh.size)]
        # Seconds of waiting for one that is silent.
        self.patience: float = min(here.link.timeout / 2, 300.0)
        # Saves are numbered, so that a late message of an earlier one is not taken.
        self.board.saves[here.rank] += 1
        self.number: int = self.board.saves[here.rank]
        self.lost: dict[int, str] = {}  # by rank, why it will never report

    def tell(self, error: str) -> None:
        """Tells the others that this rank has done its part, or why it could not.

        What failed elsewhere is told in place of this rank's error, which follows from
        it.
        """
        message = Message("save", self.rank, self.number, self.failure or error)
        self.board.send(self.ranks, message)

    def read_messages(self) -> dict[int, str]:
        """Returns their messages, by rank: "" of one that has done its part."""
        return self.board.read("save", self.ranks, self.number)

    @property
    def failure(self) -> str:
        """The failure of one of them, in words; "" where there is none."""
        errors = self.read_messages()
        lost = [
            f"rank {r} {reason}" for r, reason in self.lost.items() if r not in errors
        ]
        return next(filter(None, errors.values()), "; ".join(lost))

    def wait(self, all_of_them: bool = False) -> None:
        """Returns when all of them have done their part.

        Args:
            all_of_them: whether to wait for the others too, if one has failed.

        Raises:
            CheckpointError: one of them failed, or will never report.
        """
        pause, silent_since = 0.5, dict[int, float]()  # seconds; by rank

        def is_over() -> bool:
            all_done = len({*self.read_messages(), *self.lost}) == len(self.ranks)
            return all_done or not all_of_them and bool(self.failure)

        while not is_over():
            self.board.wait(pause, is_over)
            pause = min(2 * pause, _MAX_PAUSE)
            if is_over():
                break
            # A rank without a message may be busy, or gone: the board says which. One
            # that has ended will never report. One that does not answer may be slow:
            # it is waited for as long as there is patience.
            asked_at = time.monotonic()
            missing = self.board.missing(
                [r for r in self.ranks if r not in self.read_messages()]
            )
            silent_since = {r: silent_since.get(r, asked_at) for r in missing}
            deadline = time.monotonic() - self.patience
            self.lost = {
                r: reason
                for r, reason in missing.items()
                if is_final(reason) or silent_since[r] < deadline
            }
            if self.lost and (self.path / MANIFEST).exists():
                return  # rank 0 completed the checkpoint, and ended before it told
        if self.failure:
            raise CheckpointError(f"{self.path} was not saved: {self.failure}")
