"""What attention over a cut sequence costs: bytes sent, memory, equal work."""

import pytest
import torch

import fsfunc as ff
from fsfunc.nn import attention_blocks
from fsfunc.nn.attention_blocks import Heads, attend_by_tiles, pull_back
from fsfunc.nn.attention_masks import Visible
from tests.checks import simulated, trained
from tests.models import train_step
from tests.nn.test_context_parallel import attention, cut, pulled, tensors
from tests.planning.comparing import planned_and_run

HEADS, READ, WIDTH, VALUE = 4, 2, 4, 6


def sent(form, order, size, way, n=4, **how):
    """The ledger of one call on every rank, and bytes of a rank's q, k and v, out."""
    shapes = [
        (2, heads, n * size, width)
        for heads, width in ((HEADS, WIDTH), (READ, WIDTH), (READ, VALUE))
    ]
    whole = tensors(0, *shapes)
    parts = [cut(x, size, order) for x in whole]

    def main():
        mine = [x[ff.axis_index("context")] for x in parts]
        return way(attention(form, order, **how))(*mine)

    with ff.ledger() as log:
        ff.spmd(main, simulated(context=size))()
    q, k, v, out = (x[0].numel() * 8 for x in parts)
    return log, (q, k + v, out)


def forward(attend):
    return lambda q, k, v, w: attend(q, k, v)


@pytest.mark.parametrize("size", [1, 3])
def test_a_ring_sends_what_is_seen(size) -> None:
    hops = size - 1

    for order in (None, "zigzag", "contiguous"):
        logs = [sent("ring", order, size, way) for way in (forward, pulled)]
        kept, (q, b, out) = sent("ring", order, size, pulled, recompute=False)
        for i in range(size):
            once, both, kept_both = (
                log.bytes("context", rank=i) for log in (logs[0][0], logs[1][0], kept)
            )
            if order is None:
                assert once == hops * b
                assert both == 3 * hops * b
                assert kept_both == 2 * hops * b
                assert logs[0][0].count("ppermute", rank=i) == hops
                continue
            turns = 0
            if order == "contiguous":  # halves that a rank keeps: blocks 2 i, 2 i + 1
                held = (i, 2 * size - 1 - i)
                kept_here = sum(block in held for block in (2 * i, 2 * i + 1))
                turns = (2 - kept_here) * (q + b + out) // 2 if hops else 0
            assert once == (hops + i) * b // 2 + turns
            assert both == (4 * hops + i) * b // 2 + 2 * turns
            assert kept_both == 3 * hops * b // 2 + 2 * turns


@pytest.mark.parametrize("size", [1, 2])
def test_all_to_all_is_four_of_them_each_way(size) -> None:
    for order in (None, "zigzag", "contiguous"):
        for way, times in ((forward, 1), (pulled, 2)):
            log, (q, b, out) = sent("all_to_all", order, size, way)
            assert log.bytes("context") == times * (q + b + out) * (size - 1) / size
            assert log.count("all_to_all") == len(log.of()) == 4 * times * (size > 1)


def test_no_tile_is_computed_that_is_masked_as_a_whole(monkeypatch) -> None:
    seen, scores = [], attention_blocks._scores
    spy = lambda *args: seen.append(scores(*args)) or seen[-1].clone()  # noqa: E731
    monkeypatch.setattr(attention_blocks, "_scores", spy)
    monkeypatch.setattr(attention_blocks, "_MAX_SCORES", 0)
    monkeypatch.setattr(attention_blocks, "_MIN_ROWS", 2)
    q, k, v, g = tensors(0, (1, 4, 8, 4), (1, 2, 8, 4), (1, 2, 8, 5))
    of = attend_by_tiles(Heads(q, k, v), Visible(least=0), 0.5)
    pull_back(g, Heads(q, k, v), of, Visible(least=0), 0.5)
    # Heads, rows of a tile, and keys that the last of them sees; in both passes.
    assert [x.numel() for x in seen] == [4 * 2 * keys for keys in (2, 4, 6, 8)] * 2


