"""Links that move nothing: on paper, and one level of vmap.

All ranks run one program at once, so Python cannot branch on a rank, and random
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
from fsfunc.comm.backends.link import Done, Handle, Link
from fsfunc.comm.ledgers import note
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import Here, Mesh, asking, place_here
from fsfunc.comm.operations import OPERATIONS
from fsfunc.runtime.scopes import plainly

_INSTEAD = (
    ", where all tensors are fake: leave out there what reads a value, or run it on a "
    "simulated mesh"
)
_MOST = 512  # distinct programs: more are a mistake, and would take for ever


def shape_of_result(
    op: str, x: Tensor, where: Any, how: Mapping[str, Any]
) -> tuple[int, ...]:
    """The shape of this rank's result of a collective of ``x``."""
    return OPERATIONS[op].result_shape(x.shape, where.size, where.index, **how)


class AbstractLink(Link):
    """Every result has the right shape and dtype, and meaningless values."""

    moves = False

    def __init__(self, rank: int = 0, notes: dict[Any, Any] | None = None):
        self.rank, self.notes = rank, notes

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        what: str = "",
        **how: Any,
    ) -> Handle:
        if out is not None:
            return Done(out)
        shape = shape_of_result(op, x, where, how)
        alike = shape == x.shape and not how.get("sizes")
        return Done(x.clone() if alike else x.new_empty(shape))

    def send(self, x: Tensor, where: Any, to: int, what: str = "") -> Handle:
        return Done(x.new_empty(0))

    def receive(self, like: Tensor, where: Any, source: int, what: str = "") -> Handle:
        return Done(like)


class EchoLink(AbstractLink):
    """As if all ranks had the same: for tensors with data, of which nothing is sent."""

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        what: str = "",
        **how: Any,
    ) -> Handle:
        found = OPERATIONS[op].echo(x, where.size, where.index, **how)
        return Done(found if out is None else out.copy_(found))


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
    mode, found = fake_modes.abstract_mode(), {}
    notes: dict[Any, Any] = {}  # a step that all ranks are laid out by is recorded once

    def fake(x: Any) -> Any:
        return fake_modes.fake_of(mode, x) if isinstance(x, Tensor) else x

    while todo := [r for r in _lowest(mesh, asked) if r not in found]:
        for rank in todo:
            link = AbstractLink(rank, notes)
            told = told_where("a function run on an abstract mesh", _INSTEAD)
            with told, mode, asking(asked), place_here(Here(mesh, rank, link)):
                found[rank] = fn(*tree.map(fake, list(args(rank))))
            if len(found) == 1:
                break  # now it is known what it asks for
    return {rank: found[rank] for rank in sorted(found)}


def _lowest(mesh: Mesh, asked: set[str]) -> list[int]:
    """The lowest rank of each set with equal coordinates along ``asked``."""
    axes = {name: n for name, n in mesh.axes.items() if name in asked}
    count = math.prod(axes.values())
    if count > _MOST:
        raise ValueError(
            f"the program reads its coordinates along the axes {sorted(axes)}, so that "
            f"{count} ranks of {mesh} may each run a program of their own, of which at "
            f"most {_MOST} are tried: cut batches by ff.local_batch, which needs no "
            "coordinate, or take a smaller mesh"
        )
    none = dict.fromkeys(mesh.axes, 0)
    return sorted(
        mesh.rank_at({**none, **dict(zip(axes, index, strict=True))})
        for index in itertools.product(*map(range, axes.values()))
    )


_ALL_AT_ONCE = (
    "no rank of a vmap mesh can {} alone: they all run as one program; use a simulated "
    "mesh"
)


