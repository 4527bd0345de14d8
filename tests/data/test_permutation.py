"""Orders computed index by index: permutations, and as even as chance."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsfunc.data.dataset import Shuffled
from fsfunc.runtime.generators import seed64
from tests.covering import examples


@settings(max_examples=examples(12))
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_an_order_is_a_permutation(n, key):
    order = Shuffled(n, key)
    assert len(order) == n
    assert sorted(order[i] for i in range(n)) == list(range(n))


def test_an_order_of_many_is_not_held():
    n = 10**12
    order = Shuffled(n, 5)
    found = [order[i] for i in (*range(500), n - 1)]
    assert len(set(found)) == 501 and max(found) < n
    # 500 uniform numbers: their mean is within 5 standard deviations.
    assert abs(sum(found) / 501 / n - 0.5) < 5 / math.sqrt(12 * 501)


def excess(counts, cells, drawn):
    """Of a chi-squared test: by how many standard deviations chance is exceeded."""
    expected = drawn / cells
    chi = sum((n - expected) ** 2 / expected for n in counts.values())
    chi += (cells - len(counts)) * expected
    return (chi - (cells - 1)) / math.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("n", [2, 4])
def test_all_orders_of_few_are_as_likely(n):
    drawn = 1000
    orders = [Shuffled(n, seed64(0, epoch)) for epoch in range(drawn)]
    counts = Counter(tuple(order[i] for i in range(n)) for order in orders)
    assert set(counts) <= set(itertools.permutations(range(n)))
    assert excess(counts, math.factorial(n), drawn) < 5


@pytest.mark.parametrize(
    "see",
    [
        lambda order: order[0] * 10 // 1000,
        lambda order: order[999] * 10 // 1000,
        lambda order: (order[1] - order[0]) % 1000 // 100,  # neighbours part
        lambda order: order[500] % 10,
    ],
)
def test_the_places_of_many_are_as_likely(see):
    drawn = 2000
    counts = Counter(see(Shuffled(1000, seed64(7, epoch))) for epoch in range(drawn))
    assert excess(counts, 10, drawn) < 5


def test_epochs_have_little_in_common():
    first, second = (Shuffled(2000, seed64(0, epoch)) for epoch in (0, 1))
    assert sum(first[i] == second[i] for i in range(2000)) < 10  # 1 is expected


def test_it_stays_what_it_is():
    """A checkpoint's position means nothing where the order has changed."""
    order = Shuffled(10, seed64(0, 0))
    assert [order[i] for i in range(10)] == [4, 0, 7, 5, 9, 8, 1, 2, 6, 3]
    assert seed64(1, 2, 3) == 7702586659592502839


def test_there_is_no_other_index():
    with pytest.raises(IndexError, match="index 3 of an order of 3"):
        Shuffled(3, 0)[3]
