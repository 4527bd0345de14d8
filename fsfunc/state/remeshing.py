"""``remesh``: a state goes on with more ranks, or with fewer.

Nothing of the run changes but the sizes of the axes along which ranks hold parts. So
the new layouts follow from the old ones (`Relaid`), and no step is asked. Ranks that
stay keep what they have and still need; new ones are sent their parts; what a rank that
is gone had comes from another that has the same.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.comparison import (
    Lines,
    Section,
    agree,
    gather_bytes,
    raise_everywhere,
    unrecorded,
)
from fsfunc.comm.descriptions import describe_value
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.launch import PerRank, spmd
from fsfunc.comm.mesh import Mesh, check_mesh, here, maybe_here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.runtime.generators import generator_states
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.layout import Coordinates, Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packing import as_packed_tree, local_chunk
from fsfunc.sharded.placements import (
    Own,
    Whole,
)
from fsfunc.sharded.plain_leaves import placement_of
from fsfunc.sharded.resized_layouts import Relaid
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.sharded.transfers import Side
from fsfunc.state.leaf_moves import (
    LeafMove,
    computing_device,
    is_of_rank,
    layout_and_part,
    run_moves,
)
from fsfunc.state.values import lies_on
from fsfunc.tree.types import Leaf, PyTree


@dataclass(frozen=True)
class _LeafLay:
    """How one leaf lies on the old mesh, without its values.

    Args:
        value: that of a leaf that is no tensor; ``layout`` is None then.
        part_layout: how this rank's part lies: as ``layout``, or whole, of a buffer
            that each rank has gathered.
        dtype: that of the part, which a moment may have unlike its layout.
        numbers: what is equal on all ranks of one step, such as its count, as text.
    """

    path: str
    layout: Layout | None
    part_layout: Layout | None = None
    value: Any = None
    numbers: str = ""
    dtype: torch.dtype | None = None
    device_type: str = "cpu"
    placement: Whole | Own | None = None


@dataclass(frozen=True)
class _Described:
    """A state without its values, which ranks that join are sent.

    Args:
        axes: the sizes of the axes of the mesh that it lies on.
        treedef, leaves: its structure and its leaves.
        groups: the positions of leaves that share a buffer.
    """

    axes: dict[str, int]
    treedef: tree.TreeDef
    leaves: list[_LeafLay]
    groups: list[list[int]]

    @staticmethod
    def of(state: PyTree, mesh: Mesh, coordinates: Coordinates) -> _Described:
        """Describes a state that lies on ``mesh``, at a rank's coordinates."""
        refuse_unusable(state)
        paths, leaves, treedef = tree.flatten_with_paths(state, is_leaf=is_sharded)
        lays = []
        for path, x in zip(paths, leaves, strict=True):
            if not isinstance(x, Sharded | Tensor):
                numbers = describe_value(x)
                lays.append(_LeafLay(path, None, value=x, numbers=numbers))
                continue
            if is_sharded(x):
                if not lies_on(x, mesh, coordinates):
                    raise ValueError(
                        f"remesh: {path!r} lies as {x.layout}, and not so on {mesh}: "
                        "on= is the mesh that the state lies on"
                    )
                x.layout.check_part(x.part_shape, coordinates)
            part_layout, part = layout_and_part(x, coordinates)
            layout = x.layout if is_sharded(x) else part_layout
            if space_of(part).offloaded:
                raise ValueError(
                    f"remesh: {path!r} is offloaded, to memory of its process. Place "
                    "the state for a step without offload first, and back afterwards"
                )
            placement = placement_of(x)
            if isinstance(placement, Own):
                raise ValueError(
                    f"remesh: {path!r} is each rank's own, and other ranks have none: "
                    "make it one value (ff.pmean), or leave it out of the state"
                )
            kind, numbers = computing_device(part).type, ""
            if isinstance(placement, Whole) and not part.ndim:  # a count, say
                numbers = f" of {describe_value(part)}"
            lays.append(
                _LeafLay(
                    path,
                    layout,
                    part_layout,
                    None,
                    numbers,
                    part.dtype,
                    kind,
                    placement,
                )
            )
        groups = [p for p, packed in as_packed_tree(state).groups if packed is not None]
        return _Described(dict(mesh.axes), treedef, lays, groups)

    def lines(self) -> Lines:
        """Describes it in lines, which ranks that stay compare."""
        return [
            ("mesh", str(self.axes)),
            *((x.path, f"{x.part_layout or ''}{x.numbers}") for x in self.leaves),
        ]


