"""The laws of trees: there and back, one order, paths that lead to their leaf."""

import re
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from fsfunc import tree
from fsfunc.tree.structure import TreeMismatch
from tests.covering import examples


class Pair(NamedTuple):
    first: Any
    second: Any


class Boxed:
    """One child, with static data, as a sharded leaf has."""

    def __init__(self, inside, label="x"):
        self.inside, self.label = inside, label

    def __eq__(self, other):
        return type(other) is Boxed and vars(self) == vars(other)


class State:
    """Two named children."""

    def __init__(self, params, step):
        self.params, self.step = params, step


def register():
    tree.register_node(
        Boxed, lambda b: ([b.inside], b.label), lambda label, c: Boxed(c[0], label)
    )
    tree.register_node(
        State,
        lambda s: ([s.params, s.step], None),
        lambda _, c: State(*c),
        names=("params", "step"),
    )


register()

KEYS = st.one_of(st.sampled_from(["w", "b", "z10", "z9", "A"]), st.integers(0, 12))


LEAVES = st.integers(0, 99)


def trees():
    def grow(below):
        return st.one_of(
            st.dictionaries(KEYS, below, max_size=4),
            st.lists(below, max_size=3),
            st.lists(below, max_size=3).map(tuple),
            st.builds(Pair, below, below),
            st.builds(Boxed, below, st.sampled_from("xy")),
        )

    return st.recursive(st.one_of(st.none(), LEAVES), grow, max_leaves=12)


def sorted_keys(mapping):
    """Keys of one type are sorted; mixed ones by the name of their type first."""
    return sorted(mapping, key=lambda key: (type(key).__name__, key))


