"""``exact``, a context in which steps are computed exactly; ``residues``, their data.

The context enters the dispatch mode of ``mode.py`` with a new ``Field``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.runtime.scopes import running_eagerly
from fsfunc.sharded.leaf import is_sharded
from fsfunc.testing.finite_field.field import (
    PRIME,
    Field,
    inverse,
    product,
    salt,
    small_fraction,
    strip_companions,
)
from fsfunc.testing.finite_field.mode import Exact

TreeT = TypeVar("TreeT")


@contextmanager
def exact(seed: int = 0) -> Iterator[Field]:
    """Computes everything inside in a finite field, where sums have no order.

    Two programs that compute the same function agree there to the last bit, whatever
    the order of their sums; two that differ are told apart, however little they differ.
    Begin from :func:`residues`; every floating tensor inside is a float64 tensor of
    residues modulo a prime near 2^25. Arithmetic is that of the field; a nonlinear
    function is a random one of its own, and comparisons go by one random order. Casts
    change nothing, and compiled functions run as what they were compiled from.

    Simulated ranks that ``ff.spmd`` starts inside compute so too; over processes each
    enters it by itself, with the same seed.

    Args:
        seed: the seed of the random choices.

    Raises:
        RuntimeError: inside of another exact run.
        NoExactRule: at an operator without a rule; one that draws numbers; a write into
            a narrower tensor that was made outside.

    Cost: some ten times that of float64, and more for small tensors.

    >>> import torch, fsfunc as ff
    >>> with ff.testing.exact():
    ...     x = ff.testing.residues(torch.ones(1000))
    ...     mean, other = x.mean(), x.flip(0).view(10, 100).mean(0).mean()
    ...     print(torch.equal(mean, other), torch.equal(mean, other * (1 + 1e-12)))
    True False
    """
    # The inner run would take the outer's numbers, companions and all, for floats.
    if is_exact():
        raise RuntimeError("an exact run inside of an exact run: leave one of them")
    mode = Exact(Field(seed))
    with warnings.catch_warnings(), running_eagerly(), mode:
        # torch 2.12 warns that nothing was compiled; ``plainly`` asked for that.
        warnings.filterwarnings("ignore", ".*found no compiled frames")
        yield mode.field


def is_exact() -> bool:
    """Returns whether an exact run is active: inside of :func:`exact`."""
    return any(isinstance(mode, Exact) for mode in _torch.modes_of_ranks())


def residues(values: TreeT, seed: int = 0) -> TreeT:
    """Returns a tree in which each floating tensor has random residues, in float64.

    They depend on the seed and on a leaf's path. A tensor that is in a tree twice stays
    one tensor. Integers, and leaves that are no tensors, stay as they are.

    Raises:
        TypeError: complex tensors, and leaves that are sharded already.
    """
    paths, leaves, structure = tree.flatten_with_paths(values, is_leaf=is_sharded)
    drawn_tensors: dict[int, Tensor] = {}
    new_leaves = []
    for path, x in zip(paths, leaves, strict=True):
        if is_sharded(x) or isinstance(x, Tensor) and x.is_complex():
            kind = "sharded" if is_sharded(x) else "complex"
            raise TypeError(
                f"residues: {path!r} is {kind}; an exact run begins from whole tensors "
                "of real numbers"
            )
        if isinstance(x, Tensor) and x.is_floating_point():
            if id(x) not in drawn_tensors:
                drawn_tensors[id(x)] = _draw_residues(x, salt(path, seed))
            x = drawn_tensors[id(x)]
        new_leaves.append(x)
    return tree.unflatten(structure, new_leaves)


def _draw_residues(x: Tensor, seed: int) -> Tensor:
    """Draws residues with the shape and device of ``x``."""
    generator = torch.Generator().manual_seed(seed)
    with _torch.beneath_all_modes():
        numbers = torch.randint(0, PRIME, x.shape, generator=generator, device="cpu")
        x_residues = numbers.to(torch.float64).to(x.device)
    return x_residues.requires_grad_(x.requires_grad and x.is_leaf)


def values(x: Tensor) -> Tensor:
    """Returns the residues of a tensor of an exact run, to be read outside of it."""
    with _torch.beneath_all_modes():
        return strip_companions(x.detach())


def exact_ratio(a: Tensor, b: Tensor) -> float | None:
    """Returns the small fraction k, neither 0 nor 1, where a = k b in an exact run."""
    a, b = values(a).flatten(), values(b).flatten()
    with _torch.beneath_all_modes():
        index = int(b.argmax())
        k = product(a[index], inverse(b[index]))
        ratio = small_fraction(int(k))
        if ratio is None or ratio in (0, 1) or not torch.equal(product(b, k), a):
            return None
    return float(ratio)
