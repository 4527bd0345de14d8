"""Different optimizers for different leaves, told apart by path and global shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsfunc import tree
from fsfunc.optim.base import Optimizer
from fsfunc.optim.leafwise import Mask, Tree, along, paths_of, trainable
from fsfunc.sharded import is_sharded

Labels = Callable[[str, Any], str | None]  # (path, leaf) -> which optimizer, if any


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
            gradient; a state of other labels.

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

    def labelled(params: Tree) -> list[str | None]:
        leaves, treedef = tree.flatten(params, is_sharded)
        found: list[str | None] = []
        for path, leaf in zip(paths_of(treedef), leaves, strict=True):
            label = labels(path, leaf) if trainable(leaf) else None
            if label is not None and label not in optimizers:
                raise ValueError(
                    f"{path!r} is labelled {label!r}, which names no optimizer: "
                    f"there are {list(optimizers)}; None freezes a leaf"
                )
            found.append(label)
        return found

    def init(params: Tree) -> dict[str, Any]:
        found = labelled(params)
        return {
            label: optimizer.init(_only(params, params, found, label))
            for label, optimizer in optimizers.items()
        }

    def parts(grads: Tree, states: Any, params: Tree, found: list[str | None]):
        """(label, its gradients, its state, its parameters) for each optimizer."""
        if set(states) != set(optimizers):
            raise ValueError(
                f"the state has the labels {list(states)}, the optimizers have "
                f"{list(optimizers)}: make it with this partition's own init(params)"
            )
        like = grads if params is None else params
        treedef = tree.flatten(like, is_sharded)[1]
        given = zip(found, along(like, treedef, grads, "gradients"), strict=True)
        if any(found) and all(label is None or g is None for label, g in given):
            raise ValueError(
                "none of the leaves to train has a gradient; a chain of two masked "
                "optimizers gives this: write partition({label: optimizer}, labels)"
            )
        return [
            (
                label,
                _only(like, grads, found, label),
                states[label],
                None if params is None else _only(params, params, found, label),
            )
            for label in optimizers
        ]

    def update(grads: Tree, states: Any, params: Tree = None):
        like = grads if params is None else params
        found = labelled(like)
        done = {
            label: optimizers[label].update(g, s, p)
            for label, g, s, p in parts(grads, states, params, found)
        }
        updates = {label: u for label, (u, _) in done.items()}
        return (
            _merged(like, found, updates, frozen=None),
            {label: state for label, (_, state) in done.items()},
        )

    def prepare(grads: Tree, states: Any, params: Tree):
        found = labelled(params)
        commits = {
            label: optimizers[label].prepare(g, s, p)
            for label, g, s, p in parts(grads, states, params, found)
        }

        def finish():
            done = {label: commit() for label, commit in commits.items()}
            new = {label: p for label, (p, _) in done.items()}
            return (
                _merged(params, found, new, frozen=params),
                {label: state for label, (_, state) in done.items()},
            )

        return finish

    return Optimizer(init, update, prepare=prepare)


def _only(like: Tree, values: Tree, found: list[str | None], label: str) -> Tree:
    """``values``, with None in place of all leaves that are labelled otherwise."""
    treedef = tree.flatten(like, is_sharded)[1]
    column = along(like, treedef, values, "gradients")
    return tree.unflatten(
        treedef,
        [x if its == label else None for x, its in zip(column, found, strict=True)],
    )


def _merged(
    like: Tree, found: list[str | None], values: Mapping[str, Tree], frozen: Tree
) -> Tree:
    """By leaf, what the tree of its label holds; what ``frozen`` does without one."""
    leaves, treedef = tree.flatten(like, is_sharded)
    columns: dict[str | None, list[Any]] = {
        label: along(like, treedef, part, "updates") for label, part in values.items()
    }
    kept = [None] * len(leaves) if frozen is None else leaves
    return tree.unflatten(
        treedef,
        [
            kept[i] if label is None else columns[label][i]
            for i, label in enumerate(found)
        ],
    )