def walk(value, path=()):
    """Yield (path, leaf) by the plain definition, with no library."""
    if value is None:
        return
    if isinstance(value, dict):
        children = [(str(key), value[key]) for key in sorted_keys(value)]
    elif isinstance(value, Pair):
        children = list(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        children = [(str(i), child) for i, child in enumerate(value)]
    elif isinstance(value, Boxed):
        yield from walk(value.inside, path)
        return
    else:
        yield "/".join(path), value
        return
    for name, child in children:
        yield from walk(child, (*path, name))


def reordered(value):
    """The same tree, its dicts built in the opposite order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    if isinstance(value, Pair):
        return Pair(*[reordered(child) for child in value])
    if isinstance(value, list | tuple):
        return type(value)(reordered(child) for child in value)
    if isinstance(value, Boxed):
        return Boxed(reordered(value.inside), value.label)
    return value


@settings(max_examples=examples(30))
@given(trees())
def test_unflatten_undoes_flatten(value):
    """And leaves and paths are those of a plain walk, however dicts were built."""
    paths, leaves, treedef = tree.flatten_with_paths(value)
    assert list(zip(paths, leaves, strict=True)) == list(walk(value))
    assert (leaves, treedef) == tree.flatten(value) == (tree.leaves(value), treedef)
    assert tree.unflatten(treedef, leaves) == value == tree.map(lambda x: x, value)
    other = reordered(value)
    assert tree.leaves(other) == leaves and tree.paths(other) == paths
    tree.check_same_structure(value, other)
    doubled = tree.map(lambda a, b: a + b, value, other)
    assert tree.leaves(doubled) == [2 * leaf for leaf in leaves]
    named = tree.map_with_path(lambda path, _, other: (path, other), value, doubled)
    assert treedef.flatten_up_to(named) == list(walk(doubled))


@settings(max_examples=examples(30))
@given(trees(), trees())
def test_a_mismatch_is_raised_exactly_where_structures_differ(left, right):
    if tree.flatten(left)[1] == tree.flatten(right)[1]:
        tree.check_same_structure(left, right)
    else:
        with pytest.raises(TreeMismatch, match="tree does not match the expected"):
            tree.check_same_structure(left, right)


@settings(max_examples=examples(30))
@given(trees().filter(tree.leaves), st.data())
def test_a_mismatch_names_the_one_place_that_differs(value, data):
    paths, leaves, treedef = tree.flatten_with_paths(value)
    at = data.draw(st.integers(0, len(leaves) - 1))
    grown = [{"new": leaf} if i == at else leaf for i, leaf in enumerate(leaves)]
    place = repr(paths[at]) if paths[at] else "the root"
    with pytest.raises(TreeMismatch) as error:
        tree.check_same_structure(value, tree.unflatten(treedef, grown))
    assert str(error.value) == (
        f"tree does not match the expected structure at {place}: "
        "expected a leaf (int), found dict with keys ['new']"
    )
    with pytest.raises(TreeMismatch, match="expected dict with keys .*, found a leaf"):
        tree.map(max, tree.unflatten(treedef, grown), value)


def both(*keys):
    return {key: 0 for key in keys}


MANY = [f"k{i}" for i in range(20)]


MISMATCHES = [
    ({"blocks": [0, both("w", "b")]}, {"blocks": [0, both("w")]},
        "at 'blocks/1': expected keys ['b', 'w'], found ['w']"),
    ([0, (1, 2)], [0, (1,)], "at '1': expected length 2, found 1"),
    ({"a": (1, 2)}, {"a": [1, 2]}, "at 'a': expected tuple of 2, found list of 2"),
    ((1, 2), Pair(1, 2), "expected tuple of 2, found Pair with fields"),
    ({"a": None}, {"a": 1}, "at 'a': expected None, found a leaf (int)"),
    ({"a": 1}, {"a": None}, "at 'a': expected a leaf (int), found None"),
    ({"a": torch.zeros(2, 3)}, {"a": {}}, "expected a leaf (Tensor [2, 3]), found d"),
    ({"a": 1}, OrderedDict(a=1), "expected dict with keys ['a'], found OrderedDict"),
    (OrderedDict(a=1, b=2), OrderedDict(b=1, a=2), "keys ['a', 'b'], found ['b', 'a']"),
    (0, both(*MANY), "'k13', 'k14', 'k15'] and 12 more"),
    (defaultdict(int, a=1), defaultdict(list, a=1), "the static data of defaultdict"),
    ([{"w": Boxed(1, "x")}], [{"w": Boxed(1, "y")}], "at '0/w': the static data of Bo"),
    ([{"w": Boxed(1)}], [{"w": Boxed([1])}], "at '0/w': expected a leaf (int)"),
    (State([1], 2), State([], 2), "at 'params': expected length 1, found 0"),
    (both(*MANY), both(*MANY[1:], "z"), "1 missing ['k0'], 1 unexpected ['z']"),
    (OrderedDict.fromkeys(MANY, 0), OrderedDict.fromkeys(reversed(MANY), 0),
        "expected key 'k0' at position 0, found 'k19'"),
    ([both("w")] * 3, [both("v")] * 3, "found ['v'] (and at 2 more places)"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "actual", "message"), MISMATCHES)
def test_a_mismatch_tells_what_stands_there(expected, actual, message):
    with pytest.raises(TreeMismatch, match=re.escape(message)):
        tree.check_same_structure(expected, actual)


def test_a_mismatch_says_whose_it_is():
    with pytest.raises(TreeMismatch, match="^parameters do not match the state at the"):
        tree.check_same_structure(1, [1], what="parameters", against="the state")
    with pytest.raises(TreeMismatch, match="^loss does not match"):
        tree.check_same_structure(1, [1], what="loss")


def test_is_leaf_hides_what_lies_below():
    def is_boxed(value):
        return isinstance(value, Boxed)

    left, right = {"w": Boxed([1, 2])}, {"w": Boxed(3, "other")}
    tree.check_same_structure(left, right, is_leaf=is_boxed)
    assert tree.paths(left, is_boxed) == ["w"]
    assert tree.paths(left) == ["w/0", "w/1"]
    assert tree.leaves(left, is_boxed) == [left["w"]]
    assert tree.map(lambda b, n: n, left, {"w": 7}, is_leaf=is_boxed) == {"w": 7}
    with pytest.raises(TreeMismatch, match="at 'w': expected a leaf .Boxed., found"):
        tree.check_same_structure(left, {"w": [1]}, is_leaf=is_boxed)


def test_map_names_the_path_where_a_tree_falls_short():
    assert tree.map(lambda _, below: below, {"a": 1}, {"a": [2, 3]}) == {"a": [2, 3]}
    with pytest.raises(TreeMismatch, match=r"map over .* at 'a/1': expected keys \['b"):
        tree.map(max, {"a": [1, {"b": 2}]}, {"a": [1, {}]})
    with pytest.raises(TreeMismatch, match="at 'a': expected None, found a leaf"):
        tree.map(max, {"a": None}, {"a": 1})
    with pytest.raises(ZeroDivisionError):  # the function's own
        tree.map(lambda x: 1 / x, [0])


def test_none_is_no_leaf_and_empty_containers_stay():
    value = {"a": None, "b": [], "c": (), "d": {}}
    assert tree.leaves(value) == []
    assert tree.map(str, value) == value
    assert tree.paths(None) == []
    assert tree.paths(3) == [""]


def test_registered_nodes_are_nodes_in_both_libraries():
    value = [Boxed({"w": 1, "b": 2}), State([3], 4)]
    assert tree.leaves(value) == optree.tree_leaves(value) == [2, 1, 3, 4]
    assert tree.paths(value) == ["0/b", "0/w", "1/params/0", "1/step"]
    assert torch_pytree.tree_leaves(value) == [1, 2, 3, 4]
    back = torch_pytree.tree_map(lambda leaf: -leaf, Boxed([1], "kept"))
    assert back == Boxed([-1], "kept")


def test_torch_func_sees_through_a_registered_node():
    register()  # again: which changes nothing
    out = torch.func.grad(lambda b: (b.inside**2).sum())(Boxed(torch.ones(2), "kept"))
    assert out.label == "kept" and out.inside.tolist() == [2.0, 2.0]


def test_other_objects_and_unknown_classes_are_leaves():
    class Mine(dict):
        pass

    for leaf in [SimpleNamespace(a=1), Mine(a=1), "text", torch.zeros(2)]:
        assert tree.leaves([leaf])[0] is leaf
    assert tree.paths(namedtuple("N", "u v")(1, [2])) == ["u", "v/0"]
