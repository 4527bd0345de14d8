"""Matches the leaves of gradients and moments with those of parameters.

An update of four trees (parameters, gradients and two moments) works on four equally
long lists of flat tensors. `Matched` makes these lists, and refuses trees that do not
fit together. `Matched.map_rule` then runs a rule over them out of place, by operations
that differentiate; `in_place.run_kernel` runs a kernel over them in place. Each
optimizer calls `Matched.of` in each step.
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
    Mask,
    Tree,
    UnpackedTree,
    are_strided,
    describe_leaf,
    first_mismatch,
    flatten_like,
    local_tensor,
    paths_of,
    real_flat_buffers,
    stored_tensors,
    trainable,
)
from fsfunc.optim.places import run_rule
from fsfunc.runtime.host_copies import wait_for_copies
from fsfunc.sharded.complex_numbers import as_real
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf, PyTree

Decay = float | Tensor  # a tensor where the leaves of one buffer decay differently
Rule = Callable[..., Sequence[Tensor]]  # (param, grad, *moments, decay) -> results


_device, _dtype = attrgetter("device"), attrgetter("dtype")
_shape = attrgetter("shape")
_PLAIN_TYPES = {Tensor, torch.nn.Parameter}


class TensorKind(NamedTuple):
    """The properties that some plain tensors, none of them sparse, have in common."""

    device: torch.device
    dtype: torch.dtype
    all_contiguous: bool
    any_requires_grad: bool


# By (number of columns, number of tensors): a check whether tensors are like those of
# an earlier step, and what these had in common.
_KINDS: dict[tuple[int, int], tuple[Callable[..., bool], TensorKind]] = {}


def common_kind(columns: list[list[Leaf]]) -> TensorKind | None:
    """Returns what equally long columns of plain tensors have in common.

    None where they differ in device or dtype, where the columns differ in shapes, or
    where a leaf is no plain tensor.
    """
    tensors = list(chain.from_iterable(columns))
    if not _PLAIN_TYPES.issuperset(map(type, tensors)):
        return None
    counts = len(columns), len(tensors)
    check, kind = _KINDS.get(counts, (None, None))
    # Each step asks this of tensors like those of the step before. A guard of torch's
    # compares all of them in one call: an update of 50 leaves took 0.50 ms without it,
    # and takes 0.42.
    if check is None or not check(*tensors):
        if (kind := _find_kind(columns, tensors)) is not None and not composable():
            if len(_KINDS) >= 64:
                _KINDS.clear()
            _KINDS[counts] = _torch.likeness_check(tensors), kind
    return kind


def _find_kind(columns: list[list[Tensor]], tensors: list[Tensor]) -> TensorKind | None:
    devices, dtypes = set(map(_device, tensors)), set(map(_dtype, tensors))
    first, *others = (list(map(_shape, column)) for column in columns)
    if len(devices) != 1 or len(dtypes) != 1 or any(x != first for x in others):
        return None
    if not are_strided(tensors):
        return None
    all_contiguous = all(map(Tensor.is_contiguous, tensors))
    any_requires_grad = any([x.requires_grad for x in tensors])
    return TensorKind(devices.pop(), dtypes.pop(), all_contiguous, any_requires_grad)


@dataclass(frozen=True)
class Matched:
    """The leaves to update (trainable, with a gradient) of trees that fit together.

    Args:
        treedef: the structure of the parameters.
        trees: of params, grads and each tree of moments, in this order: all leaves.
        active: the positions of the leaves that are updated.
        buffers: of each tree: the active leaves as few flat tensors, `leaves.Buffers`.
        kind: what all leaves have in common, if they are plain tensors of one kind.
    """

    treedef: tree.TreeDef
    trees: list[list[Leaf]]
    active: list[int]
    buffers: list[Any]
    kind: TensorKind | None = None

    # A recording of torch's functions need not see the library read shapes.
    @classmethod
    @_torch.outside_function_modes()
    def of(cls, params: Tree, grads: Tree, *moments: Tree) -> Matched:
        """Matches the trees; each of ``grads`` and ``moments`` is like ``params``.

        A leaf whose gradient is None, or that has no derivative, takes no part. Complex
        leaves take part as real ones, of twice as many elements.

        Raises:
            TreeMismatch: structures, shapes, layouts or devices differ; or one of them
                has real numbers where another has complex ones.
        """
        leaves, treedef = tree.flatten(params, is_sharded)
        titles = ["gradients"] + ["optimizer state"] * len(moments)
        others = [
            flatten_like(treedef, other, title)
            for title, other in zip(titles, (grads, *moments), strict=True)
        ]
        trees = [leaves, *others]
        kind = common_kind(trees)
        # Plain tensors of one kind have been compared already: all are updated.
        if kind is not None and kind.dtype.is_floating_point:
            buffers = [UnpackedTree(column, True) for column in trees]
            return cls(treedef, trees, list(range(len(leaves))), buffers, kind)
        active = [
            i
            for i, (leaf, grad) in enumerate(zip(leaves, others[0], strict=True))
            if grad is not None and trainable(leaf)
        ]
        columns = _select_positions(trees, active)
        for title, column in zip(titles, others, strict=True):
            if (i := first_mismatch(leaves, column, active)) is not None:
                leaf, other, path = leaves[i], column[i], paths_of(treedef)[i]
                raise tree.TreeMismatch(
                    f"{title} do not fit the parameters at {path!r}: expected one like "
                    f"{describe_leaf(leaf)}, found {describe_leaf(other)}"
                    f"{_advice(leaf, other)}"
                )
        return cls(treedef, trees, active, real_flat_buffers(columns))

    @property
    def columns(self) -> list[list[Leaf]]:
        """By tree: the active leaves."""
        return _select_positions(self.trees, self.active)

    @property
    def no_updates(self) -> list[None]:
        """None for each leaf: the update of a leaf that takes no part."""
        return [None] * len(self.trees[0])

    @property
    @_torch.outside_function_modes()
    def differentiated(self) -> bool:
        """Whether operations on the tensors may be differentiated.

        A leaf that requires grad and has no history does not count: it is a parameter
        of this step, and a graph from step to step would hold every step's memory.
        """
        if composable():
            return True
        kind = self.kind
        if not torch.is_grad_enabled() or kind and not kind.any_requires_grad:
            return False
        # The tensors as they are stored: a view would have a ``grad_fn`` of its own.
        tensors = [t for b in self.buffers for t in stored_tensors(b)]
        return any(t.grad_fn is not None for t in tensors if t.requires_grad)

    def decays(self, weight_decay: float, mask: Mask | None) -> list[float]:
        """Returns the weight decay of each active leaf: 0 where not ``mask``."""
        if mask is None or not weight_decay:
            return [weight_decay] * len(self.active)
        paths, leaves = paths_of(self.treedef), self.trees[0]
        return [weight_decay if mask(paths[i], leaves[i]) else 0 for i in self.active]

    def map_rule(
        self,
        rule: Rule,
        decays: Sequence[float] | None = None,
        *,
        returns_params: bool = False,
    ) -> list[Tree]:
        """Runs ``rule(param, grad, *moments, decay)`` on flat tensors, out of place.

        The rule's first result is the update (the new parameter if ``returns_params``),
        the others are the new moments. A leaf that takes no part has None for an
        update, and keeps its parameter and moments. ``decay`` is a number, or a tensor
        where it differs within a flat buffer.

        Returns:
            a tree for each result of the rule.
        """
        decays = [0.0] * len(self.active) if decays is None else decays
        params, grads, *moments = self.buffers
        columns = [b.tensors for b in self.buffers]
        rows = [
            run_rule(rule, row, decay, returns_params)
            for *row, decay in zip(*columns, self.decays_by_buffer(decays), strict=True)
        ]
        # Copies between device and host run on while Python does. From here on anybody
        # may write into tensors of the host that were fetched.
        wait_for_copies()
        # Each result is laid out as what it is the next value of; an update as a grad.
        layouts = [params if returns_params else grads, *moments]
        results = list(zip(*rows, strict=True)) if rows else [()] * len(layouts)
        unchanged = self.trees[0] if returns_params else self.no_updates
        old_leaves = [unchanged, *self.trees[2:]]
        return [
            self.restore(buffers.rebuild(list(new)), old)
            for buffers, new, old in zip(layouts, results, old_leaves, strict=True)
        ]

    def map_params(self, rule: Callable[[Tensor, Tensor], Tensor]) -> Tree:
        """Returns params with ``rule(param, grad)`` where active, out of place."""
        return self.map_rule(lambda p, g, _: [rule(p, g)], returns_params=True)[0]

    @property
    def leaf_positions(self) -> list[list[int]]:
        """By flat tensor: the positions in ``active`` of its leaves."""
        return [positions for positions, _ in self.buffers[0].groups]

    def cut_by_decay(
        self, decays: Sequence[Any]
    ) -> Iterator[tuple[Any, int, int | None]]:
        """Yields what a kernel can update at one decay.

        That is a flat tensor, or a single leaf where decays differ within the tensor:
        a fused kernel takes one decay.

        Args:
            decays: by active leaf.

        Yields:
            (decay, index of the flat tensor, None or the active leaf's position).
        """
        for k, positions in enumerate(self.leaf_positions):
            members = [decays[j] for j in positions]
            if members.count(members[0]) == len(members):
                yield members[0], k, None
            else:
                yield from ((decays[j], k, j) for j in positions)

    def decays_by_buffer(self, decays: Sequence[float]) -> list[Decay]:
        """Returns the decay of each flat tensor's elements, given that of each leaf.

        A tensor of decays where they differ within it, as operations can take one.
        """
        flats, groups = self.buffers[0].tensors, self.leaf_positions
        is_mixed = [len({decays[j] for j in group}) > 1 for group in groups]
        if not any(is_mixed):
            return [decays[group[0]] for group in groups]
        flats = [
            torch.zeros_like(t) if mixed else t
            for t, mixed in zip(flats, is_mixed, strict=True)
        ]
        # Rebuilt leaves are views of these tensors: filling them fills the tensors.
        leaves = self.buffers[0].rebuild(flats)
        for group, mixed in zip(groups, is_mixed, strict=True):
            for j in group if mixed else ():
                as_real(local_tensor(leaves[j])).fill_(decays[j])
        return [
            t if mixed else decays[group[0]]
            for t, mixed, group in zip(flats, is_mixed, groups, strict=True)
        ]

    def restore(self, active: Sequence[Leaf], old: Sequence[Leaf]) -> Tree:
        """Returns a tree like params: ``active`` leaves, and ``old`` ones elsewhere."""
        if len(active) == len(old):
            return tree.unflatten(self.treedef, active)
        leaves = list(old)
        for i, leaf in zip(self.active, active, strict=True):
            leaves[i] = leaf
        return tree.unflatten(self.treedef, leaves)


def wrong_state_error(name: str, state: PyTree, expected: type) -> ValueError:
    """Returns the error for a state that another optimizer has made."""
    return ValueError(
        f"{name} keeps {expected.__name__}, and is given {type(state).__name__}, which "
        "another optimizer has made: make the state by this one's own init(params), as "
        "ff.init_state does"
    )


def _advice(leaf: Leaf, other: Leaf) -> str:
    """Returns how to lay two leaves out alike, if only that differs; otherwise ""."""
    if is_sharded(leaf) != is_sharded(other):
        return _WHOLE_AND_SHARDED
    if is_sharded(leaf) and leaf.layout.shape == other.layout.shape:
        return _OTHER_PLACES.format(leaf.name, other.name)
    return ""


_OTHER_PLACES = (
    ". They are cut at other places, as trees are that were packed apart. Have one lie "
    "as the other: ff.place(step, state, ..., like={{{!r}: {!r}}}), or with the paths "
    "of the two trees, either first"
)
_WHOLE_AND_SHARDED = (
    ". One is whole, the other sharded: ff.init_state(step, params, optimizer, *batch) "
    "makes the optimizer's state from the laid out parameters, as "
    "optimizer.init(placed) does; for a state that was made before, name what has the "
    'layouts of parameters: ff.place(step, state, ..., like={"opt_state/*": "params"})'
)


def _select_positions(trees: list[list[Leaf]], active: list[int]) -> list[list[Leaf]]:
    if len(active) == len(trees[0]):
        return [list(column) for column in trees]
    return [[column[i] for i in active] for column in trees]


def has_decay(decay: Decay) -> bool:
    """Returns whether anything decays; a tensor is not looked into."""
    return isinstance(decay, Tensor) or bool(decay)


def add_decay(g: Tensor, p: Tensor, decay: Decay) -> Tensor:
    """Returns ``g + decay * p``, or ``g`` itself where nothing decays."""
    if isinstance(decay, Tensor):
        return g + decay * p
    return torch.add(g, p, alpha=decay) if decay else g
