"""What a gradient call does not differentiate is a constant to it, in units too."""

import pytest
import torch

import fsfunc as ff
from fsfunc.tree import map as tree_map

MESH = ff.make_mesh({"data": 2}, "simulated")
unit = ff.unit(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))
PARAMS = {"w": torch.eye(3) * 0.5, "b": torch.tensor([0.1, -0.2, 0.3])}
X = torch.arange(12.0).view(4, 3) / 12
grad = ff.value_and_grad


def captured(params, x):
    """A target that is held fixed, as in self-distillation."""
    return grad(lambda p: (unit(p, x) - 2 * unit(params, x)).square().mean())(params)


def in_part(params, x):
    """One leaf is captured, and its neighbour in the buffer is not."""

    def loss(p):
        return unit({"w": params["w"], "b": p["b"]}, x).square().mean()

    return grad(loss)(params)


def adversarial(params, x):
    """A gradient call by the data within one by the parameters."""

    def loss(p):
        at = lambda d: unit(p, x + d).square().sum()  # noqa: E731
        return unit(p, x + 0.1 * grad(at)(torch.zeros_like(x))[1].sign()).mean()

    return grad(loss)(params)


def beside(params, x):
    """A leaf that a unit reads, and that is read beside it as well."""

    def loss(p):
        doubled = tree_map(lambda w: 2 * w, p)
        return (unit(p, x) + unit(doubled, x)).square().mean()

    return grad(loss)(params)


def between(params, x):
    """A loss that differentiates by what a unit returned, once and once more."""

    def loss(p):
        h = unit(p, x)
        middle = unit(p, h)
        y = unit(p, middle)
        by = [z.square().sum() for z in (y, middle)]
        slopes = [torch.autograd.grad(z, h, retain_graph=True)[0] for z in by]
        return (y * (1 + slopes[0] - slopes[1])).mean()

    return grad(loss)(params)


@pytest.mark.parametrize(
    "how", [{}, {"zero": 1}, {"zero": 0}, {"min_bytes": 99}], ids=str
)
@pytest.mark.parametrize("stack", [lambda f: f, ff.remat], ids=["plain", "remat"])
@pytest.mark.parametrize("step", [captured, in_part, adversarial, beside, between])
def test_a_gradient_is_by_what_is_given(step, stack, how):
    value, expected = step(PARAMS, X)

    def main():
        run = ff.shard(stack(step), MESH, "data", **how)
        mine = ff.local_batch(X, MESH, "data")
        placed = ff.place(run, PARAMS, mine)
        found = [run(placed, mine) for _ in range(2)]
        assert all(x.parts is None for x in placed.values() if hasattr(x, "parts"))
        return [(v, ff.unshard(g)) for v, g in found]

    for found in ff.spmd(main, MESH)():
        for again, grads in found:
            torch.testing.assert_close(again, value)
            torch.testing.assert_close(grads, expected)
