"""Links that move nothing: on paper, and one level of vmap.

On an abstract mesh (plans, the type check of a step) tensors are fake, and one rank of
each distinct program runs; results have the right shapes.

On a vmap mesh all ranks run one program at once, as rows of batched tensors, and a
collective is its own ``vmap`` rule. So Python cannot branch on a rank, and random
numbers are refused (vmap's own rule). 64 ranks cost about as much as one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.attribution import traceback_line
from fsfunc.comm.backends.link import Done, GroupOfRanks, Handle, Link
from fsfunc.comm.descriptions import describe_value
from fsfunc.comm.ledgers import note
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import Here, Mesh, noting_axes_read, set_here
from fsfunc.comm.operations import OPERATIONS
from fsfunc.runtime.scopes import running_eagerly
from fsfunc.tree.types import Leaf

_INSTEAD = (
    ", where all tensors are fake: leave out there what reads a value, or run it on a "
    "simulated mesh"
)
_MOST_PROGRAMS = 512  # more are a mistake, and would take for ever


def result_shape(
    op: str, x: Tensor, group: GroupOfRanks, kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """Returns the shape of this rank's result of a collective of ``x``."""
    return OPERATIONS[op].result_shape(x.shape, group.size, group.index, **kwargs)


class AbstractLink(Link):
    """Every result has the right shape and dtype, and meaningless values."""

    moves_data = False

    def __init__(self, rank: int = 0, notes: dict[Any, Any] | None = None):
        self.rank, self.notes = rank, notes

    def start(
        self,
        op: str,
        x: Tensor,
        group: GroupOfRanks,
        *,
        out: Tensor | None = None,
        name: str = "",
        **kwargs: Any,
    ) -> Handle:
        if out is not None:
            return Done(out)
        shape = result_shape(op, x, group, kwargs)
        like_input = shape == x.shape and not kwargs.get("sizes")
        return Done(x.clone() if like_input else x.new_empty(shape))

    def send(self, x: Tensor, group: GroupOfRanks, to: int, name: str = "") -> Handle:
        return Done(x.new_empty(0))

    def receive(
        self, like: Tensor, group: GroupOfRanks, source: int, name: str = ""
    ) -> Handle:
        return Done(like)


class EchoLink(AbstractLink):
    """A link of one rank alone, which answers as if all ranks had the same tensors.

    For tensors with data, as in a replay of one rank's step.
    """

    def start(
        self,
        op: str,
        x: Tensor,
        group: GroupOfRanks,
        *,
        out: Tensor | None = None,
        name: str = "",
        **kwargs: Any,
    ) -> Handle:
        result = OPERATIONS[op].result_if_equal(x, group.size, group.index, **kwargs)
        return Done(result if out is None else out.copy_(result))


def run_abstract(
    mesh: Mesh,
    fn: Callable[..., Any],
    args: Callable[[int], Sequence[Any]],
    asked: set[str],
) -> dict[int, Any]:
    """Runs ``fn(*args(rank))`` on fake tensors, on one rank of each distinct program.

    Args:
        asked: axes along which the arguments differ; those whose coordinate ``fn``
            reads are added.

    Returns:
        the results, by rank: the lowest of each set of ranks with equal coordinates
        along the axes ``asked``.

    Raises:
        ValueError: more than 512 programs.
    """
    mode, results = fake_modes.abstract_mode(), {}
    notes: dict[Any, Any] = {}  # a step that all ranks are laid out by is recorded once

    def fake(x: Leaf) -> Leaf:
        return fake_modes.fake_of(mode, x) if isinstance(x, Tensor) else x

    # Until no run reads a coordinate along another axis: each such axis has more ranks
    # whose programs may differ.
    while todo := [r for r in _lowest_ranks(mesh, asked) if r not in results]:
        for rank in todo:
            link = AbstractLink(rank, notes)
            naming = naming_value_reads("a function run on an abstract mesh", _INSTEAD)
            here = set_here(Here(mesh, rank, link))
            with naming, mode, noting_axes_read(asked), here:
                results[rank] = fn(*tree.map(fake, list(args(rank))))
            # The first run adds to ``asked`` the axes that the program reads, and so
            # tells which ranks are to run beside it.
            if len(results) == 1:
                break
    return {rank: results[rank] for rank in sorted(results)}


