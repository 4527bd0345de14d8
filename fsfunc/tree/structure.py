"""Tree structures: how two differ, and tensors hidden in leaves that are none.

`functions` calls `differences` when a tree does not fit, to name the smallest subtrees
that differ; `hides` finds tensors inside objects that a tree takes for leaves, which no
transform would see. Most leaves are known by their types alone, all of a tree in one
set operation.
"""

import enum
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import optree
import torch

from fsfunc.tree.types import Leaf, PyTree

# Classes that become nodes at first sight are registered in a namespace of our own, so
# that the user may still register them with optree.
NAMESPACE = "fsfunc"

_TENSORS: set[type] = {torch.Tensor, torch.nn.Parameter}
# Types whose values hold no tensor.
_BARE: set[type] = {
    int, float, complex, bool, str, bytes, type, type(None), torch.dtype, torch.device,
    torch.Size, types.FunctionType,
}  # fmt: skip
# Types that hide no tensor: they hold none, or are tensors, or nodes.
SHOWN: set[type] = _BARE | _TENSORS
# Types that nobody can register as nodes later, or be mistaken in.
PLAIN: frozenset[type] = frozenset(
    _TENSORS | {int, float, complex, bool, str, bytes, torch.dtype}
)
# Types that are leaves where they are found, as none is registered as a node.
LEAVES: set[type] = set(SHOWN)


def count_as_leaf(cls: type) -> None:
    """Registers a class as a leaf that hides no tensor."""
    LEAVES.add(cls)
    SHOWN.add(cls)


def is_node(cls: type) -> bool:
    """Returns whether optree flattens values of the class."""
    registered = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    is_tuple = optree.is_namedtuple_class(cls) or optree.is_structseq_class(cls)
    return registered is not None or is_tuple


def is_open(cls: type) -> bool:
    """Returns whether values of the class need no search for hidden tensors.

    Functions and modules hold tensors openly: what calls them uses these.
    """
    if issubclass(cls, (torch.Tensor, enum.Enum, Callable)):
        return not issubclass(cls, _PARAMETERS)
    return not (issubclass(cls, CONTAINERS) or cls.__dictoffset__ or slots_of(cls))


# Modules that nobody calls: what they hold are the leaves of a tree.
_PARAMETERS = (torch.nn.ParameterDict, torch.nn.ParameterList)
# Classes that are no nodes, and what can be made of one, for advice.
GIVE: tuple[tuple[type, str], ...] = (
    (Mapping, "dict"), (_PARAMETERS[0], "dict"), (_PARAMETERS[1], "list"),
)  # fmt: skip
CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset, deque, Mapping)


def slots_of(cls: type) -> list[str]:
    """Returns the attributes that a class has in slots, those of its bases too."""
    return [
        name
        for c in cls.__mro__
        if vars(c).get("__slots__")
        for name, x in vars(c).items()
        if type(x) is types.MemberDescriptorType
    ]


def hides(x: Leaf) -> bool:
    """Returns whether a leaf, which is no tensor, holds one out of sight."""
    return type(x) not in SHOWN and holds_tensor(x)


def holds_tensor(x: Leaf, depth: int = 6) -> bool:
    """Returns whether an object holds a tensor, not within functions or modules.

    Args:
        depth: how many objects deep to look; objects may refer to each other in rings.
    """
    cls = type(x)
    if cls in _BARE:
        return False
    if isinstance(x, torch.Tensor):
        return True
    if is_open(cls):
        _BARE.add(cls)
        return False
    inner = _inside(x) if depth else ()
    if _BARE.issuperset(map(type, inner)):
        return False
    return any(holds_tensor(y, depth - 1) for y in inner)


def _inside(x: Leaf) -> Sequence[Any]:
    """Returns what an object holds: its children, items and attributes."""
    cls = type(x)
    if is_node(cls):
        return optree.tree_leaves(x, lambda y: y is not x, namespace=NAMESPACE)
    items = ()
    if isinstance(x, CONTAINERS):
        items = x.values() if isinstance(x, Mapping) else x
    slots = [getattr(x, name, None) for name in slots_of(cls)]
    return [*items, *getattr(x, "__dict__", {}).values(), *slots]


Tree = PyTree
TreeDef = optree.PyTreeSpec
IsLeaf = Callable[[Any], bool]

