"""The newest checkpoint that can be loaded, and the older ones that go."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from fsfunc.checkpoint.agreement import way_out
from fsfunc.checkpoint.blocks import check_files, prove
from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.folders import (
    age,
    alike,
    delete,
    entries,
    family_of,
    is_unfinished,
)
from fsfunc.checkpoint.manifest import MANIFEST
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.printing.tables import visible


def latest(
    folder: str | os.PathLike, pattern: str = "*", *, proven: bool = False
) -> Path | None:
    """The newest checkpoint in ``folder`` that can be loaded; None where there is none.

    One that is truncated or damaged is passed over, with a warning, and stays where it
    is. Every rank that sees the folder finds the same one.

    Args:
        pattern: what its name looks like, such as ``"step-*"``, where a folder holds
            others too.
        proven: read all of it and compare the checksums too; without that flipped bits
            are found by `load`.

    Raises:
        CheckpointError: there are some, and none can be loaded.

    The newest is the one with the highest last number in its name (``step-00000200``);
    of names without numbers, the last by name.

    Cost: reads one manifest, and asks for the lengths of its files.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         ff.save(f"{folder}/step-{step}", {"w": torch.ones(2)})
    ...     ff.latest(folder).name
    'step-10'
    """
    with way_out():
        found = [p for p in entries(Path(folder)) if p.match(pattern) and _is_one(p)]
        faults: list[CheckpointError] = []
        for path in sorted(found, key=age, reverse=True):
            fault = _fault(path, proven)
            if fault is None:
                return path
            faults.append(fault)
            warnings.warn(
                f"{visible(str(path))} cannot be loaded, and the one before it is "
                f"taken: {fault}",
                RuntimeWarning,
                stacklevel=2,
            )
    if faults:
        raise CheckpointError(
            f"none of the {len(faults)} checkpoints in {folder} can be loaded; of the "
            f"newest: {faults[0]}"
        )
    return None


def keep_newest(path: Path, keep: int) -> None:
    """Deletes all checkpoints named as ``path`` is but itself and the newest others.

    ``keep`` stay in all, of those that can be loaded. Names are alike that differ in
    their last number alone. What cannot be loaded, and what another job has put there
    since this one began, is left alone. So is, with a warning, what cannot be deleted:
    the one that was saved is complete.
    """
    others = [p for p in _family(path) if p != path and p.name in _known(path)]
    others = [p for p in others if _fault(p) is None]
    for old in sorted(others, key=age)[: len(others) - (keep - 1)]:
        try:
            delete(old)
        except OSError as error:
            warnings.warn(
                f"{old} is to make room, and cannot be deleted: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


# What of a folder this process found there when it first saved, or saved itself: all
# else is another job's, on whatever machine.
_KNOWN: dict[tuple[int, Path, tuple[str, bool, str]], set[str]] = {}


def _known(path: Path) -> set[str]:
    key = os.getpid(), path.parent, family_of(path.name)
    if key not in _KNOWN:
        _KNOWN[key] = {p.name for p in _family(path)}
    return _KNOWN[key]


def remember(path: Path) -> None:
    """``path`` is this job's."""
    _known(path).add(path.name)


def tell_of_others(path: Path) -> None:
    """Warns where another job saves beside ``path``, under names that are alike."""
    for other in _family(path):
        if other.name not in _known(path):
            warnings.warn(
                f"{other} was saved by another job while this one saves here too: each "
                "would go on from the other's; give each a folder of its own",
                RuntimeWarning,
                stacklevel=2,
            )


def _family(path: Path) -> list[Path]:
    """The checkpoints whose names are like that of ``path``."""
    return [p for p in entries(path.parent) if alike(p.name, path.name) and _is_one(p)]


def _is_one(path: Path) -> bool:
    return not is_unfinished(path) and os.path.lexists(path / MANIFEST)


def _fault(path: Path, proven: bool = False) -> CheckpointError | None:
    """The error that loading a checkpoint would raise, as far as is seen."""
    try:
        stored = metadata(path)
        if proven:
            prove(stored)
        else:
            check_files(stored, stored.files)
    except CheckpointError as error:
        return error
    except FileNotFoundError as error:  # it was deleted meanwhile
        return CheckpointError(str(error))
    return None