def _lowest_ranks(mesh: Mesh, asked: set[str]) -> list[int]:
    """Returns the lowest rank of each set with equal coordinates along ``asked``."""
    axes = {name: n for name, n in mesh.axes.items() if name in asked}
    # Before any is listed: a mesh on paper may have a million ranks.
    count = math.prod(axes.values())
    if count > _MOST_PROGRAMS:
        raise ValueError(
            f"the program reads its coordinates along the axes {sorted(axes)}, so that "
            f"{count} ranks of {mesh} may each run a program of their own, of which at "
            f"most {_MOST_PROGRAMS} are tried: cut batches by ff.local_batch, which "
            "needs no coordinate, or take a smaller mesh"
        )
    origin = dict.fromkeys(mesh.axes, 0)
    return sorted(
        mesh.rank_at({**origin, **dict(zip(axes, index, strict=True))})
        for index in itertools.product(*map(range, axes.values()))
    )


_ALL_AT_ONCE = (
    "no rank of a vmap mesh can {} alone: they all run as one program; use a simulated "
    "mesh"
)


class VmapLink(Link):
    """The link of all ranks at once, as rows of tensors that ``vmap`` batches.

    The ``vmap`` rule of a collective calls `exchange` at the level of the mesh.

    Args:
        level: the functorch level of the ranks.
        ranks: the numbers of the ranks, batched at that level.
    """

    def __init__(self, mesh: Mesh, level: int, ranks: Tensor):
        self.mesh, self.vmap_level, self.ranks = mesh, level, ranks

    def start(
        self,
        op: str,
        x: Tensor,
        group: GroupOfRanks,
        *,
        out: Tensor | None = None,
        name: str = "",
        **kwargs: Any,
    ) -> Handle:
        raise RuntimeError(
            f"{op} over {group.axis} on a vmap mesh was not called on every rank at "
            "once: this transform needs ranks of their own; use a simulated mesh"
        )

    def send(self, x: Tensor, group: GroupOfRanks, to: int, name: str = "") -> Handle:
        raise RuntimeError(_ALL_AT_ONCE.format("send"))

    def receive(
        self, like: Tensor, group: GroupOfRanks, source: int, name: str = ""
    ) -> Handle:
        raise RuntimeError(_ALL_AT_ONCE.format("receive"))

    def apply(
        self, function: Callable[..., Tensor], x: Tensor, *args: object
    ) -> Tensor:
        """Calls ``function`` at the mesh's level, also on what is equal everywhere."""
        return function(self.spread(x), *args)

    def spread(self, x: Tensor) -> Tensor:
        """Returns ``x``, batched at the mesh's level, so that its rule is called."""
        with _torch.forward_ad_enabled():  # we may be inside a jvp
            zeros = (self.ranks * 0).to(x.dtype)
            # x - 0, as -0.0 + 0 would be 0.0. Of bools torch has no difference.
            return x | zeros if x.dtype == torch.bool else x - zeros

    def exchange(self, linear_map: LinearMap, x: Tensor, group: GroupOfRanks) -> Tensor:
        inputs = x.unbind(0)
        results = list(inputs)
        # ``group`` is one rank's; here all groups along its axis have their turn.
        for ranks in {self.mesh.members(group.axis, r) for r in range(self.mesh.size)}:
            ys = linear_map.apply_to_all([inputs[r] for r in ranks])
            for i, (r, y) in enumerate(zip(ranks, ys, strict=True)):
                results[r] = y
                # A rule runs once for all ranks, below `RankGroup`, which notes one
                # rank's collective on other backends. Of a single rank nothing is sent.
                if linear_map.collective and len(ranks) > 1:
                    ranks_group = replace(group, ranks=ranks, index=i, rank=r)  # type: ignore[type-var]
                    kwargs = linear_map.kwargs
                    note(linear_map.collective, inputs[r], ranks_group, kwargs)
        return torch.stack(results)

    def axis_index(self, group: GroupOfRanks) -> Tensor:
        indices = [self.mesh.coordinate(group.axis, r) for r in range(self.mesh.size)]
        return torch.tensor(indices)[self.ranks]


