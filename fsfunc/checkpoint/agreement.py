"""Reports of ranks in one save, and what all ranks of a checkpoint agree on.

Reports use no collectives, which could be matched with those of training: a rank writes
the list of its files to a file in the common folder.
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
from fsfunc.comm.watch.mailboxes import Message, is_final

_T = TypeVar("_T")


def everywhere(at: Here | None, action: Callable[[], _T]) -> _T:
    """``action()``, or on every rank the error of any; also waits for all ranks."""
    with label("", "checkpoint"):
        return comparison.run_everywhere(action, everyone(at), CheckpointError)


def raise_everywhere(at: Here | None, error: BaseException | None) -> None:
    """Raises on every rank if any rank has an ``error``; also waits for all ranks."""
    with label("", "checkpoint"):
        comparison.raise_everywhere(error, everyone(at), CheckpointError)


def everyone(at: Here | None) -> RankGroup | None:
    """All ranks of the mesh, wherever a state lies; None without a mesh."""
    return None if at is None else get_group(tuple(at.mesh.axes), at)


def attempt(action: Callable[[], Any]) -> Exception | None:
    """The exception that ``action()`` raised, or None."""
    try:
        action()
    except Exception as error:
        return error
    return None


def check_alike(at: Here | None, said: Callable[[], str], what: str) -> None:
    """Raises on every rank where ``said()`` is not the same on all of them.

    Raises:
        RanksDiffer: says ``what`` the ranks do, and each one's text.
    """
    where = everyone(at)
    if where is not None and where.size > 1:
        title = f"the ranks {what}, and every rank must name the same one"
        agree(where, Section(title, [("said", said())]), waits=True)


_PATIENCE = 5.0  # seconds without a report, after which a rank is asked for its state


class RankStatus(NamedTuple):
    """The files that a rank has written, and the states of its random generators.

    Args:
        files: its files.
        random: its default generators' states, by device type.
    """

    files: Mapping[str, StoredFile]
    random: Mapping[str, str]


def report(folder: Path, rank: int, status: RankStatus) -> None:
    """Leaves what a rank has written for the first rank to read."""
    path = _path(folder, rank)
    part = path.with_name(f"{path.name}.part")  # it is there whole or not at all
    part.write_text(json.dumps(status._asdict()))
    os.rename(part, path)


def take_status(folder: Path, rank: int) -> RankStatus:
    """Takes what a rank reported out of the folder.

    Raises:
        CheckpointError: it is not there.
    """
    try:
        said = json.loads(_path(folder, rank).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"rank {rank} wrote its part where rank 0 does not see it, in {folder}: "
            "all ranks need one shared file system"
        ) from error
    _path(folder, rank).unlink()
    files = {
        name: StoredFile(n, tuple(s)) for name, (n, s, *_) in said["files"].items()
    }
    return RankStatus(files, said["random"])


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


class Others:
    """Those whom a rank waits for in one save: rank 0 for all, and all for rank 0.

    Args:
        path: what the checkpoint will be.
    """

    def __init__(self, at: Here, path: Path):
        self.board, self.rank, self.path = at.link.board, at.rank, path
        self.ranks = [0] if at.rank else [*range(1, at.mesh.size)]
        self.patience = min(at.link.timeout / 2, 300.0)  # with who does not answer
        self.board.saves[at.rank] += 1
        self.number = self.board.saves[at.rank]
        self.gone: dict[int, str] = {}  # by rank, why it does not report

    def tell(self, why: str) -> None:
        """Says that this rank has done its part, or why it could not."""
        message = Message("save", self.rank, self.number, self.blamed or why)
        self.board.send(self.ranks, message)

    def said(self) -> dict[int, str]:
        """Their messages, by rank: "" where all is well."""
        return self.board.read("save", self.ranks, self.number)

    @property
    def blamed(self) -> str:
        """The failure of one of them, in words; "" where there is none."""
        said = self.said()
        gone = [f"rank {r} {why}" for r, why in self.gone.items() if r not in said]
        return next(filter(None, said.values()), "; ".join(gone))

    def wait(self, all_of_them: bool = False) -> None:
        """Returns when all of them have done their part.

        Args:
            all_of_them: whether the others are waited for where one could not.

        Raises:
            CheckpointError: one of them could not, or will never say.
        """
        pause, silent = 0.5, dict[int, float]()  # since when

        def over() -> bool:
            done = len({*self.said(), *self.gone}) == len(self.ranks)
            return done or not all_of_them and bool(self.blamed)

        while not over():
            self.board.wait(pause, over)
            pause = min(2 * pause, _PATIENCE)
            if over():
                break
            asked = time.monotonic()
            missing = self.board.missing(
                [r for r in self.ranks if r not in self.said()]
            )
            silent = {r: silent.get(r, asked) for r in missing}
            given_up = time.monotonic() - self.patience
            self.gone = {
                r: why
                for r, why in missing.items()
                if is_final(why) or silent[r] < given_up
            }
            if self.gone and (self.path / MANIFEST).exists():
                return  # rank 0 has ended, and well
        if self.blamed:
            raise CheckpointError(f"{self.path} was not saved: {self.blamed}")
