"""Linear maps between ranks, as data: collectives and their transposes.

Each is a frozen :class:`LinearMap`. Its transpose is a row of a table, and
:meth:`LinearMap.across` applies it to all ranks' inputs at once, as a reference.

Types. Over an axis a value is V (varies: every rank its own), I (invariant: equal, and
one value), R (replicated: equal, with a cotangent of one part per rank) or P (partial:
the value is the sum of the ranks' parts). The cotangent of V is V, of I is I, of R is
P and of P is R; the pairings are the sum over ranks for V, once for I, and
``<sum of parts, x>`` between P and R.

M is V paired by the *mean* over ranks, as under ``shard``, whose loss is the mean of
the ranks' losses. Its transposes are those of V up to a factor of n, the number of
ranks: n for a map from M, 1/n for one to M. ``shard``'s fused path divides by n itself,
in ``gradients``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fsfunc.comm.attribution import internal
from fsfunc.comm.backends.link import Done, Handle
from fsfunc.comm.groups import RankGroup, check_kind, dense
from fsfunc.comm.operations import OPERATIONS, SUM, Sizes, Types

AxisType: TypeAlias = Literal["V", "I", "R", "P"]
"""The types that a user names, as ``of`` and ``to`` of the collectives."""

# The transposes of maps that are no collectives, by op and types before and after; of
# collectives `OPERATIONS` has them. M counts as V. Those with an asterisk have inputs
# that are equal on all ranks, whatever their type.
LOCAL: dict[str, Mapping[Types, tuple[str, str, str]]] = {
    "cast": {
        ("I", "V"): ("psum", "V", "I"),
        ("I", "R"): ("psum", "P", "I"),
        ("R", "V"): ("cast", "V", "P"),
        ("V", "P"): ("cast", "R", "V"),
        ("V", "V"): ("cast", "V", "V"),
        ("V", "R"): ("cast", "P", "V"),  # *
        ("P", "V"): ("cast", "V", "R"),
        ("R", "I"): ("keep", "I", "P"),
    },
    "keep": {
        ("I", "P"): ("cast", "R", "I"),
        ("I", "V"): ("pbroadcast", "V", "I"),
    },
    "slice": {
        ("I", "V"): ("all_gather", "V", "I"),
        ("R", "V"): ("embed", "V", "P"),
        ("V", "V"): ("embed", "V", "V"),  # *
    },
    "embed": {
        ("V", "P"): ("slice", "R", "V"),
        ("V", "V"): ("slice", "V", "V"),
    },
    "collect": {("V", "V"): ("pbroadcast", "V", "V")},
    "enter": {("V", "V"): ("psum", "V", "V")},  # *
}


def transposes(op: str) -> Mapping[Types, tuple[str, str, str]]:
    """The transposes of an op, by the types between which it has one."""
    return OPERATIONS[op].transposes if op in OPERATIONS else LOCAL[op]


@cache
def meanings(op: str) -> tuple[str, ...]:
    """The types between which ``op`` has a transpose, such as ``V->I``."""
    return tuple(f"{of}->{to}" for of, to in transposes(op))


@dataclass(frozen=True)
class LinearMap:
    """A linear map between ranks, or pmax or pmin, which have no transpose.

    Args:
        op: a collective, or a local map: ``cast``; ``keep`` (zeros except on
            ``source``); ``slice`` (this rank's part along ``dim``); ``embed`` (its
            transpose); ``enter`` (the identity, as the mean of values that are equal on
            all ranks: how a parameter enters the ranks' losses).
        of, to: the types over the axis, before and after.
        dim, to_dim: the tensor dims that are cut or joined (``to_dim``: all_to_all).
        pairs: (source, target) indices along the axis, for ppermute.
        source: the index along the axis that pbroadcast and keep read.
        sizes: for an all_to_all of unequal parts along dim 0: the number of rows, by
            sender and receiver.
        power: the result is multiplied by n ** power, for n ranks.
        what: the name of the buffer that is moved, if it is one.
    """

    op: str
    of: str = "V"
    to: str = "V"
    dim: int = 0
    to_dim: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    source: int = 0
    power: int = 0
    what: str = ""
    sizes: Sizes = ()

    def transpose(self) -> LinearMap:
        """The transposed map, which the backward applies to the cotangent.

        Raises:
            RuntimeError: an op that has none, such as pmax.
        """
        leaves, comes = self.of == "M", self.to == "M"
        if not (rows := transposes(self.op)):
            raise RuntimeError(
                f"{self.op} has no derivative here: give it x.detach(), where it only "
                "scales or shifts"
            )
        of, to = ("V" if kind == "M" else kind for kind in (self.of, self.to))
        op, of, to = rows[of, to]
        dim, to_dim = self.dim, self.to_dim
        if op in OPERATIONS and OPERATIONS[op].dims == 2:
            dim, to_dim = to_dim, dim
        return replace(
            self,
            op=op,
            of="M" if comes else of,
            to="M" if leaves else to,
            dim=dim,
            to_dim=to_dim,
            pairs=tuple((d, s) for s, d in self.pairs),
            sizes=tuple(zip(*self.sizes, strict=True)),
            power=self.power + leaves - comes,
        )

    @property
    def sends(self) -> str | None:
        """The collective that it runs, or None if it sends nothing."""
        if self.op in OPERATIONS:
            return self.op
        return "psum" if self.op == "collect" else None

    @property
    def ordered(self) -> bool:
        """True if it compares elements, as pmax does."""
        found = OPERATIONS.get(self.op)
        reduction = None if found is None else found.fold
        return reduction is not None and reduction.ordered

    @property
    def agrees(self) -> bool:
        """True if the result is equal on all ranks."""
        return (
            self.op == "enter" or self.op in OPERATIONS and OPERATIONS[self.op].agrees
        )

    @property
    def how(self) -> dict[str, Any]:
        """The keyword arguments of the collective."""
        names = OPERATIONS[self.op].arguments if self.op in OPERATIONS else ()
        found = {name: getattr(self, name) for name in names}
        if not self.sizes:  # of equal parts nothing is said
            found.pop("sizes", None)
        return found

    def check(self, x: Tensor, where: RankGroup) -> None:
        """Raises if no backend can apply it to ``x``.

        Raises:
            TypeError: a dtype or a layout that cannot be sent; complex numbers for
                pmax and pmin.
        """
        check_kind(self.op, x, where)
        if self.ordered and x.is_complex():
            raise TypeError(
                f"{self.op} over {where.name} of {x.dtype}: complex numbers have no "
                "order; take it of x.abs(), or of x.real and x.imag"
            )

    def before(self, x: Tensor) -> Tensor:
        """The tensor that this rank sends, with the split or joined dim first."""
        return dense(self._first(x))

    def _first(self, x: Tensor) -> Tensor:
        """What is sent of ``x``, with the split or joined dim first."""
        x = self._counted(x)
        joins = self.op in OPERATIONS and OPERATIONS[self.op].dims
        return x.movedim(self.dim, 0) if joins else x

    def _counted(self, x: Tensor) -> Tensor:
        """``x`` in int64 where a sum counts truth values, or averages integers."""
        found = OPERATIONS.get(self.sends or "")
        if found is None or found.fold is not SUM:
            return x
        real = x.is_floating_point() or x.is_complex()
        counts = x.dtype == torch.bool or self.power < 0 and not real
        return x.to(torch.int64) if counts else x

    def after(self, y: Tensor, x: Tensor, size: int, index: int) -> Tensor:
        """This rank's result, from that of the collective, ``y``, and the input."""
        dims = OPERATIONS[self.op].dims if self.op in OPERATIONS else 0
        if dims == 1:
            y = y.movedim(0, self.dim)
        elif dims == 2 and not self.sizes:
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
            y = y.view_as(y)
        if self.power and self.op != "enter":
            n = size ** abs(self.power)
            y = y / n if self.power < 0 else y * n
        return y

    def start(self, x: Tensor, where: RankGroup, any_order: bool = False) -> Handle:
        """Starts the map on this rank; :meth:`finish` returns its result."""
        if self.sends is None or where.size == 1:
            return Done(self.alone(x))
        x = self.before(x)
        what = self.what or ("a mean" if self.power < 0 else "")
        how = {"any_order": any_order, "what": what, **self.how}
        return where.start(self.sends, x, **how)

    def finish(self, work: Handle, x: Tensor, where: RankGroup) -> Tensor:
        """Waits for the collective, and returns this rank's result."""
        return self.after(work.wait(), x, where.size, where.index)

    def run(self, x: Tensor, where: RankGroup) -> Tensor:
        """Starts the map, and waits for it."""
        with internal():
            return self.finish(self.start(x, where), x, where)

    def alone(self, x: Tensor) -> Tensor:
        """The result on an axis of size 1: the input, or zeros if nothing is sent.

        It is a copy where a larger axis would make one, so that it may be written in
        place on an axis of any size.
        """
        if self.sends is None:
            return x
        x, operation = self._first(x), OPERATIONS[self.sends]
        reduces = operation.fold is not None
        return x.clone() if reduces else operation.combine([x], **self.how)[0]

    def across(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Applies the map to all ranks' inputs at once: the reference semantics."""
        n = len(xs)
        if self.sends is None or n == 1:
            ys = [self.alone(x) for x in xs]
        else:
            sent = [self.before(x) for x in xs]
            ys = OPERATIONS[self.sends].combine(sent, **self.how)
        return [
            self.after(y, x, n, i) for i, (y, x) in enumerate(zip(ys, xs, strict=True))
        ]
