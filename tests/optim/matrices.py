"""Steps over trees of matrices, laid out by units, whose gradients are given."""

import torch
from hypothesis import strategies as st

import fsfunc as ff

DIMS = st.one_of(st.integers(1, 9), st.just(0))
UNITS = st.lists(
    st.lists(st.tuples(DIMS, DIMS), min_size=1, max_size=3), min_size=1, max_size=2
)


def drawn(shapes, seed):
    """Trees of these shapes by unit, of numbers whose means over ranks are exact."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randint(-64, 65, tuple(shape), generator=generator) / 64

    return [{f"w{i}": draw(s) for i, s in enumerate(unit)} for unit in shapes]


@ff.unit
def linear(params, factors):
    return sum((p * factors[name]).sum() for name, p in params.items())


def loss(params, batch):
    """Of which ``batch`` is the gradient."""
    return sum(linear(p, x) for p, x in zip(params, batch, strict=True))


def trained(optimizer, shapes, steps=2, transform=lambda step: step):
    """The whole parameters after some steps, and the state."""
    step = transform(optimizer(ff.value_and_grad(loss)))
    state = ff.init_state(step, drawn(shapes, 0), optimizer, drawn(shapes, 1))
    for i in range(steps):
        state, _ = step(state, drawn(shapes, i + 1))
    return ff.unshard(state.params), state
