"""Whether a plan fits: the margin, FSDP2's streams, releases, what it says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.allocation import Allocator, needed_bytes
from fsfunc.planning.events import Allocated, Freed
from fsfunc.planning.hardware import CPU, GIVEN, H100, replace
from fsfunc.planning.plans import Plan, RankPlan
from tests.checks import all_refused
from tests.models import chain, train_step

MIB = 2**20
NO_MARGIN = replace(H100, margin=0.0)


def took(key, size, op="aten.empty"):
    return Allocated(key, size, op, "", "")


def planned(events, kinds=None):
    own = RankPlan(0, 8, {"data": 0}, events, kinds or {}, (), ())
    return Plan(Mesh({"data": 8}, "abstract"), (own,))


FULL = planned([took(0, 100 * MIB)])


@pytest.mark.parametrize("known", GIVEN, ids=lambda known: known.name)
def test_what_fills_the_memory_to_the_margin_fits_and_a_segment_more_does_not(known):
    assert 0 < known.margin < 0.5
    memory = int(100 * MIB / (1 - known.margin)) + 1
    assert ff.fits(FULL, replace(known, memory=memory))
    fit = ff.fits(FULL, replace(known, memory=memory - 2))
    assert not fit and fit.needed == 100 * MIB < fit.memory
    assert f"{known.margin:.0%} is kept free".replace("%", " %") in str(fit)
    assert ff.fits(FULL, replace(known, memory=100 * MIB, margin=0.0))


def test_a_margin_is_of_the_memory_alone():
    half = replace(H100, margin=0.5)
    assert half.memory == H100.memory and 2 * half.usable == H100.memory // 2 * 2
    assert needed_bytes(FULL, half) == needed_bytes(FULL, H100) == 100 * MIB


REDUCED = [took(0, 40 * MIB), Freed(0), took(1, 40 * MIB), took(2, 40 * MIB, "aten.mm")]
GRADIENTS = {1: "gradients", 2: "gradients"}


def test_reductions_have_memory_of_their_own_under_fsdp2_alone():
    plan = planned([*REDUCED, Freed(2)], GRADIENTS)
    assert ff.fits(plan, H100).needed == 80 * MIB
    # What a product gives is taken on the stream that computes, as there.
    assert ff.fits(plan, H100, streams="fsdp2").needed == 80 * MIB
    plan = planned(REDUCED[:3], GRADIENTS)
    assert ff.fits(plan, H100).needed == 40 * MIB
    assert ff.fits(plan, H100, streams="fsdp2").needed == 80 * MIB
    assert ff.fits(plan, CPU, streams="fsdp2").needed == 40 * MIB


def test_releases_are_counted_where_the_memory_ends_and_an_allocator_caches():
    plan = planned([took(0, 40 * MIB), Freed(0), took(1, 60 * MIB)])
    assert ff.fits(plan, H100).retries == 0
    tight = ff.fits(plan, replace(NO_MARGIN, memory=80 * MIB))
    assert tight and tight.retries == 1 and tight.needed == 60 * MIB
    assert "after 1 releases of cached segments a step" in str(tight)
    assert ff.fits(plan, replace(CPU, memory=80 * MIB)).retries == 0
    # In the margin there is room for what would be kept: nothing has to be released.
    room = ff.fits(plan, replace(H100, memory=105 * MIB, margin=0.2))
    assert room and room.retries == 0 and room.needed == 60 * MIB


def test_segments_that_grow_have_no_parts_left_over():
    grown = [took(0, 40 * MIB), Freed(0), took(1, 60 * MIB)]
    assert ff.fits(planned(grown), NO_MARGIN).needed == 100 * MIB
    more = {"expandable_segments": True}
    assert ff.fits(planned(grown), NO_MARGIN, **more).needed == 60 * MIB
    # 20 MiB at a time; the end of the segment is taken with what it grows by.
    assert ff.fits(planned([took(0, 11 * MIB)]), H100, **more).needed == 20 * MIB
    held = [took(0, 11 * MIB), took(1, 11 * MIB), took(2, 1)]
    assert ff.fits(planned(held), H100, **more).needed == 42 * MIB


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MIB)), max_size=60),
    st.sampled_from([float("inf"), 80 * MIB]),
)
def test_a_growing_segment_holds_what_is_held_and_gives_it_back(steps, capacity):
    allocator, held, size = Allocator(capacity, expandable=True), [], 0
    for takes, n in steps:
        if takes or not held:
            held.append((allocator.allocate(n), n))
            size += n
        else:
            block, given_back = held.pop(n % len(held))
            allocator.release(block)
            size -= given_back
        blocks = [block for block, _ in held]
        free = [item[2] for row in allocator._free_blocks.values() for item in row]
        assert allocator.reserved == sum(b.size for b in [*blocks, *free]) >= size
    for block, _ in held:
        allocator.release(block)
    allocator._release_segments()
    steps_left = sum(  # parts of a step between holes
        item[0] for row in allocator._free_blocks.values() for item in row
    )
    assert allocator.reserved == steps_left
    assert capacity < float("inf") or not allocator.reserved


def test_the_rank_that_needs_most_is_named():
    ranks = [
        RankPlan(r, 4, {"data": r}, [took(0, n * MIB)], {}, (), ())
        for r, n in ((0, 10), (4, 90))
    ]
    plan = Plan(Mesh({"data": 8}, "abstract"), tuple(ranks), ("data",))
    small = replace(NO_MARGIN, memory=50 * MIB)
    assert "rank 4 holds 94.4 MB, 41.9 MB more than its 52.4 MB" in str(
        ff.fits(plan, small)
    )


def test_what_is_said_of_a_host_has_the_process():
    line = str(ff.fits(FULL, CPU))
    assert line.startswith("fits CPU: 105 MB of 12.0 GB, 1 %")
    assert f"beside {CPU.process // 10**6} MB of the process itself" in line
    assert "process" not in str(ff.fits(FULL, H100))


def test_a_search_keeps_the_margin_unless_told_its_memory():
    layer = ff.unit(lambda w, x: torch.tanh(x @ w))
    optimizer = ff.sharded_adam(1e-3)
    step = train_step(chain(layer), optimizer)
    params, batch = [torch.zeros(64, 64) for _ in range(3)], torch.zeros(4, 64)
    held = ff.plan(ff.donate(step), params, optimizer, batch).peak_bytes
    only = {"remat": (None,), "accumulate": (1,)}

    def searched(card, margin, **given):
        here = replace(CPU, memory=card, margin=margin)
        losses = chain(layer), optimizer, params, batch, {"data": 1}, here
        return ff.search(*losses, **only, **given)

    assert searched(held, 0.0).best.needed_bytes == held
    with pytest.raises(ValueError, match="none of .* kept free"):
        searched(held, 0.1)
    found = searched(int(held / 0.9) + 1, 0.1)
    assert found.best.fits and "10 % of" in found.table()
    assert searched(1, 0.1, memory=held).best.fits


test_other_streams_and_margins_are_refused = all_refused({
    "streams": (lambda: ff.fits(FULL, H100, streams="ddp"), ValueError,
                "streams='ddp' is \"one\" or \"fsdp2\""),
    "all": (lambda: replace(H100, margin=1.0), ValueError,
            "margin is a share below 1, got 1.0"),
    "less": (lambda: replace(H100, margin=-0.1), ValueError, "margin is finite"),
    "process": (lambda: replace(CPU, process=-1), ValueError, "process is finite"),
})  # fmt: skip
