"""What the tests of optimizers share: trees to draw, and torch's own optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from hypothesis import strategies as st

from fsfunc import tree
from fsfunc.core.frames import frame, inside
from fsfunc.sharded.donated import Donation, Everything
from fsfunc.sharded.leaf import is_sharded

SHAPES = st.lists(
    st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4
)
SEEDS = st.integers(0, 2**31 - 1)


def params_of(shapes, seed, dtype=torch.float32):
    """A nested tree with one leaf for each shape, an integer leaf and a None."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    return {"blocks": made[1:], "head": made[0], "steps": torch.tensor(3), "no": None}


def like(params, seed, scale=1.0):
    """Random gradients of ``params``: None for what is not floating."""
    generator = torch.Generator().manual_seed(seed)

    def draw(p):
        if not p.dtype.is_floating_point:
            return None
        return scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)

    return tree.map(draw, params)


def floating(values):
    """The floating tensors of a tree, those of shards included."""
    held = [x.local if is_sharded(x) else x for x in tree.leaves(values, is_sharded)]
    return [
        x for x in held if isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    ]


def copies(values):
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)


def by_torch(make: Callable, params, grads_of_steps):
    """The floating leaves of ``params`` after steps of a ``torch.optim`` optimizer."""
    leaves = [torch.nn.Parameter(x.clone()) for x in floating(params)]
    optimizer = make(leaves)
    for grads in grads_of_steps:
        for leaf, grad in zip(leaves, floating(grads), strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


def trained(optimizer, params, grads_of_steps):
    """(params, state) after steps by ``apply``."""
    state = optimizer.init(params)
    for grads in grads_of_steps:
        params, state = optimizer.apply(grads, state, params)
    return params, state


def trained_by_update(optimizer, params, grads_of_steps):
    """(params, state) after steps by ``update`` and an addition leaf by leaf.

    Parameters that are sharded then lie in no buffer.
    """
    state = optimizer.init(params)
    for grads in grads_of_steps:
        updates, state = optimizer.update(grads, state, params)
        leaves, treedef = tree.flatten(params, is_sharded)
        rows = zip(leaves, treedef.flatten_up_to(updates), strict=True)
        params = tree.unflatten(treedef, [_plus(*row) for row in rows])
    return params, state


def _plus(leaf, update):
    if update is None:
        return leaf
    if is_sharded(leaf):
        return leaf.with_local(leaf.local + update.local)
    return leaf + update


@contextmanager
def donated(*values) -> Iterator[None]:
    """Inside, optimizers write into the memory of ``values``; without any, into all."""
    leaves = tree.leaves(values, is_leaf=is_sharded)
    tensors = [x for leaf in leaves for x in over(leaf)]
    given = Donation(tensors) if values else Everything()
    with inside(replace(frame(), donated=given)):
        yield


def over(leaf):
    """The tensors over the memory of a leaf."""
    if is_sharded(leaf):
        return [leaf.local] if leaf.packed is None else [leaf.local, leaf.packed.flat]
    return [leaf] if isinstance(leaf, torch.Tensor) else []


def assert_bits(expected, actual):
    """Two lists (or trees) hold the same bits."""
    expected, actual = tree.leaves(expected), tree.leaves(actual)
    assert len(expected) == len(actual)
    for x, y in zip(expected, actual, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)


def assert_near(expected, actual, tolerance=1e-6):
    expected, actual = tree.leaves(expected), tree.leaves(actual)
    assert len(expected) == len(actual)
    for x, y in zip(expected, actual, strict=True):
        torch.testing.assert_close(y, x, rtol=tolerance, atol=tolerance)
