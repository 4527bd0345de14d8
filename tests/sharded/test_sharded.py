"""The leaf that carries its sharding: no tensor, a node, and a view of a buffer."""

import copy
import io
import pickle

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import strategies as st

from fsfunc import tree
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.sharded.packing import as_packed_tree, repack_leaves
from fsfunc.sharded.slices import take
from tests.checks import all_refused, refused


def repack(t, coordinates):
    """A tree, its leaves packed again where one had lost its buffer."""
    leaves, treedef = tree.flatten(t, is_leaf=is_sharded)
    return tree.unflatten(treedef, leaves) if repack_leaves(leaves, coordinates) else t


AT = {"data": 1}
SHAPES = st.lists(
    st.lists(st.integers(0, 4), max_size=2).map(tuple), min_size=1, max_size=5
)


def packed_of(shapes, size=2, buffer="u", names=None, at=None):
    """A shard of leaves 0, 1, 2 ... one after another, as rank ``at`` holds it."""
    at = AT if at is None else at
    names = [f"leaf{i}" for i in range(len(shapes))] if names is None else names
    layouts = pack_flat(shapes, torch.float32, names, ["data"], size, buffer)
    place = layouts[0].flat
    shard = FlatShard(layouts, torch.zeros(place.chunk), at)
    start = 0
    for leaf, layout in zip(shard.leaves(), layouts, strict=True):
        whole = torch.arange(start, start + layout.numel, dtype=torch.float32)
        leaf.local.copy_(take(whole.view(layout.shape), layout, at))
        start += layout.numel
    return shard


def leaf(name="blocks/3/w"):
    return packed_of([(4, 3)], names=[name]).leaves()[0]


USES = {
    "+": lambda x: x + 1,
    "reflected -": lambda x: 1 - x,
    "@": lambda x: x @ torch.ones(3),
    "@ from a tensor": lambda x: torch.ones(4) @ x,
    "in place": lambda x: x.__imul__(2),
    "==": lambda x: x == x,
    "<": lambda x: x < 1,
    "bool": bool,
    "len": len,
    "iteration": list,
    "in": lambda x: 1 in x,
    "index": lambda x: x[0],
    "assignment": lambda x: x.__setitem__(0, 1),
    "float": float,
    "-": lambda x: -x,
    "abs": abs,
    "a method": lambda x: x.sum(),
    "a property": lambda x: x.T,
    "a function": torch.relu,
    "in a list": lambda x: torch.stack([x, x]),
    "of two": lambda x: torch.add(torch.ones(3), x),
}


WAY = r"'blocks/3/w'.*@ff.unit.*ff.unshard"
test_used_as_a_tensor_it_names_its_path_and_the_way_out = all_refused(
    {name: (lambda use=use: use(leaf()), TypeError, WAY) for name, use in USES.items()}
)


def test_it_shows_the_global_tensor():
    x = leaf()
    assert (x.shape, x.ndim, x.dtype, x.numel()) == ((4, 3), 2, torch.float32, 12)
    assert x.name == "blocks/3/w" and x.device == torch.device("cpu")
    assert repr(x).startswith("Sharded(blocks/3/w f32[4, 3]")
    assert len({x, x}) == 1  # hashed by identity: it cannot be compared
    assert not hasattr(x, "_private") and not hasattr(x, "__array__")


@pytest.mark.parametrize(
    "flatten", [optree.tree_leaves, torch_pytree.tree_leaves], ids=["optree", "torch"]
)
def test_it_is_a_node_in_both_libraries(flatten):
    x = leaf()
    assert [t is x.local for t in flatten({"w": x})] == [True]


def test_maps_see_the_local_part_and_keep_the_layout():
    x = leaf()
    for mapped in (optree.tree_map, torch_pytree.tree_map, tree.map):
        y = mapped(lambda t: 2 * t, {"w": x})["w"]
        assert y.layout is x.layout and y.packed is None
        assert torch.equal(y.local, 2 * x.local)
    assert tree.paths({"w": x}) == ["w"]


def test_trees_of_other_layouts_do_not_map_together():
    one, other = packed_of([(4, 3)]).leaves(), packed_of([(3, 4)]).leaves()
    call = lambda: tree.map(torch.add, one, other)  # noqa: E731
    refused(
        call,
        ValueError,
        "(?s)expected a leaf in parts.*4, 3.*found a leaf in parts.*3, 4",
    )


def test_copies_clone_the_part_alone():
    shard = packed_of([(100,), (100,)])
    x = shard.leaves()[1]
    written = io.BytesIO()
    torch.save(x, written)
    assert len(pickle.dumps(x)) < 2000 and written.tell() < 3500  # of 100 x 4 bytes
    for y in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert torch.equal(y.local, x.local) and y.layout == x.layout
        y.local.zero_()
    assert x.local.sum() != 0


def test_a_whole_buffer_shows_what_it_was_gathered_from():
    shard = packed_of([(4,)])
    assert not shard.is_cached(torch.float32)
    shard.cache_gathered(torch.arange(4.0))
    assert shard.is_cached(torch.float32) and not shard.is_cached(torch.bfloat16)
    shard.leaves()[0].local.add_(1)  # a user who writes into a part
    assert not shard.is_cached(torch.float32)


def values(t):
    return [x.local.tolist() for x in tree.leaves(t, is_leaf=is_sharded)]


def test_a_donated_leaf_says_so():
    x = leaf()
    x.why_unusable = "it was donated"
    for use in (
        lambda: x.local,
        lambda: as_packed_tree([x]),
        lambda: repack_leaves([x], AT),
    ):
        with pytest.raises(RuntimeError, match="'blocks/3/w': it was donated"):
            use()
    assert isinstance(x, Sharded) and x.shape == (4, 3)
