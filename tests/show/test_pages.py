"""The page of a plan: well-formed, by itself, and with all that the plan says."""

import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.hardware import A100_40, H100
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.printing.tables import of_bytes, of_seconds
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.show import html
from fsfunc.show.lanes import name_of
from tests.models import train_step
from tests.show.planned import lone, ran, small, stages


@pytest.fixture(scope="module")
def pipelined():
    """The plan of two stages over two data parallel ranks, and its estimate."""
    mesh = ff.make_mesh({"data": 2, "pipe": 2}, "abstract")

    @ff.unit
    def layer(w, x):
        return torch.tanh(x @ w)

    def loss(params, x):
        for w in params:
            x = layer(w, x)
        return x.sum()

    optimizer = ff.sharded_adam(1e-3)
    step = ff.remat(train_step(loss, optimizer))
    step = ff.pipeline(step, mesh, "pipe", n_microbatches=3)
    step = ff.shard(step, mesh, "data", zero=3)
    init = lambda: [torch.zeros(8, 8) for _ in range(4)]  # noqa: E731
    plan = ff.plan(step, init, optimizer, torch.zeros(6, 8), mesh=mesh)
    return plan, ff.estimate(plan, H100, tokens=12)


def bars(page):
    """(its row, what hovers over it, its labels) of each bar of the timeline."""
    found = []
    for row in page.iterfind(".//div[@class='row']"):
        key = row.find("div").text
        for one in row.iter("i"):
            found.append((key, one.get("title"), [x.text for x in one.iter("span")]))
    return found


GAP = re.compile("waits|not begun")


