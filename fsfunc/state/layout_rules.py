"""A table of path patterns that says how leaves are split over axes of the mesh.

It is the ``layouts=`` of ``place`` and ``init_state``, such as
``{"blocks/*/up": Split(1, "model"), "extra/h": Own("data")}``. The layer functions know
what to do with a leaf that is split: over an axis that splits the work of one loss
(tensor parallelism), or over an axis of ``shard``, along which each rank has experts of
its own. What ``shard`` does to a leaf comes on top, over its other axes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.folding import axis_text
from fsfunc.comm.mesh import Mesh
from fsfunc.sharded.layout import Layout, Split
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import Own, describe_tensor
from fsfunc.tree.structure import did_you_mean, matches, nearest
from fsfunc.tree.types import Leaf, PyTree

# By pattern: how the leaves on the paths that it matches are split, outermost first; or
# that they are each rank's own.
LayoutRules = Mapping[str, Split | Sequence[Split] | Own]


def axes_of(rules: LayoutRules) -> tuple[str, ...]:
    """Returns the axes that rules split leaves over, each once, by the rules' names.

    Raises:
        TypeError: a rule that is no `Split`.
    """
    rule_splits = (
        _splits(pattern, rule)
        for pattern, rule in rules.items()
        if not isinstance(rule, Own)
    )
    return tuple(dict.fromkeys(x.axis for splits in rule_splits for x in splits))


def rank_local_of(
    rules: LayoutRules, leaves: Mapping[str, Leaf], axes: Sequence[str], mesh: Mesh
) -> dict[str, Own]:
    """Returns, by path, the leaves that rules say are each rank's own.

    Args:
        leaves: the leaves, by path.
        axes: the axes of the ``shard``, on ``mesh``.

    Raises:
        ValueError: a pattern that matches no path, or an `Own` of other axes.
    """
    rank_local: dict[str, Own] = {}
    for pattern, rule in rules.items():
        if not isinstance(rule, Own):
            continue
        rule_axes = mesh.expand(rule.axes)
        if set(rule_axes) != set(axes):
            unknown = next((a for a in rule_axes if a not in axes), None)
            hint = "" if unknown is None else did_you_mean(unknown, axes)
            raise ValueError(
                f"layouts: {pattern!r} is given {rule}{hint}, and the shard averages "
                f"over {tuple(axes)}: a rank's own value is its own along all of them"
            )
        rule = replace(rule, axes=rule_axes) if mesh.names else rule
        rank_local |= dict.fromkeys(_matching_paths(pattern, leaves), rule)
    return rank_local


def _matching_paths(pattern: str, leaves: Mapping[str, Leaf]) -> list[str]:
    """Returns the paths that a pattern matches.

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
    rules: LayoutRules, leaves: Mapping[str, Leaf], mesh: Mesh, taken: Iterable[str]
) -> dict[str, tuple[Split, ...]]:
    """Returns, by path, how the leaves that a rule names are split.

    Args:
        leaves: by path; those that are split must be whole tensors.
        taken: axes along which nothing can be split.

    Raises:
        TypeError: a rule that is no `Split`, or a leaf that is no tensor.
        ValueError: a pattern that matches no path, two that match one; an axis that the
            mesh does not have, or is taken, or does not divide the dim.
    """
    splits_by_path: dict[str, tuple[Split, ...]] = {}
    pattern_of: dict[str, str] = {}
    for pattern, rule in rules.items():
        if isinstance(rule, Own):
            continue
        paths = _matching_paths(pattern, leaves)
        splits = _with_sizes(pattern, rule, mesh, taken)
        for path in paths:
            if path in pattern_of:
                raise ValueError(
                    f"layouts: {pattern_of[path]!r} and {pattern!r} both match "
                    f"{path!r}: let one pattern name it, with all of its splits"
                )
            pattern_of[path] = pattern
            splits_by_path[path] = splits
            if splits:  # none of them: whole, as `place` may move it
                _check_splits(path, leaves[path], splits)
    return splits_by_path


