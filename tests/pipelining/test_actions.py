"""Schedules as data: text, JSON, and what is no schedule."""

from hypothesis import given
from hypothesis import strategies as st

from fsfunc.pipelining.actions import (
    KINDS,
    Action,
    forward_only,
    from_json,
    listing,
    parse,
    texts,
    to_json,
)

NUMBERS = st.integers(0, 40)


@st.composite
def actions(draw):
    kind = draw(st.sampled_from(KINDS))
    peer = draw(NUMBERS) if len(kind) == 2 else None
    return Action(kind, draw(NUMBERS), draw(NUMBERS), peer)


@given(st.lists(st.lists(actions(), max_size=5), max_size=4))
def test_text_and_json_come_back(rows):
    schedule = tuple(tuple(row) for row in rows)
    assert parse(texts(schedule)) == schedule
    assert parse([" ".join(map(str, row)) for row in schedule]) == schedule
    assert parse(schedule) == schedule
    assert from_json(to_json(schedule)) == schedule


def test_a_listing_leaves_a_stage_out_only_where_it_is_the_ranks_own():
    row = "F3 B3 I3 W3 SF3>1 RF3<1 SB3>1 RB3<1"
    assert listing(parse([row])) == f"0: {row}"
    assert listing(parse(["F0@1", "F0@0"])) == "0: F0@1\n1: F0@0"
    assert listing(parse(["F0@0 F0@3", "F0@1"])) == "0: F0@0 F0@3\n1: F0"
    assert parse([["F0", Action("B", 0, 0)]]) == parse(["F0 B0"])
    wide = listing(parse(["F0"] * 11)).splitlines()
    assert wide[0] == " 0: F0" and wide[10] == "10: F0"


def test_forward_only_keeps_places_and_order():
    schedule = parse(["F1 F0 I1 W1 B0", "F0 F1 B0 B1"])
    assert forward_only(schedule) == parse(["F1 F0", "F0 F1"])
