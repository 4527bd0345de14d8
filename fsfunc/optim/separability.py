"""Whether an optimizer's step of a part is that part of its step, found by trying it.

On a few elements of each leaf, which is told to be a part of the whole one: so a rule
that goes by paths and shapes does what it will do, and one that sums over elements asks
an axis that is nowhere, or shows in that parts come out otherwise.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import Frame, inside
from fsfunc.optim.mirrored_state import MirroredState
from fsfunc.optim.optimizer import Optimizer
from fsfunc.optim.torch_probe import at_rest
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import Flat

__all__ = ["check_separable"]

Leaf = tuple[str, tuple[int, ...], torch.dtype]

_LENGTH, _CUTS = 5, (slice(2), slice(2, None))
# From gradients that no threshold cuts to some that any does; and one that is no number.
_SCALES = (1.0, 1e-6, 1e12, math.inf)
_LATER = 10_000  # a count by which a learning rate has warmed up


@lru_cache(maxsize=64)  # of a train step the same every time
def check_separable(optimizer: Optimizer, leaves: tuple[Leaf, ...]) -> None:
    """Raises where ``optimizer`` does not treat each element by itself.

    Args:
        leaves: (path, global shape, dtype) of those that it trains.

    Raises:
        ValueError: it does not, of such leaves.
    """
    if not leaves:
        return
    draw = torch.Generator().manual_seed(0)
    with at_rest(), torch.random.fork_rng(devices=[]), inside(Frame()), torch.no_grad():
        params = {path: _drawn(path, shape, dtype) for path, shape, dtype in leaves}
        try:
            first = optimizer.init(params)
            later = tree.map(_counted, first, is_leaf=is_sharded)
            for state in (first, later):
                _try(optimizer, params, state, draw)
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise ValueError(
                "step_in_backward steps a part of the parameters at a time, and this "
                f"optimizer's step of parts is not that of the whole ({said}). Give it "
                "one that treats each element by itself, such as ff.sharded_adam, "
                "ff.sgd or ff.lion, and what needs norms or all gradients a step "
                "without it"
            ) from error


def _drawn(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Sharded:
    """Some elements of a leaf; zeros among them, which show the smallest updates."""
    part = torch.tensor([0.0, 0.5, -0.25, 0.0, 2.0]).to(dtype)
    flat = Flat(("of a part",), 2, path, 0, max(-(-math.prod(shape) // 2), 1))
    return Sharded(part, Layout(shape, dtype, (flat,), path))


def _counted(x: Any) -> Any:
    return _LATER if type(x) is int else x


def _try(
    optimizer: Optimizer, params: dict[str, Any], state: Any, draw: torch.Generator
) -> None:
    """Four steps of the whole, each beside those of parts, which are compared."""
    paths, treedef = sorted(params), tree.flatten(params, is_sharded)[1]
    every = range(len(paths))
    for scale in _SCALES:
        grads = {p: x.with_local(_gradient(x, scale, draw)) for p, x in params.items()}
        after, next_state = optimizer.apply(grads, state, params)
        mine, its = [
            MirroredState(s, [p[path] for path in paths], treedef, paths)
            for s, p in ((state, params), (next_state, after))
        ]
        for positions in filter(None, (every[::2], every[1::2])):
            some = {paths[i] for i in positions}
            for cut in _CUTS:
                g, s, p, *expected = [
                    _cut(x, cut)
                    for x in (
                        {path: grads[path] for path in some},
                        mine.part(positions),
                        {path: params[path] for path in some},
                        {path: after[path] for path in some},
                        its.part(positions),
                    )
                ]
                _compare(list(optimizer.apply(g, s, p)), expected)
        params, state = after, next_state


def _gradient(x: Sharded, scale: float, draw: torch.Generator) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    g = torch.randn(_LENGTH, generator=draw, dtype=dtype)
    if math.isinf(scale):
        g[-1] = scale
        return g
    return g * scale


def _cut(values: Any, cut: slice) -> Any:
    """``values`` with these elements of each leaf that is like a parameter."""

    def part(x: Any) -> Any:
        if not is_sharded(x):
            return x
        if x.local.shape != (_LENGTH,):
            raise ValueError(f"of {_LENGTH} elements it keeps {tuple(x.local.shape)}")
        return x.with_local(x.local[cut].clone())

    return tree.map(part, values, is_leaf=is_sharded)


def _compare(found: Any, expected: Any) -> None:
    tree.check_same_structure(expected, found, is_leaf=is_sharded)
    xs, ys = [tree.flatten(t, is_sharded)[0] for t in (found, expected)]
    for x, y in zip(xs, ys, strict=True):
        x, y = [z.local if is_sharded(z) else z for z in (x, y)]
        if not isinstance(y, Tensor):
            same = x == y or x != x and y != y
        elif not y.is_floating_point():
            same = torch.equal(x, y)
        else:  # not to the bit: some kernels treat the last few elements otherwise
            near = max(1e-3, 8 * torch.finfo(y.dtype).eps)
            same = x.dtype == y.dtype and torch.allclose(
                x.double(), y.double(), rtol=near, atol=0.0, equal_nan=True
            )
        if not same:
            raise ValueError(f"{x} in place of {y}")
