"""The collectives, and their calculus.

Only these move data between ranks. Each is a linear map, described by a frozen
:class:`Move`; what is known of it is data: its transpose is a row of a table, its
``jvp`` is itself, and its ``vmap`` only shifts dims. One ``autograd.Function`` runs
them all, so they hold under ``torch.func.grad``, ``vjp``, ``jvp`` and ``vmap``, nested
in any way, and under plain autograd, twice.

Types. Over an axis a value is V (varies: every rank its own), I (invariant: equal, and
one value), R (replicated: equal, with a cotangent of one part per rank) or P (partial:
the value is the sum of the ranks' parts). The cotangent of V is V, of I is I, of R is
P and of P is R; the pairings are the sum over ranks for V, once for I, and
``<sum of parts, x>`` between P and R. M is V under the *mean* over ranks, the pairing
of ``shard``, whose loss is the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.accounting import aside, current_label, label, note
from fsfunc.mesh import Axis, Here, here

__all__ = [
    "Group",
    "Move",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "group",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "ppermute",
    "psum",
    "psum_scatter",
]


@dataclass(frozen=True)
class Group:
    """One rank's handle on the ranks along an axis: fixed when it is made.

    Backward passes use the handle that the forward pass made, never the context.
    """

    axis: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    rank: int
    link: Any

    @property
    def size(self) -> int:
        return len(self.ranks)

    def start(self, op: str, x: Tensor, *, out: Tensor | None = None, **how: Any):
        """Issues ``op`` on contiguous ``x``, along dim 0; returns what to wait for.

        ``how`` is ``pairs=`` for ppermute and ``source=`` for pbroadcast. Until
        ``wait()`` has returned, ``x`` must not be written.
        """
        sends = any(s == self.index and s != d for s, d in how.get("pairs", ()))
        note(op, self.axis, self.size, x, self.rank, sends)
        return self.link.start(op, x, self, out=out, **how)


def group(axis: Axis, at: Here | None = None) -> Group:
    """The group along ``axis`` of whoever asks.

    Raises:
        NoMesh: outside a transform and outside ``spmd``.
        ValueError: an axis that the mesh does not have.
    """
    at = here() if at is None else at
    names = at.mesh.check(axis)
    ranks = at.mesh.members(names, at.rank)
    return Group(names, ranks, ranks.index(at.rank), at.rank, at.link)


# op, of -> to : op, of -> to
_TRANSPOSES = {
    ("psum", "V", "I"): ("cast", "I", "V"),
    ("psum", "P", "I"): ("cast", "I", "R"),
    ("psum", "P", "R"): ("psum", "P", "R"),
    ("psum", "M", "M"): ("psum", "M", "M"),
    ("cast", "I", "V"): ("psum", "V", "I"),
    ("cast", "I", "R"): ("psum", "P", "I"),
    ("cast", "R", "V"): ("cast", "V", "P"),
    ("cast", "V", "P"): ("cast", "R", "V"),
    ("cast", "R", "I"): ("keep", "I", "P"),
    ("keep", "I", "P"): ("cast", "R", "I"),
    ("all_gather", "V", "V"): ("psum_scatter", "V", "V"),
    ("all_gather", "V", "R"): ("psum_scatter", "P", "V"),
    ("all_gather", "V", "I"): ("slice", "I", "V"),
    ("all_gather", "M", "M"): ("psum_scatter", "M", "M"),
    ("psum_scatter", "V", "V"): ("all_gather", "V", "V"),
    ("psum_scatter", "P", "V"): ("all_gather", "V", "R"),
    ("psum_scatter", "M", "M"): ("all_gather", "M", "M"),
    ("slice", "I", "V"): ("all_gather", "V", "I"),
    ("slice", "R", "V"): ("embed", "V", "P"),
    ("embed", "V", "P"): ("slice", "R", "V"),
    ("all_to_all", "V", "V"): ("all_to_all", "V", "V"),
    ("ppermute", "V", "V"): ("ppermute", "V", "V"),
    ("pbroadcast", "V", "V"): ("collect", "V", "V"),
    ("pbroadcast", "V", "I"): ("keep", "I", "V"),
    ("keep", "I", "V"): ("pbroadcast", "V", "I"),
    ("collect", "V", "V"): ("pbroadcast", "V", "V"),
    ("enter", "M", "M"): ("psum", "M", "M"),
}
_LOCAL = {"cast", "keep", "slice", "embed", "enter"}


@dataclass(frozen=True)
class Move:
    """One linear map between ranks, as data.

    Args:
        op: a collective, or what moves nothing: ``cast``; ``keep`` (zero but on
            ``source``); ``slice`` (this rank's part along ``dim``); ``embed`` (its
            transpose); ``enter`` (a replicated parameter into the ranks' losses).
        of, to: the types over the axis, before and after.
        dim, to_dim: the tensor dims that are cut or joined (``to_dim``: all_to_all).
        pairs: (source, target) indices along the axis, for ppermute.
        source: the index along the axis that pbroadcast and keep read.
    """

    op: str
    of: str = "V"
    to: str = "V"
    dim: int = 0
    to_dim: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    source: int = 0

    def transpose(self) -> Move:
        """The map that the cotangent takes."""
        key = (self.op, self.of, self.to)
        op, of, to = _TRANSPOSES[key]
        dim, to_dim, pairs = self.dim, self.to_dim, self.pairs
        if op == "all_to_all":
            dim, to_dim = to_dim, dim
        return replace(
            self,
            op=op,
            of=of,
            to=to,
            dim=dim,
            to_dim=to_dim,
            pairs=tuple((d, s) for s, d in pairs),
        )

    @property
    def sends(self) -> str | None:
        """The op that goes over the wire, if any."""
        return None if self.op in _LOCAL else {"collect": "psum"}.get(self.op, self.op)

    @property
    def how(self) -> dict[str, Any]:
        if self.op == "ppermute":
            return {"pairs": self.pairs}
        return {"source": self.source} if self.op == "pbroadcast" else {}

    def before(self, x: Tensor) -> Tensor:
        """What this rank puts on the wire: the cut or joined dim first."""
        if self.op in ("all_gather", "psum_scatter", "all_to_all"):
            x = x.movedim(self.dim, 0)
        return x.contiguous()

    def after(self, y: Tensor, x: Tensor, size: int, index: int) -> Tensor:
        """This rank's result, from what came over the wire (or ``x`` itself)."""
        if self.op in ("all_gather", "psum_scatter"):
            y = y.movedim(0, self.dim)
        elif self.op == "all_to_all":
            parts = [p.movedim(0, self.dim) for p in y.tensor_split(size)]
            y = torch.cat(parts, self.to_dim)
        elif self.op == "slice":
            y = x.tensor_split(size, self.dim)[index].clone()
        elif self.op == "embed":
            parts = [x if i == index else torch.zeros_like(x) for i in range(size)]
            y = torch.cat(parts, self.dim)
        elif self.op in ("keep", "collect"):
            y = y.clone() if index == self.source else torch.zeros_like(y)
        elif self.op in ("cast", "enter"):
            y = y.detach()
        if self.to == "M" and self.op in ("psum", "psum_scatter"):
            y = y / size
        return y

    def run(self, x: Tensor, where: Group) -> Tensor:
        """Applies the map on this rank, waiting for the others."""
        if self.sends is None or where.size == 1:
            return self.after(self.alone(x), x, where.size, where.index)
        with aside():
            y = where.start(self.sends, self.before(x), **self.how).wait()
            return self.after(y, x, where.size, where.index)

    def alone(self, x: Tensor) -> Tensor:
        """What an axis of size 1 brings: the input, or zeros where nobody sends."""
        if self.op == "ppermute" and (0, 0) not in self.pairs:
            return torch.zeros_like(x)
        return x.detach().movedim(self.dim, 0) if self.sends in _JOINS else x.detach()

    def across(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Applies the map to all ranks' inputs at once: the reference semantics."""
        n = len(xs)
        if self.sends is None or n == 1:
            ys = [self.alone(x) for x in xs]
        else:
            ys = combine(self.sends, [self.before(x) for x in xs], **self.how)
        return [
            self.after(y, x, n, i) for i, (y, x) in enumerate(zip(ys, xs, strict=True))
        ]


_JOINS = ("all_gather", "psum_scatter", "all_to_all")


def combine(
    op: str,
    xs: Sequence[Tensor],
    pairs: tuple[tuple[int, int], ...] = (),
    source: int = 0,
) -> list[Tensor]:
    """What each rank receives where rank i sent ``xs[i]``, along dim 0.

    Sums run in rank order, which fixes their bits. The results may share memory.
    """
    n = len(xs)
    if op == "psum":
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return [total] * n
    if op == "pmax":
        return [torch.stack(list(xs)).amax(0)] * n
    if op == "all_gather":
        return [torch.cat(list(xs))] * n
    if op == "psum_scatter":
        total = combine("psum", xs)[0]
        return list(total.tensor_split(n))
    if op == "all_to_all":
        parts = [x.tensor_split(n) for x in xs]
        return [torch.cat([p[i] for p in parts]) for i in range(n)]
    if op == "ppermute":
        by_target = {d: xs[s] for s, d in pairs}
        return [by_target.get(i, torch.zeros_like(x)) for i, x in enumerate(xs)]
    if op == "pbroadcast":
        return [xs[source]] * n
    raise ValueError(f"unknown collective {op!r}")


class _Apply(torch.autograd.Function):
    """Every collective: ``move`` on ``x`` over ``where``."""

    @staticmethod
    def forward(x: Tensor, move: Move, where: Group) -> Tensor:  # type: ignore[override]
        return move.run(x, where)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.move, ctx.where = inputs
        ctx.unit = current_label()[0]

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        with label(ctx.unit, "backward"):
            return _Apply.apply(g, ctx.move.transpose(), ctx.where), None, None

    @staticmethod
    def jvp(ctx, t, _, __):  # type: ignore[override]
        return _Apply.apply(t, ctx.move, ctx.where)

    @staticmethod
    def vmap(info, in_dims, x, move, where):  # type: ignore[override]
        d = in_dims[0]
        if where.link.level(where.axis) == _torch.current_level() + 1:
            return torch.stack(move.across(x.movedim(d, 0).unbind(0))), 0
        y = _Apply.apply(x.movedim(d, -1), move, where)
        return y, y.ndim - 1


def move(x: Tensor, how: Move, where: Group) -> Tensor:
    """``how`` applied to one tensor over ``where``, differentiably."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{how.op} over {_names(where.axis)} needs tensors, got "
            f"{type(x).__name__}; axis_size gives the number of ranks"
        )
    return where.link.apply(_Apply.apply, x, how, where)


def _names(axis: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in axis)


_RUN: ContextVar[Callable[..., Any] | None] = ContextVar("fsfunc_run", default=None)
_INVARIANT: ContextVar[set[str] | None] = ContextVar("fsfunc_invariant", default=None)


@contextmanager
def watch_invariants() -> Iterator[set[str]]:
    """Gathers the axes over which a collective inside made one value of many."""
    seen: set[str] = set()
    token = _INVARIANT.set(seen)
    try:
        yield seen
    finally:
        _INVARIANT.reset(token)


def _over(x: Any, axis: Axis, how: Callable[[Tensor, Group], Move]) -> Any:
    where, run, seen = group(axis), _RUN.get() or move, _INVARIANT.get()
    leaves, treedef = tree.flatten(x)
    moves = [how(leaf, where) for leaf in leaves]
    if seen is not None and any(m.to == "I" for m in moves):
        seen.update(where.axis)
    out = [run(leaf, m, where) for leaf, m in zip(leaves, moves, strict=True)]
    return tree.unflatten(treedef, out)


def _dim(x: Tensor, dim: int, name: str = "dim") -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"a collective needs tensors, got {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}={dim}: the tensor has shape {tuple(x.shape)}")
    return dim % x.ndim


def _typed(op: str, of: str, to: str, **fields: Any) -> Move:
    if (op, of, to) not in _TRANSPOSES:
        legal = [f"{a}->{b}" for o, a, b in _TRANSPOSES if o == op and "M" not in a + b]
        raise ValueError(f"{op} {of}->{to} has no meaning; it has: {', '.join(legal)}")
    return Move(op, of, to, **fields)


def psum(x: Any, axis: Axis, *, of: str = "V", to: str = "I") -> Any:
    """The sum of ``x`` over the ranks along ``axis``, on each of them.

    Transpose: V->I a cast, without communication; P->R a psum (Megatron's g after f).

    Args:
        x: tensors, each of one shape and dtype on every rank.
        axis: one name or several.
        of, to: the types before and after (see the module).

    Cost: one all-reduce, 2(n-1)/n of the bytes.
    """
    return _over(x, axis, lambda leaf, where: _typed("psum", of, to))


def pmean(x: Any, axis: Axis, *, of: str = "V", to: str = "I") -> Any:
    """The mean of ``x`` over the ranks along ``axis``: ``psum(x) / n``."""
    n = axis_size(axis)
    return tree.map(lambda y: y / n, psum(x, axis, of=of, to=to))


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(x, where):  # type: ignore[override]
        return x.clone() if where.size == 1 else where.start("pmax", x).wait()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return None, None

    @staticmethod
    def vmap(info, in_dims, x, where):  # type: ignore[override]
        x = x.movedim(in_dims[0], -1)
        if where.link.level(where.axis) == _torch.current_level() + 1:
            return x.amax(-1), None
        return _Max.apply(x.contiguous(), where), x.ndim - 1


def pmax(x: Any, axis: Axis) -> Any:
    """The elementwise maximum over the ranks along ``axis``. Not differentiable.

    Cost: one all-reduce, 2(n-1)/n of the bytes.
    """
    where = group(axis)
    detached = tree.map(lambda leaf: leaf.detach().contiguous(), x)
    return tree.map(lambda leaf: where.link.apply(_Max.apply, leaf, where), detached)


def all_gather(x: Any, axis: Axis, *, dim: int = 0, to: str = "V") -> Any:
    """The ranks' ``x`` concatenated along ``dim``, in axis order.

    Transpose: psum_scatter (``to="V"`` or ``"R"``); for ``to="I"`` the rank's slice.

    Args:
        x: tensors of one shape on every rank.
        to: the result's type over ``axis``: "V", "R" or "I".

    Cost: one all-gather, (n-1) times the bytes of ``x``.
    """
    return _over(
        x, axis, lambda leaf, _: _typed("all_gather", "V", to, dim=_dim(leaf, dim))
    )


def _check_cut(x: Tensor, dim: int, where: Group, op: str) -> int:
    dim = _dim(x, dim)
    if x.shape[dim] % where.size:
        raise ValueError(
            f"cannot {op} a tensor of shape {tuple(x.shape)} over axis "
            f"{_names(where.axis)} of size {where.size} along dim {dim}: "
            f"{x.shape[dim]} is not a multiple of {where.size}; pad it"
        )
    return dim


def psum_scatter(x: Any, axis: Axis, *, dim: int = 0, of: str = "V") -> Any:
    """This rank's part, along ``dim``, of the sum over the ranks along ``axis``.

    Transpose: all_gather.

    Raises:
        ValueError: the axis does not divide ``x.shape[dim]``.

    Cost: one reduce-scatter, (n-1)/n of the bytes of ``x``.
    """

    def how(leaf: Tensor, where: Group) -> Move:
        cut = _check_cut(leaf, dim, where, "psum_scatter")
        return _typed("psum_scatter", of, "V", dim=cut)

    return _over(x, axis, how)


def all_to_all(x: Any, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
    """Part i of ``x`` along ``split_dim`` goes to rank i; received ones are joined.

    Transpose: all_to_all with the dims exchanged.

    Raises:
        ValueError: the axis does not divide ``x.shape[split_dim]``.

    Cost: one all-to-all, (n-1)/n of the bytes of ``x``.
    """

    def how(leaf: Tensor, where: Group) -> Move:
        cut = _check_cut(leaf, split_dim, where, "all_to_all")
        join = _dim(leaf, concat_dim, "concat_dim")
        return Move("all_to_all", dim=cut, to_dim=join)

    return _over(x, axis, how)


def ppermute(x: Any, axis: Axis, pairs: Sequence[tuple[int, int]]) -> Any:
    """``x`` of rank ``s`` at rank ``d`` for each (s, d) in ``pairs``; zeros elsewhere.

    Transpose: ppermute with every pair turned round.

    Raises:
        ValueError: an index off the axis, or a source or target named twice.

    Cost: the bytes of ``x`` from every source that is not its own target.
    """
    pairs = tuple((int(s), int(d)) for s, d in pairs)
    n = axis_size(axis)
    for ends in zip(*pairs, strict=True):
        if len(set(ends)) != len(ends) or not all(0 <= i < n for i in ends):
            raise ValueError(
                f"ppermute over {axis!r} of size {n}: each source and target once, "
                f"each in 0..{n - 1}; got {list(pairs)}"
            )
    return _over(x, axis, lambda leaf, where: Move("ppermute", pairs=pairs))


def pbroadcast(x: Any, axis: Axis, *, source: int, to: str = "V") -> Any:
    """``x`` of the rank at index ``source`` along ``axis``, on each of them.

    Transpose: the sum arrives at the source (``to="V"``); what the source holds stays,
    without communication (``to="I"``).

    Cost: one broadcast, (n-1)/n of the bytes.
    """
    n = axis_size(axis)
    if not 0 <= source < n:
        raise ValueError(f"source={source} is off the axis {axis!r} of size {n}")
    return _over(x, axis, lambda leaf, _: _typed("pbroadcast", "V", to, source=source))


def pcast(x: Any, axis: Axis, *, to: str, of: str = "I", dim: int = 0) -> Any:
    """``x`` with another type over ``axis``; nothing moves in the forward pass.

    ``I->V`` sums the cotangent (a psum in the backward pass), ``I->R`` leaves it in
    parts that are summed once (Megatron's f), ``R->V`` and ``V->P`` are free.
    """
    return _over(x, axis, lambda leaf, where: _typed("cast", of, to, dim=dim))


def axis_index(axis: Axis) -> Any:
    """This rank's index along ``axis``: an int (a batched tensor on a vmap mesh)."""
    where = group(axis)
    return where.link.axis_index(where)


def axis_size(axis: Axis) -> int:
    """The number of ranks along ``axis``."""
    return group(axis).size