def held(form, order, size, n, value=8):
    """The most that a rank holds in both passes, and what it keeps between them."""
    shapes = (1, 4, n, 8), (1, 4, n, 8), (1, 4, n, value)
    whole = tensors(0, *shapes, dtype=torch.float32)
    parts = [[y.clone() for y in cut(x, size, order)] for x in whole]

    def main():
        q, k, v, w = (x[ff.axis_index("context")] for x in parts)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        kept = []
        hooks = torch.autograd.graph.saved_tensors_hooks
        with ff.testing.live_bytes((q, k, v, w)) as seen:
            with hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
                out = attention(form, order)(q, k, v)
            torch.autograd.grad(out, (q, k, v), w)
        return seen.peak_bytes, sum(kept)

    found = ff.spmd(main, simulated(context=size))()
    assert len(set(found)) == 1  # the same on every rank
    return found[0]


@pytest.mark.parametrize("order", [None, "zigzag"])
@pytest.mark.parametrize("form", ["ring", "all_to_all"])
def test_memory_is_a_share_of_the_whole(form, order) -> None:
    part = 4 * 256 * 8 * 4  # bytes of q, where the sequence is whole
    for size in (2, 4):
        peak, kept = held(form, order, size, 256)
        # q, k, v, the output, one number a query, and the places of half-blocks.
        places = 4 * 2 * size * 8 if form == "all_to_all" and order else 0
        assert kept * size <= part * (4 + 1 / 8) + places * size
        assert peak * size <= 25.3 * part
    scores = 4 * 256 * 256 * 4 // 4  # a rank's probabilities, of which none is kept
    assert held(form, order, 4, 256)[0] < 25.3 * part // 4 < scores


MASKS = {"documents": torch.arange(16)[None] // 7, "attn_mask": torch.zeros(16, 32)}


@pytest.mark.parametrize(
    ("form", "order", "window", "masks"),
    [
        ("ring", "zigzag", None, {}),
        ("all_to_all", None, None, {}),
        ("ring", "contiguous", 5, MASKS),
        ("all_to_all", "zigzag", 5, MASKS),
    ],
)
def test_a_plan_knows_bytes_and_memory(form, order, window, masks) -> None:
    mesh, optimizer = simulated(context=2), ff.sgd(0.1)

    @ff.unit
    def layer(p, x, masks):
        attend = attention(form, order, window=window, **masks)
        heads = (x @ p["qkv"]).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return x + torch.tanh(attend(*heads)).transpose(1, 2).flatten(2) @ p["o"]

    def loss(params, batch):
        x, masks = batch
        for p in params:
            x = layer(p, x, masks)
        return (x**2).mean()

    def init():
        return [{"qkv": torch.ones(8, 24), "o": torch.ones(8, 8)} for _ in "ab"]

    step = ff.shard(ff.remat(train_step(loss, optimizer)), mesh, "context")
    batch = torch.arange(512.0).view(2, 32, 8) / 512, masks

    def part(batch):
        x, masks = batch
        return x.chunk(2, 1)[ff.axis_index("context")], masks

    how = {"mesh": mesh, "over": part, "steps": 1, "call": planned_and_run}
    for run in trained(step, init, optimizer, batch, **how):
        run.logs[0].check()


def test_rows_of_scores_are_bounded_whatever_the_length(monkeypatch) -> None:
    monkeypatch.setattr(attention_blocks, "_MAX_SCORES", 1 << 18)
    peaks = [held("ring", "zigzag", 2, n, value=9)[0] for n in (1024, 2048)]
    rows = 3 * 4 * 4 * (1 << 18) // 4  # tiles of 2^18 scores in fp32, and their work
    assert peaks[1] - peaks[0] < rows < 4 * 512 * 512 * 4
