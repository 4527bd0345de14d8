"""Schedules as data: text, JSON, and what is no schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.pipelining.actions import (
    KINDS,
    Action,
    ScheduleError,
    forward_only,
    from_json,
    listing,
    owners,
    parse,
    ranks_for,
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


def test_a_row_may_mix_actions_and_text():
    assert parse([["F0", Action("B", 0, 0)]]) == parse(["F0 B0"])
    assert parse(["F0", "F0"])[1] == (Action("F", 1, 0),)


def test_the_stage_is_left_out_only_where_it_is_the_ranks_own():
    assert listing(parse(["F0@1", "F0@0"])) == "0: F0@1\n1: F0@0"
    assert listing(parse(["F0@0 F0@3", "F0@1"])) == "0: F0@0 F0@3\n1: F0"
    assert listing(parse(["F0"] * 10)).startswith("0: F0")
    wide = listing(parse(["F0"] * 11))
    assert wide.splitlines()[0] == " 0: F0" and wide.splitlines()[10] == "10: F0"


def test_every_kind_prints():
    row = "F3 B3 I3 W3 SF3>1 RF3<1 SB3>1 RB3<1"
    assert listing(parse([row])) == f"0: {row}"


@pytest.mark.parametrize(
    "entry", ["", "F", "G3", "F-1", "F3>1", "SF3", "SF3<1", "RB3>1", "F3@", "F3 ", None]
)
def test_an_entry_that_is_no_action_is_named(entry):
    with pytest.raises(ScheduleError, match=r"rank 1, entry 2: .* is no action"):
        parse([["F0"], ["F0", "B0", entry]])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("X", 0, 0), "no action has the kind 'X'"),
        (("F", -1, 0), "stage=-1"),
        (("F", 0, 1.5), "microbatch=1.5"),
        (("F", True, 0), "stage=True"),
        (("F", 0, 0, 1), "F has no peer; got peer=1"),
        (("SF", 0, 0), "SF has a peer, .* got peer=None"),
        (("RB", 0, 0, -2), "got peer=-2"),
    ],
)
def test_an_action_that_cannot_be_is_refused(arguments, says):
    with pytest.raises(ScheduleError, match=says):
        Action(*arguments)


@pytest.mark.parametrize("text", ["3", '{"a": 1}', '["F0", "F0"]', "[[3]]"])
def test_json_of_another_form_is_refused(text):
    with pytest.raises(ScheduleError, match="a list of lists|is no action"):
        from_json(text)


def test_owners():
    assert owners(parse(["F0@1 B0@1", "F0@0"])) == (1, 0)
    with pytest.raises(
        ScheduleError, match="rank 1 has F1@0, but stage 0 is on rank 0"
    ):
        owners(parse(["F0", "F1@0"]))
    with pytest.raises(ScheduleError, match="stage 1 is on no rank"):
        owners(parse(["F0", "", "F0"]))
    with pytest.raises(ScheduleError, match="stage 0 is on no rank.*no action"):
        owners(parse(["", ""]))


def test_forward_only_keeps_places_and_order():
    schedule = parse(["F1 F0 I1 W1 B0", "F0 F1 B0 B1"])
    assert forward_only(schedule) == parse(["F1 F0", "F0 F1"])


@pytest.mark.parametrize("name", ["n_stages", "n_microbatches", "chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True])
def test_a_count_is_an_integer_from_one_on(name, value):
    counts = {"n_stages": 4, "n_microbatches": 4, "chunks": 1} | {name: value}
    with pytest.raises(ScheduleError, match=f"{name} must be an integer from 1 on"):
        ranks_for(**counts)