KEYS_SHOWN = 8  # of longer lists a message says what is missing, and what is extra


class TreeMismatch(ValueError):
    """Two trees that should have one structure do not."""


def paths_of(treedef: TreeDef) -> list[str]:
    """Returns where each leaf lies, its steps joined by "/"."""
    return list(map("/".join, _steps(treedef)))


def _steps(treedef: TreeDef) -> list[tuple[str, ...]]:
    """Returns the steps to each leaf, found node by node.

    ``treedef.accessors()`` says the same, and makes an object a leaf, which is slow.
    """
    steps: list[tuple[str, ...]] = [()] if treedef.is_leaf() else []
    for name, child in zip(_names(treedef), treedef.children(), strict=True):
        first = () if name is None else (name,)
        below = [()] if child.is_leaf() else _steps(child)
        steps += [first + others for others in below]
    return steps


def _names(treedef: TreeDef) -> Iterable[str | None]:
    """Returns the steps to the children of a node; None for a step without a name."""
    cls: Any = treedef.type
    if cls in (None, dict, list, tuple):
        return map(str, treedef.entries())
    node: Any = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    kind = node.path_entry_type
    return [_component(kind(x, cls, treedef.kind)) for x in treedef.entries()]


def _component(entry: optree.PyTreeEntry) -> str | None:
    if isinstance(entry, optree.NamedTupleEntry | optree.StructSequenceEntry):
        return entry.field
    if entry.entry is None and isinstance(entry, optree.FlattenedEntry):
        return None  # the inside of a registered node with one unnamed child
    return str(entry.entry)


def matches(pattern: str, path: str, between: str = "/") -> bool:
    """Returns whether a pattern fits a path: name by name, ``**`` any number of names.

    Within a name ``*``, ``?`` and ``[...]`` are what they are in names of files.

    >>> [matches("blocks/*/w[qk]", p) for p in ("blocks/3/wq", "blocks/3/attn/wq")]
    [True, False]
    >>> matches("**.wq", "blocks.3.attn.wq", "."), matches("**/wq", "wq")
    (True, True)
    """
    return _fits(pattern.split(between), path.split(between))


def _fits(patterns: list[str], names: list[str]) -> bool:
    if not patterns:
        return not names
    first, *others = patterns
    if first == "**":
        return any(_fits(others, names[i:]) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], first) and _fits(others, names[1:])


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns, as text, the known names that are most like ``name``.

    >>> nearest("wieght", ["bias", "weight"])
    "'weight' (2 in all)"
    """
    names = list(known)
    similar = get_close_matches(name, names[:1000], 3, 0.4) or names[:3]
    return f"{', '.join(map(repr, similar))} ({len(names)} in all)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence that asks if another name was meant, or "".

    >>> did_you_mean("dota", ["data", "pipe"]), did_you_mean("x", ["data"])
    (' (did you mean "data"?)', '')
    """
    similar = get_close_matches(name, list(known), 1, 0.5)
    return f' (did you mean "{similar[0]}"?)' if similar else ""