class VmapLink(Link):
    """Collectives are done by their ``vmap`` rule, at the level that is the mesh."""

    def __init__(self, mesh: Mesh, level: int, ranks: Tensor):
        self.mesh, self.level, self.ranks = mesh, level, ranks

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        what: str = "",
        **how: Any,
    ) -> Handle:
        raise RuntimeError(
            f"{op} over {where.axis} on a vmap mesh was not called on every rank at "
            "once: this transform needs ranks of their own; use a simulated mesh"
        )

    def send(self, x: Tensor, where: Any, to: int, what: str = "") -> Handle:
        raise RuntimeError(_ALL_AT_ONCE.format("send"))

    def receive(self, like: Tensor, where: Any, source: int, what: str = "") -> Handle:
        raise RuntimeError(_ALL_AT_ONCE.format("receive"))

    def apply(self, function: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        """Calls ``function`` at the mesh's level, also on what is equal everywhere."""
        return function(self.spread(x), *rest)

    def spread(self, x: Tensor) -> Tensor:
        """``x``, batched at the mesh's level."""
        with _torch.forward_ad_enabled():  # we may be inside a jvp
            zeros = (self.ranks * 0).to(x.dtype)
            return x | zeros if x.dtype == torch.bool else x - zeros  # -0.0 stays so

    def exchange(self, how: LinearMap, x: Tensor, where: Any) -> Tensor:
        inputs = x.unbind(0)
        results = list(inputs)
        for ranks in {self.mesh.members(where.axis, r) for r in range(self.mesh.size)}:
            made = how.across([inputs[r] for r in ranks])
            for i, (r, y) in enumerate(zip(ranks, made, strict=True)):
                results[r] = y
                if how.sends and len(ranks) > 1:
                    its = replace(where, ranks=ranks, index=i, rank=r)
                    note(how.sends, inputs[r], its, how.how)
        return torch.stack(results)

    def axis_index(self, where: Any) -> Any:
        table = [self.mesh.coordinate(where.axis, r) for r in range(self.mesh.size)]
        return torch.tensor(table)[self.ranks]


def run_vmapped(
    mesh: Mesh, fn: Callable[..., Any], args: Sequence[Sequence[Any]]
) -> list[Any]:
    """``[fn(*args[r]) for each rank r]``, all ranks at once.

    What is no tensor must be the same on every rank, going in and coming out.
    """
    rows: list[list[Any]] = []
    treedef: Any = None
    for mine in args:
        leaves, treedef = tree.flatten(tuple(mine))
        rows.append(leaves)
    columns = list(zip(*rows, strict=True))
    batched = [
        i for i, c in enumerate(columns) if all(isinstance(x, Tensor) for x in c)
    ]
    spec: Any = None
    constants: dict[int, Any] = {}

    def call(ranks: Tensor, *tensors: Tensor) -> list[Tensor]:
        nonlocal spec
        leaves = [column[0] for column in columns]
        for i, x in zip(batched, tensors, strict=True):
            leaves[i] = x
        link = VmapLink(mesh, _torch.current_level(), ranks)
        with place_here(Here(mesh, 0, link)):
            out, spec = tree.flatten(fn(*tree.unflatten(treedef, leaves)))
        for i, x in enumerate(out):
            if not isinstance(x, Tensor):
                constants[i], out[i] = x, ranks
        return [x if x is ranks else link.spread(x) for x in out]

    stacks = [torch.stack(columns[i]) for i in batched]
    outs = torch.func.vmap(call)(torch.arange(mesh.size), *stacks)
    return [
        tree.unflatten(spec, [constants.get(i, o[r]) for i, o in enumerate(outs)])
        for r in range(mesh.size)
    ]


def asks_for_a_value(error: BaseException) -> bool:
    """True if ``error`` was raised by a fake tensor whose value was read."""
    return _torch.is_data_dependent(error) or str(error).startswith(".numpy()")


@contextmanager
def told_where(what: str, instead: str) -> Iterator[None]:
    """Inside, fake tensors that are asked for a value raise with the source line.

    Compiled functions run as plain ones.

    Args:
        what: the function that asks, for the message.
        instead: the end of the message: what to do.

    Raises:
        RuntimeError: in place of torch's own error.
    """
    try:
        with plainly():
            yield
    except Exception as error:
        if not asks_for_a_value(error):
            raise
        raise RuntimeError(
            f"{what} asks for a tensor's value at {traceback_line(error)} (.item(), "
            f"`if tensor`, a boolean mask){instead}"
        ) from error
