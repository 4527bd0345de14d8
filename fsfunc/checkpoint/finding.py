"""metadata and latest: what a checkpoint holds, and the newest one in a folder.

A checkpoint is a folder with a manifest, which `metadata` reads. It also takes what
others wrote, one safetensors file or a folder of them (Hugging Face's with an index,
torch.distributed.checkpoint's): their table is derived from the headers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fsfunc.checkpoint.folders import (
    MANIFEST,
    delete,
    is_pickle,
    is_same_series,
    is_unfinished,
    is_within,
    list_folder,
    pickle_error,
    read_regular,
    series_order,
)
from fsfunc.checkpoint.headers import (
    check_files,
    facts_from,
    read_header,
    read_manifest,
    tensors_from,
)
from fsfunc.checkpoint.parsing import (
    MAX_JSON_BYTES,
    InvalidTable,
    JsonTable,
    parse_table,
)
from fsfunc.checkpoint.reading import prove
from fsfunc.checkpoint.stored import CheckpointError, Stored, validate
from fsfunc.comm.attribution import warn
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.printing.tables import visible
from fsfunc.runtime.scopes import gc_paused


@api_boundary
def metadata(path: str | os.PathLike[str]) -> Stored:
    """Reads the leaves and metadata of the checkpoint at ``path``, and no tensor.

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
        files, index = _find_files(path)
        if files:
            return _read_foreign(path, files, index)
        if any(is_pickle(p) for p in path.iterdir()):
            raise pickle_error(path)
        raise CheckpointError(
            f"{path} is no checkpoint: it holds neither {MANIFEST} nor a safetensors "
            f"file{_describe_alternative(path)}"
        )
    if path.exists():
        if is_pickle(path):
            raise pickle_error(path)
        return _read_foreign(path.parent, [path])
    raise FileNotFoundError(
        f"there is no checkpoint at {path}{_describe_alternative(path.parent)}"
    )


def _describe_alternative(folder: Path) -> str:
    """Describes what a folder has in place of the checkpoint that was looked for."""
    paths = list_folder(folder)
    if checkpoints := [p for p in paths if _is_checkpoint(p)]:
        newest = max(checkpoints, key=series_order).name
        return (
            f". {folder} has {len(checkpoints)}, the newest {newest}: "
            f"ff.load(ff.latest({str(folder)!r}), target)"
        )
    if unfinished := [p for p in paths if is_unfinished(p)]:
        return (
            f". {folder} has {unfinished[-1].name} alone, of a save that is not "
            "finished or was cut off: begin anew"
        )
    return ""


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Returns a folder's safetensors files, and its index: by tensor a file's name.

    If there is an index, these are the files that it names.
    """
    paths, file_of = sorted(folder.glob("*.safetensors")), None
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _check_within(index, folder)
        try:
            table = parse_table(read_regular(index, MAX_JSON_BYTES + 1, follow=True))
            file_of = table.texts("weight_map")
            named = set(file_of.values())
        except InvalidTable as error:
            raise CheckpointError(f"{index} is damaged: {error}") from error
        for name in sorted(named - {path.name for path in paths}):
            raise CheckpointError(
                f"{name[:99]!r} is missing in {folder}: {index.name} names it"
            )
        paths = [path for path in paths if path.name in named]
        break  # the first index
    for path in paths:
        _check_within(path, folder)
    return paths, file_of


def _check_within(path: Path, folder: Path) -> None:
    """Raises if a link leads out of the folder: to any file that the user can read."""
    if not is_within(path, folder):
        raise CheckpointError(
            f"{path} is a link to {os.path.realpath(path)}, out of the folder: put the "
            "file itself there, or load that one"
        )


def _read_foreign(
    folder: Path, paths: list[Path], index: Mapping[str, str] | None = None
) -> Stored:
    """Reads the table of safetensors files, of whole tensors or of DCP's boxes.

    Only sealed files have checksums.

    Args:
        index: by tensor the file to read it from. Whole tensors in other files are
            left out.
    """
    headers = {path.name: read_header(path, follow=True) for path in paths}
    part = next((name for name, header in headers.items() if header.is_part), None)
    if part is not None:
        raise CheckpointError(
            f"{folder / part} is a part of a checkpoint of fsfunc: load its folder, "
            f"which has {MANIFEST} too; if that is missing, load an earlier checkpoint"
        )
    facts, left_out = JsonTable(), set[str]()
    for file, header in headers.items():
        facts |= header.sealed
        for name, (_, box) in list(header.boxes.items()):
            # One tensor may be in two files, and the index says which counts. The other
            # gets a name of its own: it must be checked too, or the file would seem to
            # have a gap there.
            if not (index is None or index.get(name) == file or any(box.offsets)):
                left_out.add(alias := f"{name} in {file}")
                header.boxes[alias] = header.boxes.pop(name)
    files = {file: header.file for file, header in headers.items()}
    data_begins = {file: header.nbytes for file, header in headers.items()}
    try:
        with gc_paused():
            tensors = tensors_from(headers.values(), facts)
            stored = Stored(folder, tensors, files=files, **facts_from(facts))
            stored = validate(stored, data_begins)
    except InvalidTable as error:
        raise CheckpointError(
            f"{folder if len(paths) > 1 else paths[0]} is damaged ({error})"
        ) from error
    leaves = {name: x for name, x in stored.tensors.items() if name not in left_out}
    return replace(stored, tensors=leaves)


@api_boundary
def latest(
    folder: str | os.PathLike[str], pattern: str = "*", *, proven: bool = False
) -> Path | None:
    """Returns the newest checkpoint in ``folder`` that can be loaded, or None.

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
    if _is_checkpoint(Path(folder)):
        raise ValueError(
            f"{folder} is a checkpoint itself, and ff.latest looks for those within a "
            f"folder: give ff.load this path, or ff.latest {Path(folder).parent}"
        )
    checkpoints = [
        p for p in list_folder(Path(folder)) if p.match(pattern) and _is_checkpoint(p)
    ]
    faults: list[CheckpointError] = []
    for path in sorted(checkpoints, key=series_order, reverse=True):
        fault = _find_fault(path, proven)
        if fault is None:
            return path
        faults.append(fault)
        warn(
            f"{visible(str(path))} cannot be loaded, and the one before it is "
            f"taken: {fault}",
            RuntimeWarning,
        )
    # None would mean "begin anew" to the caller, who would lose the run.
    if faults:
        raise CheckpointError(
            f"none of the {len(faults)} checkpoints in {folder} can be loaded; of the "
            f"newest: {faults[0]}"
        )
    return None


def delete_older(path: Path, keep: int) -> None:
    """Deletes the checkpoints of a series but ``path`` and the newest others.

    ``keep`` stay in all, of those that can be loaded. What cannot be loaded is neither
    counted nor deleted.
    """
    series = [p for p in list_folder(path.parent) if is_same_series(p.name, path.name)]
    others = [
        p for p in series if p != path and _is_checkpoint(p) and _find_fault(p) is None
    ]
    for old in sorted(others, key=series_order)[: len(others) - (keep - 1)]:
        try:
            delete(old)
        except OSError as error:  # a warning: the one that was saved is complete
            warn(
                f"{old} is to make room, and cannot be deleted: {error}",
                RuntimeWarning,
            )


def _is_checkpoint(path: Path) -> bool:
    return not is_unfinished(path) and os.path.lexists(path / MANIFEST)


def _find_fault(path: Path, proven: bool = False) -> CheckpointError | None:
    """Returns the error that a load would raise, as far as the files' lengths show.

    Args:
        proven: whether to read the files too, and compare checksums.
    """
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
