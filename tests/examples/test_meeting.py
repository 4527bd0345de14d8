"""Who is on a list, and from which state all go on: a law of `agree`."""

import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.programs import SCRIPT


@pytest.fixture(scope="module")
def agree() -> Iterator[Callable]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield __import__("meeting").agree
        sys.modules.pop("meeting")


@given(st.data())
def test_all_go_on_from_the_newest_state_that_survivors_share(
    agree: Callable, data: st.DataObject
) -> None:
    """Some are a step ahead of the others, some are new, some were left out before."""
    alive = data.draw(st.sets(st.integers(0, 5), min_size=1), "ranks")
    ahead = {rank: data.draw(st.booleans()) for rank in alive}
    kept = lambda rank: [[[3, 8 + ahead[rank] + i], rank] for i in (0, 1)]  # noqa: E731
    left_out = data.draw(st.integers(0, len(alive) - 1), "left out")
    come = [
        *((rank, kept(rank)) for rank in alive),
        *((None, [[[2, 5], i], [[2, 6], i]]) for i in range(left_out)),
        *((None, []) for _ in range(data.draw(st.integers(0, 3), "new"))),
    ]
    come = data.draw(st.permutations(come))
    order, key = agree(dict(enumerate(states for _, states in come)))
    assert sorted(order) == [*range(len(come))]
    # A step at least as old as each one's newest, and that all of them have.
    assert key == (3, 10 if all(ahead.values()) else 9)
    # Who stays keeps its rank where there is one; the others follow each other.
    ranks = [come[i][0] for i in order]
    assert all(ranks[rank] == rank for rank in alive if rank < len(come))
    new = [i for i in order if come[i][0] is None]
    assert new == sorted(new)


def test_nobody_has_a_state(agree: Callable) -> None:
    assert agree({0: [], 2: []}) == ([0, 2], None)