def _new_tree(
    described: _Described, layouts: Mapping[str, Layout], coordinates: Coordinates
) -> PyTree:
    """Returns the state as it is to lie at a rank's coordinates, without data."""
    leaves: list[Leaf] = []
    for x in described.leaves:
        if x.layout is None:
            leaves.append(x.value)
            continue
        layout = layouts[x.path]
        shape = layout.local_shape(coordinates)
        stand_in = torch.empty(shape, dtype=x.dtype, device="meta")
        # A leaf in a packed buffer of one rank is in parts too.
        leaves.append(Sharded(stand_in, layout) if layout.parts else stand_in)
    for positions in described.groups:
        members = tuple(layouts[described.leaves[i].path] for i in positions)
        chunk = local_chunk(members[0], coordinates)
        dtype = described.leaves[positions[0]].dtype
        flat = torch.empty(chunk, dtype=dtype, device="meta")
        own = {axis: coordinates[axis] for axis in members[0].axes}
        for i, leaf in zip(
            positions, FlatShard(members, flat, own).leaves(), strict=True
        ):
            leaves[i] = leaf
    return tree.unflatten(described.treedef, leaves)


@dataclass(frozen=True)
class _Participants:
    """The ranks that take part, in order: those that stay, and those that join.

    Args:
        old: by participant, its rank on the old mesh; None of one that joins.
        old_mesh, new_mesh: participant i is rank i of the new one, if that has so many.
        checkpoint: what the error names, if parts are lost.
    """

    old: tuple[int | None, ...]
    old_mesh: Mesh
    new_mesh: Mesh
    checkpoint: str = ""

    def move(
        self, state: PyTree, described: _Described, index: int, ranks: RankGroup | None
    ) -> PyTree:
        """Returns the new state of one participant; None where it has no part."""
        size = self.new_mesh.size
        for x in described.leaves:
            # Codes of a rank that is gone, or of elements that go to another rank.
            if x.layout is not None and is_of_rank(x.layout):
                raise ValueError(
                    f"remesh: {x.path!r} {x.layout} is of the elements of one rank's "
                    "buffer (codes in 8 bits, or what reductions lost), and these "
                    "move: begin the optimizer's state anew, of the parameters alone"
                )
        relaid = Relaid(
            (x.layout for x in described.leaves if x.layout is not None),
            self.new_mesh.axes,
        )
        layouts = {
            x.path: relaid.layout(x.layout)
            for x in described.leaves
            if x.layout is not None
        }
        old_positions = tuple(
            None if rank is None else self.old_mesh.coordinates(rank)
            for rank in self.old
        )
        new_positions = tuple(
            self.new_mesh.coordinates(i) if i < size else None
            for i in range(len(self.old))
        )
        parts: list[Leaf] = []
        if state is not None:
            parts = tree.leaves(state, is_leaf=is_sharded)
        moves: dict[str, LeafMove] = {}
        for i, x in enumerate(described.leaves):
            if x.part_layout is None or x.dtype is None:
                continue
            part = None
            if parts and (coordinates := old_positions[index]) is not None:
                _, part = layout_and_part(parts[i], coordinates)
            old, new = (
                Side(x.part_layout, old_positions),
                Side(layouts[x.path], new_positions),
            )
            self._check_there(old)
            moves[x.path] = LeafMove(
                x.path, old, part, new, x.dtype,
                torch.device(x.device_type) if part is None else part.device,
                x.placement,
            )  # fmt: skip
        leaves_here = index < size
        coordinates = self.new_mesh.coordinates(index if leaves_here else 0)
        return run_moves(
            moves,
            _new_tree(described, layouts, coordinates),
            ranks,
            caller="remesh",
            leaves_here=leaves_here,
        )

    def _check_there(self, old: Side) -> None:
        """Raises where a part was on ranks alone that are gone."""
        coordinates = [self.old_mesh.coordinates(r) for r in range(self.old_mesh.size)]
        missing = [
            rank
            for rank, at in enumerate(coordinates)
            if old.layout.key(at) not in old.ranks_by_key
            and math.prod(old.layout.local_shape(at))
        ]
        if missing:
            last = self.checkpoint or "ff.latest(folder)"
            raise ValueError(
                f"remesh: parts of {old.layout.subject} were on rank {missing[0]} "
                "alone, which is gone. With shard(..., replicate=axis) another rank "
                f"has the same; without, load the last checkpoint, {last}"
            )


