"""Finding out what lies at a path: our own checkpoint, or somebody's safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from fsfunc.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Chunk,
    Stored,
    StoredFile,
    StoredTensor,
    read_manifest,
)
from fsfunc.checkpoint.safetensors import (
    PART_OF,
    SAFE_DTYPES,
    head_at,
    sums_of,
    unsealed,
)

__all__ = ["metadata"]

_DTYPES = {name: dtype for dtype, name in SAFE_DTYPES.items()}
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".distcp", ".metadata")
_KEYS = {"dtype", "shape", "data_offsets"}


def metadata(path: str | os.PathLike) -> Stored:
    """What lies in the checkpoint at ``path``; needs no mesh, and reads no tensor.

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
    path = Path(path)
    if (path / MANIFEST).is_file():
        return read_manifest(path)
    if path.is_dir():
        if files := _files_of(path):
            return _foreign(path, files)
        if any(_is_pickle(p) for p in path.iterdir()):
            raise _refusal(path)
        raise CheckpointError(
            f"{path} is no checkpoint: it holds neither {MANIFEST} nor a safetensors "
            "file"
        )
    if path.is_file():
        if _is_pickle(path):
            raise _refusal(path)
        return _foreign(path.parent, [path])
    raise FileNotFoundError(f"there is no checkpoint at {path}")


def _files_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, if it has one."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            names = {
                str(n) for n in json.loads(index.read_bytes())["weight_map"].values()
            }
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged: {error}") from error
        for name in sorted(names):
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder / name} is missing: {index} names it")
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def _is_pickle(path: Path) -> bool:
    if path.name.endswith(_PICKLES):
        return True
    if not path.is_file():
        return False
    with open(path, "rb") as file:  # of torch.save: a zip file; before it, a pickle
        head = file.read(8)
    return head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04"))


def _refusal(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds pickles, which can run any code and are never loaded: turn it "
        "into safetensors with the library that wrote it (torch.load with "
        "weights_only=True, then safetensors.torch.save_file)"
    )


def _foreign(folder: Path, paths: list[Path]) -> Stored:
    """The tensors of safetensors files, whole or the boxes that DCP wrote."""
    found: dict[str, list[tuple[torch.dtype, Chunk]]] = {}
    files: dict[str, StoredFile] = {}
    ours: dict[str, Any] = {}
    for path in paths:
        head, text = _head(path)
        start, nbytes = len(text), path.stat().st_size
        extra = head.pop("__metadata__", {})
        sums = sums_of(text, extra, nbytes - start, path)
        files[path.name] = StoredFile(nbytes, sums, start if sums is not None else 0)
        if PART_OF in extra:
            raise CheckpointError(
                f"{path} is a part of a checkpoint of fsfunc: load its folder, where "
                f"{MANIFEST} lies too; where that is missing, go back to an earlier one"
            )
        ours |= unsealed(extra, path)
        info = json.loads(extra.get("DCP_SHARDING_INFO", "{}"))
        for name, said in head.items():
            if not isinstance(said, dict) or not _KEYS <= said.keys():
                raise CheckpointError(
                    f"{path} is damaged, or no safetensors file: of {name!r} it says "
                    f"{str(said):.99}"
                )
            sizes = tuple(said["shape"])
            begin, end = said["data_offsets"]
            offsets = info.get(name, {}).get("saved_offsets", [0] * len(sizes))
            chunk = Chunk(path.name, start + begin, tuple(offsets), sizes)
            dtype = _DTYPES.get(said["dtype"])
            length = torch.Size(sizes).numel() * (dtype.itemsize if dtype else 0)
            if (
                dtype is None
                or length != end - begin
                or start + end > files[path.name][0]
            ):
                raise CheckpointError(
                    f"{path} is damaged or of a kind that is not known: it says of "
                    f"{name!r} {said}, and has {files[path.name].nbytes} bytes"
                )
            found.setdefault(name, []).append((dtype, chunk))
    tensors = {name: _joined(boxes) for name, boxes in sorted(found.items())}
    kept = {k: ours.get(k, {}) for k in ("values", "metadata", "random", "mesh")}
    return Stored(folder, tensors, files=files, version=None, **kept)


def _joined(boxes: list[tuple[torch.dtype, Chunk]]) -> StoredTensor:
    """The leaf of which these are the boxes; it reaches as far as they do."""
    chunks = tuple(chunk for _, chunk in boxes)
    ends = [[o + n for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    return StoredTensor(shape, boxes[0][0], chunks)


def _head(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        return head_at(path)
    except ValueError as error:
        if _is_pickle(path):
            raise _refusal(path) from error
        raise CheckpointError(
            f"{path} is damaged, or no safetensors file: it has {error}"
        ) from error
