"""Leaves of a state matched with those of parameters.

Every optimizer here is elementwise, so what it needs of four trees is four equally long
lists of tensors. `Matched` makes them, refuses trees that do not fit together, and runs
a rule over them out of place, differentiably; `in_place` runs a kernel over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.frames import composable
from fsfunc.optim.leaves import (
    Loose,
    Mask,
    Tree,
    along,
    are_strided,
    first_unfit,
    held,
    local,
    paths_of,
    said,
    split_real,
    trainable,
)
from fsfunc.optim.places import computed
from fsfunc.runtime.host_copies import settle
from fsfunc.sharded.complex_numbers import as_real
from fsfunc.sharded.leaf import is_sharded

Decay = float | Tensor
Rule = Callable[..., Sequence[Tensor]]  # (param, grad, *moments, decay) -> results


_device, _dtype = attrgetter("device"), attrgetter("dtype")
_shape = attrgetter("shape")
_PLAIN = {Tensor, torch.nn.Parameter}


class Kind(NamedTuple):
    """The properties that plain tensors, none of them sparse, have in common."""

    device: torch.device
    dtype: torch.dtype
    dense: bool  # whether all are contiguous
    asks: bool  # whether some ask for a gradient


_KINDS: dict[tuple[int, int], tuple[Callable[..., bool], Kind]] = {}


def one_kind(columns: list[list[Any]]) -> Kind | None:
    """The kind of equally long columns of plain tensors that fit each other.

    None where they are of several kinds, or do not fit. Of tensors like those before it
    is known: each step asks anew.
    """
    every = list(chain.from_iterable(columns))
    if not _PLAIN.issuperset(map(type, every)):
        return None
    counts = len(columns), len(every)
    check, kind = _KINDS.get(counts, (None, None))
    if check is None or not check(*every):
        if (kind := _kind_of(columns, every)) is not None and not composable():
            if len(_KINDS) >= 64:
                _KINDS.clear()
            _KINDS[counts] = _torch.likeness_check(every), kind
    return kind


def _kind_of(columns: list[list[Tensor]], every: list[Tensor]) -> Kind | None:
    devices, dtypes = set(map(_device, every)), set(map(_dtype, every))
    first, *others = (list(map(_shape, column)) for column in columns)
    if len(devices) != 1 or len(dtypes) != 1 or any(x != first for x in others):
        return None
    if not are_strided(every):
        return None
    dense = all(map(Tensor.is_contiguous, every))
    asks = any([x.requires_grad for x in every])
    return Kind(devices.pop(), dtypes.pop(), dense, asks)


@dataclass(frozen=True)
class Matched:
    """The leaves to update (trainable, with a gradient) of trees that fit together."""

    treedef: tree.TreeDef
    trees: list[list[Any]]  # by tree (params, grads, *moments): all leaves
    active: list[int]  # which of them are updated
    buffers: list[Any]  # by tree: the active leaves as few flat tensors
    kind: Kind | None = None  # of all leaves, where these are plain tensors of one kind

    @classmethod
    def of(cls, params: Tree, grads: Tree, *moments: Tree) -> Matched:
        """Match the trees; each of ``grads`` and ``moments`` is like ``params``.

        A leaf whose gradient is None, or that has no derivative, takes no part. Complex
        leaves take part as real ones, of twice as many elements.

        Raises:
            TreeMismatch: structures, shapes, layouts or devices differ; or one of them
                has real numbers where another has complex ones.
        """
        leaves, treedef = tree.flatten(params, is_sharded)
        names = ["gradients"] + ["optimizer state"] * len(moments)
        others = [
            along(treedef, other, what)
            for what, other in zip(names, (grads, *moments), strict=True)
        ]
        trees = [leaves, *others]
        kind = one_kind(trees)
        if kind is not None and kind.dtype.is_floating_point:
            loose = [Loose(x, True) for x in trees]
            return cls(treedef, trees, list(range(len(leaves))), loose, kind)
        active = [
            i
            for i, (leaf, grad) in enumerate(zip(leaves, others[0], strict=True))
            if grad is not None and trainable(leaf)
        ]
        columns = _chosen(trees, active)
        for what, column in zip(names, others, strict=True):
            if (i := first_unfit(leaves, column, active)) is not None:
                at, its = paths_of(treedef)[i], said(column[i])
                raise tree.TreeMismatch(
                    f"{what} do not fit the parameters at {at!r}: expected one like "
                    f"{said(leaves[i])}, found {its}{_way_out(leaves[i], column[i])}"
                )
        return cls(treedef, trees, active, split_real(columns))

    @property
    def columns(self) -> list[list[Any]]:
        """By tree: the active leaves."""
        return _chosen(self.trees, self.active)

    @property
    def nothing(self) -> list[None]:
        """None for each leaf, as what stands where a leaf takes no part."""
        return [None] * len(self.trees[0])

    @property
    def differentiated(self) -> bool:
        """True if operations on the tensors may be differentiated.

        A leaf that merely asks for a gradient does not count: it is a parameter of
        this step, and a graph from step to step would hold every step's memory.
        """
        if composable():
            return True
        if not torch.is_grad_enabled() or self.kind is not None and not self.kind.asks:
            return False
        asking = [t for b in self.buffers for t in held(b) if t.requires_grad]
        return any(t.grad_fn is not None for t in asking)

    def decays(self, weight_decay: float, mask: Mask | None) -> list[float]:
        """The weight decay of each active leaf."""
        if mask is None or not weight_decay:
            return [weight_decay] * len(self.active)
        paths, leaves = paths_of(self.treedef), self.trees[0]
        return [weight_decay if mask(paths[i], leaves[i]) else 0 for i in self.active]

    def composed(
        self,
        rule: Rule,
        decays: Sequence[float] | None = None,
        *,
        as_params: bool = False,
    ) -> list[Tree]:
        """The trees that ``rule(param, grad, *moments, decay)`` gives, out of place.

        The rule's first result is the update (or, ``as_params``, the new parameter),
        the others are the new moments. A leaf that takes no part has None for an
        update, and keeps its parameter and moments. ``decay`` is a number, or a tensor
        where it differs within a flat buffer.
        """
        decays = [0.0] * len(self.active) if decays is None else decays
        params, grads, *moments = self.buffers
        columns = [b.tensors for b in self.buffers]
        rows = [
            computed(rule, row, decay, as_params)
            for *row, decay in zip(*columns, self.spread(decays), strict=True)
        ]
        settle()  # what was brought may be written by anybody from here on
        made = [params if as_params else grads, *moments]
        results = list(zip(*rows, strict=True)) if rows else [()] * len(made)
        kept = [self.trees[0] if as_params else self.nothing, *self.trees[2:]]
        return [
            self.restore(b.rebuild(list(new)), old)
            for b, new, old in zip(made, results, kept, strict=True)
        ]

    def summed(self, rule: Callable[[Tensor, Tensor], Tensor]) -> Tree:
        """Params, with ``rule(param, grad)`` for what is updated, out of place."""
        return self.composed(lambda p, g, _: [rule(p, g)], as_params=True)[0]

    @property
    def members(self) -> list[list[int]]:
        """By flat tensor: the positions in ``active`` of its leaves."""
        return [positions for positions, _ in self.buffers[0].groups]

    def cuts(self, decays: Sequence[Any]) -> Iterator[tuple[Any, int, int | None]]:
        """(decay, flat tensor, None), or leaf by leaf where decays differ within it."""
        for k, members in enumerate(self.members):
            each = [decays[j] for j in members]
            if each.count(each[0]) == len(each):
                yield each[0], k, None
            else:
                yield from ((decays[j], k, j) for j in members)

    def spread(self, decays: Sequence[float]) -> list[Decay]:
        """By flat tensor: the decay of its elements."""
        flats = self.buffers[0].tensors
        members = self.members
        cut = [len({decays[j] for j in group}) > 1 for group in members]
        if not any(cut):
            return [decays[group[0]] for group in members]
        flats = [
            torch.zeros_like(t) if c else t for t, c in zip(flats, cut, strict=True)
        ]
        leaves = self.buffers[0].rebuild(flats)
        for group, c in zip(members, cut, strict=True):
            for j in group if c else ():
                as_real(local(leaves[j])).fill_(decays[j])
        return [
            t if c else decays[group[0]]
            for t, c, group in zip(flats, cut, members, strict=True)
        ]

    def restore(self, active: Sequence[Any], old: Sequence[Any]) -> Tree:
        """A tree like params: the ``active`` leaves, and ``old`` ones elsewhere."""
        if len(active) == len(old):
            return tree.unflatten(self.treedef, active)
        out = list(old)
        for i, leaf in zip(self.active, active, strict=True):
            out[i] = leaf
        return tree.unflatten(self.treedef, out)


def unlike(of: str, state: Any, kind: Any) -> ValueError:
    """The error for a state that another optimizer has made."""
    return ValueError(
        f"{of} keeps {kind.__name__}, and is given {type(state).__name__}, which "
        "another optimizer has made: make the state by this one's own init(params), as "
        "ff.init_state does"
    )


def _way_out(leaf: Any, other: Any) -> str:
    """How leaves are made to lie alike, where that is all that differs; or ""."""
    if is_sharded(leaf) != is_sharded(other):
        return _WHOLE
    if is_sharded(leaf) and leaf.layout.shape == other.layout.shape:
        return _ELSEWHERE.format(leaf.name, other.name)
    return ""


_ELSEWHERE = (
    ". They are cut at other places, as trees are that were packed apart. Have one lie "
    "as the other: ff.place(step, state, ..., like={{{!r}: {!r}}}), or with the paths "
    "of the two trees, either first"
)
_WHOLE = (
    ". One is whole, the other sharded: ff.init_state(step, params, optimizer, *batch) "
    "makes the optimizer's state from the laid out parameters, as "
    "optimizer.init(placed) does; for a state that was made before, name what has the "
    'layouts of parameters: ff.place(step, state, ..., like={"opt_state/*": "params"})'
)


def _chosen(trees: list[list[Any]], active: list[int]) -> list[list[Any]]:
    if len(active) == len(trees[0]):
        return [list(column) for column in trees]
    return [[column[i] for i in active] for column in trees]


def decays(decay: Decay) -> bool:
    """False where nothing decays."""
    return isinstance(decay, Tensor) or bool(decay)


def decayed(g: Tensor, p: Tensor, decay: Decay) -> Tensor:
    """``g + decay * p``; ``g`` itself where nothing decays."""
    if isinstance(decay, Tensor):
        return g + decay * p
    return torch.add(g, p, alpha=decay) if decay else g
