"""``export``: a folder of whole tensors, as Hugging Face's libraries read it.

A checkpoint (`saving`) has the parts that ranks hold, and all that a run goes on from.
This is for others: whole tensors under names of theirs, in files of at most some bytes,
with an index. `plan_files` says from names, shapes and dtypes what lies where. One rank
writes, by `safetensors.write_file`, as `state.leaf_by_leaf`, or a checkpoint, hands it
one tensor after another; the folder appears as a checkpoint does (`folders`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from fsfunc.checkpoint import folders
from fsfunc.checkpoint.contents import check_name
from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.headers import (
    SAFE_DTYPES,
    Entry,
    check_files,
    dtype_name,
    make_header,
)
from fsfunc.checkpoint.safetensors import read_whole, to_plain, write_file
from fsfunc.checkpoint.stored import Stored
from fsfunc.comm.attribution import label
from fsfunc.comm.comparison import run_everywhere
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.state.leaf_by_leaf import (
    NamedLeaf,
    Rename,
    check_floating,
    collect_leaves,
    name_leaves,
    rank_local_error,
    ranks_in_sight,
    stream,
)
from fsfunc.tree.types import PyTree


@api_boundary
def export(
    folder: str | os.PathLike[str],
    t: PyTree,
    *,
    at: str = "",
    beside: Sequence[Callable[[str], object]] = (),
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_bytes: int = 5 * 10**9,
) -> None:
    """Exports ``t`` as a folder of safetensors files that `transformers` loads.

    ``AutoModel.from_pretrained(folder)`` and inference engines read it, and so does
    `load`. The folder has each tensor whole, under its name, and appears whole or not
    at all. Every rank calls it, between two steps; training may go on when it returns.
    To have it go on meanwhile, `save_async` a checkpoint, and let a process without a
    mesh export that.

        apply, params, frozen = ff.from_module(model, units=...)
        ...
        ff.export("model-7", {**state.params, **state.extra}, dtype=torch.bfloat16,
                  beside=[model.config.save_pretrained])

    Args:
        folder: where; nothing may be there.
        t: any tree, or the path of a checkpoint; names are paths. The params of
            ``ff.from_module`` have the names of the module's own state dict, tied ones
            once, which `transformers` loads. Of a few models (those whose experts it
            stacks) it writes other names itself; who reads only these wants
            ``to_module(...).save_pretrained``. Leaves that are no tensors are left out.
        at: of a checkpoint, the path of a subtree, below which names begin.
        beside: functions of a folder that write further files, such as the
            ``save_pretrained`` of a configuration and of a tokenizer. They run on rank
            0, first.
        rename: returns a tensor's name, of its path; None leaves it out, as the
            buffers that a module does not save.
        dtype: what floating tensors are cast to, before they are sent.
        max_bytes: of the tensors in one file; a larger tensor has a file of its own.

    Raises (on every rank, with nothing left behind):
        FileExistsError: ``folder`` exists.
        TypeError: a dtype that the files cannot hold.
        ValueError, RanksDiffer, RuntimeError: as `whole_leaves` raises them.
        CheckpointError: the checkpoint is damaged.
        OSError: the disk is full, or the like; and what ``beside`` raises.

    Cost: that of `whole_leaves` with ``only=0``, on whose host each tensor is written,
    and summed, once; or each byte of a checkpoint, read once. Memory for one tensor.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.export(f"{folder}/a", {"w": torch.ones(2), "b": torch.zeros(1)})
    ...     ff.load(f"{folder}/a", {"w": torch.zeros(2)}, only="w")
    {'w': tensor([1., 1.])}
    """
    destination = Path(os.path.abspath(os.fspath(folder)))
    if isinstance(t, str | os.PathLike):
        stored = metadata(t).below(at)
        _export_checkpoint(destination, stored, beside, rename, dtype, max_bytes)
        return
    if at:
        raise ValueError(f"at={at!r} is of a checkpoint; of a tree give the subtree")
    group = ranks_in_sight("export")
    is_writer = group is None or group.rank == 0

    def check_alone() -> tuple[dict[str, NamedLeaf], list[_File]]:
        named = collect_leaves(t, "export", rename, dtype)
        # The header of a file has names and sizes alone: its tensors are made as they
        # are written, in their order there.
        read = lambda: to_plain(next(tensors)[1])  # noqa: E731
        entries = [Entry(x.name, x.dtype, x.shape, read) for x in named.values()]
        if is_writer:
            folders.check_absent(destination)
        return named, plan_files(entries, max_bytes)

    with _drafts(is_writer) as drafts:
        with label("", "export"):
            named, files = run_everywhere(check_alone, group)
            run_everywhere(lambda: _write_drafts(beside, drafts, files), group)
        leaves = [named[entry.name] for file in files for entry in file.entries]
        tensors = stream(leaves, group, to="cpu", only=0)

        def write_or_send() -> None:
            with closing(tensors):
                if is_writer:
                    _write_folder(destination, files, drafts)
                for _ in tensors:  # on the other ranks, which have none: it sends
                    pass

        with label("", "export"):
            run_everywhere(write_or_send, group)


def _export_checkpoint(
    destination: Path,
    stored: Stored,
    beside: Sequence[Callable[[str], object]],
    rename: Rename | None,
    dtype: torch.dtype | None,
    max_bytes: int,
) -> None:
    """Exports the tensors of a checkpoint, by this process alone."""
    # Before memory is allocated for what a table says, which may be forged.
    check_files(stored, stored.files, stored.tensors.values())
    folders.check_absent(destination)
    check_floating("export", dtype)
    names = name_leaves(stored.tensors, "export", rename)
    entries: list[Entry] = []
    for name, path in names.items():
        x = stored.tensors[path]
        if x.stacked_axes:
            raise rank_local_error("export", path, str(x))
        cast = dtype if dtype and x.dtype.is_floating_point else x.dtype
        read = lambda cast=cast: to_plain(next(tensors).to(cast))  # noqa: E731
        entries.append(Entry(name, cast, x.shape, read))
    files = plan_files(entries, max_bytes)
    ordered = [names[entry.name] for file in files for entry in file.entries]
    tensors = read_whole(stored, [stored.tensors[path] for path in ordered])
    with _drafts(True) as drafts:
        _write_drafts(beside, drafts, files)
        _write_folder(destination, files, drafts)


class _File(NamedTuple):
    """A file of an export: its name, and its tensors as they lie in it."""

    name: str
    entries: list[Entry]


def plan_files(entries: Sequence[Entry], max_bytes: int) -> list[_File]:
    """Fills one file after another with tensors, in order, and names all.

    Raises:
        ValueError: files of no byte; a name that files cannot hold.
        TypeError: a dtype that they cannot.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes!r}: a file has at least one byte")
    groups: list[list[Entry]] = [[]]
    nbytes = 0
    for x in entries:
        check_name(x.name)
        if x.dtype not in SAFE_DTYPES:
            raise TypeError(
                f"cannot export {x.name!r}, of dtype {dtype_name(x.dtype)}: "
                "safetensors has none such; leave it out by rename="
            )
        if groups[-1] and nbytes + x.nbytes > max_bytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(x)
        nbytes += x.nbytes
    # Safetensors aligns nothing. With the widest elements first all are aligned.
    ordered = [sorted(group, key=lambda x: -x.dtype.itemsize) for group in groups]
    if len(ordered) == 1:
        return [_File("model.safetensors", ordered[0])]
    return [
        _File(f"model-{i:05}-of-{len(ordered):05}.safetensors", group)
        for i, group in enumerate(ordered, 1)
    ]


