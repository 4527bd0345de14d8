"""Linear maps between ranks, as data: collectives and their transposes.

A public collective, and every gather and reduction of ``shard``, is a frozen
:class:`LinearMap`. ``collective_ops.apply_map`` runs one: its backward applies the
map's ``transpose()``, which is a row of a table. :meth:`LinearMap.apply_to_all` applies
a map to all ranks' inputs at once, as a reference and on ``vmap`` meshes.

Types over an axis say how the ranks' values x_r and cotangents y_r are paired:

    ====  ==================================  =========  ===============================
    type  value                               cotangent  pairing
    ====  ==================================  =========  ===============================
    V     varies: every rank has another one  V          sum over ranks of <y_r, x_r>
    I     invariant: equal, and one value     I          <y, x>, once
    R     replicated: equal                   P          <sum of y_r, x>
    P     partial: the sum of x_r is meant    R          <y, sum of x_r>
    M     as V, under ``shard``               M          mean over ranks of <y_r, x_r>
    ====  ==================================  =========  ===============================

M is for ``shard``, whose loss is the mean of the ranks' losses. So a transpose with M
is that with V up to the number of ranks n: times n if the map is from M (its pairing
divides by n), and times 1/n if it is to M. ``shard``'s fused path divides by n itself,
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
from fsfunc.comm.groups import RankGroup, check_sendable, to_contiguous
from fsfunc.comm.operations import OPERATIONS, SUM, Sizes, Types

AxisType: TypeAlias = Literal["V", "I", "R", "P"]
"""The types that a user names, as ``of`` and ``to`` of the collectives."""

# The transposes of maps that send nothing, and of `collect`, which sends a psum: by op
# and types before and after, the op and the types of the transpose. Those of
# collectives are in `OPERATIONS`. M counts as V.
# Rows with an asterisk have inputs that are equal on all ranks, whatever their type.
LOCAL_TRANSPOSES: dict[str, Mapping[Types, tuple[str, str, str]]] = {
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


def get_transposes(op: str) -> Mapping[Types, tuple[str, str, str]]:
    """Returns the transposes of an op, by the types between which it has one."""
    return OPERATIONS[op].transposes if op in OPERATIONS else LOCAL_TRANSPOSES[op]


@cache
def legal_types(op: str) -> tuple[str, ...]:
    """Returns the types between which ``op`` has a transpose, such as ``V->I``."""
    return tuple(f"{of}->{to}" for of, to in get_transposes(op))


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
        name: the name of the buffer that is moved, if it is one.
    """

    op: str
    of: str = "V"
    to: str = "V"
    dim: int = 0
    to_dim: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    source: int = 0
    power: int = 0
    name: str = ""
    sizes: Sizes = ()

    def transpose(self) -> LinearMap:
        """Returns the transposed map, which the backward applies to the cotangent.

        Raises:
            RuntimeError: an op that has none, such as pmax.
        """
        from_mean, to_mean = self.of == "M", self.to == "M"
        if not (transposes := get_transposes(self.op)):
            raise RuntimeError(
                f"{self.op} has no derivative here: give it x.detach(), where it only "
                "scales or shifts"
            )
        of, to = ("V" if kind == "M" else kind for kind in (self.of, self.to))
        op, of, to = transposes[of, to]
        dim, to_dim = self.dim, self.to_dim
        # An all_to_all that cuts one dim and joins another is undone the other way.
        if op in OPERATIONS and OPERATIONS[op].dims == 2:
            dim, to_dim = to_dim, dim
        return replace(
            self,
            op=op,
            of="M" if to_mean else of,
            to="M" if from_mean else to,
            dim=dim,
            to_dim=to_dim,
            pairs=tuple((d, s) for s, d in self.pairs),
            sizes=tuple(zip(*self.sizes, strict=True)),
            power=self.power + from_mean - to_mean,
        )

    @property
    def collective(self) -> str | None:
        """The collective that it runs; None if it sends nothing."""
        if self.op in OPERATIONS:
            return self.op
        # The transpose of a broadcast: the sum of all cotangents arrives at the source.
        return "psum" if self.op == "collect" else None

    @property
    def is_comparison(self) -> bool:
        """Whether it compares elements, as pmax does."""
        operation = OPERATIONS.get(self.op)
        reduction = None if operation is None else operation.fold
        return reduction is not None and reduction.is_comparison

    @property
    def same_on_all(self) -> bool:
        """Whether the result is equal on all ranks."""
        return (
            self.op == "enter"
            or self.op in OPERATIONS
            and OPERATIONS[self.op].same_on_all
        )

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the collective."""
        names = OPERATIONS[self.op].arguments if self.op in OPERATIONS else ()
        kwargs = {name: getattr(self, name) for name in names}
        # If parts are equal, each rank derives the sizes from its own shape, and shapes
        # are compared between ranks.
        if not self.sizes:
            kwargs.pop("sizes", None)
        return kwargs

    def check(self, x: Tensor, group: RankGroup) -> None:
        """Raises if no backend can apply it to ``x``.

        Raises:
            TypeError: a dtype or a layout that cannot be sent; complex numbers for
                pmax and pmin.
        """
        check_sendable(self.op, x, group)
        if self.is_comparison and x.is_complex():
            raise TypeError(
                f"{self.op} over {group.name} of {x.dtype}: complex numbers have no "
                "order; take it of x.abs(), or of x.real and x.imag"
            )

    def prepare_input(self, x: Tensor) -> Tensor:
        """Returns the tensor that this rank sends: contiguous, with ``dim`` first."""
        return to_contiguous(self._move_dim_first(x))

    def _move_dim_first(self, x: Tensor) -> Tensor:
        """Moves the dim that is cut or joined to the front, where backends work."""
        x = self._widen_counts(x)
        uses_dim = self.op in OPERATIONS and OPERATIONS[self.op].dims
        return x.movedim(self.dim, 0) if uses_dim else x

    def _widen_counts(self, x: Tensor) -> Tensor:
        """Returns ``x`` in int64 where a sum counts bools, or averages integers.

        ``torch.sum`` counts bools too. A mean of small integers needs their sum, which
        may not fit their dtype.
        """
        operation = OPERATIONS.get(self.collective or "")
        if operation is None or operation.fold is not SUM:
            return x
        is_inexact = x.is_floating_point() or x.is_complex()
        counts = x.dtype == torch.bool or self.power < 0 and not is_inexact
        return x.to(torch.int64) if counts else x

    def make_result(self, y: Tensor, x: Tensor, size: int, index: int) -> Tensor:
        """Returns this rank's result.

        Args:
            y: the result of the collective; ``x`` if nothing is sent.
            x: this rank's input.
            size, index: the number of ranks, and this one's position.
        """
        dims = OPERATIONS[self.op].dims if self.op in OPERATIONS else 0
        # Backends work along dim 0. The clones are for callers that write the result in
        # place, which torch refuses for a view that a Function returns.
        if dims == 1:
            y = y.movedim(0, self.dim)
        elif dims == 2 and not self.sizes:  # of unequal parts both dims are 0
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
            y = y.view_as(y)  # a Function must not return its input itself
        # The power of `enter` is for its transpose, a mean; it is itself the identity.
        if self.power and self.op != "enter":
            n = size ** abs(self.power)
            y = y / n if self.power < 0 else y * n
        return y

    def start(self, x: Tensor, group: RankGroup, any_order: bool = False) -> Handle:
        """Starts the map on this rank; :meth:`finish` returns its result."""
        if self.collective is None or group.size == 1:
            return Done(self.apply_alone(x))
        x = self.prepare_input(x)
        # A mean has a name so that ranks of which one sums and one averages raise: what
        # they send looks alike.
        name = self.name or ("a mean" if self.power < 0 else "")
        kwargs = {"any_order": any_order, "name": name, **self.kwargs}
        return group.start(self.collective, x, **kwargs)

    def finish(self, work: Handle, x: Tensor, group: RankGroup) -> Tensor:
        """Waits for the collective ``work``, and returns this rank's result."""
        return self.make_result(work.wait(), x, group.size, group.index)

    def run(self, x: Tensor, group: RankGroup) -> Tensor:
        """Starts the map, and waits for it."""
        with internal():
            return self.finish(self.start(x, group), x, group)

    def apply_alone(self, x: Tensor) -> Tensor:
        """Returns the result on an axis of size 1: the input, or zeros of a ppermute.

        It is a copy where a larger axis would make one, so that it may be written in
        place on an axis of any size.
        """
        if self.collective is None:
            return x
        x, operation = self._move_dim_first(x), OPERATIONS[self.collective]
        is_reduction = operation.fold is not None
        return x.clone() if is_reduction else operation.combine([x], **self.kwargs)[0]

    def apply_to_all(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Applies the map to all ranks' inputs at once: the reference semantics."""
        n = len(xs)
        # `combine` takes two ranks or more, and a local map has none.
        if self.collective is None or n == 1:
            ys = [self.apply_alone(x) for x in xs]
        else:
            sent = [self.prepare_input(x) for x in xs]
            ys = OPERATIONS[self.collective].combine(sent, **self.kwargs)
        return [
            self.make_result(y, x, n, i)
            for i, (y, x) in enumerate(zip(ys, xs, strict=True))
        ]
