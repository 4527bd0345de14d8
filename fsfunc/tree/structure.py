"""Tree structures: how two differ, and tensors hidden in leaves that are none.

Most leaves are told by their types alone, all of a tree in one set operation.
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

# Of what is learned at first sight: who registers a class with optree later may.
NAMESPACE = "fsfunc"

_TENSORS = {torch.Tensor, torch.nn.Parameter}
# Types that hold no tensor; those that hide none; those that are leaves where found.
_BARE: set[type] = {
    int, float, complex, bool, str, bytes, type, type(None), torch.dtype, torch.device,
    torch.Size, types.FunctionType,
}  # fmt: skip
SHOWN: set[type] = _BARE | _TENSORS
# Those that nobody can register as nodes' types later, or be mistaken in.
PLAIN = frozenset(_TENSORS | {int, float, complex, bool, str, bytes, torch.dtype})
LEAVES: set[type] = set(SHOWN)


def count_as_leaf(cls: type) -> None:
    """Registers a class as a leaf that hides no tensor."""
    LEAVES.add(cls)
    SHOWN.add(cls)


def is_node(cls: type) -> bool:
    """True if optree flattens values of the class."""
    registered = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    tuples = optree.is_namedtuple_class(cls) or optree.is_structseq_class(cls)
    return registered is not None or tuples


def is_open(cls: type) -> bool:
    """True if values of the class need no search for hidden tensors."""
    if issubclass(cls, (torch.Tensor, enum.Enum, Callable)):
        return not issubclass(cls, _PARAMETERS)
    return not (issubclass(cls, CONTAINERS) or cls.__dictoffset__ or slots_of(cls))


# Modules that nobody calls: what they hold are the leaves of a tree.
_PARAMETERS = (torch.nn.ParameterDict, torch.nn.ParameterList)
# Classes that are no nodes, and what can be made of one.
GIVE = ((Mapping, "dict"), (_PARAMETERS[0], "dict"), (_PARAMETERS[1], "list"))
CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)


def slots_of(cls: type) -> list[str]:
    """The attributes that a class keeps in slots, those of its bases too."""
    return [
        name
        for c in cls.__mro__
        if vars(c).get("__slots__")
        for name, x in vars(c).items()
        if type(x) is types.MemberDescriptorType
    ]


def hides(x: Any) -> bool:
    """Return whether a leaf, which is no tensor, holds one out of sight."""
    return type(x) not in SHOWN and holds(x)


def holds(x: Any, depth: int = 6) -> bool:
    """True if an object holds a tensor, not within functions or modules."""
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
    return any(holds(y, depth - 1) for y in inner)


def _inside(x: Any) -> Sequence[Any]:
    cls = type(x)
    if is_node(cls):
        return optree.tree_leaves(x, lambda y: y is not x, namespace=NAMESPACE)
    items = ()
    if isinstance(x, CONTAINERS):
        items = x.values() if isinstance(x, Mapping) else x
    slots = [getattr(x, name, None) for name in slots_of(cls)]
    return [*items, *getattr(x, "__dict__", {}).values(), *slots]


Tree = Any
TreeDef = optree.PyTreeSpec
IsLeaf = Callable[[Any], bool]

KEYS_SHOWN = 8  # longer lists of keys are told apart by what is missing and extra


class TreeMismatch(ValueError):
    """Two trees that should have one structure do not."""


def paths_of(treedef: TreeDef) -> list[str]:
    """Return where each leaf lies, its steps joined by "/"."""
    return list(map("/".join, _steps(treedef)))


def _steps(treedef: TreeDef) -> list[tuple[str, ...]]:
    """The steps to each leaf, found node by node: an accessor a leaf is slow."""
    found: list[tuple[str, ...]] = [()] if treedef.is_leaf() else []
    for name, child in zip(_names(treedef), treedef.children(), strict=True):
        step = () if name is None else (name,)
        below = [()] if child.is_leaf() else _steps(child)
        found += [step + rest for rest in below]
    return found


def _names(treedef: TreeDef) -> Iterable[str | None]:
    """The steps to the children of a node."""
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
    """Return whether a pattern fits a path: name by name, ``**`` any number of names.

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
    first, *rest = patterns
    if first == "**":
        return any(_fits(rest, names[i:]) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], first) and _fits(rest, names[1:])


def nearest(name: str, known: Iterable[str]) -> str:
    """The names that are most like one that is not among them, as text.

    >>> nearest("wieght", ["bias", "weight"])
    "'weight' (2 in all)"
    """
    names = list(known)
    found = get_close_matches(name, names[:1000], 3, 0.4) or names[:3]
    return f"{', '.join(map(repr, found))} ({len(names)} in all)"


