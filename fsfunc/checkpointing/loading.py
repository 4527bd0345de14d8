"""Loading a state onto whatever mesh there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import ChunkStorageMetadata, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)

from fsfunc import _torch, tree
from fsfunc.boxing import Box
from fsfunc.checkpointing.agreeing import agreed, check_alike
from fsfunc.checkpointing.blocks import check_files
from fsfunc.checkpointing.finding import find
from fsfunc.checkpointing.leaves import (
    Held,
    check_mesh,
    check_real,
    coordinates_here,
    mesh_here,
)
from fsfunc.checkpointing.manifest import CheckpointError, Stored
from fsfunc.checkpointing.matching import check_match, within
from fsfunc.checkpointing.randomness import restore_random
from fsfunc.checkpointing.reading import Reader
from fsfunc.donated import refuse_spent, spend
from fsfunc.holding import is_held
from fsfunc.layout import Layout
from fsfunc.mesh import Here
from fsfunc.packing import PackedTree, split_buffers
from fsfunc.sharded import Sharded, is_sharded

__all__ = ["Fill", "fill", "load"]

_TAKEN = (
    "this state's memory was given to ff.load(..., donate=True): go on with what it "
    "returned"
)


def load(
    path: str | os.PathLike,
    target: Any,
    *,
    at: str = "",
    random: bool | None = None,
    donate: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """The state saved at ``path``, laid out as ``target`` is.

    Every rank of the mesh in sight calls it. ``target`` may lie on any mesh, by any
    transforms: each rank reads the boxes that its parts are made of.

    Args:
        path: what `save` wrote; or one safetensors file (`consolidate`), or a folder of
            them, as torch.distributed.checkpoint or Hugging Face write them.
        target: a tree like the one saved: a placed state, or an abstract one
            (`abstract_state`), whose tensors take no memory. It is left as it
            is, but under ``donate``.
        at: the path of the subtree to read: ``load(path, state.params, at="params")``.
        random: restore the states of the default random generators, as they stood when
            the state was saved. Without ``at`` it is the default.
        donate: write into the target's own memory, as a donated step does: the target
            is spent then, and spoiled where the load fails.
        device: where the result lies, if not where the target does (the CPU, where that
            is abstract).

    Raises (on every rank; the target and the generators are left as they are):
        FileNotFoundError: nothing is there.
        CheckpointError: it is damaged, of another format version, or holds pickles.
        TreeMismatch: the trees differ; names the smallest subtree that does.
        ValueError: a shape or dtype differs.

    Cost: reads what the rank needs, whole checksum blocks (1 MiB) of it; makes the
    result's memory and some 20 MiB. A few numbers are sent to agree on success.
    """
    here = mesh_here()
    if here is not None and here.mesh.backend in ("abstract", "vmap"):
        raise RuntimeError(
            f"cannot load on {here.mesh}, which holds no values of its own: load on a "
            "simulated mesh or on processes"
        )
    stored = agreed(here, lambda: find(path))
    check_alike(here, stored.identity, "load different checkpoints")
    result = agreed(
        here, lambda: fill(within(stored, at), target, here, device, donate)
    )
    if not at if random is None else random:
        restore_random(stored.random, 0 if here is None else here.rank)
    return result


def fill(
    stored: Stored,
    target: Any,
    here: Here | None,
    device: Any = None,
    donate: bool = False,
) -> Any:
    """A tree like ``target`` with the values of ``stored``."""
    refuse_spent(target)
    check_match(stored, target)
    for leaf in tree.leaves(target, is_leaf=is_sharded):
        if isinstance(leaf, Sharded):
            check_mesh(leaf.layout, here, "load")
    if device is not None and torch.device(device).type == "meta":
        raise ValueError("cannot load to the meta device, which holds no values")
    buffers = split_buffers(target)
    if donate:
        fresh, spoil = _own_memory(target, buffers, device)
    else:
        fresh, spoil = [_room(x, device) for x in buffers.tensors], None
    result = buffers.rebuild(fresh)
    paths, leaves, treedef = tree.flatten_with_paths(result, is_leaf=is_sharded)
    wanted: dict[str, Held] = {}
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(leaf, Sharded):
            wanted[path] = Held(path, leaf.layout, leaf.local)
        elif isinstance(leaf, Tensor):
            layout = Layout(leaf.shape, leaf.dtype, (), path)
            wanted[path] = Held(path, layout, leaf)
        else:
            leaves[i] = stored.values[path]
    reader, planner = Reader(stored), Fill(wanted, coordinates_here(here))
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, True)
    plan = planner.finish_plan(planner.create_local_plan())
    names = {reader.chunk_of(item).file for item in plan.items}
    check_files(stored, sorted(names))
    if spoil is not None:
        spoil()
    with torch.no_grad():
        reader.read_data(plan, planner).wait()
    return tree.unflatten(treedef, leaves)


def _own_memory(
    target: Any, buffers: PackedTree, device: Any
) -> tuple[list[Any], Callable[[], None]]:
    """The target's own memory, as few tensors; and what marks the target as spent."""
    leaves = tree.leaves(target, is_leaf=is_sharded)
    for x in buffers.tensors:
        if isinstance(x, Tensor):
            check_real("the target", x, "load into")
            if x.is_inference() or device not in (None, x.device, str(x.device)):
                raise ValueError(
                    "a load into the target's own memory stays on its device, and "
                    "takes no inference tensors: leave donate= out"
                )
    if is_held(x for x in buffers.tensors if isinstance(x, Tensor)):
        raise ValueError("the target is being saved: wait() for that before a load")
    homes = {id(x) for _, home in buffers.groups if home for x in (home.flat,)}
    # Whole leaves as other objects: the marks are on the old ones.
    fresh = [
        x.detach() if isinstance(x, Tensor) and id(x) not in homes else x
        for x in buffers.tensors
    ]

    def spoil() -> None:
        for leaf in leaves:
            spend(leaf, _TAKEN)
        written = [x for x in fresh if isinstance(x, Tensor)]
        torch.autograd.graph.increment_version(written)  # no gathered buffer shows it

    return fresh, spoil


