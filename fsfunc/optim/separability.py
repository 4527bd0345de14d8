"""Whether an optimizer's step of a part is that part of its step, found by trying it.

On a few elements of each leaf, which is told to be a part of the whole one: so a rule
that goes by paths and shapes does what it will do, and one that sums over elements asks
an axis that is nowhere, or shows in that parts come out otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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

_NUMBER = re.compile(r"\d+")
_LENGTH, _CUTS = 5, (slice(2), slice(2, None))
# Gradients that a threshold may leave as they are, some that any cuts, an infinity.
_SCALES = (1.0, 1e12, math.inf)
_LATER = 10_000  # a count by which a learning rate has warmed up


@lru_cache(maxsize=64)  # of a train step the same every time
def check_separable(optimizer: Optimizer, leaves: tuple[Leaf, ...]) -> None:
    """Raises where ``optimizer`` does not treat each element by itself.

    Args:
        leaves: (path, global shape, dtype) of those that it trains.

    Raises:
        ValueError: it does not, of such leaves.
    """
    kinds: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        path, *how = leaf
        kinds.setdefault((_NUMBER.sub("#", path), *how), []).append(leaf)
    some = [leaf for alike in kinds.values() for leaf in {alike[0]: 0, alike[-1]: 0}]
    try:
        with at_rest(), torch.random.fork_rng(devices=[]), inside(Frame()):
            _try(optimizer, some, _SCALES, later=False)
            _try(optimizer, some, _SCALES, later=True)
            if len(some) < len(leaves):  # a rule may go by the number of a layer
                _try(optimizer, leaves, _SCALES[1:2], later=True)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ValueError(
            "step_in_backward steps a part of the parameters at a time, and this "
            f"optimizer's step of parts is not that of the whole ({said}). Give it "
            "one that treats each element by itself, such as ff.sharded_adam, ff.sgd "
            "or ff.lion, and what needs norms or all gradients a step without it"
        ) from error


def _drawn(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Sharded:
    """Some elements of a leaf; zeros among them, which show the smallest updates."""
    part = torch.tensor([0.0, 0.5, -0.25, 0.0, 2.0]).to(dtype)
    flat = Flat(("of a part",), 2, path, 0, max(-(-math.prod(shape) // 2), 1))
    return Sharded(part, Layout(shape, dtype, (flat,), path))


def _counted(x: Any) -> Any:
    return _LATER if type(x) is int else x


def _try(
    optimizer: Optimizer, leaves: Sequence[Leaf], scales: Sequence[float], later: bool
) -> None:
    """Some steps of the whole, each beside those of two parts, which are compared.

    To a part belong the first elements of one leaf and the last of the next.

    Args:
        later: whether counts in the first state are as after many steps.
    """
    if not leaves:
        return
    params: Any = {path: _drawn(path, shape, dtype) for path, shape, dtype in leaves}
    state, draw = optimizer.init(params), torch.Generator().manual_seed(0)
    if later:
        state = tree.map(_counted, state, is_leaf=is_sharded)
    paths, treedef = sorted(params), tree.flatten(params, is_sharded)[1]
    every = range(len(paths))
    for scale in scales:
        grads = {p: x.with_local(_gradient(x, scale, draw)) for p, x in params.items()}
        after, next_state = optimizer.apply(grads, state, params)
        mine, its = [
            MirroredState(s, [p[path] for path in paths], treedef, paths)
            for s, p in ((state, params), (next_state, after))
        ]
        for k in (0, 1):
            cuts = {path: _CUTS[(i + k) % 2] for i, path in enumerate(paths)}
            its_part, my_part = [x.part(every) for x in (its, mine)]
            g, s, p = [_cut(x, cuts) for x in (grads, my_part, params)]
            found = optimizer.apply(g, s, p)
            _compare(found, (_cut(after, cuts), _cut(its_part, cuts)))
        params, state = after, next_state


def _gradient(x: Sharded, scale: float, draw: torch.Generator) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    g = torch.randn(_LENGTH, generator=draw, dtype=dtype)
    if math.isinf(scale):
        g[-1] = scale
        return g
    return g * scale


def _cut(values: Any, cuts: dict[str, slice]) -> Any:
    """``values`` with these elements of each leaf that is like a parameter."""

    def part(x: Any) -> Any:
        if not is_sharded(x):
            return x
        if x.local.shape != (_LENGTH,):
            raise ValueError(f"of {_LENGTH} elements it keeps {tuple(x.local.shape)}")
        return x.with_local(x.local[cuts[x.name]])

    return tree.map(part, values, is_leaf=is_sharded)


def _compare(found: Any, expected: Any) -> None:
    (xs, spec), (ys, other) = [tree.flatten(t, is_sharded) for t in (found, expected)]
    if spec != other:
        raise ValueError("its state is another one")
    numbers: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for x, y in zip(xs, ys, strict=True):
        x, y = [z.local if is_sharded(z) else z for z in (x, y)]
        if not isinstance(y, Tensor):
            if x != y and (x == x or y == y):
                raise ValueError(f"{x} in place of {y}")
            continue
        if x.dtype != y.dtype or x.shape != y.shape:
            raise ValueError(f"{x} in place of {y}")
        both = numbers.setdefault(y.dtype, ([], []))
        both[0].append(x.reshape(-1))
        both[1].append(y.reshape(-1))
    for dtype, both in numbers.items():
        # Not to the bit: some kernels treat the last few elements otherwise.
        near = max(1e-3, 8 * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0
        x, y = [torch.cat(z).double() for z in both]
        if not torch.allclose(x, y, rtol=near, atol=0.0, equal_nan=True):
            i = (x - y).nan_to_num(1.0).abs().argmax()
            raise ValueError(f"{x[i]:.3g} in place of {y[i]:.3g}")
