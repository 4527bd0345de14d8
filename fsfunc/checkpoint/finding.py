"""Metadata of a checkpoint, or of safetensors files; the newest one in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fsfunc.checkpoint.folders import (
    MANIFEST,
    age,
    alike,
    delete,
    entries,
    is_pickle,
    is_unfinished,
    read_regular,
    refuse_pickle,
    stays,
)
from fsfunc.checkpoint.headers import (
    check_files,
    facts_in,
    header_at,
    read_manifest,
    tensors_in,
)
from fsfunc.checkpoint.parsing import LONGEST, Said, Wrong, table_of
from fsfunc.checkpoint.reading import prove
from fsfunc.checkpoint.stored import CheckpointError, Stored, proven
from fsfunc.comm.attribution import warn
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.printing.tables import visible
from fsfunc.runtime.scopes import gc_paused


@api_boundary
def metadata(path: str | os.PathLike) -> Stored:
    """The leaves and metadata of the checkpoint at ``path``; reads no tensor.

    Args:
        path: whatever `load` takes.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: it is damaged, of another format version, or holds pickles.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.save(f"{folder}/a", {"w": torch.ones(2)}, metadata={"run": 7})
    ...     stored = ff.metadata(f"{folder}/a")
    >>> stored.metadata, stored.leaves
    ({'run': 7}, {'w': ((2,), torch.float32)})
    """
    if path is None:
        raise FileNotFoundError(
            "there is no checkpoint: the path is None, which ff.latest returns of a "
            "folder that has none. Begin anew then: `found = ff.latest(folder)`, and "
            "`state = ff.load(found, target) if found else ff.init_state(...)`"
        )
    path = Path(path)
    if os.path.lexists(path / MANIFEST):
        return read_manifest(path)
    if path.is_dir():
        files, index = _files_of(path)
        if files:
            return _foreign(path, files, index)
        if any(is_pickle(p) for p in path.iterdir()):
            raise refuse_pickle(path)
        raise CheckpointError(
            f"{path} is no checkpoint: it holds neither {MANIFEST} nor a safetensors "
            f"file{_instead(path)}"
        )
    if path.exists():
        if is_pickle(path):
            raise refuse_pickle(path)
        return _foreign(path.parent, [path])
    raise FileNotFoundError(f"there is no checkpoint at {path}{_instead(path.parent)}")


def _instead(folder: Path) -> str:
    """What a folder has in place of the checkpoint that was looked for, in words."""
    paths = entries(folder)
    if found := [p for p in paths if _is_one(p)]:
        return (
            f". {folder} has {len(found)}, the newest {max(found, key=age).name}: "
            f"ff.load(ff.latest({str(folder)!r}), target)"
        )
    if begun := [p for p in paths if is_unfinished(p)]:
        return (
            f". {folder} has {begun[-1].name} alone, of a save that is not finished "
            "or was cut off: begin anew"
        )
    return ""


def _files_of(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files of a folder, and by tensor the file that its index names.

    Where it has an index, those that it names.
    """
    paths, index_of = sorted(folder.glob("*.safetensors")), None
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _check_stays(index, folder)
        try:
            said = table_of(read_regular(index, LONGEST + 1, follow=True))
            index_of = said.texts("weight_map")
            named = set(index_of.values())
        except Wrong as error:
            raise CheckpointError(f"{index} is damaged: {error}") from error
        for name in sorted(named - {path.name for path in paths}):
            raise CheckpointError(
                f"{name[:99]!r} is missing in {folder}: {index.name} names it"
            )
        paths = [path for path in paths if path.name in named]
        break
    for path in paths:
        _check_stays(path, folder)
    return paths, index_of


def _check_stays(path: Path, folder: Path) -> None:
    if not stays(path, folder):
        raise CheckpointError(
            f"{path} is a link to {os.path.realpath(path)}, out of the folder: put the "
            "file itself there, or load that one"
        )


def _foreign(
    folder: Path, paths: list[Path], index: Mapping[str, str] | None = None
) -> Stored:
    """The tensors of safetensors files, whole or the boxes that DCP wrote.

    Whole ones that the ``index`` does not name for their file are passed over.
    None is proven by checksums but those of files that are sealed.
    """
    headers = {path.name: header_at(path, follow=True) for path in paths}
    part = next((name for name, header in headers.items() if header.is_part), None)
    if part is not None:
        raise CheckpointError(
            f"{folder / part} is a part of a checkpoint of fsfunc: load its folder, "
            f"which has {MANIFEST} too; if that is missing, load an earlier checkpoint"
        )
    said, over = Said(), set[str]()
    for file, header in headers.items():
        said |= header.ours
        for name, (_, box) in list(header.boxes.items()):
            if not (index is None or index.get(name) == file or any(box.offsets)):
                over.add(alias := f"{name} in {file}")  # proven too, and left out
                header.boxes[alias] = header.boxes.pop(name)
    files = {file: header.file for file, header in headers.items()}
    begins = {file: header.nbytes for file, header in headers.items()}
    try:
        with gc_paused():
            tensors = tensors_in(headers.values(), said)
            found = Stored(folder, tensors, files=files, **facts_in(said))
            found = proven(found, begins)
    except Wrong as error:
        raise CheckpointError(
            f"{folder if len(paths) > 1 else paths[0]} is damaged ({error})"
        ) from error
    kept = {name: leaf for name, leaf in found.tensors.items() if name not in over}
    return replace(found, tensors=kept)


@api_boundary
def latest(
    folder: str | os.PathLike, pattern: str = "*", *, proven: bool = False
) -> Path | None:
    """The newest checkpoint in ``folder`` that can be loaded; None if there is none.

    Those that are truncated or damaged are skipped, with a warning, and not deleted.
    Every rank finds the same one.

    Args:
        pattern: a pattern of its name, such as ``"step-*"``.
        proven: read all of it and compare the checksums; without that flipped bits are
            found by `load`.

    Raises:
        CheckpointError: there are some, and none can be loaded.
        ValueError: the folder is a checkpoint itself.

    The newest is the one with the highest last number in its name (``step-00000200``);
    of names without numbers, the last by name.

    Cost: reads one manifest, and the lengths of its files.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         ff.save(f"{folder}/step-{step}", {"w": torch.ones(2)})
    ...     ff.latest(folder).name
    'step-10'
    """
    if _is_one(Path(folder)):
        raise ValueError(
            f"{folder} is a checkpoint itself, and ff.latest looks for those within a "
            f"folder: give ff.load this path, or ff.latest {Path(folder).parent}"
        )
    found = [p for p in entries(Path(folder)) if p.match(pattern) and _is_one(p)]
    faults: list[CheckpointError] = []
    for path in sorted(found, key=age, reverse=True):
        fault = _fault(path, proven)
        if fault is None:
            return path
        faults.append(fault)
        warn(
            f"{visible(str(path))} cannot be loaded, and the one before it is "
            f"taken: {fault}",
            RuntimeWarning,
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
    their last number alone. What cannot be loaded is left alone. So is, with a warning,
    what cannot be deleted: the one that was saved is complete.
    """
    family = [p for p in entries(path.parent) if alike(p.name, path.name)]
    others = [p for p in family if p != path and _is_one(p) and _fault(p) is None]
    for old in sorted(others, key=age)[: len(others) - (keep - 1)]:
        try:
            delete(old)
        except OSError as error:
            warn(
                f"{old} is to make room, and cannot be deleted: {error}",
                RuntimeWarning,
            )


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
