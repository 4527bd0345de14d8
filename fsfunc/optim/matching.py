"""Parameters, gradients and moments matched leaf by leaf, as few flat tensors.

Every optimizer here is elementwise, so what it needs of four trees is four equally long
lists of tensors. `Matched` makes them, refuses trees that do not fit together, and runs
a rule over them in one of two ways: `composed`, out of place and differentiable, and
`fused`, in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.donated import Donation, Everything
from fsfunc.frames import frame
from fsfunc.optim import kernels
from fsfunc.optim.leafwise import (
    Mask,
    Tree,
    along,
    fits,
    local,
    paths_of,
    said,
    split,
    trainable,
    twin,
)
from fsfunc.sharded import is_sharded

Decay = float | Tensor


@dataclass(frozen=True)
class Matched:
    """The leaves to update (trainable, with a gradient) of trees that fit together."""

    treedef: tree.TreeDef
    trees: list[list[Any]]  # by tree (params, grads, *moments): all leaves
    active: list[int]  # which of them are updated
    buffers: list[Any]  # by tree: the active leaves as few flat tensors

    @classmethod
    def of(cls, params: Tree, grads: Tree, *moments: Tree) -> Matched:
        """Match the trees; each of ``grads`` and ``moments`` is like ``params``.

        A leaf whose gradient is None, or that is no floating tensor, takes no part.

        Raises:
            TreeMismatch: structures, shapes, layouts or devices differ.
        """
        leaves, treedef = tree.flatten(params, is_sharded)
        names = ["gradients"] + ["optimizer state"] * len(moments)
        others = [
            along(params, treedef, other, what)
            for what, other in zip(names, (grads, *moments), strict=True)
        ]
        active = [
            i
            for i, (leaf, grad) in enumerate(zip(leaves, others[0], strict=True))
            if grad is not None and trainable(leaf)
        ]
        for what, column in zip(names, others, strict=True):
            for i in active:
                if not fits(leaves[i], column[i]):
                    raise tree.TreeMismatch(
                        f"{what} do not fit the parameters at "
                        f"{paths_of(treedef)[i]!r}: expected one like "
                        f"{said(leaves[i])}, found {said(column[i])}"
                    )
        trees = [leaves, *others]
        buffers = split([[column[i] for i in active] for column in trees])
        return cls(treedef, trees, active, buffers)

    @property
    def differentiated(self) -> bool:
        """Whether somebody may differentiate through what is done with the tensors.

        A leaf that merely asks for a gradient does not count: it is a parameter of
        this step, and a graph from step to step would hold every step's memory.
        """
        if kernels.composable():
            return True
        return torch.is_grad_enabled() and any(
            t.grad_fn is not None for b in self.buffers for t in b.tensors
        )

    def decays(self, weight_decay: float, mask: Mask | None) -> list[float]:
        """The weight decay of each active leaf."""
        if mask is None or not weight_decay:
            return [weight_decay] * len(self.active)
        paths, leaves = paths_of(self.treedef), self.trees[0]
        return [weight_decay if mask(paths[i], leaves[i]) else 0 for i in self.active]

    def composed(
        self,
        rule: Callable[..., Sequence[Tensor]],
        decays: Sequence[float],
        *,
        as_params: bool = False,
    ) -> list[Tree]:
        """The trees that ``rule(param, grad, *moments, decay)`` gives, out of place.

        The rule's first result is the update (or, ``as_params``, the new parameter),
        the others are the new moments. A leaf that takes no part has None for an
        update, and keeps its parameter and moments. ``decay`` is a number, or a tensor
        where it differs within a flat buffer.
        """
        params, grads, *moments = self.buffers
        columns = [b.tensors for b in self.buffers]
        rows = [
            rule(*row, decay)
            for *row, decay in zip(*columns, self._spread(decays), strict=True)
        ]
        made = [params if as_params else grads, *moments]
        results = list(zip(*rows, strict=True)) if rows else [()] * len(made)
        nothing = [None] * len(self.trees[0])
        kept = [self.trees[0] if as_params else nothing, *self.trees[2:]]
        return [
            self._restore(b.rebuild(list(new)), old)
            for b, new, old in zip(made, results, kept, strict=True)
        ]

    def fused(
        self, kernel: Callable[..., None], decays: Sequence[float]
    ) -> Callable[[], list[Tree]]:
        """What writes ``kernel`` into params and moments, and returns them.

        Under `donate` it writes into the tensors given, where nobody else holds their
        memory, else into copies (on fresh memory the page faults cost most, whatever
        the order of copy and update).
        ``kernel(params, grads, *moments, weight_decay=)`` takes lists of dense tensors
        of one dtype on one device, and is called once for each such group.
        """
        donation = frame().donated
        if donation is not None and self._overlap():
            donation = None

        def commit() -> list[Tree]:
            kept = [self.trees[0], *self.trees[2:]]
            taken: tuple[list[Any], list[Any]] = [], []
            with torch.no_grad():
                new = self._writable(kept, donation, taken)
                _count_write([t for _, tensors in new for t in tensors])
                for (_, dtype, decay), rows in self._groups(new, decays).items():
                    _write(kernel, rows, dtype, decay)
            if donation is not None:
                donation.take(*taken)
            return [
                self._restore(leaves, old)
                for (leaves, _), old in zip(new, kept, strict=True)
            ]

        return commit

    def _overlap(self) -> bool:
        """Whether memory to write lies at two places: each then gets its own."""
        params, grads, *moments = self.buffers
        tensors = [t for b in (params, *moments) for t in b.tensors]
        if any(isinstance(t, _torch.FakeTensor) for t in (*tensors, *grads.tensors)):
            return False  # nothing is written, and asking where would raise
        written = [t.data_ptr() for t in tensors if t.numel()]
        read = {t.data_ptr() for t in grads.tensors}
        return len(set(written) - read) < len(written)

    def _writable(
        self,
        columns: list[list[Any]],
        donation: Donation | None,
        taken: tuple[list[Any], list[Any]],
    ) -> list[tuple[list[Any], list[Tensor]]]:
        """By tree to write: its active leaves and its flat tensors, or copies.

        ``taken`` gets the old and the new leaves where memory is written over.
        """
        written = [self.buffers[0], *self.buffers[2:]]
        if donation is None:
            copies = [[t.clone() for t in b.tensors] for b in written]
            return [(b.rebuild(c), c) for b, c in zip(written, copies, strict=True)]
        active = [[column[i] for i in self.active] for column in columns]
        if isinstance(donation, Everything):  # leaves that are recorded stay themselves
            return [(x, b.tensors) for x, b in zip(active, written, strict=True)]
        flats = [b.tensors for b in written]
        donation.look()
        return [
            _over(old, b, tensors, donation.may_write(tensors), taken)
            for old, b, tensors in zip(active, written, flats, strict=True)
        ]

    def _groups(
        self, new: list[tuple[list[Any], list[Tensor]]], decays: Sequence[float]
    ) -> dict[Any, list[list[Tensor]]]:
        """Rows (param, grad, *moments) by device, dtype and decay.

        A flat buffer whose leaves decay differently falls apart into its leaves.
        """
        groups: dict[Any, list[list[Tensor]]] = {}
        grads = [self.trees[1][i] for i in self.active]
        (leaves, flat), *rest = new
        wholes = [flat, self.buffers[1].tensors, *(t for _, t in rest)]
        parts = [leaves, grads, *(x for x, _ in rest)]
        for k, members in enumerate(self._members()):
            first = decays[members[0]]
            if len(members) == 1 or all(decays[j] == first for j in members):
                cuts = [(first, [w[k] for w in wholes])]
            else:
                cuts = [
                    (decays[j], [local(part[j]) for part in parts]) for j in members
                ]
            for decay, row in cuts:
                p, _, *moments = row
                if p.numel():
                    dtype = p.dtype
                    for m in moments:
                        if m.dtype != dtype:
                            dtype = torch.promote_types(dtype, m.dtype)
                    groups.setdefault((p.device, dtype, decay), []).append(row)
        return groups

    def _members(self) -> list[list[int]]:
        """By flat tensor: the positions in ``active`` of its leaves."""
        return [positions for positions, _ in self.buffers[0].groups]

    def _spread(self, decays: Sequence[float]) -> list[Decay]:
        """By flat tensor: the decay of its elements."""
        flats = self.buffers[0].tensors
        members = self._members()
        cut = [len({decays[j] for j in group}) > 1 for group in members]
        if not any(cut):
            return [decays[group[0]] for group in members]
        flats = [
            torch.zeros_like(t) if c else t for t, c in zip(flats, cut, strict=True)
        ]
        leaves = self.buffers[0].rebuild(flats)
        for group, c in zip(members, cut, strict=True):
            for j in group if c else ():
                local(leaves[j]).fill_(decays[j])
        return [
            t if c else decays[group[0]]
            for t, c, group in zip(flats, cut, members, strict=True)
        ]

    def _restore(self, active: Sequence[Any], old: Sequence[Any]) -> Tree:
        """A tree like params: the ``active`` leaves, and ``old`` ones elsewhere."""
        out = list(old)
        for i, leaf in zip(self.active, active, strict=True):
            out[i] = leaf
        return tree.unflatten(self.treedef, out)


def _over(
    old: list[Any],
    buffers: Any,
    tensors: list[Tensor],
    mine: list[bool],
    taken: tuple[list[Any], list[Any]],
) -> tuple[list[Any], list[Tensor]]:
    """New leaves over the memory of the old ones, or over copies; and flat tensors."""
    leaves = list(old)
    if not all(mine):
        pairs = zip(tensors, mine, strict=True)
        tensors = [t if own else t.clone() for t, own in pairs]
        leaves = buffers.rebuild(tensors)
    at: list[int] = []
    for (positions, home), own in zip(buffers.groups, mine, strict=True):
        if not own:
            continue
        at += positions
        if home is None:
            leaves[positions[0]] = twin(old[positions[0]])
            continue
        for j, new in zip(positions, home.renewed().leaves(), strict=True):
            leaves[j] = new
    taken[0].extend(old[j] for j in at)
    taken[1].extend(leaves[j] for j in at)
    return leaves, tensors


def _count_write(tensors: Sequence[Tensor]) -> None:
    """Counts one write more, where a rank holds no element too.

    By the versions `shard` sees whether a gathered buffer is still right, and all ranks
    must come to one answer.
    """
    counted = [t for t in tensors if not t.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def _write(
    kernel: Callable[..., None],
    rows: list[list[Tensor]],
    dtype: torch.dtype,
    decay: float,
) -> None:
    """Run ``kernel`` over the rows; what is not dense or not of ``dtype`` is copied.

    Fused kernels read any tensor as if it were dense: an expanded gradient (that of a
    sum) would give garbage, silently.
    """
    columns = [*zip(*rows, strict=True)]
    work = [[_dense(t, dtype) for t in column] for column in columns]
    kernel(*work, weight_decay=decay)
    del columns[1], work[1]  # the gradients are only read
    for targets, sources in zip(columns, work, strict=True):
        for target, source in zip(targets, sources, strict=True):
            if target is not source:
                target.copy_(source)


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == dtype and x.is_contiguous():
        return x
    return x.to(dtype).contiguous()
