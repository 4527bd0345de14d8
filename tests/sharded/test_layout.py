"""The sharding math, against definitions written out the slow and plain way."""

import math

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsfunc.sharded.layout import Layout, every_coordinate
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.sharded.placements import Flat, Owned, Split, short_dtype
from fsfunc.sharded.slices import assemble, boxes, take
from tests.checkpoint import trees
from tests.checks import all_refused
from tests.covering import examples

F32 = torch.float32
AXES = ("node", "data", "model")
lengths = st.integers(0, 5)
shapes = st.one_of(
    st.lists(lengths, max_size=3).map(tuple),
    st.sampled_from([(9,), (1,), (), (0,), (3, 0, 2), (17,), (1, 1, 7)]),
)


@st.composite
def layouts(draw, shape):
    """Any layout of this shape over axes of at most 8 ranks in all."""
    sizes, left = {}, 8
    for axis in AXES:
        sizes[axis] = draw(st.integers(1, left))
        left //= sizes[axis]
    return draw(trees.layouts(shape, torch.int64, sizes, "w"))


one_layout = shapes.flatmap(layouts)
law = settings(max_examples=examples(60))

NINE = Layout((9,), torch.int64, (Split(0, "data", 8),), "w")
PRODUCT = Layout(  # runs over two dims, ranks whose range begins and ends inside a row
    (3, 4, 5),
    torch.int64,
    (Owned("pipe", 2, 1), Split(2, "model", 2), Flat(("data",), 3, "unit", 1, 14)),
    "w",
)
CUBE = Layout((3, 4, 5), torch.int64, (Split(1, "data", 2), Split(1, "node", 4)), "w")


def of_every_layout(test):
    return law(given(one_layout)(example(NINE)(example(PRODUCT)(example(CUBE)(test)))))


def count_up(layout):
    """Each element is its own row-major number."""
    return torch.arange(layout.numel).view(layout.shape)


def cut(x, layout, coordinates):
    """A rank's part by definition: chunk for Split, a filled buffer for Flat."""
    for part in layout.parts:
        if isinstance(part, Owned):
            if coordinates[part.axis] != part.coordinate:
                return x.new_empty(0)
        elif isinstance(part, Split):
            step = max(1, math.ceil(x.shape[part.dim] / part.size))
            pieces = [*x.split(step, part.dim)]
            pieces += [pieces[0].narrow(part.dim, 0, 0)] * (part.size - len(pieces))
            x = pieces[coordinates[part.axis]]
        else:
            rank = 0
            for axis, size in zip(part.axes, part.sizes, strict=True):
                rank = rank * size + coordinates[axis]
            buffer = torch.full((part.size * part.chunk,), -1)
            buffer[part.offset : part.offset + x.numel()] = x.reshape(-1)
            held = buffer[rank * part.chunk : (rank + 1) * part.chunk]
            x = held[held >= 0]
    return x


def take_all(x, layout):
    return [(at, take(x, layout, at)) for at in every_coordinate(layout)]


@of_every_layout
def test_a_part_is_the_cut_by_definition_and_parts_make_the_whole(layout):
    x, flat, seen = count_up(layout), layout.flat is not None, []
    parts = take_all(x, layout)
    for at, local in parts:
        assert torch.equal(local, cut(x, layout, at)), at
        assert layout.local_shape(at) == tuple(local.shape), at
        found, end = boxes(layout, at), 0
        assert len(found) <= (max(2 * layout.ndim - 1, 1) if flat else 1)
        for box in found:
            where = tuple(slice(o, o + n) for o, n in zip(*box[:2], strict=True))
            assert box.start == end and box.numel
            end += box.numel
            inside = x[where].reshape(-1)
            assert torch.equal(inside, local.reshape(-1)[box.start : end]), at
            seen += inside.tolist()
        assert end == local.numel()
    assert sorted(seen) == list(range(layout.numel))
    assert torch.equal(assemble(parts, layout), x)
    held = {layout.key(at): part for at, part in parts if part.numel()}
    assert not held or torch.equal(assemble(held, layout), x)


@law
@given(st.lists(shapes, max_size=5), st.integers(1, 8), st.integers(1, 2))
def test_pack_flat_lays_leaves_end_to_end_and_pads_at_the_end(some, size, nodes):
    names = [str(i) for i in range(len(some))]
    over = ["node", "data"], [nodes, size]
    packed = pack_flat(some, torch.int64, names, *over, "unit")
    total, ranks = sum(math.prod(shape) for shape in some), nodes * size
    leaves = [count_up(layout) + 100 * (i + 1) for i, layout in enumerate(packed)]
    chunk = math.ceil(total / ranks)
    whole = torch.cat([torch.empty(0, dtype=torch.int64), *map(torch.flatten, leaves)])
    whole = torch.cat([whole, torch.zeros(ranks * chunk - total, dtype=torch.int64)])
    built = []
    for at in every_coordinate({"node": nodes, "data": size}):
        mine = torch.zeros(chunk, dtype=torch.int64)
        for leaf, layout in zip(leaves, packed, strict=True):
            assert layout.flat and layout.flat.chunk == chunk
            start, stop = layout.buffer_range(at)
            mine[start:stop] = take(leaf, layout, at)
        built.append(mine)
    assert torch.equal(torch.cat(built), whole)


