"""Draws in blocks: any range alone is that range of the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsfunc.runtime import random_blocks
from fsfunc.runtime.random_blocks import Streams, draw, fill_of

aten = torch.ops.aten
FILLS = {
    "normal": fill_of(aten.normal_.default, {"self": None, "mean": 2.0, "std": 3.0}),
    "uniform": fill_of(aten.rand.default, {"size": [3]}),
    "exponential": fill_of(aten.exponential_.default, {"self": None, "lambd": 1.0}),
    "bernoulli": fill_of(aten.bernoulli_.float, {"self": None, "p": 0.5}),
    "integers": fill_of(aten.randint.low, {"low": -5, "high": 9, "size": [3]}),
}


@given(
    st.sampled_from(sorted(FILLS)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 70),
    st.data(),
)
@settings(max_examples=20)
def test_a_range_is_that_range_of_the_whole(name, dtype, size, data):
    """Also blocks shorter than what torch draws at once (16)."""
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_blocks, "BLOCK", data.draw(st.sampled_from([5, 20, 32])))
        whole, part = torch.empty(size, dtype=dtype), torch.empty(1 + stop, dtype=dtype)
        draw(FILLS[name], (7, 1), whole, 0, size)
        part = part[1 : 1 + stop - start]  # somewhere else in memory
        draw(FILLS[name], (7, 1), part, start, size)
    assert torch.equal(part, whole[start:stop])


def test_blocks_and_operators_draw_apart():
    n = random_blocks.BLOCK
    a, b = torch.empty(3 * n), torch.empty(3 * n)
    draw(FILLS["normal"], (7, 0), a, 0, len(a))
    draw(FILLS["normal"], (7, 1), b, 0, len(b))
    both = torch.stack([a[:n], a[n : 2 * n], b[:n]])
    assert (both.corrcoef() - torch.eye(3)).abs().max() < 0.02
    assert abs(a.mean() - 2) < 0.05 and abs(a.std() - 3) < 0.05


def test_a_generator_gives_one_number_until_it_is_seeded_anew():
    streams, g = Streams(), torch.Generator().manual_seed(3)
    cpu = torch.device("cpu")
    (key, one), (same, two) = streams.next(g, cpu), streams.next(g, cpu)
    assert (key, one, two) == (same, 0, 1)
    g.manual_seed(3)
    assert streams.next(g, cpu) == (key, 0)
    g.manual_seed(4)
    assert streams.next(g, cpu)[0] != key
    with torch.random.fork_rng():
        before = torch.random.get_rng_state()
        assert Streams(draws=False).next(None, cpu)[0] == 0
        assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["Tensor", "p"])
def test_what_depends_on_tensors_is_not_drawn_in_blocks(name):
    func = aten.bernoulli_.Tensor if name == "Tensor" else aten.bernoulli.p
    assert fill_of(func, {"self": None, "p": torch.ones(3)}) is None
