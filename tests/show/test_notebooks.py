"""What a notebook shows: the words of the text, as HTML, without a value being read."""

from xml.etree import ElementTree

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsfunc as ff
from fsfunc.comm.launch import PerRank
from fsfunc.planning.hardware import A100_40
from fsfunc.printing.tables import Report, Table
from fsfunc.show import estimates, memory, plan, sharding, streams, timeline
from tests.models import train_step
from tests.show.planned import STEP, small, stages

ODD = 'w<b>&"'  # a parameter's name


def shown(value):
    """The page of what a notebook shows; it is well-formed, and runs nothing."""
    written = value._repr_html_()
    page = ElementTree.fromstring(written)
    assert {one.tag for one in page.iter()} <= set(
        "div table tr th td b pre span code".split()
    )
    return page


def words(text):
    """What is printed, without the blanks that make columns."""
    return "".join(text.split())


def rows(page):
    """The cells of each row of its tables, heads too."""
    return [[cell.text or "" for cell in row] for row in page.iter("tr")]


PRINTED = {
    "plan": lambda: plan(small()),
    "timeline": lambda: timeline(ff.schedules.zb_h1(2, 3)),
    "memory": lambda: memory(small()),
    "streams": lambda: streams(STEP),
    "hardware": lambda: estimates.description(A100_40),
    "leaf": lambda: sharding(ff.Layout((4, 3), torch.float32, (), ODD)),
    "long": lambda: Report((Table("a <b>", ("<x",), [("1",)] * 9, most=3), "", "<i>")),
    "ledger": lambda: small().ranks[0].ledger,
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_words_are_those_of_the_text(name):
    value = PRINTED[name]()
    assert words("".join(shown(value).itertext())) == words(str(value))


def test_columns_and_colours_are_those_of_the_text():
    page = shown(timeline(ff.schedules.one_f_one_b(2, 3)))
    assert rows(page)[1:] == [
        ["rank 0", "9", "3", "25 %", "2"],
        ["rank 1", "9", "3", "25 %", "1"],
    ]
    styles = {one.text: one.get("style") for one in page.iter("span")}
    assert styles["F2"] == "color:#000000;background:#4c7cb8"
    sides = [cell.get("style") for cell in page.find(".//tr")]
    assert sides == ["text-align:left", *["text-align:right"] * 4]
    (picture,) = page.iter("pre")
    drawn = "".join(picture.itertext()).splitlines()
    assert drawn == str(timeline(ff.schedules.one_f_one_b(2, 3))).splitlines()[:6]


@pytest.mark.parametrize("planned", [small, stages])
def test_a_plan_shows_what_it_sends_and_holds(planned):
    said, page = planned(), shown(planned())
    assert page.find("div").text == repr(said)
    found = rows(page)
    for row in rows(shown(said.ranks[0].ledger)):
        assert row in found
    most = max(said.ranks, key=lambda own: own.peak_bytes)
    kinds = [kind for kind, size in most.peak.items() if size]
    assert [row[0] for row in found[-len(kinds) :]] == kinds


def test_an_estimate_shows_its_text():
    mesh, optimizer, step = case("abstract")
    made = ff.plan(ff.shard(step, mesh, "data"), init, optimizer, X, mesh=mesh)
    times = ff.estimate(made, ff.hardware.H100)
    assert "".join(shown(times).itertext()) == str(times)


@ff.unit
def layer(params, x):
    return torch.tanh(x @ params[ODD])


def loss(params, x):
    for each in params["layers"]:
        x = layer(each, x)
    return x.square().mean() + params["bias"]


def init():
    torch.manual_seed(0)
    layers = [{ODD: torch.randn(4, 4)} for _ in range(2)]
    return {"layers": layers, "bias": torch.ones(())}


X = torch.linspace(0, 1, 16).reshape(4, 4)


def case(backend="simulated"):
    optimizer = ff.sharded_adam(1e-2)
    return ff.make_mesh({"data": 2}, backend), optimizer, train_step(loss, optimizer)


def states_of(step, mesh, optimizer):
    """The states of all ranks, and their batches."""

    def begin():
        x = ff.local_batch(X, mesh, "data")
        return ff.init_state(step, init(), optimizer, x), x

    return ff.spmd(begin, mesh)().unzip()


class NothingRuns(TorchDispatchMode):
    """Inside, no operator may run: none reads a value, or waits for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


STATE = [
    ["path", "whole", "layout", "part", "bytes each"],
    ["params/bias", "f32[]", "whole", "all", "4 B"],
    [f"params/layers/0-1/{ODD} ×2", "f32[4, 4]", "flat over data=2", "[8]", "32 B"],
]


@pytest.mark.parametrize("backend", ["simulated", "abstract"])
def test_a_state_shows_a_rank_s_part_on_that_rank_alone(backend):
    mesh, optimizer, step = case(backend)
    step = ff.shard(step, mesh, "data", zero=3)
    states, _ = states_of(step, mesh, optimizer)

    def on_one(state):
        if mesh.rank == 0:
            with NothingRuns():
                return rows(shown(state))

    with ff.ledger() as log:
        found = ff.spmd(on_one, mesh)(states)[0]
        assert rows(shown(states[0])) == found
    assert found[:3] == STATE and not log.records
    assert ["step", "int", "", "0", ""] in found


def test_a_state_that_was_given_away_is_shown_too():
    mesh, optimizer, step = case()
    step = ff.donate(ff.shard(step, mesh, "data"))
    states, x = states_of(step, mesh, optimizer)
    after, _ = ff.spmd(step, mesh)(states, x).unzip()
    before = rows(shown(states[0]))
    assert before[2][3:] == ["given away", ""]
    assert [row for row in before if row[0] == "step"] == [["step", "int", "", "0", ""]]
    assert rows(shown(after[0]))[:3] == STATE


def test_a_leaf_and_its_layout_show_their_text():
    mesh, optimizer, step = case()
    states, _ = states_of(ff.shard(step, mesh, "data"), mesh, optimizer)
    leaf = states[0].params["layers"][0][ODD]
    with NothingRuns():
        assert shown(leaf).text == repr(leaf)
        assert shown(leaf.layout).text == str(leaf.layout)


def test_states_of_all_ranks_are_a_column_each():
    mesh, optimizer, step = case()
    states, x = states_of(ff.shard(step, mesh, "data"), mesh, optimizer)
    with NothingRuns():
        found = rows(shown(states))
    assert found[0] == ["path", "whole", "layout", "rank 0", "rank 1"]
    assert found[2] == [*STATE[2][:3], "32 B", "32 B"]
    assert ["step", "int", "", "0", "0"] in found
    held = 4 * (3 * 1 + 3 * 2 * 8)  # a bias and two halves of matrices, three times
    assert found[-1] == ["all leaves", "", "", f"{held} B", f"{held} B"]
    params = ff.spmd(lambda state: state.params, mesh)(states)
    assert rows(shown(params))[2][1:] == found[2][1:]


def test_of_many_ranks_the_first_are_shown():
    mesh, optimizer, step = case()
    states, _ = states_of(ff.shard(step, mesh, "data"), mesh, optimizer)
    page = shown(PerRank([states[0]] * 20))
    assert len(rows(page)[0]) == 3 + 8
    assert "and 12 ranks more" in page.itertext()


def test_a_process_shows_its_own_rank():
    """Its list has one item, of whichever rank it is."""
    mesh, optimizer, step = case()
    states, _ = states_of(ff.shard(step, mesh, "data"), mesh, optimizer)
    assert rows(shown(PerRank([states[1]])))[0][3:] == ["this rank"]


def test_other_lists_of_ranks_stay_text():
    assert PerRank()._repr_html_() is None
    assert PerRank([1.5, 2.5])._repr_html_() is None
    assert PerRank([torch.ones(2)] * 2)._repr_html_() is None
    mesh, optimizer, step = case()
    states, _ = states_of(ff.shard(step, mesh, "data"), mesh, optimizer)
    assert PerRank([states[0], states[1].params])._repr_html_() is None


def test_the_sharding_of_all_ranks_states_is_that_of_one():
    """Not the sum of all that is in the list."""
    mesh, optimizer, step = case()
    states, _ = states_of(ff.shard(step, mesh, "data"), mesh, optimizer)
    assert str(sharding(states)) == str(sharding(states[0]))
    assert str(sharding(states, rank=1)) == str(sharding(states[1], rank=1))
    with pytest.raises(IndexError):
        sharding(states, rank=2)
