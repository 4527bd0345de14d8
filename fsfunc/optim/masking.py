"""Different optimizers for different leaves, by path and global shape.

Each optimizer sees the whole tree with None in place of the leaves of others: None is
no leaf to update, so norms and moments are of its own leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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
    State,
    begin_step,
    finish_step,
    from_phases,
    optimizer_factory,
)
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf

Labels = Callable[[str, Leaf], str | None]  # (path, leaf) -> which optimizer, if any


@optimizer_factory
def masked(optimizer: Optimizer, mask: Mask) -> Optimizer:
    """Trains the leaves where ``mask(path, leaf)`` by ``optimizer``, and no others.

    The other leaves are frozen: their update is None, they have no moments, and take no
    part in what ``optimizer`` reduces over the tree, such as a global norm. For two
    optimizers over one tree use `partition`: a chain of two of these would train
    nothing, and raises.

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
    """Trains each leaf by the optimizer that its label names.

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
    are_elementwise = all(x.elementwise for x in optimizers.values())
    functions = _PartitionFunctions(optimizers, labels)
    return from_phases(functions.init, functions.phases, elementwise=are_elementwise)


def frozen_paths(optimizer: Optimizer, params: Tree) -> Iterator[str]:
    """Yields the paths of leaves that a `masked` or `partition` in it freezes."""
    arguments = dict(optimizer.configuration)
    if (select := arguments.get(_SELECTORS.get(optimizer.called, ""))) is not None:
        paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
        for path, leaf in zip(paths, leaves, strict=True):
            if trainable(leaf) and select(path, leaf) in (None, False):
                yield path
    is_optimizer = lambda x: isinstance(x, Optimizer)  # noqa: E731
    values = list(arguments.values())
    for inner in filter(is_optimizer, tree.leaves(values, is_optimizer)):
        yield from frozen_paths(inner, params)


# By function, the argument that selects leaves.
_SELECTORS = {"masked": "mask", "partition": "labels"}


@dataclass(frozen=True, eq=False)
class _LabelledTree:
    """A tree, and the label of each of its leaves: which optimizer has it."""

    treedef: tree.TreeDef
    leaves: list[Leaf]
    labels: list[str | None]

    def only(self, label: str, values: Tree, title: str) -> Tree:
        """Returns ``values`` with None in place of leaves with another label.

        Args:
            title: what errors call ``values``.
        """
        mask = [other == label for other in self.labels]
        return select_leaves(self.treedef, mask, values, title=title)

    def merge(self, trees: Mapping[str, Tree], frozen: list[Leaf]) -> Tree:
        """Returns each leaf from the tree of its label; from ``frozen`` without one."""
        columns = {
            label: flatten_like(self.treedef, part, "updates")
            for label, part in trees.items()
        }
        leaves = [
            frozen[i] if label is None else columns[label][i]
            for i, label in enumerate(self.labels)
        ]
        return tree.unflatten(self.treedef, leaves)


@dataclass(frozen=True, eq=False)
class _PartitionFunctions:
    """The ``init`` and ``phases`` of a `partition`."""

    optimizers: Mapping[str, Optimizer]
    labels: Labels

    def label_leaves(self, params: Tree) -> _LabelledTree:
        leaves, treedef = tree.flatten(params, is_sharded)
        labels: list[str | None] = []
        for path, leaf in zip(paths_of(treedef), leaves, strict=True):
            label = self.labels(path, leaf) if trainable(leaf) else None
            if label is not None and label not in self.optimizers:
                raise ValueError(
                    f"{path!r} is labelled {label!r}, which names no optimizer: "
                    f"there are {list(self.optimizers)}; None freezes a leaf"
                )
            labels.append(label)
        return _LabelledTree(treedef, leaves, labels)

    def init(self, params: Tree) -> dict[str, State]:
        labelled = self.label_leaves(params)
        return {
            label: optimizer.init(labelled.only(label, params, "parameters"))
            for label, optimizer in self.optimizers.items()
        }

    def split_arguments(
        self,
        labelled: _LabelledTree,
        grads: Tree,
        states: Mapping[str, State],
        params: Tree,
    ) -> dict[str, tuple[Tree, State, Tree]]:
        """Returns by label the (gradients, state, parameters) of its optimizer."""
        if set(states) != set(self.optimizers):
            raise ValueError(
                f"the state has the labels {list(states)}, the optimizers have "
                f"{list(self.optimizers)}: make it with this partition's own "
                "init(params)"
            )
        labels = labelled.labels
        grad_leaves = flatten_like(labelled.treedef, grads, "gradients")
        pairs = zip(labels, grad_leaves, strict=True)
        if any(labels) and all(label is None or g is None for label, g in pairs):
            raise ValueError(
                "none of the leaves to train has a gradient; a chain of two masked "
                "optimizers gives this: write partition({label: optimizer}, labels)"
            )
        return {
            label: (
                labelled.only(label, grads, "gradients"),
                states[label],
                None if params is None else labelled.only(label, params, "parameters"),
            )
            for label in self.optimizers
        }

    def phases(
        self,
        grads: Tree,
        states: Mapping[str, State],
        params: Tree,
        returns_params: bool,
    ) -> Phases:
        labelled = self.label_leaves(grads if params is None else params)
        arguments = self.split_arguments(labelled, grads, states, params)
        # All of them check and reduce before any of them writes.
        steps = {
            label: begin_step(self.optimizers[label].phases(*args, returns_params))
            for label, args in arguments.items()
        }
        yield
        ended = {label: finish_step(step) for label, step in steps.items()}
        frozen = labelled.leaves if returns_params else [None] * len(labelled.leaves)
        trees = {label: new for label, (new, _) in ended.items()}
        merged = labelled.merge(trees, frozen)
        return merged, {label: state for label, (_, state) in ended.items()}
