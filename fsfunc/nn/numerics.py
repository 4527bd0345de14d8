"""Dtypes of sums, autocast and random numbers, as the layers of this folder use them.

Every layer of ``fsfunc.nn`` asks this file in which dtype it sums, and which dtype
autocast wants for a product. ``dropout`` and ``own_draws`` are public.

The ranks of a model axis draw equal numbers: in a unit the default generators are
seeded from the step, the unit call and the data, none of which differs over the axis.
A replicated value needs that. A split activation must not have it: every part would be
dropped by the same mask, and no check would see it. There each rank draws its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.groups import axis_index, axis_size
from fsfunc.comm.mesh import Axis
from fsfunc.runtime.generators import draw_number, generators_restored, seed63
from fsfunc.runtime.scopes import refuse_in_graph


def sum_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which sums over ``x`` are taken: fp32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def clamp_at_zero(x: Tensor) -> Tensor:
    """Sets the elements of ``x`` to 0 that only rounding made negative."""
    # Exact arithmetic in a finite field (``ff.prove``) has no negative numbers.
    return x.clamp(min=0) if _torch.is_rounded() else x


def autocast_enabled(x: Tensor) -> bool:
    """Returns whether autocast is on for the device of ``x``."""
    device_type = x.device.type
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
        device_type
    )


def cast_by_autocast(*xs: Tensor) -> Sequence[Tensor]:
    """Casts the tensors to autocast's dtype, where it is on and the first is not fp64.

    For layers that send or save the factors: those are then of the low dtype too.
    """
    # fp64 stays, as in torch's own autocast.
    if not autocast_enabled(xs[0]) or xs[0].dtype == torch.float64:
        return xs
    return [x.to(torch.get_autocast_dtype(x.device.type)) for x in xs]


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Makes products inside in the dtypes of their factors, even under autocast."""
    if not autocast_enabled(x):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


@contextmanager
def own_draws(axis: Axis | None) -> Iterator[None]:
    """Lets each rank draw its own numbers from torch's default generators inside.

    One number is drawn, equal on all ranks, and mixed with the rank's index to seed the
    generators; at the end they continue as if only that number had been drawn. So ranks
    that drew equal numbers before do so afterwards, and a recompute and any schedule
    draw the same. :func:`dropout` uses it. Use it too around functions that draw by
    themselves, such as attention whose heads are split.

    Args:
        axis: one name or several, over which the values are split. With None, or an
            axis of size 1, nothing changes.

    Raises:
        ValueError: an axis that the mesh does not have; a mesh made of ``vmap``, where
            one call draws for all ranks.

    Cost: nothing is sent; the generators' states are saved and restored.

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
    if _torch.fake_active():  # a dry run draws nothing, and a whole graph cannot seed
        refuse_in_graph(f"own_draws over {axis!r} draws random numbers")
        yield
        return
    rank_index = axis_index(axis)
    if not isinstance(rank_index, int):
        raise ValueError(
            f"own_draws over {axis!r}: on a mesh made of vmap one call draws for all "
            'ranks; make the mesh "simulated"'
        )
    seed = seed63(draw_number(), rank_index)
    with generators_restored() as generator_states:
        for generator, _ in generator_states:
            generator.manual_seed(seed)
        yield


def dropout(
    x: Tensor, p: float = 0.5, axis: Axis | None = None, *, training: bool = True
) -> Tensor:
    """Sets elements of ``x`` to 0 with probability ``p``, and scales the others.

    The others are multiplied by 1 / (1 - p), so that the mean stays.

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
