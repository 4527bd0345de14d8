"""Interpretations that take part in the reductions of a sharded gradient call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.core.frames import Interpretation
from fsfunc.sharded.leaf import FlatShard, Parts


class GradientSteps(Interpretation):
    """Steps each buffer as soon as its gradient is summed; see ``step_in_backward``.

    ``done``: the buffers that were stepped, by identity. ``why_spent``: the error for a
    read of a gradient that was used up.
    """

    observes = True
    why_spent = ""
    done: dict[int, FlatShard]

    def begin(self, keeps: dict[int, FlatShard], parts: Parts) -> GradientSteps | None:
        """Itself, if a sharded gradient call has buffers to step as it goes.

        Args:
            keeps: the buffers whose gradients it sums; ``parts``: what of their leaves
                is used outside units.
        """
        raise NotImplementedError

    def takes(self, shard: FlatShard) -> bool:
        """True if a buffer, all of whose gradients are summed, is stepped now."""
        raise NotImplementedError

    def step(self, shard: FlatShard, grad: Tensor, mean_size: int) -> None:
        """Steps a buffer by its gradient, which is written into.

        Args:
            mean_size: of how many ranks' gradients that is the sum.
        """
        raise NotImplementedError


class ReductionFeedback(Interpretation):
    """Sends gradients in the place of ``shard``'s reduction; see ``error_feedback``."""

    def check(self, how: Any) -> None:
        """Raises where reductions of this kind leave nothing to do.

        Args:
            how: the ``Reduction`` of the ``shard`` around it.
        """

    def send(
        self,
        how: Any,
        buffer: Tensor,
        shard: FlatShard,
        where: RankGroup,
        whole: bool,
    ) -> Handle:
        """Sends a gradient to be summed, in the place of ``how.send``."""
        raise NotImplementedError
