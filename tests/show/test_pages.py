"""The page of a plan: well-formed, by itself, and with all that the plan says."""

from collections import Counter
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
from fsfunc.show.lanes import named
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
    """(what hovers over it, label) of each bar of the timeline."""
    return [(one.get("title"), one.text or "") for one in page.iter("i")]


def test_every_span_is_there_once_with_the_plan_s_figures(pipelined, tmp_path):
    plan, times = pipelined
    written = html(plan, times, H100, path=tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == written
    page = ElementTree.fromstring(written)
    expected = [
        f"{of_seconds(s.start)} to {of_seconds(s.end)}, {of_seconds(s.end - s.start)}"
        + (f", {of_bytes(s.bytes)}" if s.bytes else "")
        for s in times.spans
        if not s.stream.startswith("from ")  # a message is where it is sent
    ]
    found = [(title.rpartition(": ")[2], label) for title, label in bars(page) if label]
    assert Counter(ends for ends, _ in found) == Counter(expected)
    labels = Counter(named(s) for s in times.spans if not s.stream.startswith("from "))
    assert Counter(label for _, label in found) == labels
    for turn in ("F", "B"):  # of the three microbatches
        assert {f"{turn}{n}" for n in range(3)} <= {x.split()[-1] for _, x in found}
        sent = {f"send layer {turn}{n}" for n in range(3)}
        assert sent <= {x for _, x in found}
    for own in plan.ranks:
        mine = [s for s in times.spans if s.rank == own.rank]
        assert sum(s.bytes for s in mine) == own.ledger.bytes() > 0
    text = "".join(page.itertext())
    assert f"MFU {100 * times.mfu:.0f} %" in text or "MFU <1 %" in text
    for own in plan.ranks:
        assert f"memory of rank {own.rank}: at most {of_bytes(own.peak_bytes)}" in text
        assert f"rank {own.rank} ×2 compute" in text
    for own, svg in zip(plan.ranks, page.iter("svg"), strict=True):
        assert any("V0.000H" in path.get("d") for path in svg.iter("path"))  # the top
        said = [one.text for one in svg.iter("title")]
        assert sum(f": {of_bytes(own.peak_bytes)}: " in words for words in said) >= 1


def test_memory_and_layouts_can_be_hovered_over():
    page = ElementTree.fromstring(html(small()))  # without an estimate
    assert not bars(page)
    svg, said = page.find(".//svg"), [t.text for t in page.iter("title")]
    assert len(svg.findall("path")) == 6 and len(svg.findall("rect")) == 600
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
    ((said, label),) = bars(page)
    assert label == '<b>&"\\x1b' and said.startswith(label)
    assert "".join(page.itertext()).count(label) == 2  # and in the plan's table


def test_what_is_no_plan_is_refused(tmp_path):
    for wrong in ((3,), (small(), 3)):
        with pytest.raises(TypeError, match=r"ff\.(plan|estimate)\("):
            html(*wrong, path=tmp_path / "none.html")
    with pytest.raises(ValueError, match="rank 2 has no spans"):
        html(stages(), ff.estimate(small(), A100_40))
    assert not [*tmp_path.iterdir()]
