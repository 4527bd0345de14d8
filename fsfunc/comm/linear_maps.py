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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.attribution import internal
from fsfunc.comm.backends.link import Done, Handle
from fsfunc.comm.groups import RankGroup, check_kind, dense
from fsfunc.comm.operations import OPERATIONS, SUM

# op, of -> to : op, of -> to; M counts as V. Rows with an asterisk have inputs that are
# equal on all ranks, whatever their type.
TRANSPOSES = {
    ("psum", "V", "I"): ("cast", "I", "V"),
    ("psum", "P", "I"): ("cast", "I", "R"),
    ("psum", "P", "R"): ("psum", "P", "R"),
    ("psum", "V", "V"): ("psum", "V", "V"),
    ("psum", "P", "V"): ("psum", "V", "R"),
    ("psum", "V", "R"): ("psum", "P", "V"),
    ("cast", "I", "V"): ("psum", "V", "I"),
    ("cast", "I", "R"): ("psum", "P", "I"),
    ("cast", "R", "V"): ("cast", "V", "P"),
    ("cast", "V", "P"): ("cast", "R", "V"),
    ("cast", "V", "V"): ("cast", "V", "V"),
    ("cast", "V", "R"): ("cast", "P", "V"),  # *
    ("cast", "P", "V"): ("cast", "V", "R"),
    ("cast", "R", "I"): ("keep", "I", "P"),
    ("keep", "I", "P"): ("cast", "R", "I"),
    ("all_gather", "V", "V"): ("psum_scatter", "V", "V"),
    ("all_gather", "V", "R"): ("psum_scatter", "P", "V"),
    ("all_gather", "V", "I"): ("slice", "I", "V"),
    ("psum_scatter", "V", "V"): ("all_gather", "V", "V"),
    ("psum_scatter", "P", "V"): ("all_gather", "V", "R"),
    ("slice", "I", "V"): ("all_gather", "V", "I"),
    ("slice", "R", "V"): ("embed", "V", "P"),
    ("embed", "V", "P"): ("slice", "R", "V"),
    ("slice", "V", "V"): ("embed", "V", "V"),  # *
    ("embed", "V", "V"): ("slice", "V", "V"),
    ("all_to_all", "V", "V"): ("all_to_all", "V", "V"),
    ("ppermute", "V", "V"): ("ppermute", "V", "V"),
    ("pbroadcast", "V", "V"): ("collect", "V", "V"),
    ("pbroadcast", "V", "I"): ("keep", "I", "V"),
    ("keep", "I", "V"): ("pbroadcast", "V", "I"),
    ("collect", "V", "V"): ("pbroadcast", "V", "V"),
    ("enter", "V", "V"): ("psum", "V", "V"),  # *
}
Sizes = tuple[tuple[int, ...], ...]
_LOCAL = {"cast", "keep", "slice", "embed", "enter"}
_JOINS = {"all_gather", "psum_scatter", "all_to_all"}


@cache
def meanings(op: str) -> tuple[str, ...]:
    """The types between which ``op`` has a transpose, such as ``V->I``."""
    return tuple(f"{a}->{b}" for o, a, b in TRANSPOSES if o == op)


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
            RuntimeError: pmax and pmin, which have none.
        """
        leaves, comes = self.of == "M", self.to == "M"
        if self.ordered:
            raise RuntimeError(
                f"{self.op} has no derivative here: give it x.detach(), where it only "
                "scales or shifts"
            )
        row = self.op, *("V" if kind == "M" else kind for kind in (self.of, self.to))
        op, of, to = TRANSPOSES[row]  # type: ignore[index]
        dim, to_dim = self.dim, self.to_dim
        if op == "all_to_all":
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
        return None if self.op in _LOCAL else {"collect": "psum"}.get(self.op, self.op)

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
        if self.op == "ppermute":
            return {"pairs": self.pairs}
        if self.sizes:
            return {"sizes": self.sizes}
        return {"source": self.source} if self.op == "pbroadcast" else {}

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
        x = self._counted(x)
        if self.op in _JOINS:
            x = x.movedim(self.dim, 0)
        return dense(x)

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
        if self.op in ("all_gather", "psum_scatter"):
            y = y.movedim(0, self.dim)
        elif self.op == "all_to_all" and not self.sizes:
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
        if self.op == "ppermute" and (0, 0) not in self.pairs:
            return torch.zeros_like(x)
        x = self._counted(x)
        return (x.movedim(self.dim, 0) if self.op in _JOINS else x).clone()

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


def combine(
    op: str,
    xs: Sequence[Tensor],
    pairs: tuple[tuple[int, int], ...] = (),
    source: int = 0,
    sizes: Sizes = (),
) -> list[Tensor]:
    """The results of two ranks or more where rank i sent ``xs[i]``, along dim 0.

    Sums run in rank order, which fixes their bits. The results may share memory with
    each other, never with an input.
    """
    n, found = len(xs), OPERATIONS.get(op)
    if found is not None and found.fold is not None:
        total = found.fold.of(xs)
        return list(total.tensor_split(n)) if found.rows else [total] * n
    if op == "all_gather":
        return [torch.cat(list(xs))] * n
    if op == "all_to_all":
        cuts = zip(xs, sizes or [None] * n, strict=True)
        parts = [x.split(cut) if cut else x.tensor_split(n) for x, cut in cuts]
        return [torch.cat([p[i] for p in parts]) for i in range(n)]
    if op == "ppermute":
        by_target = {d: xs[s].clone() for s, d in pairs}
        return [by_target.get(i, torch.zeros_like(x)) for i, x in enumerate(xs)]
    if op == "pbroadcast":
        return [xs[source].clone()] * n
    raise ValueError(f"unknown collective {op!r}")