class Node(NamedTuple):
    """One level of a tree: what it is, without what lies below.

    A registered class may have, for messages and maps:

    - a method ``tree_text()``, what an error calls one of its values;
    - an attribute ``tree_advice``, what to do where another kind stands in its place;
    - a method ``tree_beside(other)``, which returns what stands beside the children in
      a map, where ``other`` is no such node but fits all the same; else None.
    """

    value: Any
    treedef: TreeDef  # every child a leaf
    children: list[Any]

    @classmethod
    def of(cls, value: Tree, is_leaf: IsLeaf | None) -> "Node":
        """Returns the top level of the tree `value`."""
        if is_leaf is not None and is_leaf(value):
            return cls(value, optree.treespec_leaf(), [value])
        children, treedef = optree.tree_flatten(
            value, lambda v: v is not value, namespace=NAMESPACE
        )
        return cls(value, treedef, children)

    @property
    def components(self) -> list[str]:
        """The path components of the children."""
        return [name or "" for name in _names(self.treedef)]

    @property
    def is_leaf(self) -> bool:
        return self.treedef.is_leaf()

    def is_same(self, other: "Node") -> bool:
        """Returns whether the two levels are alike."""
        return self.treedef == other.treedef

    def maps_onto(self, other: "Node") -> bool:
        """Returns whether `map` may go on from this level into `other`."""
        return self.is_leaf or self.below(other.value) is not None

    def below(self, other: Tree) -> list[Any] | None:
        """Returns what stands beside the children in another tree; None: it differs."""
        beside = getattr(type(self.value), "tree_beside", None)
        if beside is not None and (children := beside(self.value, other)) is not None:
            return children
        try:
            return self.treedef.flatten_up_to(other)
        except ValueError:
            return None

    def __str__(self) -> str:
        value, kind = self.value, type(self.value).__name__
        if (tree_text := getattr(type(value), "tree_text", None)) is not None:
            return tree_text(value)
        if self.is_leaf:
            shape = getattr(value, "shape", None)
            return f"a leaf ({kind}{'' if shape is None else f' {list(shape)}'})"
        if value is None:
            return "None"
        if isinstance(value, Mapping):
            keys = self.treedef.entries()
            hidden = len(keys) - KEYS_SHOWN
            tail = f" and {hidden} more" if hidden > 0 else ""
            return f"{kind} with keys {keys[:KEYS_SHOWN]}{tail}"
        if optree.is_namedtuple(value):
            return f"{kind} with fields {self.components}"
        return f"{kind} of {len(self.children)}"

    def describe_difference(self, actual: "Node") -> str:
        """Returns how the actual level differs from this one, which was expected."""
        kinds = type(self.value), type(actual.value)
        advice = next(filter(None, map(_advice, kinds)), "")
        if advice or kinds[0] is not kinds[1] or self.is_leaf != actual.is_leaf:
            return f"expected {self}, found {actual}{advice and '. '}{advice}"
        if isinstance(self.value, Mapping):
            expected_keys, actual_keys = (
                self.treedef.entries(),
                actual.treedef.entries(),
            )
            if expected_keys != actual_keys:
                return _describe_keys(expected_keys, actual_keys)
        if len(self.children) != len(actual.children):
            return f"expected length {len(self.children)}, found {len(actual.children)}"
        return (
            f"the static data of {kinds[0].__name__} differ: "
            f"expected {self.treedef}, found {actual.treedef}"
        )


def _advice(kind: type) -> str:
    """Returns the advice of a class of nodes on mismatches, or ""."""
    return getattr(kind, "tree_advice", "")


def _describe_keys(expected: list[Any], actual: list[Any]) -> str:
    """Returns how two lists of keys differ."""
    if max(len(expected), len(actual)) <= KEYS_SHOWN:
        return f"expected keys {expected}, found {actual}"
    actual_keys, expected_keys = set(actual), set(expected)
    missing = [key for key in expected if key not in actual_keys]
    extra = [key for key in actual if key not in expected_keys]
    if not missing and not extra:
        i = [a == b for a, b in zip(expected, actual, strict=True)].index(False)
        return f"expected key {expected[i]!r} at position {i}, found {actual[i]!r}"
    cut = slice(KEYS_SHOWN)
    return (
        f"of {len(expected)} keys {len(missing)} missing {missing[cut]}, "
        f"{len(extra)} unexpected {extra[cut]}"
    )


def differences(
    expected: Tree,
    actual: Tree,
    is_leaf: IsLeaf | None,
    alike: Callable[[Node, Node], bool],
    path: str = "",
) -> Iterator[tuple[str, str]]:
    """Yields (path, what differs) for every smallest subtree in which the two differ.

    Args:
        alike: whether two levels count as one, of which what is below is compared.
        path: of these two trees, in larger ones.
    """
    node, other = Node.of(expected, is_leaf), Node.of(actual, is_leaf)
    if not alike(node, other):
        yield path, node.describe_difference(other)
    elif not node.is_leaf:
        below = node.components, node.children, node.below(actual) or ()
        for component, left, right in zip(*below, strict=True):
            inner = "/".join(part for part in (path, component) if part)
            yield from differences(left, right, is_leaf, alike, inner)


def mismatch_message(opening: str, places: list[tuple[str, str]]) -> str:
    """Returns one sentence: the first difference and how many others there are."""
    path, difference = places[0]
    place = repr(path) if path else "the root"
    others = len(places) - 1
    tail = f" (and at {others} more place{'s' if others > 1 else ''})" if others else ""
    return f"{opening} at {place}: {difference}{tail}"
