"""Random numbers for sharded leaves, equal to those of one device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import laid
from fsfunc.comm.collectives import pbroadcast
from fsfunc.comm.mesh import averaged_axes, here
from fsfunc.core.frames import frame
from fsfunc.runtime.generators import one_number
from fsfunc.runtime.random_blocks import draw, standard_normal
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.slices import take


def randn_like(like: Any, *, generator: torch.Generator | None = None) -> Any:
    """Standard normal noise that lies as ``like`` does.

    A leaf's numbers are those of the whole leaf, of which each rank draws its part: the
    same on any number of ranks, with any ``zero``, on one device. (``torch.randn_like``
    of a part would be the same noise on every rank's part.)

    Args:
        like: a tree of tensors and shards; None is returned for what is not floating.
        generator: one number is drawn of it, which must be alike on every rank; by
            default of the first rank's own, and sent.

    Cost: one broadcast of one number, with a generator nothing; blocks of 131072
    elements are drawn whole, and so are leaves that are split along a dim.

    >>> import torch, fsfunc as ff
    >>> {k: x.shape for k, x in ff.randn_like({"w": torch.ones(2, 3)}).items()}
    {'w': torch.Size([2, 3])}
    """
    leaves = tree.leaves(like, is_leaf=is_sharded)
    count = iter(range(len(leaves)))

    def noise(x: Any) -> Any:
        stream = number, next(count)
        if not isinstance(x, Tensor | Sharded) or not x.dtype.is_floating_point:
            return None
        local = x.local if isinstance(x, Sharded) else x
        made = torch.empty_like(
            _torch.unwrapped(local), memory_format=torch.contiguous_format
        )
        start = 0
        if isinstance(x, Sharded) and x.layout.splits:  # a block is no range of it
            full = made.new_empty(x.shape)
            draw(standard_normal(), stream, full.view(-1), 0, full.numel())
            made.copy_(take(full, x.layout, here().mesh.coordinates()))
            return laid(x.with_local(made))
        if isinstance(x, Sharded) and x.layout.axes:
            start, _ = x.layout.span(here().mesh.coordinates())
        draw(standard_normal(), stream, made.view(-1), start, math.prod(x.shape))
        return laid(x.with_local(made)) if isinstance(x, Sharded) else made

    with torch.no_grad(), _torch.beneath_functorch():
        number = one_number(generator)
        if generator is None and not frame().path:
            devices = [x.device for x in leaves if isinstance(x, Tensor | Sharded)]
            number = _agreed(number, devices[0]) if devices else number
        return tree.map(noise, like, is_leaf=is_sharded)


def _agreed(number: int, device: torch.device) -> int:
    """The first rank's number, on every rank of the mean."""
    if not (axes := averaged_axes()):
        return number
    with label("", "randn_like"):
        found = pbroadcast(torch.tensor(number, device=device), axes, source=0)
    return number if _torch.fake_active() else int(found)
