"""A table of path patterns that says how leaves are split over axes of the mesh.

The layer functions know what to do with a leaf that is split: over an axis that splits
the work of one loss (tensor parallelism), or over an axis of ``shard``, along which
each rank has experts of its own. What ``shard`` does to a leaf comes on top, over its
other axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsfunc.comm.mesh import Mesh
from fsfunc.sharded.layout import Layout, Split
from fsfunc.sharded.placements import Own, describe_tensor
from fsfunc.tree.structure import did_you_mean, matches, nearest

# By pattern: how the leaves on the paths that it matches are split, outermost first; or
# that they are each rank's own.
LayoutRules = Mapping[str, Split | Sequence[Split] | Own]


def axes_of(rules: LayoutRules) -> tuple[str, ...]:
    """The axes that rules split leaves over, each once.

    Raises:
        TypeError: a rule that is no `Split`.
    """
    each = (
        _splits(pattern, rule)
        for pattern, rule in rules.items()
        if not isinstance(rule, Own)
    )
    return tuple(dict.fromkeys(split.axis for splits in each for split in splits))


def own_of(
    rules: LayoutRules, leaves: Mapping[str, Any], axes: Sequence[str]
) -> dict[str, Own]:
    """By path, the leaves that rules say are each rank's own.

    Args:
        leaves: by path; ``axes``: those of the shard.

    Raises:
        ValueError: a pattern that matches no path, or an `Own` of other axes.
    """
    found: dict[str, Own] = {}
    for pattern, rule in rules.items():
        if not isinstance(rule, Own):
            continue
        over = (rule.axes,) if isinstance(rule.axes, str) else tuple(rule.axes)
        if set(over) != set(axes):
            unknown = next((a for a in over if a not in axes), None)
            near = "" if unknown is None else did_you_mean(unknown, axes)
            raise ValueError(
                f"layouts: {pattern!r} is given {rule}{near}, and the shard averages "
                f"over {tuple(axes)}: a rank's own value is its own along all of them"
            )
        found |= dict.fromkeys(_matched(pattern, leaves), rule)
    return found


def _matched(pattern: str, leaves: Mapping[str, Any]) -> list[str]:
    """The paths that a pattern matches.

    Raises:
        ValueError: there are none.
    """
    if paths := [path for path in leaves if matches(pattern, path)]:
        return paths
    raise ValueError(
        f"layouts: no leaf's path matches {pattern!r}; there are "
        f"{nearest(pattern, leaves)}. '*' stands for one name of a path, '**' for any "
        "number"
    )


def splits_of(
    rules: LayoutRules, leaves: Mapping[str, Any], mesh: Mesh, taken: Iterable[str]
) -> dict[str, tuple[Split, ...]]:
    """By path, how the leaves that a rule names are split.

    Args:
        leaves: by path; those that are split must be whole tensors.
        taken: axes along which nothing can be split.

    Raises:
        TypeError: a rule that is no `Split`, or a leaf that is no tensor.
        ValueError: a pattern that matches no path, two that match one; an axis that the
            mesh does not have, or is taken, or does not divide the dim.
    """
    found: dict[str, tuple[Split, ...]] = {}
    by: dict[str, str] = {}
    for pattern, rule in rules.items():
        if isinstance(rule, Own):
            continue
        paths = _matched(pattern, leaves)
        splits = _sized(pattern, rule, mesh, taken)
        for path in paths:
            if path in by:
                raise ValueError(
                    f"layouts: {by[path]!r} and {pattern!r} both match {path!r}: let "
                    "one pattern name it, with all of its splits"
                )
            by[path] = pattern
            found[path] = splits
            _check(path, leaves[path], splits)
    return found


def _sized(
    pattern: str, rule: Any, mesh: Mesh, taken: Iterable[str]
) -> tuple[Split, ...]:
    """The splits of a rule, each with its axis's size."""
    sized = []
    for split in _splits(pattern, rule):
        mesh.check(split.axis)
        size = mesh.axes[split.axis]
        if split.axis in taken:
            raise ValueError(
                f'layouts: {pattern!r} splits over "{split.axis}", the axis of a '
                "pipeline: split over another one"
            )
        if split.size not in (0, size):
            raise ValueError(
                f'layouts: {pattern!r} says size {split.size} for axis "{split.axis}", '
                f"which has {size}: leave the size out"
            )
        sized.append(replace(split, size=size))
    return tuple(sized)


def _splits(pattern: str, rule: Any) -> Sequence[Split]:
    """A rule as several splits."""
    splits = (rule,) if isinstance(rule, Split) else rule
    if not isinstance(splits, (tuple, list)) or not all(
        isinstance(split, Split) for split in splits
    ):
        raise TypeError(
            f"layouts: {pattern!r} is given {rule!r}: give ff.Split(dim, axis), a "
            "tuple of them, or ff.Own(axis)"
        )
    return splits


def _check(path: str, x: Any, splits: Sequence[Split]) -> None:
    """Raises where a leaf cannot be split so, evenly."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"layouts: {path!r} is a {type(x).__name__}, not a whole tensor: only these"
            " are split; of what is laid out already the layout stays"
        )
    lengths = list(Layout(tuple(x.shape), x.dtype, tuple(splits), path).shape)
    for split in splits:
        n = lengths[split.dim]
        if n % split.size:
            leaf = describe_tensor(x.shape, x.dtype, repr(path))
            raise ValueError(
                f"layouts: cannot split {leaf} along "
                f'dim {split.dim} over axis "{split.axis}" of size {split.size}: {n} '
                f"is not a multiple of it; make it {-(-n // split.size) * split.size}"
            )
        lengths[split.dim] = n // split.size


def check_apart(paths: Sequence[str], what: str) -> None:
    """Raises where two leaves of a tree have one path, as "a/b" and "b" of "a".

    Args:
        what: the tree, for the message.
    """
    if len(set(paths)) == len(paths):
        return
    path = next(path for i, path in enumerate(paths) if path in paths[:i])
    raise ValueError(
        f"two leaves of {what} have the path {path!r}, by which a leaf is known: a key "
        "of a dict that holds '/' looks like a path, and 0 like '0'; rename one of them"
    )
