"""One file of whole tensors out of a checkpoint."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fsfunc.checkpoint.agreement import way_out
from fsfunc.checkpoint.blocks import check_files
from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.folders import begin_file, check_absent, sync
from fsfunc.checkpoint.headers import (
    Entry,
    check_headers,
    header_of,
    seal,
    with_sums,
)
from fsfunc.checkpoint.reading import Request, read, requests
from fsfunc.checkpoint.safetensors import write_file
from fsfunc.checkpoint.stored import BLOCK, Stored, StoredTensor
from fsfunc.sharded.slices import Box


def consolidate(
    path: str | os.PathLike, file: str | os.PathLike, *, at: str = ""
) -> Path:
    """One safetensors file with every tensor of a checkpoint whole; returns its path.

    ``safetensors.torch.load_file`` reads it, under the tensors' paths; so does `load`,
    which finds the other values in its header, and checksums: of every mebibyte and of
    the header itself. It needs no mesh and no process group: one process calls it.

    Args:
        path: the checkpoint.
        file: where the file will be; it appears whole or not at all.
        at: the path of a subtree: with ``at="params"`` the names begin below it.

    Raises:
        FileExistsError: ``file`` exists.
        CheckpointError: the checkpoint is damaged.

    Cost: reads and writes every byte once; memory for one leaf.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.save(f"{folder}/a", {"params": {"w": torch.ones(2)}, "step": 3})
    ...     _ = ff.consolidate(f"{folder}/a", f"{folder}/a.safetensors")
    ...     ff.load(f"{folder}/a.safetensors", {"w": torch.zeros(2)}, at="params")
    {'w': tensor([1., 1.])}
    """
    with way_out():
        return _joined(metadata(path).below(at), Path(file))


def _joined(stored: Stored, file: Path) -> Path:
    check_files(stored, stored.files)  # before there is room for what they say
    check_absent(file)
    check_headers(stored, stored.tensors.values(), stored.files)
    leaves = sorted(stored.tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    whole = _whole(stored, [leaf for _, leaf in leaves])
    entries = [Entry(p, x.dtype, x.shape, lambda: next(whole)) for p, x in leaves]
    ours = {
        "values": stored.values, "metadata": stored.metadata,
        "random": stored.random, "mesh": stored.mesh,
    }  # fmt: skip
    if own := {name: x.own for name, x in stored.tensors.items() if x.own}:
        ours["own"] = own
    nbytes = sum(e.nbytes for e in entries)
    head, _ = header_of(entries, seal(ours, nbytes))
    part = begin_file(file)
    try:
        write_file(part, head, entries, lambda sums: with_sums(head, sums))
        check_absent(file)  # it took a while
        os.rename(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(file.parent)
    return file


def _whole(stored: Stored, leaves: Sequence[StoredTensor]) -> Iterator[Tensor]:
    """The leaves one after another; small ones are read together."""
    for some in _batches(leaves):
        made = deque(torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in some)
        wanted: list[Request] = []
        for leaf, x in zip(some, made, strict=True):
            everything = Box(tuple(0 for _ in leaf.shape), leaf.shape, 0)
            wanted += requests(leaf, everything, x)
        read(stored, wanted)
        del wanted, x
        while made:
            yield made.popleft()


def _batches(leaves: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    some: list[StoredTensor] = []
    nbytes = 0
    for leaf in leaves:
        if some and nbytes + leaf.nbytes > BLOCK:
            yield some
            some, nbytes = [], 0
        some.append(leaf)
        nbytes += leaf.nbytes
    if some:
        yield some
