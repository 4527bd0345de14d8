"""What of a tree is saved, and which of the ranks that hold a part writes it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.mesh import Here, NoMesh, here
from fsfunc.layout import Coordinates, Layout
from fsfunc.sharded import Sharded, is_sharded
from fsfunc.slices import Box, boxes

__all__ = [
    "Held",
    "Holdings",
    "check_mesh",
    "check_real",
    "coordinates_here",
    "holdings",
    "mesh_here",
    "parts_of",
]

VALUES = (bool, int, float, str)


class Held(NamedTuple):
    """A tensor leaf of a tree on this rank: its layout, whole or not, and its part."""

    path: str
    layout: Layout
    part: Tensor

    def boxes(self, coordinates: Coordinates) -> list[tuple[Box, Tensor]]:
        """The part as boxes of the whole, each with its elements (views of the part).

        A leaf without elements is one empty box, so that it is stored at all.
        """
        if not self.layout.numel:
            none = tuple(0 for _ in self.layout.shape)
            return [
                (Box(none, self.layout.shape, 0), self.part.view(self.layout.shape))
            ]
        found = boxes(self.layout, coordinates)
        if self.layout.flat is None:  # one box: the part itself, contiguous or not
            return [(box, self.part) for box in found]
        return [
            (box, self.part[box.start : box.start + box.numel].view(box.sizes))
            for box in found
        ]


@dataclass
class Holdings:
    """The tensors and the other values of a tree, by path."""

    tensors: dict[str, Held] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Equal for trees of the same paths, shapes and dtypes."""
        lines = [
            str(Layout(h.layout.shape, h.part.dtype, (), p))
            for p, h in self.tensors.items()
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def mesh_here() -> Here | None:
    """Who is asking, if there is a mesh in sight."""
    try:
        return here()
    except NoMesh:
        return None


def coordinates_here(at: Here | None) -> dict[str, int]:
    """This rank's coordinates; none without a mesh."""
    return {} if at is None else at.mesh.coordinates(at.rank)


def holdings(state: Any) -> Holdings:
    """What of ``state`` is saved.

    Raises:
        TypeError: a leaf that is neither a tensor nor a number, string or bool.
        ValueError: two leaves of one path; a tensor that is fake or on "meta".
        RuntimeError: a leaf that was donated.
    """
    found = Holdings()
    paths, leaves, _ = tree.flatten_with_paths(state, is_leaf=is_sharded)
    for path, leaf in zip(paths, leaves, strict=True):
        if path in found.tensors or path in found.values:
            raise ValueError(
                f"two leaves of the state have the path {path!r}: a key of a dict that "
                "holds '/' looks like a path; rename it"
            )
        _check_path(path)
        if isinstance(leaf, Sharded):
            layout, part = leaf.layout, leaf.local
        elif isinstance(leaf, Tensor):
            layout, part = Layout(leaf.shape, leaf.dtype, (), path), leaf
        elif isinstance(leaf, VALUES) and type(leaf) in VALUES:
            found.values[path] = leaf
            continue
        else:
            raise TypeError(
                f"cannot save {path!r}, a {type(leaf).__name__}: a checkpoint holds "
                "tensors, numbers, strings and bools; turn it into one, or leave it "
                "out of the state"
            )
        part = part.detach()
        check_real(path, part, "save")
        found.tensors[path] = Held(path, layout, part)
    return found


def _check_path(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the path {path!r} is no Unicode text, and a file could not hold it: "
            "rename the key"
        ) from None
    if path == "__metadata__":
        raise ValueError("a leaf called '__metadata__' cannot be saved: rename it")


def check_real(path: str, part: Tensor, verb: str) -> None:
    """Raises where a tensor has no values."""
    if isinstance(part, _torch.FakeTensor) or part.device.type == "meta":
        kind = "on the meta device" if part.device.type == "meta" else "fake"
        raise ValueError(
            f"cannot {verb} {path!r}: it is {kind} and has no values; give a state "
            "made by init_state on a simulated mesh or on processes"
        )
    if part.layout != torch.strided or part.is_quantized or _torch.is_wrapped(part):
        raise ValueError(
            f"cannot {verb} {path!r}, a tensor of layout {part.layout}, quantized or "
            "under a torch.func transform: give a plain, dense one"
        )


def check_mesh(layout: Layout, at: Here | None, verb: str) -> None:
    """Raises where a leaf lies over axes that the mesh in sight does not have."""
    axes = {} if at is None else at.mesh.axes
    for axis, size in layout.sizes.items():
        if axes.get(axis) != size:
            raise ValueError(
                f"cannot {verb} {layout}: it lies over {axis!r} of size {size}, and "
                f"the mesh in sight has {dict(axes)}; {verb} it inside spmd(fn, mesh) "
                "on its own mesh"
            )


def parts_of(found: Holdings, at: Here | None) -> list[tuple[Held, Box, Tensor]]:
    """The boxes that this rank writes.

    Ranks whose coordinates agree on a leaf's axes hold the same part. Whole leaves go
    to them in turn, each to the one that has the fewest bytes so far: every rank comes
    to the same answer by the layouts alone.
    """
    coordinates = coordinates_here(at)
    written: list[tuple[Held, Box, Tensor]] = []
    load: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for held in sorted(found.tensors.values(), key=lambda h: -h.layout.nbytes):
        mine, count = _replica(held.layout, at)
        loads = load.setdefault(held.layout.axes, [0] * count)
        writer = loads.index(min(loads))
        loads[writer] += held.layout.nbytes
        if held.layout.numel == 0:
            mine = 0 if at is None else at.rank
        if writer == mine:
            written += [(held, box, x) for box, x in held.boxes(coordinates)]
    return written


def _replica(layout: Layout, at: Here | None) -> tuple[int, int]:
    """(which, of how many) this rank is among those that hold the same part."""
    if at is None:
        return 0, 1
    coordinates, index, count = at.mesh.coordinates(at.rank), 0, 1
    for axis, size in at.mesh.axes.items():
        if axis not in layout.axes:
            index, count = index * size + coordinates[axis], count * size
    return index, count