def test_a_part_is_a_view_where_it_can_be():
    full = torch.zeros(8, 6)
    flat = pack_flat([(8, 6)], F32, ["w"], ["data"], 3, "unit")[0]
    column = Layout((8, 6), F32, (Split(1, "model", 2),))
    for layout, at in ((flat, {"data": 1}), (column, {"model": 1})):
        take(full, layout, at).fill_(1)
        assert full.sum() == math.prod(layout.local_shape(at))
        full.zero_()
    assert take(full, Layout((8, 6), F32), {}) is full


def test_an_empty_part_keeps_no_storage_alive():
    full = torch.zeros(4)
    absent = Layout((4,), F32, (Owned("pipe", 2, 0),))
    beyond = pack_flat([(4,)], F32, ["b"], ["pipe"], 3, "unit")[0]
    for layout, last in ((absent, 1), (beyond, 2)):
        part = take(full, layout, {"pipe": last})
        assert part.shape == (0,)
        assert part.untyped_storage().nbytes() == 0


PRINTED = {
    "f32[10, 7] whole": (),
    "f32[10, 7] flat over data=4 at 0:70 of 4x20": (Flat(("data",), 4, "u", 0, 20),),
    "f32[10, 7] split over m=3 along dim 0, flat over a=2,b=2 at 2:30 of 4x9": (
        Split(0, "m", 3), Flat(("a", "b"), 4, "u", 2, 9, (2, 2))),
    "f32[10, 7] owned over pipe=4 by 2": (Owned("pipe", 4, 2),),
}  # fmt: skip


def test_layouts_and_dtypes_print():
    for text, parts in PRINTED.items():
        assert str(of(*parts)) == f"blocks/3/w {text}"
    names = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "f8_e4m3fn"}
    names |= {torch.int64: "i64", torch.complex64: "c64", torch.bool: "bool"}
    assert {dtype: short_dtype(dtype) for dtype in names} == names


# What is refused


def of(*parts, shape=(10, 7)):
    return Layout(shape, F32, parts, "blocks/3/w")


def bad(*parts, **shape):
    return lambda: of(*parts, **shape)


FOUR, X = of(Split(0, "data", 4)), torch.zeros(10, 7)


REFUSED = {
    "a dim": (bad(Split(5, "data", 4)),
        r"^cannot shard 'blocks/3/w' f32\[10, 7\] over axis \"data\" of size 4 along "
        "dim 5: it has 2 dims; pass a dim from 0 to 1$"),
    "a dim below": (bad(Split(-1, "data", 4)), "along dim -1: .* from 0 to 1"),
    "no ranks": (bad(Split(0, "data", 0)), "has no ranks; a size is at least 1"),
    "an axis twice": (bad(Split(0, "data", 2), Flat(("data",), 2, "u", 0, 35)),
        "already used by another part"),
    "twice in one": (bad(Flat(("a", "a"), 4, "u", 0, 35, (2, 2))), '"a" is already'),
    "an owner": (bad(Owned("pipe", 2, 2)), "coordinate 2: .* pass one from 0 to 1"),
    "beyond flat": (bad(Flat(("data",), 2, "u", 0, 35), Split(0, "model", 2)),
        "it is Flat, .* put Flat last"),
    "sizes": (bad(Flat(("a", "b"), 4, "u", 0, 20)), "whose product is size"),
    "a buffer": (bad(Flat(("data",), 4, "u", 11, 20)), "does not fit the buffer; pack"),
    "a scalar": (bad(Split(0, "data", 2), shape=()), "it has 0 dims; lay it flat"),
    "a length": (bad(shape=(2, -1)), "a dim has a negative length"),
    "no coordinate": (lambda: FOUR.local_shape({"pipe": 0}), "give each of .'data'. a"),
    "a coordinate": (lambda: boxes(FOUR, {"data": 4}), "of size 4 has coordinate 4"),
    "no buffer": (lambda: FOUR.buffer_range({"data": 0}), "lies in no buffer"),
    "another shape": (lambda: take(X[1:], FOUR, {"data": 0}), r"of shape \[9, 7\]"),
    "missing parts": (lambda: assemble([({"data": 0}, X[:3])], FOUR),
        r"the parts at \[{'data': 1}, {'data': 2}, {'data': 3}\] are missing"),
    "a part's shape": (lambda: assemble({(3,): X[:3]}, FOUR),
        r"at {'data': 3} has shape \[3, 7\], not \[1, 7\]"),
}  # fmt: skip
test_bad_input_is_refused_with_the_way_out = all_refused(
    {k: (call, ValueError, way) for k, (call, way) in REFUSED.items()}
)
