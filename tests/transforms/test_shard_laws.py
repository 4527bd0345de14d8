"""Laws of ``shard`` over drawn meshes, trees and orders: it equals one device."""

from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from tests.checks import held, same
from tests.transforms.models import SPECS, batch_of

SEEDS = st.integers(0, 2**20)
POWERS = st.sampled_from([{"data": 1}, {"data": 2}, {"data": 4}, {"data": 8}])
TWO = st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)])
ORDERS = st.permutations(["shard", "remat", "accumulate"]).flatmap(
    lambda order: st.sets(st.sampled_from(["remat", "accumulate"])).map(
        lambda kept: tuple(t for t in order if t == "shard" or t in kept)
    )
)


@st.composite
def places(draw):
    """A mesh whose size is a power of two, and the arguments of ``shard`` for it."""
    if draw(st.booleans()):
        mesh = ff.make_mesh(draw(POWERS), "simulated")
        axis, copies = "data", None
    else:
        a, b = draw(TWO)
        mesh = ff.make_mesh({"a": a, "b": b}, "simulated")
        axis, copies = draw(
            st.sampled_from([(("a", "b"), None), (("b", "a"), None), ("b", "a")])
        )
    options = {
        "zero": draw(st.integers(0, 3)),
        "replicate": copies,
        "reshard_after_forward": draw(st.booleans()),
        "min_bytes": draw(st.sampled_from([0, 40, 10**6])),
    }
    return mesh, axis, options


def transformed(fn, order, mesh, axis, options):
    """``fn`` with the transforms of ``order``, the innermost first."""
    for name in order:
        if name == "shard":
            fn = ff.shard(fn, mesh, axis, **options)
        elif name == "remat":
            fn = ff.remat(fn)
        else:
            fn = ff.accumulate(fn, 2)
    return fn


def data_axes(axis, options):
    copies = options["replicate"]
    names = (axis,) if isinstance(axis, str) else axis
    return names if copies is None else (copies, *names)


@given(SPECS, places(), ORDERS, SEEDS)
@settings(max_examples=60)
def test_a_sharded_gradient_call_has_the_bits_of_one_device(spec, place, order, seed):
    mesh, axis, options = place
    params, frozen = spec.params(seed), spec.frozen_params(seed)
    batch = batch_of(4 * mesh.size, seed)
    grad = ff.value_and_grad(spec.loss)
    loss, grads = grad(params, frozen, batch)

    def main():
        step = transformed(grad, order, mesh, axis, options)
        mine = ff.local_batch(batch, mesh, data_axes(axis, options))
        base = ff.place(lambda f: step(params, f, mine), frozen)
        placed = ff.place(step, params, base, mine)
        before = held((placed, base, mine))
        found = []
        for _ in range(2):  # the second call prefetches by what the first one learnt
            value, grads = step(placed, base, mine)
            found.append((value, ff.unshard(grads)))
        return found, ff.unshard(placed), before, held((placed, base, mine))

    for found, whole, before, after in ff.spmd(main, mesh)():
        for value, unsharded in found:
            same(value, loss)
            same(unsharded, grads)
        same(whole, params)
        same(after, before)