@api_boundary
def remesh(
    state: Any, mesh: Mesh, *, on: Mesh | None = None, checkpoint: str = ""
) -> Any:
    """Returns a state laid out for ``mesh``, whose axes have other sizes.

    The run goes on with more ranks or fewer. Layouts are what ``init_state`` would give
    there: each buffer is cut into as many chunks as there are ranks. Ranks that stay
    keep what they have and still need, and are sent the rest; new ones are sent their
    parts. Build the step anew for ``mesh``, and cut the batch for it.

    On simulated ranks, outside ``spmd``: give the list of states that ``spmd``
    returned, with None in place of a rank that is gone, and get the list for ``mesh``,
    to pass to ``spmd(main, mesh)``. A rank that stays keeps its number if there is one.

    Over processes each rank calls it with its own state, and one that joins with None.
    ``mesh`` is the mesh that they have made together: after a process has died, those
    that are left call ``torch.distributed.destroy_process_group()``, meet again by a
    store of their own (`init_process_group` with ``store=``, ``rank=`` and
    ``world_size=``) and make it, as do those that join; examples/elastic.py is such a
    program. A rank may then be one step ahead of another, so keep the state before the
    newest, and give the newest that all have. Default generators of torch get the state
    of the first rank that stays.

    Args:
        state: see above. Without ``donate`` inside of it: a step that raised has left
            the state as it was, but a donated one may have spoiled it.
        mesh: the new mesh: the axes of the old one, with other sizes.
        on: the old mesh; None on a process that joins.
        checkpoint: what the error names, where parts are lost.

    Raises:
        RanksDiffer: ranks that stay have states of unlike steps, as numbers and scalar
            tensors tell, or unlike layouts.
        ValueError: parts that a rank alone had which is gone; a leaf that is split and
            cannot be over the new size; one that has an owner along an axis whose size
            changes (a pipeline's stage); one of each rank's own; an offloaded one;
            processes whose old meshes are not the same.
        PeerFailed (a RuntimeError): a process dies meanwhile. The others have the old
            state as it was: they meet once more, and give it again.

    Cost: each rank is sent every element that it needs and has not, once, and holds the
    old state and the new one meanwhile. What describes the state to those that join,
    some hundred bytes a leaf, is in no ledger.

    >>> import torch, fsfunc as ff
    >>> unit, x = ff.unit(lambda p, x: x @ p), torch.ones(1, 12)
    >>> four, three = (ff.make_mesh({"data": n}, "simulated") for n in (4, 3))
    >>> step = lambda mesh: ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
    >>> def begin():
    ...     return ff.place(step(four), torch.arange(12.0), x)
    >>> states = ff.spmd(begin, four)()
    >>> with ff.ledger() as log:
    ...     states = ff.remesh(states, three, on=four)
    >>> [s.local.tolist() for s in states]
    [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    >>> [int(log.bytes(rank=r)) for r in range(4)]
    [0, 4, 8, 12]
    """
    check_mesh(mesh, "remesh")
    if mesh.backend == "simulated":
        return _remesh_simulated(state, mesh, on, checkpoint)
    if mesh.backend != "processes":
        raise ValueError(
            f"remesh: the ranks of {mesh} hold nothing; it takes a mesh of simulated "
            "ranks or of processes"
        )
    return _remesh_process(state, mesh, on, checkpoint)


def _remesh_simulated(
    states: Any, mesh: Mesh, on: Mesh | None, checkpoint: str
) -> PerRank[Any]:
    """Returns the states of simulated ranks of ``mesh``, as a list."""
    if maybe_here() is not None:
        raise ValueError(
            "remesh of simulated ranks inside spmd, which runs a fixed number of them: "
            "return the states from it, call ff.remesh(states, mesh, on=old_mesh), and "
            "go on in ff.spmd(main, mesh)(states)"
        )
    if on is None or not isinstance(states, list) or len(states) != on.size:
        count = len(states) if isinstance(states, list) else "no list"
        raise ValueError(
            "remesh of simulated ranks takes the list of their states that spmd "
            f"returned, and on=, the mesh of these: given are {count} states, on={on}"
        )
    stay = [rank for rank, state in enumerate(states) if state is not None]
    if not stay:
        raise ValueError(f"remesh: all {on.size} ranks of {on} are gone{_LAST}")
    described = {r: _Described.of(states[r], on, on.coordinates(r)) for r in stay}
    first = described[stay[0]]
    seats = _seats(stay, mesh.size)
    ranks = _Participants(seats, on, mesh, checkpoint)
    # One that joins has no state to compare: it is to have the others'.
    lines = [first.lines() if r is None else described[r].lines() for r in seats]

    def main(state: PyTree, lines: Lines) -> PyTree:
        group = get_group("ranks")
        if group.size > 1:
            agree(group, Section(_UNLIKE, lines))
        return ranks.move(state, first, group.index, group)

    everyone = Mesh({"ranks": len(seats)}, "simulated")
    given = PerRank([None if r is None else states[r] for r in seats])
    moved = spmd(main, everyone)(given, PerRank(lines))
    return PerRank(moved[: mesh.size])


