"""Leaves side by side in buffers, trees as few tensors, and pages that are there."""

import resource
import sys

import pytest
import torch

from fsfunc.runtime.stores import populate
from fsfunc.sharded.layout import Layout, Owned, Split
from fsfunc.sharded.leaf import Sharded
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.sharded.packing import (
    join_differentiably,
    local_chunk,
    pack,
    packed_buffer_of,
)
from fsfunc.sharded.slices import take
from fsfunc.testing import assert_equal


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.platform != "linux", reason="where faults are counted so")
def test_populated_memory_faults_no_more():
    x = torch.empty(1 << 24)  # from the system, each time
    before = faults()
    populate(x)
    taken = faults()
    x.zero_()
    assert faults() - taken < 100 or taken == before  # or the system is too old


def test_what_is_written_stays():
    x = torch.arange(1 << 14)
    for part in (x, x[1:3], x[5000:], x[:0], x[::2], x.to("meta")):
        populate(part)
    assert torch.equal(x, torch.arange(1 << 14))


SHAPES, NAMES = [(3,), (0,), (2, 2), ()], ["a", "b", "c", "d"]
AT = [{"data": i} for i in range(3)]


def members(size=3, buffer="u", **how):
    return pack_flat(SHAPES, torch.float32, NAMES, ["data"], size, buffer, **how)


def loose(at, layouts=None, start=1.0):
    """A rank's leaves, each on its own: the elements of the buffer count from 1."""
    out = []
    for m in layouts or members():
        offset = m.flat.offset + start
        whole = torch.arange(offset, offset + m.numel).view(m.shape)
        out.append(Sharded(take(whole, m, at).clone(), m))
    return out


@pytest.mark.parametrize("at", AT, ids=str)
def test_what_is_joined_is_differentiable_in_each_leaf(at):
    parts = [x.local.requires_grad_() for x in loose(at)]
    leaves = [Sharded(p, m) for p, m in zip(parts, members(), strict=True)]
    flat = join_differentiably(leaves, at)
    grads = torch.autograd.grad((flat * flat).sum(), parts)
    assert_equal(list(grads), [2 * p.detach() for p in parts])
    packed, differentiated = packed_buffer_of(leaves, at)
    assert differentiated.grad_fn is not None and packed.flat.grad_fn is None
    with torch.no_grad():
        packed, plain = packed_buffer_of(leaves, at)
    assert plain is packed.flat


def test_a_rank_has_no_room_for_what_others_own():
    owned = pack_flat(
        [(4,)], torch.float32, ["w"], ["data"], 2, "u", outer=[[Owned("pipe", 2, 1)]]
    )
    assert local_chunk(owned[0], {"pipe": 1, "data": 0}) == 2
    assert local_chunk(owned[0], {"pipe": 0, "data": 0}) == 0
    assert local_chunk(Layout((4,), torch.float32, (Split(0, "data", 2),)), AT[0]) == 0
    away = {"pipe": 0, "data": 1}
    leaf = Sharded(torch.zeros(0), owned[0])
    assert (
        pack([leaf], away).flat.shape == join_differentiably([leaf], away).shape == (0,)
    )
