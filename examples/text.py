"""Real text as bytes: reading it, drawing batches from it, and writing it."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

MAX_BYTES = 4_000_000
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Corpus(NamedTuple):
    """Bytes [n] as uint8: the last tenth of every file is kept for validation."""

    train: Tensor
    validation: Tensor
    files: int


def read_corpus(path: Path | None = None, max_bytes: int = MAX_BYTES) -> Corpus:
    """The text of a file or folder; by default the source of the standard library.

    Folders are read in sorted order until max_bytes are reached; files that hold a zero
    byte (they are no text) are passed over.

    Raises: FileNotFoundError where there is no such path, or no text in it.
    """
    train, validation = bytearray(), bytearray()
    files = 0
    for file in text_files(path):
        text = file.read_bytes()[: max_bytes - len(train) - len(validation)]
        if b"\0" in text:
            continue
        cut = len(text) - len(text) // 10
        train += text[:cut]
        validation += text[cut:]
        files += 1
        if len(train) + len(validation) >= max_bytes:
            break
    if not train:
        raise FileNotFoundError(f"no text in {path or library()}: name some by --text")
    return Corpus(as_tensor(train), as_tensor(validation), files)


def text_files(path: Path | None) -> list[Path]:
    root, pattern = (library(), "*.py") if path is None else (path, "*")
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"no such file or folder: {root}")
    inside = (file.relative_to(root) for file in root.rglob(pattern))
    # hidden folders hold version control's own files, which are no text of the user's
    kept = (
        name
        for name in inside
        if not SKIPPED & set(name.parts) and not any(p[0] == "." for p in name.parts)
    )
    return [root / name for name in sorted(kept) if (root / name).is_file()]


def library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def as_tensor(text: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batch(
    text: Tensor, batch: int, seq: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """A global batch of random windows: {"tokens", "targets"}, each [batch, seq].

    It depends on the generator alone, so that every rank of every backend draws the
    same one and takes its own part of it.

    Raises: ValueError where the text is no longer than one window.
    """
    check_length(text, seq)
    starts = torch.randint(len(text) - seq, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(seq + 1)].long()
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


class Windows(Dataset):
    """Every window of a text: {"tokens", "targets"}, each [seq], the next one byte on.

    Raises: ValueError where the text is no longer than one window.
    """

    def __init__(self, text: Tensor, seq: int):
        check_length(text, seq)
        self.text, self.seq = text, seq

    def __len__(self) -> int:
        return len(self.text) - self.seq

    def __getitem__(self, start: int) -> dict[str, Tensor]:
        window = self.text[start : start + self.seq + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def check_length(text: Tensor, seq: int) -> None:
    if len(text) <= seq:
        raise ValueError(
            f"the text has a part of {len(text)} bytes, and a window takes {seq + 1}: "
            f"name a longer text or a smaller --seq"
        )


def printable(text: bytes) -> str:
    """The text, with a dot for whatever a terminal could not show."""
    decoded = text.decode("utf-8", errors="replace")
    shown = (c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in decoded)
    return "".join(shown).replace("\N{REPLACEMENT CHARACTER}", "\N{MIDDLE DOT}")