def run_vmapped(
    mesh: Mesh, fn: Callable[..., Any], args: Sequence[Sequence[Any]]
) -> list[Any]:
    """Returns ``[fn(*args[r]) for each rank r]``, all ranks run at once.

    Leaves that are no tensors must be equal on every rank, in arguments and results.

    Raises:
        ValueError: the arguments of two ranks differ in structure, or in such a leaf.
    """
    leaves_by_rank: list[list[Leaf]] = []
    treedef: Any = None
    for rank, rank_args in enumerate(args):
        leaves, rank_treedef = tree.flatten(tuple(rank_args))
        treedef = rank_treedef if treedef is None else treedef
        # One function runs for all ranks: it would see one rank's tree in place of all.
        if rank_treedef != treedef:
            raise ValueError(_ODD_RANKS.format(rank, "another structure"))
        leaves_by_rank.append(leaves)
    columns = list(zip(*leaves_by_rank, strict=True))  # of a leaf, all ranks' values
    for column in columns:
        if all(isinstance(x, Tensor) for x in column):
            continue
        # By description, as ranks of other meshes compare: NaN is equal to NaN.
        first, *others = map(describe_value, column)
        for rank, text in enumerate(others, 1):
            if text != first:
                raise ValueError(_ODD_RANKS.format(rank, f"{text}, not {first}"))
    batched = [
        i for i, c in enumerate(columns) if all(isinstance(x, Tensor) for x in c)
    ]
    out_treedef: Any = None
    constants: dict[int, Leaf] = {}

    def call(ranks: Tensor, *tensors: Tensor) -> list[Tensor]:
        nonlocal out_treedef
        # vmap maps tensors alone: any other leaf is rank 0's, equal on all.
        leaves = [column[0] for column in columns]
        for i, x in zip(batched, tensors, strict=True):
            leaves[i] = x
        link = VmapLink(mesh, _torch.current_level(), ranks)
        with set_here(Here(mesh, 0, link)):
            out, out_treedef = tree.flatten(fn(*tree.unflatten(treedef, leaves)))
        # vmap returns tensors alone: the ranks' numbers stand in for any other leaf.
        for i, x in enumerate(out):
            if not isinstance(x, Tensor):
                constants[i], out[i] = x, ranks
        return [x if x is ranks else link.spread(x) for x in out]

    stacks = [torch.stack(columns[i]) for i in batched]
    outs = torch.func.vmap(call)(torch.arange(mesh.size), *stacks)
    return [
        tree.unflatten(
            out_treedef, [constants.get(i, o[r]) for i, o in enumerate(outs)]
        )
        for r in range(mesh.size)
    ]


_ODD_RANKS = (
    "a vmap mesh runs one function for all ranks, and rank {} is given {}: make "
    "tensors of what differs, or take a simulated mesh"
)


def is_value_read(error: BaseException) -> bool:
    """Returns whether a fake tensor raised ``error``, as its value was read."""
    return _torch.is_data_dependent(error) or str(error).startswith(".numpy()")


@contextmanager
def naming_value_reads(reader: str, instead: str) -> Iterator[None]:
    """Inside, fake tensors that are asked for a value raise with the source line.

    Compiled functions run as plain ones: a compiled kernel would read memory that fake
    tensors do not have.

    Args:
        reader: the function that asks, for the message.
        instead: the end of the message: what to do.

    Raises:
        RuntimeError: in place of torch's own error.
    """
    try:
        with running_eagerly():
            yield
    except Exception as error:
        if not is_value_read(error):
            raise
        raise RuntimeError(
            f"{reader} asks for a tensor's value at {traceback_line(error)} (.item(), "
            f"`if tensor`, a boolean mask){instead}"
        ) from error
