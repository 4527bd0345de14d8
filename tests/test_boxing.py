"""Boxes make up exactly the part that a rank holds, in the order of its elements."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.boxing import boxes
from fsfunc.layout import Flat, Layout, Owned, Split, every_coordinate
from fsfunc.pieces import take

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def layouts(draw):
    shape, parts, block = draw(shapes), [], None
    block = list(shape)
    if shape and draw(st.booleans()):
        dim, size = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
        parts.append(Split("model", size, dim))
        block[dim] = -(-block[dim] // size)
    if draw(st.booleans()):
        parts.append(Owned("pipe", 2, draw(st.integers(0, 1))))
    if draw(st.booleans()):
        size, offset = draw(st.integers(1, 5)), draw(st.integers(0, 7))
        room = offset + math.prod(block) + draw(st.integers(0, 4))
        parts.append(Flat(("data",), size, "u", offset, -(-room // size)))
    return Layout(shape, torch.int64, tuple(parts))


@given(layouts())
def test_boxes_hold_what_the_rank_holds(layout):
    full = torch.arange(layout.numel).view(layout.shape)
    for at in every_coordinate(layout):
        local, found = take(full, layout, at).reshape(-1), boxes(layout, at)
        flat = layout.flat is not None
        assert len(found) <= (max(2 * layout.ndim - 1, 1) if flat else 1)
        end = 0
        for box in found:
            where = tuple(
                slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)
            )
            assert box.start == end and box.numel
            end += box.numel
            assert torch.equal(full[where].reshape(-1), local[box.start : end])
        assert end == local.numel()


def test_a_range_within_one_row_is_one_box():
    flat = Flat(("data",), 4, "u", 0, 2)
    layout = Layout((1, 1, 8), torch.float32, (flat,))
    assert [len(boxes(layout, {"data": i})) for i in range(4)] == [1, 1, 1, 1]
    assert boxes(layout, {"data": 2})[0][:2] == ((0, 0, 4), (1, 1, 2))