def _seats(stay: Sequence[int], size: int) -> tuple[int | None, ...]:
    """Returns, by new rank, which old rank it is; then the old ones that leave.

    A rank keeps its number, where the new mesh has it: so it keeps what it can. Numbers
    that are free go to those whose number is not there any more, then to new ranks.

    >>> _seats([0, 2, 3], 4), _seats([0, 2, 3], 3), _seats([0, 1, 2], 1)
    ((0, None, 2, 3), (0, 3, 2), (0, 1, 2))
    """
    others = [rank for rank in stay if rank >= size]
    seats: list[int | None] = []
    for number in range(size):
        free = others.pop(0) if number not in stay and others else None
        seats.append(number if number in stay else free)
    return (*seats, *others)


def _remesh_process(
    state: PyTree, mesh: Mesh, on: Mesh | None, checkpoint: str
) -> PyTree:
    """Returns this process's state on ``mesh``."""
    rank_here = here(mesh)
    # All ranks, in order: so participant i of those below is rank i of the new mesh.
    ranks = get_group(tuple(mesh.axes), rank_here) if mesh.size > 1 else None
    # What one process alone finds wrong is raised on all, before anything is sent.
    described_here, payload, old_rank, error = None, b"", -1, None
    try:
        if state is not None:
            old_rank = _rank_on(on)
            coordinates = cast(Mesh, on).coordinates(old_rank)
            described_here = _Described.of(state, cast(Mesh, on), coordinates)
            generators = {g.device.type: s for g, s in generator_states()}
            payload = pickle.dumps((described_here, generators))
        elif on is not None:
            raise ValueError(
                "remesh without a state, on a mesh: one that joins gives None for both"
            )
    except Exception as raised:
        error = raised
    # None of this is part of what moves: the ledger has that alone.
    with unrecorded():
        raise_everywhere(error, ranks, ValueError)
        old, first = _gather_old_ranks(old_rank, ranks)
        # A pickle, as a state's nodes are of the program's own classes: and it comes
        # from a process of this very run.
        payload = _broadcast(payload, first, ranks)
        described, generators = pickle.loads(payload)
        if ranks is not None:
            own = described_here or described
            agree(ranks, Section(_UNLIKE, own.lines(), _GO_BACK))
    everyone = _Participants(old, Mesh(described.axes, "abstract"), mesh, checkpoint)
    moved = everyone.move(state, described, rank_here.rank, ranks)
    # A rank that has all of its parts waits until the others have theirs: where one
    # dies before, all raise, and still have the old state.
    with unrecorded():
        raise_everywhere(None, ranks)
    for generator, _ in generator_states():
        if generator.device.type in generators:
            generator.set_state(generators[generator.device.type])
    return moved


def _rank_on(mesh: Mesh | None) -> int:
    """Returns the rank that this process was on its old mesh, which may be gone."""
    if mesh is None or mesh.link is None:
        raise ValueError(
            "remesh of a state without on=, the mesh of the processes that it lies on: "
            f"given is {mesh}; a process that joins gives None for the state"
        )
    return mesh.link.rank


def _gather_old_ranks(
    old_rank: int, ranks: RankGroup | None
) -> tuple[tuple[int | None, ...], int]:
    """Returns each process's rank on the old mesh, and the first that has one.

    Args:
        old_rank: that of this process; -1 where it joins.
    """
    rows = [old_rank.to_bytes(8, "little", signed=True)]
    if ranks is not None:
        rows = gather_bytes(rows[0], ranks)
    old = [int.from_bytes(row, "little", signed=True) for row in rows]
    stay = [(rank, i) for i, rank in enumerate(old) if rank >= 0]
    if not stay:
        raise ValueError(f"remesh: no process has a state{_LAST}")
    for rank in {rank for rank, _ in stay}:
        if len(same := [i for other, i in stay if other == rank]) > 1:
            raise ValueError(
                f"remesh: ranks {same} of the new mesh all were rank {rank} of the old "
                "one, so one of these is an earlier mesh: its process joins, with None"
            )
    return tuple(None if rank < 0 else rank for rank in old), stay[0][1]


def _broadcast(payload: bytes, source: int, ranks: RankGroup | None) -> bytes:
    """Returns the bytes that the rank at an index has."""
    if ranks is None:
        return payload
    sizes = gather_bytes(len(payload).to_bytes(8, "little"), ranks)
    size = int.from_bytes(sizes[source], "little")
    data = payload[:size].ljust(size, b"\0")  # of other ranks it is not read
    x = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(ranks.link.device)
    received = ranks.start("pbroadcast", x, source=source).wait()
    return bytes(received.cpu().numpy().tobytes())


_LAST = ": load the last checkpoint, ff.load(ff.latest(folder), target)"
_UNLIKE = "ranks that stay have unlike states"
_GO_BACK = (
    "give remesh the newest state that all of them have: a rank may be one step ahead "
    "of another where a third one dies, so let a program keep the one before it"
)