def test_every_span_is_there_once_with_the_plan_s_figures(pipelined, tmp_path):
    plan, times = pipelined
    written = html(plan, times, H100, path=tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == written
    page = ElementTree.fromstring(written)
    shown = [s for s in times.spans if not s.stream.startswith("from ")]
    expected = [  # a message is where it is sent
        f"{of_seconds(s.start)} to {of_seconds(s.end)}, {of_seconds(s.end - s.start)}"
        + (f", {of_bytes(s.bytes)}" if s.bytes else "")
        for s in shown
    ]
    found = [bar for bar in bars(page) if bar[0] != "action"]
    spans = [bar for bar in found if not GAP.match(bar[1])]
    assert Counter(said.rpartition(": ")[2] for _, said, _ in spans) == Counter(
        expected
    )
    starts = Counter(f"{name_of(s)}, {s.phase}: " for s in shown)
    assert Counter(re.match(r".*?, \w*: ", said)[0] for _, said, _ in spans) == starts
    labels = {label for _, _, each in spans for label in each}
    for turn in ("F", "B"):  # of the three microbatches
        assert {f"{turn}{n}" for n in range(3)} <= labels
        assert {f"send layer {turn}{n}" for n in range(3)} <= labels
    for own in plan.ranks:
        mine = [s for s in times.spans if s.rank == own.rank]
        assert sum(s.bytes for s in mine) == own.ledger.bytes() > 0
    text = "".join(page.itertext())
    assert f"MFU {100 * times.mfu:.0f} %" in text or "MFU <1 %" in text
    for own in plan.ranks:
        assert f"memory of rank {own.rank}: at most {of_bytes(own.peak_bytes)}" in text
        said = [one.text for one in page.iter("title") if one.text]
        assert sum(f": {of_bytes(own.peak_bytes)}: " in words for words in said) >= 1
        assert f"rank {own.rank} ×2, pipe={own.rank}" in text
    facts = "256 parameters in 4 tensors, batch of a rank f32[6, 8], 4 ranks on H100"
    assert facts in text
    assert page.find(".//h1").text == f"{plan.step} on data=2, pipe=2"
    assert "step" in plan.step
    other = ElementTree.fromstring(html(plan, title="Llama & co"))
    assert [x.text for x in other.iter("h1")] == ["Llama & co"]


def test_what_a_rank_is_at_is_a_row_and_waits_say_for_what(pipelined):
    page = ElementTree.fromstring(html(*pipelined))
    actions = [said.split(":")[0] for key, said, _ in bars(page) if key == "action"]
    order = [x for x in actions if x != "update"]
    assert order == ["F0", "F1", "B0", "F2", "B1", "B2", *("F0 B0 F1 B1 F2 B2".split())]
    waits = {said.rpartition(": ")[0] for _, said, _ in bars(page) if GAP.match(said)}
    assert {"waits for a transfer: all_gather layer", "not begun, or done"} <= waits
    assert "waits for another rank: receive" in waits
    assert "not begun, or done: receive" in waits  # rank 1, before F0 comes


def test_ranks_have_one_scale_and_axes(pipelined):
    plan, times = pipelined
    page = ElementTree.fromstring(html(plan, times))
    tops = []
    for svg in page.iter("svg"):
        edges = re.findall(r"V(\d+)", "".join(p.get("d") for p in svg.iter("path")))
        tops.append(1000 - min(map(int, edges)))
    peaks = [own.peak_bytes for own in plan.ranks]
    assert tops == [round(1000 * n / round(1.02 * max(peaks))) for n in peaks]
    axes = [
        [mark.text for mark in row.iter("span")]
        for row in page.iterfind(".//div[@class='axis']")
    ]
    assert len(axes) == 2 and axes[0] == axes[1] and axes[0][0] == "0 s"
    (first, last) = page.iterfind(".//div[@class='sizes']")
    assert [x.text for x in first] == [x.text for x in last] == ["0 B", "1 kB", "2 kB"]


def test_a_stage_s_leaves_are_said_to_be_its_owner_s(pipelined):
    page = ElementTree.fromstring(html(*pipelined))
    (leaf,) = page.iterfind(".//div[@class='leaf']")
    said = [x.strip() for x in leaf.itertext() if x.strip()]
    assert said[:4] == [
        "params/0-3 ×4: f32[8, 8]",
        "params/0-1 ×2: owned over pipe=2 by 0, flat over data=2",
        "params/2-3 ×2: owned over pipe=2 by 1, flat over data=2",
        "the ranks of params/0:",
    ]


def test_memory_and_layouts_can_be_hovered_over():
    page = ElementTree.fromstring(html(small()))  # without an estimate
    assert not bars(page)
    svg, said = page.find(".//svg"), [t.text for t in page.iter("title")]
    assert len(svg.findall("path")) == 6
    shapes = [(int(r.get("x")), int(r.get("width"))) for r in svg.findall("rect")]
    assert shapes[0][0] == 0 and sum(width for _, width in shapes) == 600
    assert all(x + width == y for (x, width), (y, _) in pairwise(shapes))
    assert sum(f": {of_bytes(small().peak_bytes)}: " in words for words in said) >= 1
    assert said[1].startswith("operator 0: 688 B: parameters 264 B, moments 264 B")
    cells = [td for td in page.iter("td") if td.get("title")]
    assert cells[0].get("title") == "rows 0:4, columns 0:8: rank 0"
    assert {td.text.strip() for td in cells} == {"0", "1", "2", "3"}
    layout = pack_flat([(4096,)], torch.float32, ["w"], ["data"], 512, "u")[0]
    leaf = PlannedLeaf("w", "parameters", (4096,), torch.float32, 32, layout, "u")
    own = RankPlan(0, 512, {"data": 0}, [], {}, [leaf], [])
    wide = html(Plan(Mesh({"data": 512}, "abstract"), (own,)))
    assert "data=19<" in wide and "data=20<" not in wide and "and 492 more" in wide


def test_a_page_loads_nothing_and_escapes_names(pipelined):
    odd = lone([ran('<b>&"\x1b', "forward", 7)])
    for written in (html(*pipelined), html(odd, ff.estimate(odd, A100_40))):
        page = ElementTree.fromstring(written)
        assert not {one.tag for one in page.iter()} & {"script", "link", "img", "b"}
        keys = {key for one in page.iter() for key in one.keys()}
        assert not keys & {"src", "href", "srcset", "data"}
        assert "http" not in written and "url(" not in written
    ((_, said, (label,)),) = bars(page)
    assert label == '<b>&"\\x1b' and said.startswith(label)
    assert "".join(page.itertext()).count(label) == 2  # and in the plan's table


def test_what_is_no_plan_is_refused(tmp_path):
    for wrong in ((3,), (small(), 3)):
        with pytest.raises(TypeError, match=r"ff\.(plan|estimate)\("):
            html(*wrong, path=tmp_path / "none.html")
    with pytest.raises(ValueError, match="rank 2 has no spans"):
        html(stages(), ff.estimate(small(), A100_40))
    assert not [*tmp_path.iterdir()]
