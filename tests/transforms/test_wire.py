"""How a buffer travels can be replaced: here by bfloat16 on the wire."""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.crossings import LawError
from fsfunc.transforms.sharding import Sharding
from fsfunc.transforms.transforming import transformed
from fsfunc.transforms.wire import Gather, Reduction
from fsfunc.tree import map as tree_map
from tests.models import chain, floats, layers

MESH = ff.make_mesh({"data": 2}, "simulated")
loss, PARAMS = chain(), layers(3, make=floats)


class Narrow(Gather):
    exact = False

    def encode(self, part, dtype):
        return part.to(torch.bfloat16)

    def decode(self, arrived, dtype):
        return arrived.to(dtype)


class NarrowSum(Reduction):
    exact = False

    def encode(self, buffer):
        return buffer.to(torch.bfloat16)

    def decode(self, arrived, dtype):
        return arrived.to(dtype)


def sharded(f, zero=3, **how):
    return transformed(f, Sharding(MESH, ("data",), zero, **how))


def trained(step, given, x):
    """Value, whole gradient and bytes of each kind of collective, by rank."""

    def main():
        placed = ff.place(step, given, x)
        step(placed, x)
        with ff.ledger() as log:
            value, grads = step(placed, x)
        kept = ff.unshard(placed)
        kinds = ("all_gather", "psum_scatter")
        return value, ff.unshard(grads), kept, [log.bytes(op=k) for k in kinds]

    return ff.spmd(main, MESH)()


@pytest.mark.parametrize("stack", [lambda f: f, ff.remat], ids=["plain", "remat"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_gather_in_bfloat16_is_a_cast_before_it_at_half_the_bytes(zero, stack):
    gradient, x = ff.value_and_grad(loss), torch.ones(2, 4)
    narrow = lambda w: w.to(torch.bfloat16).to(w.dtype)  # noqa: E731
    exact = sharded(stack(gradient), zero)
    (value, grads, _, sent), *_ = trained(exact, tree_map(narrow, PARAMS), x)
    found = trained(sharded(stack(gradient), zero, gather=Narrow()), PARAMS, x)
    for v, g, kept, (gathered, reduced) in found:
        torch.testing.assert_close((v, g), (value, grads), rtol=0, atol=0)
        torch.testing.assert_close(kept, PARAMS, rtol=0, atol=0)  # in full
        assert gathered == sent[0] / 2 and reduced == sent[1]


def test_so_is_a_reduction():
    gradient, x = ff.value_and_grad(loss), torch.ones(2, 4)
    (value, grads, _, sent), *_ = trained(sharded(gradient), PARAMS, x)
    for v, g, _, (gathered, reduced) in trained(
        sharded(gradient, reduction=NarrowSum()), PARAMS, x
    ):
        torch.testing.assert_close(v, value, rtol=0, atol=0)
        torch.testing.assert_close(g, grads, rtol=2**-7, atol=2**-9)
        assert gathered == sent[0] and reduced == sent[1] / 2


def test_what_is_not_exact_has_no_derivative_by_torch_func():
    step = sharded(torch.func.grad(loss), gather=Narrow())
    with pytest.raises(LawError, match="Narrow changes what it sends"):
        trained(step, PARAMS, torch.ones(2, 4))
