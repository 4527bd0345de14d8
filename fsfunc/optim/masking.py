"""Different optimizers for different leaves, by path and global shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsfunc import tree
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    flatten_like,
    paths_of,
    select_leaves,
    trainable,
)
from fsfunc.optim.optimizer import (
    Optimizer,
    Phases,
    begin_step,
    finish_step,
    from_phases,
    optimizer_factory,
)
from fsfunc.sharded.leaf import is_sharded

Labels = Callable[[str, Any], str | None]  # (path, leaf) -> which optimizer, if any


@optimizer_factory
def masked(optimizer: Optimizer, mask: Mask) -> Optimizer:
    """The optimizer that trains the leaves where ``mask(path, leaf)``, and no others.

    The others are frozen: None for an update, no moments, and no part in what
    ``optimizer`` reduces over the tree, such as a global norm. For two optimizers over
    one tree take `partition`: a chain of two of these would train nothing, and raises.

    Returns:
        the optimizer; its state is ``{"trained": state of optimizer}``.

    Raises:
        ValueError: no leaf that the mask selects has a gradient.

    Cost: that of ``optimizer`` on those leaves. A flat buffer that the mask cuts is
    visited leaf by leaf.

    >>> import torch
    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = masked(sgd(1.0), lambda path, leaf: path != "frozen")
    >>> params = {"frozen": torch.ones(1), "w": torch.ones(1)}
    >>> optimizer.apply(params, optimizer.init(params), params)[0]
    {'frozen': tensor([1.]), 'w': tensor([0.])}
    """
    return partition(
        {"trained": optimizer},
        lambda path, leaf: "trained" if mask(path, leaf) else None,
    )


@optimizer_factory
def partition(optimizers: Mapping[str, Optimizer], labels: Labels) -> Optimizer:
    """The optimizer that gives each leaf to the one that its label names.

    Args:
        optimizers: by label.
        labels: ``labels(path, leaf)`` names the optimizer of a floating leaf, by its
            path and global shape, alike on every rank; None freezes the leaf.

    Returns:
        the optimizer; its state has the state of each by its label.

    Raises:
        ValueError: a label that names no optimizer; no leaf with both a label and a
            gradient; a state of other labels; an optimizer with a say in
            how gradients are taken.

    Cost: the sum of theirs on their leaves; all collectives come before the first
    write. A flat buffer that the labels cut is visited leaf by leaf.

    >>> import torch
    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = partition(
    ...     {"matrix": sgd(0.5), "other": sgd(0.1)},
    ...     lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
    ... )
    >>> params = {"b": torch.ones(1), "w": torch.ones(1, 1)}
    >>> optimizer.apply(params, optimizer.init(params), params)[0]
    {'b': tensor([0.9000]), 'w': tensor([[0.5000]])}
    """

    for label, optimizer in optimizers.items():
        if optimizer.interprets is not None:
            raise ValueError(
                f"the optimizer of {label!r} takes the gradients of all leaves in a "
                "way of its own, as loss_scale does: put it around the partition"
            )
    each = all(x.elementwise for x in optimizers.values())
    f = _PartitionFunctions(optimizers, labels)
    return from_phases(f.init, f.phases, elementwise=each)


def frozen_paths(optimizer: Optimizer, params: Tree) -> Iterator[str]:
    """The paths of leaves that a `masked` or a `partition` within freezes."""
    known = dict(optimizer.configuration)
    if (chosen := known.get(_SELECTORS.get(optimizer.called, ""))) is not None:
        paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
        for path, leaf in zip(paths, leaves, strict=True):
            if trainable(leaf) and chosen(path, leaf) in (None, False):
                yield path
    is_one = lambda x: isinstance(x, Optimizer)  # noqa: E731
    for inner in filter(is_one, tree.leaves(list(known.values()), is_one)):
        yield from frozen_paths(inner, params)


_SELECTORS = {"masked": "mask", "partition": "labels"}


@dataclass(frozen=True, eq=False)
class _LabelledTree:
    """A tree whose leaves belong to optimizers, by label."""

    treedef: tree.TreeDef
    leaves: list[Any]
    labels: list[str | None]

    def only(self, label: str, values: Tree, what: str) -> Tree:
        """``values``, with None in place of all leaves that are labelled otherwise."""
        mine = [its == label for its in self.labels]
        return select_leaves(self.treedef, mine, values, title=what)

    def merged(self, values: Mapping[str, Tree], frozen: list[Any]) -> Tree:
        """By leaf, what the tree of its label holds; of ``frozen`` without one."""
        columns = {
            k: flatten_like(self.treedef, part, "updates") for k, part in values.items()
        }
        merged = [
            frozen[i] if label is None else columns[label][i]
            for i, label in enumerate(self.labels)
        ]
        return tree.unflatten(self.treedef, merged)


@dataclass(frozen=True, eq=False)
class _PartitionFunctions:
    """The functions of such an optimizer."""

    optimizers: Mapping[str, Optimizer]
    labels: Labels

    def parted(self, params: Tree) -> _LabelledTree:
        leaves, treedef = tree.flatten(params, is_sharded)
        found: list[str | None] = []
        for path, leaf in zip(paths_of(treedef), leaves, strict=True):
            label = self.labels(path, leaf) if trainable(leaf) else None
            if label is not None and label not in self.optimizers:
                raise ValueError(
                    f"{path!r} is labelled {label!r}, which names no optimizer: "
                    f"there are {list(self.optimizers)}; None freezes a leaf"
                )
            found.append(label)
        return _LabelledTree(treedef, leaves, found)

    def init(self, params: Tree) -> dict[str, Any]:
        parts = self.parted(params)
        return {
            label: optimizer.init(parts.only(label, params, "parameters"))
            for label, optimizer in self.optimizers.items()
        }

    def shares(self, parts: _LabelledTree, grads: Tree, states: Any, params: Tree):
        """By label, the gradients, state and parameters of its optimizer."""
        if set(states) != set(self.optimizers):
            raise ValueError(
                f"the state has the labels {list(states)}, the optimizers have "
                f"{list(self.optimizers)}: make it with this partition's own "
                "init(params)"
            )
        found = flatten_like(parts.treedef, grads, "gradients")
        given = zip(parts.labels, found, strict=True)
        if any(parts.labels) and all(label is None or g is None for label, g in given):
            raise ValueError(
                "none of the leaves to train has a gradient; a chain of two masked "
                "optimizers gives this: write partition({label: optimizer}, labels)"
            )
        return {
            label: (
                parts.only(label, grads, "gradients"),
                states[label],
                None if params is None else parts.only(label, params, "parameters"),
            )
            for label in self.optimizers
        }

    def phases(
        self, grads: Tree, states: Any, params: Tree, returns_params: bool
    ) -> Phases:
        parts = self.parted(grads if params is None else params)
        shares = self.shares(parts, grads, states, params)
        steps = {
            k: begin_step(self.optimizers[k].phases(*x, returns_params))
            for k, x in shares.items()
        }
        yield
        done = {label: finish_step(step) for label, step in steps.items()}
        frozen = parts.leaves if returns_params else [None] * len(parts.leaves)
        merged = parts.merged({k: new for k, (new, _) in done.items()}, frozen)
        return merged, {label: state for label, (_, state) in done.items()}