class Fill(LoadPlanner):
    """DCP's planner for parts that are boxes of a whole.

    Args:
        wanted: path -> the leaf whose part is to be filled.
    """

    def __init__(self, wanted: Mapping[str, Held], coordinates: dict[str, int]):
        self.wanted = wanted
        self.coordinates = coordinates
        self.parts: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def set_up_planner(
        self,
        state_dict: Any,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for path, held in self.wanted.items():
            boxes = held.boxes(self.coordinates)
            for box, x in boxes:
                self.parts[path, box.offsets] = x
            said: Any = self.metadata.state_dict_metadata[path]
            found = create_read_items_for_chunk_list(
                path, said, [_chunk(box) for box, _ in boxes]
            )
            asked = sum(box.numel for box, _ in boxes)
            if sum(torch.Size(item.lengths).numel() for item in found) != asked:
                raise CheckpointError(
                    f"the checkpoint holds {path!r} {held.layout.subject} in part "
                    "only: a file of it is missing; go back to an earlier one"
                )
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index: MetadataIndex = read_item.dest_index
        x = self.parts[index.fqn, tuple(index.offset or ())]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            x = x.narrow(dim, start, length)
        return x

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError("bytes are never loaded: they would be unpickled")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _room(x: Any, device: Any) -> Any:
    """Memory like ``x``; zero, as padding is (the system gives zero pages anyway)."""
    if not isinstance(x, Tensor):
        return x
    abstract = x.device.type == "meta" or isinstance(x, _torch.FakeTensor)
    device = device or ("cpu" if abstract else x.device)
    return torch.zeros(x.shape, dtype=x.dtype, device=device)