def _drafts(is_writer: bool) -> AbstractContextManager[str]:
    """Inside, the writer has a folder where nobody looks, for small files.

    A function that fails to write them is told before anything is sent, and what it
    has written is no part of an export.
    """
    return TemporaryDirectory() if is_writer else nullcontext("")


def _write_drafts(
    beside: Sequence[Callable[[str], object]], drafts: str, files: Sequence[_File]
) -> None:
    """Writes what lies beside the tensors, on the rank that has a folder for it."""
    if not drafts:
        return
    for write in beside:
        write(drafts)
    for name in (_INDEX, *(file.name for file in files)):
        if os.path.lexists(os.path.join(drafts, name)):
            raise ValueError(
                f"export: a function of beside= writes {name!r}, as export itself "
                "does; give the save_pretrained of a configuration or a tokenizer, not "
                "that of the model"
            )


_INDEX = "model.safetensors.index.json"


def _write_folder(destination: Path, files: Sequence[_File], drafts: str) -> None:
    """Writes all files into a folder, and gives it its name when it is complete."""
    part = folders.begin_saving(destination, folders.unique_name())
    try:
        part.mkdir()
        for file in files:
            header = make_header(file.entries, {})
            write_file(part / file.name, header, file.entries)
        if len(files) > 1:
            (part / _INDEX).write_text(_index_of(files))
        shutil.copytree(drafts, part, dirs_exist_ok=True)
        for path in part.rglob("*"):
            if path.suffix != ".safetensors":
                folders.sync(path)
        folders.publish(part, destination)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # made here: all in it is of this call
        folders.discard(part)
        raise


def _index_of(files: Sequence[_File]) -> str:
    """Returns the index of several files: by tensor the name of its file."""
    total = sum(x.nbytes for file in files for x in file.entries)
    weight_map = {x.name: file.name for file in files for x in file.entries}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
