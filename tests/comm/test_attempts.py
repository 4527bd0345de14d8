"""The ranks of a restarted run share no word with those that were there before."""

from threading import Thread

import pytest
import torch.distributed as dist

from fsfunc.comm.backends.process_groups import fresh


def attempt(store, size, absent=()):
    """What each rank finds in a store of its own attempt, having left its number."""
    found = {}

    def rank(r):
        mine = fresh(store.clone(), r, size, patience=10)
        mine.set(f"rank {r}", "here")
        mine.wait([f"rank {i}" for i in range(size) if i not in absent])
        found[r] = mine.check(["old"]), mine
        return mine

    threads = [Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == size
    return found


@pytest.fixture
def store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("size", [1, 3])
def test_each_attempt_has_a_store_of_its_own(store, size):
    for _ in range(3):
        found = attempt(store, size)
        assert not any(old for old, _ in found.values())
        next(iter(found.values()))[1].set("old", "1")


def test_ranks_that_do_not_come_are_named(store):
    for rank, absent in ((1, "rank 0"), (0, "rank 1, rank 2")):
        # what rank 1 left is of an earlier attempt
        said = f"^{absent} did not join rank {rank} of 3"
        with pytest.raises(TimeoutError, match=said):
            fresh(store, rank, 3, patience=0.1)
