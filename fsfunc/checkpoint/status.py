"""Reports of the ranks that make one save: files, and messages that all is well or not.

No collectives, which could meet those of training. What a rank has written stands in a
file, in the folder that all write into, as it may be long.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fsfunc.checkpoint.manifest import MANIFEST
from fsfunc.checkpoint.stored import CheckpointError, Chunk, StoredFile
from fsfunc.comm.mesh import Here
from fsfunc.comm.watch.mailboxes import Message, is_final

_PATIENCE = 5.0  # seconds without a word, after which a rank is asked where it is


class RankStatus(NamedTuple):
    """The files that a rank has written, and the states of its random generators.

    Args:
        files: its files.
        chunks: the boxes of each leaf that it wrote.
        random: its default generators' states, by device type.
    """

    files: Mapping[str, StoredFile]
    chunks: Mapping[str, list[Chunk]]
    random: Mapping[str, str]


def report(folder: Path, rank: int, status: RankStatus) -> None:
    """Leaves what a rank has written for the first rank to read."""
    _put(_path(folder, rank), json.dumps(status._asdict()))


def take_status(folder: Path, rank: int) -> RankStatus:
    """Takes what a rank reported out of the folder.

    Raises:
        FileNotFoundError: it is not there.
    """
    said = json.loads(_path(folder, rank).read_text())
    _path(folder, rank).unlink()
    files = {
        name: StoredFile(n, tuple(s)) for name, (n, s, *_) in said["files"].items()
    }
    chunks = {
        path: [Chunk(name, at, tuple(o), tuple(n)) for name, at, o, n in boxes]
        for path, boxes in said["chunks"].items()
    }
    return RankStatus(files, chunks, said["random"])


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def _put(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.rename(part, path)


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
        self.gone: dict[int, str] = {}  # why nothing is to be heard of some

    def tell(self, why: str) -> None:
        """Says that this rank has done its part, or why it could not."""
        message = Message("save", self.rank, self.number, self.blamed or why)
        self.board.tell(self.ranks, message)

    def said(self) -> dict[int, str]:
        """Their messages, by rank: "" where all is well."""
        return self.board.read("save", self.ranks, self.number)

    @property
    def blamed(self) -> str:
        """The failure of one of them, in words; "" where there is none."""
        said = self.said()
        gone = [f"rank {r} {why}" for r, why in self.gone.items() if r not in said]
        return next(filter(None, said.values()), "; ".join(gone))

    def wait(self) -> None:
        """Returns when all of them have done their part.

        Raises:
            CheckpointError: one of them could not, or will never say.
        """
        pause, silent = 0.5, dict[int, float]()  # since when
        over = lambda: self.blamed or len(self.said()) == len(self.ranks)  # noqa: E731
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
