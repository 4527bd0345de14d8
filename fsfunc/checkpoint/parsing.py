"""Parsing and validation of manifests and headers.

Manifests and headers are untrusted data: JSON of bounded size. `Said` reads each value
with its type, and `proven` checks them together. So all boxes of a `Stored` make up
their tensors, and fill the bytes of their files, and no other module checks that.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsfunc.checkpoint.stored import Stored, StoredTensor

LEAVES = 1 << 18  # of a tree
DEEPEST = 200  # names in a path, and levels of metadata
LONGEST = 1 << 28  # bytes of JSON: the checksums of 32 TiB
_ITEMS = 1 << 23  # values in it: a gigabyte of Python's objects at the most
_LETTERS = 1 << 16  # of a path
_DIMS, _MOST = 64, (1 << 63) - 1  # what torch can count


class Wrong(ValueError):
    """A table that is invalid."""


def table_of(text: bytes) -> Said:
    """A table from JSON.

    Raises:
        Wrong: it is no table, or larger or deeper than any that is written.
    """
    if len(text) > LONGEST or sum(map(text.count, (b",", b"[", b"{"))) > _ITEMS:
        raise Wrong(f"{len(text)} bytes are more than any checkpoint says")
    try:
        found = json.loads(text.decode(), object_pairs_hook=_once)
    except RecursionError:
        raise Wrong("it is nested too deeply") from None
    except Wrong:
        raise
    except ValueError as error:
        raise Wrong(f"it is no JSON: {error}") from None
    if type(found) is not dict:
        raise Wrong("it is no table")
    return Said(found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Wrong("a table says something twice")
    return found


class Said(dict[str, Any]):
    """A JSON table, whose values are read by type.

    Every method raises `Wrong` where it is of another.

    >>> said = Said(n=3, shape=[2, 3])
    >>> said.numbers("shape"), said.number("n")
    ((2, 3), 3)
    """

    def only(self, *names: str) -> Said:
        """Itself, where it says just this."""
        if set(names) != self.keys():
            raise Wrong(f"it says {str(sorted(self))[:99]}, and not {sorted(names)}")
        return self

    def number(self, name: str) -> int:
        """A number from 0 on."""
        return number_of(self.get(name), name)

    def numbers(self, name: str) -> tuple[int, ...]:
        return numbers_of(self.get(name), name)

    def text(self, name: str) -> str:
        return _of(self.get(name), str, name)

    def row(self, name: str) -> list[Any]:
        return _of(self.get(name), list, name)

    def table(self, name: str) -> Said:
        return Said(_of(self.get(name), dict, name))

    def tables(self, name: str) -> dict[str, Said]:
        """Tables by name, no more than a tree has leaves."""
        found = self.table(name).few()
        return {key: found.table(key) for key in found}

    def few(self) -> Said:
        """Itself, where it says of no more than a tree has leaves."""
        _check_count(len(self))
        return self

    def texts(self, name: str) -> dict[str, str]:
        """Texts by name."""
        found = self.table(name)
        return {key: found.text(key) for key in found}


def _of(x: Any, kind: type, name: str) -> Any:
    if type(x) is not kind:  # a bool is no int here
        raise Wrong(f"{name[:99]!r} is {say(x)}, and no {kind.__name__}")
    return x


def number_of(x: Any, name: str) -> int:
    """``x``, a number from 0 on."""
    if type(x) is not int or not 0 <= x <= _MOST:
        raise Wrong(f"{name[:99]!r} is {say(x)}, and no number from 0 on")
    return x


def numbers_of(x: Any, name: str) -> tuple[int, ...]:
    """``x``, a list of such numbers."""
    for n in _of(x, list, name):
        if type(n) is not int or not 0 <= n <= _MOST:
            number_of(n, name)  # which raises
    return tuple(x)


def say(x: Any) -> str:
    """A value of JSON, in a few letters however large it is."""
    if isinstance(x, dict | list):
        return f"a {type(x).__name__} of {len(x)}"
    return repr(x)[:99]


def proven(stored: Stored, heads: Mapping[str, int] | None = None) -> Stored:
    """``stored``, all of which makes sense together.

    Args:
        heads: where in each file its tensors begin, where that is known.

    Raises:
        Wrong: the boxes of a tensor do not make it up, or reach out of it; those in a
            file overlap, leave a gap or do not end where it does; the values, the mesh
            or the generators' states are of the wrong kind.
    """
    _check_count(len(stored.tensors) + len(stored.values))
    for path in (*stored.tensors, *stored.values):
        check_path(path)
    if twice := stored.tensors.keys() & stored.values.keys():
        raise Wrong(f"{min(twice)!r} is a tensor and a value")
    for path, value in stored.values.items():
        if type(value) not in (bool, int, float, str):
            raise Wrong(f"the value {path!r} is {say(value)}")
    for axis, size in stored.mesh.items():
        if type(size) is not int or size < 1:
            raise Wrong(f"the mesh's axis {axis!r} is of size {say(size)}")
    check_depth(stored.metadata)
    alike: set[Any] = set()  # many leaves are cut alike
    for path, leaf in stored.tensors.items():
        shape, dtype, chunks, _, own = leaf
        cut = shape, dtype, tuple([chunk[2:] for chunk in chunks])
        if cut not in alike:
            _check_boxes(path, leaf)
            alike.add(cut)
        if own:
            _check_own(path, leaf, stored.mesh)
    _check_bytes(stored, heads)
    return replace(stored, random=_random(stored.random))


def _check_count(many: int) -> None:
    if many > LEAVES:
        raise Wrong(f"it has {many} leaves, and a checkpoint has {LEAVES} at the most")


def check_path(path: str) -> None:
    """Raises where no tree has a leaf at such a path, or no file could name it."""
    if path.count("/") >= DEEPEST or len(path) > _LETTERS:
        raise Wrong(
            f"{path[:99]!r}... lies more than {DEEPEST} levels deep, or is longer than "
            f"{_LETTERS} letters"
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise Wrong(f"the path {path[:99]!r} is no Unicode text") from None


def check_depth(said: Any) -> None:
    """Raises if lists and tables are nested deeper than can be printed."""
    level, depth = [said], 0
    while level:
        inner = [x.values() if isinstance(x, dict) else x for x in level]
        level = [x for some in inner for x in some if isinstance(x, dict | list)]
        depth += 1
        if depth > DEEPEST:
            raise Wrong(f"its metadata is more than {DEEPEST} levels deep")


def _check_boxes(path: str, leaf: StoredTensor) -> None:
    room = math.prod(max(n, 1) for n in leaf.shape) * leaf.dtype.itemsize
    if len(leaf.shape) > _DIMS or room > _MOST:
        raise Wrong(f"{path!r} is of shape {str(list(leaf.shape))[:99]}")
    for chunk in leaf.chunks:
        if not len(leaf.shape) == len(chunk.offsets) == len(chunk.sizes) or any(
            o + n > m
            for o, n, m in zip(chunk.offsets, chunk.sizes, leaf.shape, strict=True)
        ):
            raise Wrong(f"a box of {path!r} {leaf} lies at {str(chunk[2:])[:99]}")
    if not leaf.is_whole:
        raise Wrong(
            f"the boxes of {path!r} {leaf} do not make it up once: a file is missing, "
            "or one too many"
        )


def _check_own(path: str, leaf: StoredTensor, mesh: Mapping[str, int]) -> None:
    """Raises where there are not as many values of their own as ranks along axes."""
    sizes = [(axis, n) for axis, n in mesh.items() if axis in leaf.own]  # in order
    if sizes == [(axis, n) for axis, n in leaf.own.items() if type(n) is int]:
        if leaf.shape[:1] == (math.prod(n for _, n in sizes),):
            return
    raise Wrong(
        f"of {path[:99]!r}, of shape {str(list(leaf.shape))[:99]}, each rank has a row "
        f"over {say(leaf.own)[:99]}, on a mesh of {str(dict(mesh))[:99]}"
    )


def _check_bytes(stored: Stored, heads: Mapping[str, int] | None) -> None:
    """Raises where a file's tensors are not all that follows its header.

    They are where each begins as another one ends: then every byte is in one more of
    those that have begun than of those that have ended.
    """
    begins: dict[str, list[int]] = {name: [] for name in stored.files}
    ends: dict[str, list[int]] = {name: [] for name in stored.files}
    for leaf in stored.tensors.values():
        width = leaf.dtype.itemsize
        for name, begin, _, sizes in leaf.chunks:
            begins[name].append(begin)
            ends[name].append(begin + math.prod(sizes) * width)
    for name, low in begins.items():
        high, nbytes = ends[name], stored.files[name].nbytes
        if heads is None and not low:
            raise Wrong(f"nothing lies in {name}")
        low.sort()
        high.sort()
        at = low[0] if heads is None else heads[name]
        for begin, end in zip(low, [at, *high], strict=False):
            if begin != end:
                found = stored.tensors.items()
                here = [p for p, x in found for c in x.chunks if c[:2] == (name, begin)]
                raise Wrong(
                    f"{here[0]!r} begins at byte {begin} of {name}, and not {end}"
                )
        if (end := high[-1] if high else at) != nbytes:
            raise Wrong(f"what lies in {name} ends at byte {end}, and not {nbytes}")


def _random(said: Mapping[str, Any]) -> dict[str, Any]:
    """The generators' states, base64 by device type, and which each rank had."""
    if not said:
        return {}
    table = Said(said)
    if not said.keys() & {"states", "of"}:  # the first checkpoints had one rank's
        table = Said(states=[dict(said)], of=[0])
    table.only("states", "of")
    states, of = table.row("states"), table.numbers("of")
    if not of or max(of) >= len(states):
        raise Wrong("the ranks' generators are not those that it holds")
    for state in states:
        for kind, text in Said(x=state).texts("x").items():
            try:
                base64.b64decode(text, validate=True)
            except ValueError:
                raise Wrong(f"the state of the {kind} generator is no base64") from None
    return dict(table)
