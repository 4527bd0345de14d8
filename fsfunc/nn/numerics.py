"""Numbers in layers: dtypes of sums and autocast; random numbers of each rank.

The ranks of a model axis draw equal numbers: in a unit the default generators are
seeded from the step, the unit call and the data, none of which differs over the axis.
A replicated value needs that. Of a split activation, every part would get the same
numbers, which is an error that does not show: there each rank must draw its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.groups import axis_index, axis_size
from fsfunc.comm.mesh import Axis
from fsfunc.runtime.generators import draw_number, generators_restored, seed63
from fsfunc.runtime.scopes import refuse_in_graph


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which sums over ``x`` are held: fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def not_negative(x: Tensor) -> Tensor:
    """``x``, which is below 0 by rounding alone: there it is 0."""
    return x.clamp(min=0) if _torch.is_rounded() else x


def is_autocast(x: Tensor) -> bool:
    """True if autocast is on for the device of ``x``."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def autocast(*xs: Tensor) -> Sequence[Tensor]:
    """Tensors in autocast's dtype, where it is on and the first is not fp64."""
    if not is_autocast(xs[0]) or xs[0].dtype == torch.float64:
        return xs
    return [x.to(torch.get_autocast_dtype(x.device.type)) for x in xs]


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, products are made in the dtypes of their factors."""
    if not is_autocast(x):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


@contextmanager
def own_draws(axis: Axis | None) -> Iterator[None]:
    """Inside, each rank draws numbers of its own from torch's default generators.

    One number is drawn, equal on all ranks, and mixed with the rank's index to seed the
    generators; at the end they continue as if only that number had been drawn. So ranks
    that drew equal numbers before do so afterwards, and a recompute and any schedule
    draw the same. For :func:`dropout`, and for functions that draw by themselves, such
    as attention whose heads are split.

    Args:
        axis: one name or several, over which the values are split; None, or an axis of
            size 1: nothing changes.

    Raises:
        ValueError: an axis that the mesh does not have; a mesh made of ``vmap``, where
            one call draws for all ranks.

    Cost: nothing is sent; the generators' states are kept and put back.

    >>> import fsfunc as ff, torch
    >>> def main():
    ...     with ff.nn.own_draws("model"):
    ...         own = torch.rand(4)
    ...     return own, torch.rand(4)
    >>> (a, x), (b, y) = ff.spmd(main, ff.make_mesh({"model": 2}, "simulated"))()
    >>> torch.equal(a, b), torch.equal(x, y)
    (False, True)
    """
    if axis is None or axis_size(axis) == 1:
        yield
        return
    if _torch.fake_active():
        refuse_in_graph(f"own_draws over {axis!r} draws random numbers")
        yield
        return
    index = axis_index(axis)
    if not isinstance(index, int):
        raise ValueError(
            f"own_draws over {axis!r}: on a mesh made of vmap one call draws for all "
            'ranks; make the mesh "simulated"'
        )
    seed = seed63(draw_number(), index)
    with generators_restored() as states:
        for generator, _ in states:
            generator.manual_seed(seed)
        yield


def dropout(
    x: Tensor, p: float = 0.5, axis: Axis | None = None, *, training: bool = True
) -> Tensor:
    """``x`` with elements set to 0 with probability ``p``, the others times 1/(1-p).

    Args:
        x: floating, of any shape; with ``axis`` this rank's part of what is split over
            it, along whatever dim; without, one value on all ranks.
        p: within [0, 1].
        axis: one name or several; each rank draws the mask of its own part. None, or an
            axis of size 1: torch's dropout, with the same mask on all ranks of an axis
            that splits the work of one loss.
        training: False gives ``x`` and draws nothing.

    Raises:
        ValueError: as :func:`own_draws` does; a probability outside [0, 1].

    Cost: torch's dropout; nothing is sent.

    >>> import torch
    >>> dropout(torch.ones(3), 0.0).tolist()
    [1.0, 1.0, 1.0]
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p={p} is no probability: give one within [0, 1]")
    if not training:
        return x
    with own_draws(axis):
        return F.dropout(x, p)