def _with_sizes(
    pattern: str, rule: Split | Sequence[Split], mesh: Mesh, taken: Iterable[str]
) -> tuple[Split, ...]:
    """Returns the splits of a rule, each with its axis's size.

    A split over a name for several axes is one over each: the first cuts into the
    largest blocks.
    """
    sized = []
    for split in _splits(pattern, rule):
        axes, size = mesh.check(split.axis), mesh.axis_size(split.axis)
        if not set(axes).isdisjoint(taken):
            raise ValueError(
                f'layouts: {pattern!r} splits over "{split.axis}", the axis of a '
                "pipeline: split over another one"
            )
        if split.size not in (0, size):
            raise ValueError(
                f'layouts: {pattern!r} says size {split.size} for axis "{split.axis}", '
                f"which has {size}: leave the size out"
            )
        sized += [replace(split, axis=a, size=mesh.axes[a]) for a in axes]
    return tuple(sized)


def paths_named(rules: LayoutRules, t: PyTree, unsplit: bool = False) -> set[str]:
    """Returns the paths of a tree that rules name.

    Args:
        unsplit: only those that a rule without any split names.
    """
    patterns = [
        p for p, rule in rules.items() if not unsplit or as_hashable(rule) == ()
    ]
    paths = tree.paths(t, is_leaf=is_sharded) if patterns else []
    return {path for path in paths if any(matches(p, path) for p in patterns)}


def as_hashable(rule: Split | Sequence[Split] | Own) -> Hashable:
    """Returns a rule, several splits in a list as a tuple."""
    return tuple(rule) if isinstance(rule, list) else rule


def check_kept(
    splits: Mapping[str, tuple[Split, ...]], mesh: Mesh, taken: Iterable[str]
) -> None:
    """Raises where a leaf that stays split cannot be so on a mesh.

    Args:
        taken: axes along which nothing can be split.
    """
    for path, parts in splits.items():
        for part in parts:
            if part.axis in taken or mesh.axes.get(part.axis) != part.size:
                raise ValueError(
                    f'layouts: {path!r} is split over "{part.axis}" of size '
                    f"{part.size}, which it cannot stay on {mesh}: say how it is to "
                    f"be split there, layouts={{{path!r}: ff.Split(...)}}, or () for "
                    "not at all"
                )


def _splits(pattern: str, rule: Split | Sequence[Split]) -> Sequence[Split]:
    """Returns a rule as several splits."""
    splits = (rule,) if isinstance(rule, Split) else rule
    if not isinstance(splits, (tuple, list)) or not all(
        isinstance(split, Split) for split in splits
    ):
        raise TypeError(
            f"layouts: {pattern!r} is given {rule!r}: give ff.Split(dim, axis), a "
            "tuple of them, or ff.Own(axis)"
        )
    return splits


def _check_splits(path: str, x: Leaf, splits: Sequence[Split]) -> None:
    """Raises where a leaf cannot be split so, evenly."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"layouts: {path!r} is a {type(x).__name__}, not a whole tensor: only these"
            " are split; of what is laid out already the layout stays"
        )
    # `Layout` checks the dims. Beyond that layer functions need blocks of one shape.
    for dim, axes, size in Layout(tuple(x.shape), x.dtype, tuple(splits), path).cuts:
        n = x.shape[dim]
        if n % size:
            leaf = describe_tensor(x.shape, x.dtype, repr(path))
            raise ValueError(
                f"layouts: cannot split {leaf} along dim {dim} over axis "
                f"{axis_text(axes)} of size {size}: {n} is not a multiple of it; make "
                f"it {-(-n // size) * size}"
            )


def check_distinct(paths: Sequence[str], subject: str) -> None:
    """Raises where two leaves of a tree have one path, as "a/b" and "b" of "a".

    Args:
        subject: the tree, for the message.
    """
    if len(set(paths)) == len(paths):
        return
    path = next(path for i, path in enumerate(paths) if path in paths[:i])
    raise ValueError(
        f"two leaves of {subject} have the path {path!r}, by which a leaf is known: a "
        "key of a dict that holds '/' looks like a path, and 0 like '0'; rename one of "
        "them"
    )
