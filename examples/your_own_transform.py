"""A transform of your own, from a paper, and a property test of it.

    python examples/your_own_transform.py

Sharpness-aware minimization (Foret et al., 2021) takes the gradient not at w but where
the loss is worst nearby, at distance rho along the gradient:

    g = dL/dw,     g_sam = dL/dw at (w + rho g / |g|)

So it gives `value_and_grad` another meaning, and nothing else: a train step under it is
SAM's, whatever loss and optimizer are in it. The norm is of all leaves, however they
lie: it holds around `shard`, at any `zero`, with microbatches and recomputation. In
another order it is refused.
"""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device
from fsfunc.testing import strategies as draw


class Sharpness(ff.Interpretation):
    called = "sharpness_aware"

    def __init__(self, rho: float):
        self.rho = rho

    @property
    def configuration(self):  # ranks that run another one are told
        return (("rho", self.rho),)

    def gradient(self, run):
        def at_the_worst_point(call):
            args = list(call.args)
            _, grads = run(call).mean()
            for i, g in zip(call.argnums, grads, strict=True):
                size = ff.global_norm(g).clamp(min=1e-12)
                step = ff.tree_scale(g, self.rho / size)
                copy = ff.tree.map(torch.clone, args[i])  # a donated w stays as it is
                args[i] = ff.optim.apply_updates(copy, step)
            return run(replace(call, args=tuple(args)))

        return at_the_worst_point


def sharpness_aware(f, rho=0.05):
    """`f` whose gradients are those at the worst point within a radius of rho.

    Cost: two gradients in the place of one, and one psum for their norm.
    """
    return ff.transformed(f, Sharpness(rho))


@ff.unit
def layer(w, x):
    return x + torch.tanh(x @ w)


def loss(params, x):
    for w in params:
        x = layer(w, x)
    return x.square().mean()


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(draw.meshes(max_size=4).flatmap(draw.transform_stacks), st.integers(0, 9999))
def test_it_is_that_of_one_device(stack, seed):
    g = torch.Generator().manual_seed(seed)
    params = list(torch.randn(2, 3, 3, generator=g, dtype=torch.float64))
    x = torch.randn(2 * stack.rows, 3, generator=g).double()
    plain = ff.value_and_grad(loss)
    mine = sharpness_aware(stack(plain))  # of shard, remat and accumulate in any order
    at = {"axis": stack.axes, "tolerance": 1e-9, "calls": 1}
    assert_equals_one_device(sharpness_aware(plain), mine, stack.mesh, params, x, **at)


def main():
    test_it_is_that_of_one_device()
    print("on 8 meshes, under as many stacks of transforms: gradients of one device")
    mesh = ff.make_mesh({"data": 4})
    params, x = [torch.full((3, 3), 0.5), torch.eye(3)], torch.ones(8, 3)

    def sent(grad_fn):
        parts = ff.place(grad_fn, params, x)
        with ff.ledger() as log:
            grad_fn(parts, x)
        return log.table()

    plain = ff.shard(ff.value_and_grad(loss), mesh, "data")
    for name, fn in (("plain", plain), ("sharpness-aware", sharpness_aware(plain))):
        print(f"{name:16}", *ff.spmd(sent, mesh)(fn)[0])


if __name__ == "__main__":
    main()
