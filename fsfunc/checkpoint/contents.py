"""What one rank puts into a checkpoint: leaves, values and generator states.

`saving` collects them from the state (`collect_contents`). When a rank writes, the
layouts say which boxes of which leaves are its own to write (`assign_parts`): ranks
that hold the same part share the work, without a message. `loading` uses the same
description of a leaf (`LocalLeaf`) for what it fills.
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

from fsfunc import tree
from fsfunc.checkpoint.parsing import InvalidTable
from fsfunc.checkpoint.stored import CheckpointError, check_path
from fsfunc.comm.mesh import Here
from fsfunc.runtime.generators import generator_states
from fsfunc.sharded.layout import Coordinates, Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packed_layouts import stacked
from fsfunc.sharded.placements import describe_tensor
from fsfunc.sharded.slices import Box, boxes
from fsfunc.state.layout_rules import check_distinct
from fsfunc.state.values import check_real
from fsfunc.tree.types import PyTree

VALUE_TYPES: tuple[type, ...] = (bool, int, float, str)  # of leaves beside tensors


class LocalLeaf(NamedTuple):
    """A tensor leaf of a tree on this rank: its layout, whole or not, and its part.

    Args:
        stacked_axes: sizes of the mesh axes along which each rank has a value of its
            own, if it has: then the layout is that of the stack of all of them.
    """

    path: str
    layout: Layout
    part: Tensor
    stacked_axes: Mapping[str, int] = MappingProxyType({})

    @staticmethod
    def of(path: str, leaf: Sharded | Tensor) -> LocalLeaf:
        """Returns a leaf with its layout; that of a plain tensor is one whole box."""
        if isinstance(leaf, Sharded):
            return LocalLeaf(path, leaf.layout, leaf.local)
        return LocalLeaf(path, Layout(leaf.shape, leaf.dtype, (), path), leaf)

    def stacked(self, axes: Mapping[str, int], coordinates: Coordinates) -> LocalLeaf:
        """Returns this leaf as one row of the stack of what ranks along axes have.

        Memory is shared.
        """
        layout, part = stacked(self.layout, axes), self.part
        if layout.local_shape(coordinates) == (1, *part.shape):
            part = part[None]
        return LocalLeaf(self.path, layout, part, axes)

    def boxes(self, coordinates: Coordinates) -> list[tuple[Box, Tensor]]:
        """Cuts the part into boxes of the whole, each with its elements (views of it).

        A range of a flat buffer is several boxes: the end of one row, whole rows, and
        the beginning of another.
        """
        if not self.layout.numel:  # one empty box, so that the leaf is stored at all
            origin = tuple(0 for _ in self.layout.shape)
            return [
                (Box(origin, self.layout.shape, 0), self.part.view(self.layout.shape))
            ]
        self.layout.check_part(self.part.shape, coordinates)
        local_boxes = boxes(self.layout, coordinates)
        if self.layout.flat is None:  # one box: the part itself, contiguous or not
            return [(box, self.part) for box in local_boxes]
        return [
            (box, self.part[box.start : box.start + box.numel].view(box.sizes))
            for box in local_boxes
        ]


@dataclass
class Contents:
    """The tensors and the other values of a tree, by path; the generators' states."""

    tensors: dict[str, LocalLeaf] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    random: dict[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """A description of the tree, leaf by leaf, which ranks compare."""
        lines: list[tuple[str, str]] = []
        for path, leaf in self.tensors.items():
            axes = ", ".join(leaf.layout.axes)
            suffix = f" over {axes}" if axes else ""
            shape_and_dtype = describe_tensor(leaf.layout.shape, leaf.part.dtype)
            lines.append((repr(path), shape_and_dtype + suffix))
        return lines + [(repr(p), json.dumps(x)) for p, x in self.values.items()]


def coordinates_of(here: Here | None) -> dict[str, int]:
    """Returns the rank's coordinates, by axis; none without a mesh."""
    return {} if here is None else here.mesh.coordinates(here.rank)


def collect_contents(state: PyTree) -> Contents:
    """Collects what is saved of ``state``, and the generators' states.

    Raises:
        TypeError: a leaf that is neither a tensor nor a number, string or bool.
        ValueError: two leaves of one path; a tensor that is fake or on "meta".
        RuntimeError: a leaf that was donated.
    """
    contents = Contents(random=_save_generators())
    paths, leaves, _ = tree.flatten_with_paths(state, is_leaf=is_sharded)
    check_distinct(paths, "the state")
    for path, leaf in zip(paths, leaves, strict=True):
        check_name(path)
        if isinstance(leaf, Sharded | Tensor):
            local = LocalLeaf.of(path, leaf)
            # Detached, so that a save in the background keeps no graph alive.
            contents.tensors[path] = local._replace(part=local.part.detach())
            check_real(path, contents.tensors[path].part, "save")
        # Not of a subclass, such as an enum or numpy's numbers: it would come back as
        # another type.
        elif isinstance(leaf, VALUE_TYPES) and type(leaf) in VALUE_TYPES:
            contents.values[path] = leaf
        else:
            raise TypeError(
                f"cannot save {path!r}, a {type(leaf).__name__}: a checkpoint holds "
                "tensors, numbers, strings and bools; turn it into one, or leave it "
                "out of the state"
            )
    return contents


def check_name(path: str) -> None:
    try:
        check_path(path)
    except InvalidTable as error:
        raise ValueError(f"{error}, and a file could not hold it: rename it") from None
    if path == "__metadata__":  # safetensors' name for what is no tensor
        raise ValueError("a leaf called '__metadata__' cannot be saved: rename it")


def assign_parts(
    contents: Contents, here: Here | None
) -> list[tuple[str, Box, Tensor]]:
    """Returns the boxes that this rank writes, each with its path and elements.

    Ranks whose coordinates agree on a leaf's axes hold the same part (replicas), and
    one of them writes it. Every rank comes to the same answer by the layouts alone.
    """
    coordinates = coordinates_of(here)
    written: list[tuple[str, Box, Tensor]] = []
    # Bytes that each replica writes, by the axes of leaves. The largest leaves are
    # given away first, each to the replica with the fewest bytes so far: greedy, and so
    # nearly even.
    loads_by_axes: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for leaf in sorted(contents.tensors.values(), key=lambda x: -x.layout.nbytes):
        this_replica, count = _replica_of(leaf.layout, here)
        loads = loads_by_axes.setdefault(leaf.layout.axes, [0] * count)
        writer = loads.index(min(loads))
        loads[writer] += leaf.layout.nbytes
        # Of a leaf without elements each rank has the same empty box, also along axes
        # that cut it: one rank of all writes it, or the box would be there twice.
        if leaf.layout.numel == 0:
            this_replica = 0 if here is None else here.rank
        if writer == this_replica:
            written += [(leaf.path, box, x) for box, x in leaf.boxes(coordinates)]
    return written


def _replica_of(layout: Layout, here: Here | None) -> tuple[int, int]:
    """Returns (index, count) of this rank among those that hold the same part."""
    axes = () if here is None else here.mesh.axes
    replica_axes = tuple(axis for axis in axes if axis not in layout.axes)
    if here is None or not replica_axes:
        return 0, 1
    ranks = here.mesh.members(replica_axes, here.rank)
    return ranks.index(here.rank), len(ranks)


def _save_generators() -> dict[str, str]:
    """Returns the states of the default generators in base64, by device type."""
    return {
        generator.device.type: base64.b64encode(bytes(state.tolist())).decode()
        for generator, state in generator_states()
    }


def merge_generators(states: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Merges the generators' states of all ranks: equal ones, the usual case, once."""
    distinct: list[Mapping[str, str]] = []
    for state in states:
        if state not in distinct:
            distinct.append(state)
    return {"states": distinct, "of": [distinct.index(state) for state in states]}


def generators_of(random: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """Returns the states that this rank's default generators had, by device type.

    If there are more ranks now, they take the saved states in turn.

    Raises:
        CheckpointError: no generator has such a state.
    """
    if not random:
        return {}
    encoded = random["states"][random["of"][rank % len(random["of"])]]
    states: dict[str, Tensor] = {}
    for device_type, text in encoded.items():
        if device_type == "cpu" or device_type == "cuda" and torch.cuda.is_available():
            raw = bytearray(base64.b64decode(text))
            try:
                states[device_type] = torch.frombuffer(raw, dtype=torch.uint8)
                # Tried on another generator: a state that is none must not be found
                # out when some generators are set.
                torch.Generator(device_type).set_state(states[device_type])
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint's state of the {device_type} generator is none "
                    f"({error}): load it with random=False"
                ) from error
    return states


def restore_generators(states: Mapping[str, Tensor]) -> None:
    """Sets this rank's default generators."""
    for device_type, state in states.items():
        if device_type == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.cuda.set_rng_state(state)  # works where CUDA was not used so far
