"""What covers a product, which is all of it on request."""

import itertools

from tests.covering import by_turns, pairs


def test_turns_reach_every_value_and_every_row():
    found = by_turns("abcdefg", range(4), 2, every=False)
    assert len(found) == len(set(found)) == 2 * 7
    assert {row for row, _ in found} == {*"abcdefg"}
    for rows in ("abcd", "defg"):  # any four neighbours meet each value twice
        met = sorted(value for row, value in found if row in rows)
        assert met == sorted([*range(4)] * 2)
    every = by_turns("ab", range(3), every=True)
    assert every == list(itertools.product("ab", range(3)))


def test_any_two_values_meet():
    values = ("abc", range(4), (False, True), "xy")
    found = pairs(*values, every=False)
    assert len(found) == 4 * 3  # no fewer hold the pairs of the longest two
    for (i, one), (j, other) in itertools.combinations(enumerate(values), 2):
        met = {(row[i], row[j]) for row in found}
        assert met == set(itertools.product(one, other))
    assert pairs(*values, every=True) == list(itertools.product(*values))
