"""What one unit call holds of a buffer, and when a neighbour's is as good."""

import pytest
import torch

from fsfunc.sharded.layout import pack_flat
from fsfunc.sharded.leaf import FlatShard
from fsfunc.transforms.gathers import GatheredCall

HALF = torch.bfloat16


def buffer(fill=0.0):
    members = pack_flat([(4,)], torch.float32, ["w"], ("data",), 2, "u")
    return FlatShard(members, torch.full((2,), fill), {"data": 0})


def call(shard, dtype=torch.float32, full=None):
    made = GatheredCall("u", (0,), (), shard, [], dtype)
    made.full = full
    return made


def test_a_neighbour_of_the_same_buffer_is_taken_over():
    shard, full = buffer(), torch.zeros(4)
    other = call(shard, full=full)
    other.lasts = True
    mine = call(shard)
    mine.take_over(other)
    assert mine.full is full and mine.lasts
    assert mine.shows(shard, torch.float32)


@pytest.mark.parametrize("unlike", ["buffer", "dtype", "version"])
def test_a_neighbour_of_another_is_not(unlike):
    shard = buffer()
    other = call(
        buffer() if unlike == "buffer" else shard,
        HALF if unlike == "dtype" else torch.float32,
        torch.zeros(4),
    )
    if unlike == "version":
        shard.flat.add_(1)
    mine = call(shard)
    mine.take_over(other)
    assert mine.full is None and not mine.shows(shard, torch.float32)


def test_it_shows_its_buffer_in_its_dtype_until_that_is_written():
    shard = buffer()
    mine = call(shard, full=torch.zeros(4))
    assert mine.shows(shard, torch.float32)
    assert not mine.shows(shard, HALF) and not mine.shows(buffer(), torch.float32)
    mine.check(shard)
    shard.flat.add_(1)
    assert not mine.shows(shard, torch.float32)
    with pytest.raises(RuntimeError, match="'w' .*written over.*before the update"):
        mine.check(shard)
