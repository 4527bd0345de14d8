"""Tables of the contents of a checkpoint."""

from __future__ import annotations

import os
from typing import Any

from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.stored import Stored
from fsfunc.printing.amounts import of_axes, of_bytes
from fsfunc.printing.tables import Report, Table

__all__ = ["checkpoint"]

_LONGEST = 2000  # letters of a value


def checkpoint(found: Stored | str | os.PathLike, *, at: str = "") -> Report:
    """The tensors, values and files of a checkpoint, to print.

    Args:
        found: what ``metadata(path)`` returned, or a path.
        at: the path of the subtree to show.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.save(f"{folder}/a", {"w": torch.ones(2, 3), "step": 7})
    ...     print(ff.show.checkpoint(f"{folder}/a").tables["values"].rows)
    [('step', '7')]
    """
    stored = (found if isinstance(found, Stored) else metadata(found)).below(at)
    mesh = of_axes(stored.mesh)
    by = "fsfunc" if stored.version is not None else "safetensors, of no manifest"
    head = (
        f"{stored.path}: {of_bytes(stored.nbytes)} in {len(stored.tensors)} tensors "
        f"and {len(stored.files)} files, by {by}" + (f" on {mesh}" if mesh else "")
    )
    tensors = [
        (path, str(leaf), of_bytes(leaf.nbytes), str(len(leaf.chunks)))
        for path, leaf in stored.tensors.items()
    ]
    values = [(path, _short(value)) for path, value in stored.values.items()]
    said = [(key, _short(value)) for key, value in stored.metadata.items()]
    parts: list[Table | str] = [head]
    if tensors:
        columns = ("<path", "<tensor", ">bytes", ">boxes")
        parts.append(Table("tensors", columns, tensors))
    if values:
        parts.append(Table("values", ("<path", "<value"), values))
    if said:
        parts.append(Table("metadata", ("<key", "<value"), said))
    return Report(tuple(parts))


def _short(value: Any) -> str:
    """A value as Python writes it; of a long text the beginning."""
    text = repr(value)
    more = len(text) - _LONGEST
    return text if more <= 0 else f"{text[:_LONGEST]}... and {more} letters more"
