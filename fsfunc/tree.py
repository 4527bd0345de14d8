"""Trees of values: flattened, mapped, named by path and compared.

The one file that knows torch's pytree too. optree alone decides the order of leaves:
it sorts the keys of a dict, so that two ranks that built one in another order agree,
and it takes None for a node without leaves. torch's pytree does neither; it only
learns of the nodes registered here, so that `torch.func` sees through them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import optree
import torch.utils._pytree as torch_pytree
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE

from fsfunc.structure import (
    IsLeaf,
    Node,
    Tree,
    TreeDef,
    TreeMismatch,
    differences,
    message,
    path_of,
)


def flatten(tree: Tree, is_leaf: IsLeaf | None = None) -> tuple[list[Any], TreeDef]:
    """Return the leaves of `tree` and the structure that holds them.

    Args:
        tree: any nesting of dicts, lists, tuples, named tuples and registered nodes;
            None holds nothing, anything else is a leaf.
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
    return optree.tree_flatten(tree, is_leaf)


def unflatten(treedef: TreeDef, leaves: Any) -> Tree:
    """Return the tree of structure `treedef` that holds `leaves`: undoes `flatten`.

    Raises:
        ValueError: not as many leaves as the structure holds.

    >>> unflatten(flatten((0, {"w": 0}))[1], [1.5, 2.5])
    (1.5, {'w': 2.5})
    """
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Tree, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Return the leaves of `tree`, in the order of `flatten`.

    >>> leaves({"b": 1, "a": (2, None)})
    [2, 1]
    """
    return optree.tree_leaves(tree, is_leaf)


def paths(tree: Tree, is_leaf: IsLeaf | None = None) -> list[str]:
    """Return one path for each leaf of `tree`, in the order of `flatten`.

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
    """Return the paths and the leaves of `tree`, and its structure.

    >>> flatten_with_paths({"w": 1, "b": 2})[:2]
    (['b', 'w'], [2, 1])
    """
    values, treedef = flatten(tree, is_leaf)
    return [path_of(accessor) for accessor in treedef.accessors()], values, treedef


def map(
    fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf | None = None
) -> Tree:
    """Return a tree like `tree` with `fn(leaf, *others)` in place of each leaf.

    Args:
        fn: takes a leaf and, from each of `rest`, what lies at the same place.
        tree: gives the structure.
        rest: trees that have this structure; they may go on below a leaf of `tree`.
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
    """Return a tree like `tree` with `fn(path, leaf, *others)` in place of each leaf.

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
    """Return None if the two trees have one structure; leaves are not compared.

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
    fsfunc.structure.TreeMismatch: ... the root: expected keys ['b', 'w'], found ['w']
    """
    if flatten(expected, is_leaf)[1] == flatten(actual, is_leaf)[1]:
        return
    verb = "do" if what.endswith("s") and not what.endswith("ss") else "does"
    found = list(differences(expected, actual, is_leaf, Node.same))
    raise TreeMismatch(message(f"{what} {verb} not match {against}", found))


def register_node(
    cls: type[Any],
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Return None, with `cls` known as a node to optree (everywhere) and to torch.

    Args:
        cls: the class; its subclasses stay leaves.
        flatten: value -> (children, static data); static data are compared by `==`.
        unflatten: (static data, children) -> value, for children of any kind.
        names: the attribute names of the children, for paths. Without them a single
            child adds nothing to a path, and several are numbered.

    A second registration of the same class changes nothing, so that a module may be
    run again.

    >>> class Celsius:
    ...     def __init__(self, degrees):
    ...         self.degrees = degrees
    >>> register_node(Celsius, lambda c: ([c.degrees], None), lambda _, c: Celsius(*c))
    >>> leaves([Celsius(20), 1]), paths([Celsius(20), 1])
    ([20, 1], ['0', '1'])
    """

    def flatten_named(value: Any) -> tuple[tuple[Any, ...], Any, Any]:
        children, static = flatten(value)
        if names is not None:
            return tuple(children), static, tuple(names)
        # path_of leaves out a component that is None.
        return tuple(children), static, (None,) if len(children) == 1 else None

    def flatten_list(value: Any) -> tuple[list[Any], Any]:
        children, static = flatten(value)
        return list(children), static

    if optree.register_pytree_node.get(cls) is None:
        optree.register_pytree_node(
            cls,
            flatten_named,
            lambda static, children: unflatten(static, tuple(children)),
            path_entry_type=optree.AutoEntry if names is None else optree.GetAttrEntry,
            namespace=EVERYWHERE,
        )
    if cls not in torch_pytree.SUPPORTED_NODES:
        torch_pytree.register_pytree_node(
            cls,
            flatten_list,
            lambda children, static: unflatten(static, tuple(children)),
        )


def refuse(cls: type[Any], why: Callable[[Any], Any]) -> None:
    """Return None, with torch's own trees raising where one holds a `cls`.

    ``why(value)`` raises. To us a `cls` stays a leaf.
    """
    torch_pytree.register_pytree_node(
        cls, lambda value: (why(value), None), lambda children, static: None
    )


def adopt(cls: type[Any]) -> bool:
    """Return whether torch's pytree knows `cls`; optree then knows it too.

    Of a mapping the children are its values, and their paths its keys.

    >>> adopt(dict), adopt(object)
    (True, False)
    """
    node = torch_pytree.SUPPORTED_NODES.get(cls)
    if node is None:
        return False

    def flatten_named(value: Any) -> tuple[tuple[Any, ...], Any, Any]:
        children, context = node.flatten_fn(value)
        keys = tuple(value) if issubclass(cls, Mapping) else None
        # A list of keys could not be hashed.
        static = (True, tuple(context)) if type(context) is list else (False, context)
        return tuple(children), static, keys

    def unflatten(static: Any, children: Any) -> Any:
        listed, context = static
        return node.unflatten_fn(list(children), list(context) if listed else context)

    if optree.register_pytree_node.get(cls) is None:
        optree.register_pytree_node(
            cls, flatten_named, unflatten, namespace=EVERYWHERE,
            path_entry_type=optree.AutoEntry,
        )  # fmt: skip
    return True


def _flatten_up_to(
    treedef: TreeDef, tree: Tree, other: Tree, is_leaf: IsLeaf | None
) -> list[Any]:
    try:
        return treedef.flatten_up_to(other)
    except ValueError as error:
        found = list(differences(tree, other, is_leaf, Node.leads))
        if not found:  # the tree's own flatten function raised
            raise
        raise TreeMismatch(
            message("a tree to map over does not match the first", found)
        ) from error
