"""Pages and pictures as a browser shows them: no text overlaps another, or is cut."""

import pytest
import torch

import fsfunc as ff
from fsfunc.pipelining.schedules import zb_v
from fsfunc.planning.hardware import H100
from fsfunc.show import html, memory, streams, timeline
from fsfunc.show.charts import MEMORY, WAITS, by_sign
from tests.models import train_step
from tests.show.browser import BROWSER, MISSING, looked_at, screenshot
from tests.show.planned import small

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)


def layer(name):
    def body(w, x):
        return torch.tanh(x @ w)

    body.__name__ = body.__qualname__ = name
    return ff.unit(body)


@pytest.fixture(scope="module")
def planned():
    """A step of twelve layers in three stages, each over two ranks."""
    layers = [layer(f"model.layers.{i}") for i in range(12)]

    def loss(params, x):
        for body, (_, w) in zip(layers, params.items(), strict=True):
            x = body(w, x)
        return x.sum()

    mesh = ff.make_mesh({"data": 2, "pipe": 3}, "abstract")
    optimizer = ff.sharded_adam(1e-3)
    step = ff.remat(train_step(loss, optimizer))
    step = ff.pipeline(step, mesh, "pipe", n_microbatches=4)
    step = ff.shard(step, mesh, "data", zero=3)
    n = 1024
    init = lambda: {f"model.layers.{i}.w": torch.zeros(n, n) for i in range(12)}  # noqa: E731
    plan = ff.plan(step, init, optimizer, torch.zeros(8 * n, n), mesh=mesh)
    return plan, ff.estimate(plan, H100, tokens=16 * n)


@pytest.fixture(scope="module")
def pages(planned):
    plan, times = planned
    page = html(plan, times, H100)
    charts = (
        streams(times),
        memory(plan, estimate=times),
        memory(plan),
        timeline(zb_v(8, 8)),
    )
    drawn = "<br/>".join(chart.svg() for chart in charts)
    return {
        "a plan": page.replace("<details>", '<details open="open">'),
        "a plan, wider": page.replace('id="time"', 'id="time" style="width:900%"'),
        "a plan without times": html(small()),
        "pictures": f"<html><body>{drawn}</body></html>",
    }


SEEN = {  # page, width -> some of what is seen
    ("a plan", 1400): {"F0", "B0", "5 ms", "100 MB", "model.layers.4-11 ×8"},
    ("a plan", 390): {"B0", "5 ms"},
    ("a plan, wider", 1400): {"F0", "model.layers.0 F0", "500 µs"},
    ("a plan, wider", 390): {"F0", "500 µs"},
    ("a plan without times", 1400): {"0", "10", "1 kB"},
    ("a plan without times", 390): {"0", "10"},
    ("pictures", 1500): {"F0", "I0", "W0", "10 ms", "gathered", "in the forward"},
}


@pytest.fixture(scope="module")
def seen(pages):
    found = looked_at([(pages[name], width) for name, width in SEEN])
    return dict(zip(SEEN, found, strict=True))


@pytest.mark.parametrize(("name", "width"), SEEN)
def test_no_text_overlaps_or_is_cut(seen, name, width):
    faults, shown = seen[name, width]
    assert not faults, faults[:9]
    assert SEEN[name, width] <= set(shown)


@pytest.mark.parametrize("width", [1400, 390])
def test_a_screenshot_has_the_chart_s_colours(pages, width, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "seen.png"
    screenshot(pages["a plan"], path, width)
    pixels = (255 * image.imread(path)[..., :3]).round().astype(int)
    assert pixels.shape == (1600, width, 3)
    numbers = {*(pixels @ [2**16, 2**8, 1]).ravel().tolist()}
    colors = {f"#{number:06x}" for number in numbers}
    looks = [*map(by_sign, "FB"), WAITS, MEMORY["activations"], MEMORY["gradients"]]
    assert {look.color for look in looks} <= colors


def test_faults_are_seen():
    narrow = '<p style="width:20px;overflow:hidden;white-space:nowrap">too long</p>'
    over = '<p style="position:absolute;top:90px;left:0">over</p>'
    beyond = '<p style="position:absolute;left:380px;white-space:nowrap">beyond it</p>'
    scrolled = f'<div style="overflow-x:auto;width:99px">{"word" * 99}</div>'
    page = f"<html><body>{narrow}{beyond}{scrolled}{over}{over}</body></html>"
    ((faults, shown),) = looked_at([(page, 390)])
    expected = {"cut: too long", "overlap: over and over", "beyond the page: beyond it"}
    assert set(faults) == expected
    assert "over" in shown