def meant(name: str, known: Iterable[str]) -> str:
    """The one of ``known`` that was perhaps meant, as the end of a sentence, or "".

    >>> meant("dota", ["data", "pipe"]), meant("x", ["data"])
    (' (did you mean "data"?)', '')
    """
    found = get_close_matches(name, list(known), 1, 0.5)
    return f' (did you mean "{found[0]}"?)' if found else ""


class Node(NamedTuple):
    """One level of a tree: what it is, without what lies below.

    A class of nodes may say what one is to a message, by a method ``tree_text``, and
    what to do where another kind stands in its place, by ``tree_advice``. By a method
    ``tree_beside(other)`` it may take what is no such node for its children in a map.
    """

    value: Any
    treedef: TreeDef  # every child a leaf
    children: list[Any]

    @classmethod
    def of(cls, value: Any, is_leaf: IsLeaf | None) -> "Node":
        """Return the top level of the tree `value`."""
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

    def same(self, other: "Node") -> bool:
        """Return whether the two levels are alike."""
        return self.treedef == other.treedef

    def leads(self, other: "Node") -> bool:
        """Return whether `map` may go on from this level into `other`."""
        return self.is_leaf or self.below(other.value) is not None

    def below(self, other: Any) -> list[Any] | None:
        """Return what stands beside the children in another tree; None: it differs."""
        beside = getattr(type(self.value), "tree_beside", None)
        if beside is not None and (found := beside(self.value, other)) is not None:
            return found
        try:
            return self.treedef.flatten_up_to(other)
        except ValueError:
            return None

    def __str__(self) -> str:
        value, kind = self.value, type(self.value).__name__
        if (told := getattr(type(value), "tree_text", None)) is not None:
            return told(value)
        if self.is_leaf:
            shape = getattr(value, "shape", None)
            return f"a leaf ({kind}{'' if shape is None else f' {list(shape)}'})"
        if value is None:
            return "None"
        if isinstance(value, Mapping):
            keys = self.treedef.entries()
            more = len(keys) - KEYS_SHOWN
            tail = f" and {more} more" if more > 0 else ""
            return f"{kind} with keys {keys[:KEYS_SHOWN]}{tail}"
        if optree.is_namedtuple(value):
            return f"{kind} with fields {self.components}"
        return f"{kind} of {len(self.children)}"

    def told_from(self, actual: "Node") -> str:
        """Return what tells the level found from this one, which was expected."""
        mine, other = self.value, actual.value
        kinds = type(mine), type(other)
        advice = next(filter(None, map(_advice, kinds)), "")
        if advice or kinds[0] is not kinds[1] or self.is_leaf != actual.is_leaf:
            return f"expected {self}, found {actual}{advice and '. '}{advice}"
        if isinstance(mine, Mapping):
            here, there = self.treedef.entries(), actual.treedef.entries()
            if here != there:
                return _keys_told_apart(here, there)
        if len(self.children) != len(actual.children):
            return f"expected length {len(self.children)}, found {len(actual.children)}"
        return (
            f"the static data of {type(mine).__name__} differ: "
            f"expected {self.treedef}, found {actual.treedef}"
        )


def _advice(kind: type) -> str:
    """The advice of a class of nodes on mismatches."""
    return getattr(kind, "tree_advice", "")


def _keys_told_apart(expected: list[Any], actual: list[Any]) -> str:
    if max(len(expected), len(actual)) <= KEYS_SHOWN:
        return f"expected keys {expected}, found {actual}"
    theirs, mine = set(actual), set(expected)
    missing = [key for key in expected if key not in theirs]
    extra = [key for key in actual if key not in mine]
    if not missing and not extra:
        at = [a == b for a, b in zip(expected, actual, strict=True)].index(False)
        return f"expected key {expected[at]!r} at position {at}, found {actual[at]!r}"
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
    """Yield (path, what differs) for every smallest subtree in which the two differ."""
    mine, other = Node.of(expected, is_leaf), Node.of(actual, is_leaf)
    if not alike(mine, other):
        yield path, mine.told_from(other)
    elif not mine.is_leaf:
        below = mine.components, mine.children, mine.below(actual) or ()
        for component, left, right in zip(*below, strict=True):
            inner = "/".join(part for part in (path, component) if part)
            yield from differences(left, right, is_leaf, alike, inner)


def message(opening: str, found: list[tuple[str, str]]) -> str:
    """Return one sentence: the first difference and how many others there are."""
    path, difference = found[0]
    place = repr(path) if path else "the root"
    more = len(found) - 1
    tail = f" (and at {more} more place{'s' if more > 1 else ''})" if more else ""
    return f"{opening} at {place}: {difference}{tail}"
