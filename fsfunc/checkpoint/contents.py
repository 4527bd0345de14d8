"""The contents of a checkpoint: leaves, generator states, and their writers.

The states of the default random generators are saved as text, those of every rank.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.checkpoint.parsing import Wrong
from fsfunc.checkpoint.stored import CheckpointError, check_path
from fsfunc.comm.mesh import Here, maybe_here
from fsfunc.runtime.generators import generator_states
from fsfunc.sharded.layout import Coordinates, Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packed_layouts import stacked
from fsfunc.sharded.placements import describe_tensor
from fsfunc.sharded.slices import Box, boxes
from fsfunc.state.layout_rules import check_distinct

VALUES = (bool, int, float, str)


class Held(NamedTuple):
    """A tensor leaf of a tree on this rank: its layout, whole or not, and its part.

    ``own``: sizes of the axes along which each rank has a value of its own, of which
    this is the stack.
    """

    path: str
    layout: Layout
    part: Tensor
    own: Mapping[str, int] = MappingProxyType({})

    @staticmethod
    def of(path: str, leaf: Sharded | Tensor) -> Held:
        """A leaf with its layout."""
        if isinstance(leaf, Sharded):
            return Held(path, leaf.layout, leaf.local)
        return Held(path, Layout(leaf.shape, leaf.dtype, (), path), leaf)

    def stacked(self, own: Mapping[str, int], coordinates: Coordinates) -> Held:
        """The stack of what ranks along axes have, each its own; memory is shared."""
        layout, part = stacked(self.layout, own), self.part
        if layout.local_shape(coordinates) == (1, *part.shape):
            part = part[None]
        return Held(self.path, layout, part, own)

    def boxes(self, coordinates: Coordinates) -> list[tuple[Box, Tensor]]:
        """The part as boxes of the whole, each with its elements (views of the part).

        A leaf without elements is one empty box, so that it is stored at all.
        """
        if not self.layout.numel:
            none = tuple(0 for _ in self.layout.shape)
            return [
                (Box(none, self.layout.shape, 0), self.part.view(self.layout.shape))
            ]
        self.layout.check_part(self.part.shape, coordinates)
        found = boxes(self.layout, coordinates)
        if self.layout.flat is None:  # one box: the part itself, contiguous or not
            return [(box, self.part) for box in found]
        return [
            (box, self.part[box.start : box.start + box.numel].view(box.sizes))
            for box in found
        ]


@dataclass
class Contents:
    """The tensors and the other values of a tree, by path; the generators' states."""

    tensors: dict[str, Held] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    random: dict[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """A description of the tree, leaf by leaf, equal on every rank."""
        lines = []
        for path, held in self.tensors.items():
            axes = ", ".join(held.layout.axes)
            over = f" over {axes}" if axes else ""
            kind = describe_tensor(held.layout.shape, held.part.dtype)
            lines.append((repr(path), kind + over))
        return lines + [(repr(p), json.dumps(x)) for p, x in self.values.items()]


def mesh_here(verb: str) -> Here | None:
    """The rank and mesh in sight, if there is one.

    Raises:
        RuntimeError: there is one, and it holds no values.
    """
    at = maybe_here()
    if at is not None and at.mesh.backend in ("abstract", "vmap"):
        raise RuntimeError(
            f"cannot {verb} on {at.mesh}, which holds no values of its own: {verb} on "
            "a simulated mesh or on processes"
        )
    return at


def coordinates_here(at: Here | None) -> dict[str, int]:
    """This rank's coordinates; none without a mesh."""
    return {} if at is None else at.mesh.coordinates(at.rank)


def contents_of(state: Any) -> Contents:
    """The contents of ``state`` that are saved.

    Raises:
        TypeError: a leaf that is neither a tensor nor a number, string or bool.
        ValueError: two leaves of one path; a tensor that is fake or on "meta".
        RuntimeError: a leaf that was donated.
    """
    found = Contents(random=_random_state())
    paths, leaves, _ = tree.flatten_with_paths(state, is_leaf=is_sharded)
    check_distinct(paths, "the state")
    for path, leaf in zip(paths, leaves, strict=True):
        _check_path(path)
        if isinstance(leaf, Sharded | Tensor):
            held = Held.of(path, leaf)
            found.tensors[path] = held._replace(part=held.part.detach())
            check_real(path, found.tensors[path].part, "save")
        elif isinstance(leaf, VALUES) and type(leaf) in VALUES:
            found.values[path] = leaf
        else:
            raise TypeError(
                f"cannot save {path!r}, a {type(leaf).__name__}: a checkpoint holds "
                "tensors, numbers, strings and bools; turn it into one, or leave it "
                "out of the state"
            )
    return found


def _check_path(path: str) -> None:
    try:
        check_path(path)
    except Wrong as error:
        raise ValueError(f"{error}, and a file could not hold it: rename it") from None
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
    """Raises if a leaf's layout has axes that the mesh does not have."""
    axes = {} if at is None else at.mesh.axes
    for axis, size in layout.sizes.items():
        if axes.get(axis) != size:
            raise ValueError(
                f"cannot {verb} {layout}: it is laid out over {axis!r} of size {size}, "
                f"and this mesh has {dict(axes)}; {verb} it inside spmd(fn, mesh) on "
                "its own mesh"
            )


def parts_of(found: Contents, at: Here | None) -> list[tuple[str, Box, Tensor]]:
    """The boxes that this rank writes, each with its path and elements.

    Ranks whose coordinates agree on a leaf's axes hold the same part. Whole leaves go
    to them in turn, each to the one that has the fewest bytes so far: every rank comes
    to the same answer by the layouts alone.
    """
    coordinates = coordinates_here(at)
    written: list[tuple[str, Box, Tensor]] = []
    load: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for held in sorted(found.tensors.values(), key=lambda h: -h.layout.nbytes):
        mine, count = _replica(held.layout, at)
        loads = load.setdefault(held.layout.axes, [0] * count)
        writer = loads.index(min(loads))
        loads[writer] += held.layout.nbytes
        if held.layout.numel == 0:
            mine = 0 if at is None else at.rank
        if writer == mine:
            written += [(held.path, box, x) for box, x in held.boxes(coordinates)]
    return written


def _replica(layout: Layout, at: Here | None) -> tuple[int, int]:
    """(which, of how many) this rank is among those that hold the same part."""
    axes = () if at is None else at.mesh.axes
    others = tuple(axis for axis in axes if axis not in layout.axes)
    if at is None or not others:
        return 0, 1
    ranks = at.mesh.members(others, at.rank)
    return ranks.index(at.rank), len(ranks)


def _random_state() -> dict[str, str]:
    """The states of the default generators, by device type."""
    return {
        g.device.type: base64.b64encode(bytes(state.tolist())).decode()
        for g, state in generator_states()
    }


def together(states: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The generators of all ranks; those that are equal, as they usually are, once."""
    distinct: list[Mapping[str, str]] = []
    for state in states:
        if state not in distinct:
            distinct.append(state)
    return {"states": distinct, "of": [distinct.index(state) for state in states]}


def random_of(random: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """The states that this rank's default generators had, by device type.

    Where there are more ranks now, they take the saved ones in turn.

    Raises:
        CheckpointError: no generator has such a state.
    """
    if not random:
        return {}
    mine = random["states"][random["of"][rank % len(random["of"])]]
    found: dict[str, Tensor] = {}
    for kind, text in mine.items():
        if kind == "cpu" or kind == "cuda" and torch.cuda.is_available():
            raw = bytearray(base64.b64decode(text))
            try:
                found[kind] = torch.frombuffer(raw, dtype=torch.uint8)
                torch.Generator(kind).set_state(found[kind])
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint's state of the {kind} generator is none "
                    f"({error}): load it with random=False"
                ) from error
    return found


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Sets this rank's default generators."""
    for kind, state in states.items():
        if kind == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.cuda.set_rng_state(state)  # also where CUDA was not used so far
