"""``Max``: an auxiliary output of which the largest is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from fsfunc.comm.linear_maps import LinearMap
from fsfunc.core.losses import Reduced


class Max(Reduced):
    """A tree of tensors of which the largest over microbatches and ranks is taken.

    Element by element, for extremes: the longest sequence, the largest activation or
    loss of a sample. Otherwise as :class:`Summed`; it has no derivative. (The minimum
    is the maximum of the negated values, negated.)

    Args:
        tree: tensors, of one shape on every rank and in every microbatch.

    Raises:
        TypeError: a leaf that is no tensor, or one of booleans or complex numbers.

    Cost: under ``shard`` one pmax a gradient call for each dtype among all that is
    compared; without any, nothing.

    >>> import torch, fsfunc as ff
    >>> loss = lambda w, x: ((w * x).mean(), ff.Max(x.max()))
    >>> evaluate = ff.accumulate(ff.value(loss, has_aux=True), 2)
    >>> evaluate(torch.tensor(1.0), torch.tensor([0.0, 5.0, 1.0, 0.0]))
    (tensor(1.5000), Max(tensor(5.)))
    """

    __slots__ = ()
    called, combine = "maxima", staticmethod(torch.maximum)
    over_ranks = LinearMap("pmax", to="I")

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Returns whether tensors of its dtype have an order."""
        return x.dtype != torch.bool and not x.is_complex()
