"""Trees of values: flattened, mapped, named by path and compared.

optree alone decides the order of leaves: it sorts the keys of a dict, so that two ranks
that built one in another order agree, and it takes None for a node without leaves.
torch's pytree does neither; it only learns of the nodes registered here, so that
`torch.func` sees through them.
"""

from builtins import map as each
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree

from fsfunc.tree.nodes import learn_nodes
from fsfunc.tree.structure import (
    GIVE,
    LEAVES,
    NAMESPACE,
    PLAIN,
    SHOWN,
    IsLeaf,
    Node,
    Tree,
    TreeDef,
    TreeMismatch,
    differences,
    hides,
    mismatch_message,
    paths_of,
)

# Of the types of all leaves at once, by one set operation: these are asked in every
# call of a step, and a loop in Python over all leaves would be slow.
_are_leaves, _are_shown, _are_plain = (
    kinds.issuperset for kinds in (LEAVES, SHOWN, PLAIN)
)


def flatten(tree: Tree, is_leaf: IsLeaf | None = None) -> tuple[list[Any], TreeDef]:
    """Returns the leaves of `tree` and the structure that holds them.

    Args:
        tree: any nesting of dicts, lists, tuples, named tuples, registered nodes, and
            dataclasses that hold a tensor (children are their fields, in their order;
            they are rebuilt without ``__init__``); None holds nothing, anything else is
            a leaf.
        is_leaf: says of a subtree that it counts as one leaf.

    Returns:
        the leaves, dict entries in sorted order, and the structure (hashable where the
        static data of its registered nodes are).

    >>> leaves_, treedef = flatten({"b": [1, None], "a": 2})
    >>> leaves_
    [2, 1]
    >>> unflatten(treedef, "xy")
    {'b': ['y', None], 'a': 'x'}
    """
    flat = optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)
    # A class that is seen for the first time may become a node: then flatten anew.
    while not _are_leaves(each(type, flat[0])) and learn_nodes(flat[0]):
        flat = optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)
    return flat


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """Returns the tree of structure `treedef` that holds `leaves`: undoes `flatten`.

    Raises:
        ValueError: not as many leaves as the structure holds.

    >>> unflatten(flatten((0, {"w": 0}))[1], [1.5, 2.5])
    (1.5, {'w': 2.5})
    """
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Tree, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Returns the leaves of `tree`, in the order of `flatten`.

    >>> leaves({"b": 1, "a": (2, None)})
    [2, 1]
    """
    values = optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)
    while not _are_leaves(each(type, values)) and learn_nodes(values):
        values = optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)
    return values


def fitted(treedef: TreeDef, tree: Tree) -> list[Any] | None:
    """Returns the leaves of `tree` if `treedef` is its structure and all are plain.

    None otherwise, or where that is not known for sure. It costs a twentieth of what a
    walk does, which asks of each leaf whether its class is registered. An ordered dict
    fits a dict: the leaves are right, the structure need not be equal.

    >>> structure = flatten({"b": 1, "a": 2})[1]
    >>> fitted(structure, {"b": 3, "a": 4}), fitted(structure, {"b": 3, "a": [4]})
    ([4, 3], None)
    """
    try:
        values = treedef.flatten_up_to(tree)
    except ValueError:
        return None
    return values if _are_plain(each(type, values)) else None


def shown(
    tree: Tree,
    who: object,
    does: str,
    parts: Sequence[str] = (),
    is_leaf: IsLeaf | None = None,
) -> list[Any]:
    """Returns the leaves of `tree`, none of which hides a tensor.

    Args:
        who: the function that is given the tree, for the message.
        does: what it does, for the message, such as ``"is given"``.
        parts: what the tree's children are called, for the message.
        is_leaf: says of a subtree that it counts as one leaf.

    Raises:
        TypeError: an object holds a tensor that is no leaf of the tree: what is done to
            tensors would pass it by. Functions and modules may hold what they like.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> shown({"x": SimpleNamespace(size=2)}, "unit f", "is given")
    [namespace(size=2)]
    >>> hidden = {"x": SimpleNamespace(y=torch.ones(2))}
    >>> shown(hidden, "unit f", "is given")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    TypeError: unit f is given a SimpleNamespace, at 'x', that holds a tensor out of ...
    """
    values = optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)
    if are_shown(values):
        return values
    return _search_hidden(tree, who, does, parts, is_leaf)


def are_shown(leaves: list[Any]) -> bool:
    """Returns whether no leaf is of a type whose objects may hide tensors.

    >>> are_shown([1, "a"]), are_shown([object])
    (True, True)
    """
    return _are_shown(each(type, leaves))


def _search_hidden(
    tree: Tree, who: object, does: str, parts: Sequence[str], is_leaf: IsLeaf | None
) -> list[Any]:
    """Returns the leaves of a tree, or raises where one hides a tensor: see `shown`."""
    hiding = {type(x) for x in leaves(tree, is_leaf) if hides(x)}
    # Somebody may have registered such a class since it was first seen: look again.
    LEAVES.difference_update(hiding)
    names, values, _ = flatten_with_paths(tree, is_leaf)
    for path, x in zip(names, values, strict=True):
        if type(x) in hiding and hides(x):
            first, *others = path.split("/")
            path = "/".join([parts[int(first)] if parts else first, *others])
            ways = [f"Give {to}(...) of it" for of, to in GIVE if isinstance(x, of)]
            advice = (*ways, "Use a dict, a tuple or a dataclass")[0]
            raise TypeError(
                f"{who} {does} a {type(x).__name__}{path and f', at {path!r},'} that "
                "holds a tensor out of sight: no transform would gather, cast, cut or "
                f"recompute it. {advice}, or say what the class holds by "
                "fsfunc.tree.register_node"
            )
    return values


def paths(tree: Tree, is_leaf: IsLeaf | None = None) -> list[str]:
    """Returns one path for each leaf of `tree`, in the order of `flatten`.

    A path joins dict keys, positions and attribute names by "/"; that of a bare leaf is
    "". A registered node with one unnamed child adds nothing, so a sharded leaf bears
    the same path as its local tensor.

    Cost: one Python string a leaf: for messages and masks, not for each step.

    >>> paths({"blocks": [{"w": 0, "b": 0}], "head": 0})
    ['blocks/0/b', 'blocks/0/w', 'head']
    """
    return flatten_with_paths(tree, is_leaf)[0]


def flatten_with_paths(
    tree: Tree, is_leaf: IsLeaf | None = None
) -> tuple[list[str], list[Any], TreeDef]:
    """Returns the paths and the leaves of `tree`, and its structure.

    >>> flatten_with_paths({"w": 1, "b": 2})[:2]
    (['b', 'w'], [2, 1])
    """
    values, treedef = flatten(tree, is_leaf)
    return paths_of(treedef), values, treedef


def map(
    fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf | None = None
) -> Tree:
    """Returns a tree like `tree` with `fn(leaf, *others)` in place of each leaf.

    Args:
        fn: takes a leaf and, from each of `rest`, what lies at the same place.
        tree: gives the structure.
        rest: trees that have this structure; they may go on below a leaf of `tree`.
            Beside a sharded leaf one may have a number, for all of its elements.
        is_leaf: says of a subtree of `tree` that it counts as one leaf.

    Raises:
        TreeMismatch: one of `rest` lacks the structure; the error names the path.

    >>> map(lambda w, g: w - g, {"w": 3, "b": None}, {"b": None, "w": 1})
    {'w': 2, 'b': None}
    """
    values, treedef = flatten(tree, is_leaf)
    columns = [_flatten_up_to(treedef, tree, other, is_leaf) for other in rest]
    return unflatten(treedef, [fn(*row) for row in zip(values, *columns, strict=True)])


def map_with_path(
    fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf | None = None
) -> Tree:
    """Returns a tree like `tree` with `fn(path, leaf, *others)` in place of each leaf.

    The arguments and errors are those of `map`.

    >>> map_with_path(lambda path, leaf: path, {"blocks": [0, 0]})
    {'blocks': ['blocks/0', 'blocks/1']}
    """
    names = iter(paths(tree, is_leaf))
    return map(lambda *row: fn(next(names), *row), tree, *rest, is_leaf=is_leaf)


def check_same_structure(
    expected: Tree,
    actual: Tree,
    *,
    what: str = "tree",
    against: str = "the expected structure",
    is_leaf: IsLeaf | None = None,
) -> None:
    """Raises unless two trees have one structure; leaves are not compared.

    Args:
        expected: a tree of the structure asked for.
        actual: the tree to check.
        what: what `actual` is, for the message.
        against: what `expected` is, for the message.
        is_leaf: says of a subtree of either that it counts as one leaf.

    Raises:
        TreeMismatch: they differ; the message gives the path of the smallest subtree
            that does, what stands there in each, and how many others there are.

    >>> check_same_structure({"w": 1, "b": 2}, {"w": 1})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    fsfunc.tree.structure.TreeMismatch: ... expected keys ['b', 'w'], found ['w']
    """
    if flatten(expected, is_leaf)[1] == flatten(actual, is_leaf)[1]:
        return
    verb = "do" if what.endswith("s") and not what.endswith("ss") else "does"
    places = list(differences(expected, actual, is_leaf, Node.is_same))
    raise TreeMismatch(mismatch_message(f"{what} {verb} not match {against}", places))


def _flatten_up_to(
    treedef: TreeDef, tree: Tree, other: Tree, is_leaf: IsLeaf | None
) -> list[Any]:
    """Returns what lies in ``other`` at the place of each leaf of ``tree``."""
    try:
        return treedef.flatten_up_to(other)
    except ValueError as error:
        # optree refuses what stands beside a sharded leaf, and says no path.
        places = list(differences(tree, other, is_leaf, Node.maps_onto))
        if not places:
            return _beside(tree, other, is_leaf)
        opening = "a tree to map over does not match the first"
        raise TreeMismatch(mismatch_message(opening, places)) from error


def _beside(tree: Tree, other: Tree, is_leaf: IsLeaf | None) -> list[Any]:
    """Returns what stands beside each leaf, by the nodes' own ``tree_beside``."""
    node = Node.of(tree, is_leaf)
    if node.is_leaf:
        return [other]
    pairs = zip(node.children, node.below(other) or (), strict=True)
    return [x for child, inner in pairs for x in _beside(child, inner, is_leaf)]
