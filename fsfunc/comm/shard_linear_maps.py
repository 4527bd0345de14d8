"""Linear maps of ``shard``: between own values, parts of leaves, and one value.

Under ``shard`` the loss is the mean over n ranks of their own losses. Own values pair
by the mean over ranks (M), the parts of a sharded leaf by the sum over the ranks that
hold them (V), and what is one value on all ranks is paired once. Each crossing is a
linear map with a transpose (the fused path of ``shard`` divides by n on its own):

===========  =======================================  ===============================
crossing     forward                                  transpose
===========  =======================================  ===============================
GATHER       parts to own: a unit's parameters        REDUCE
REDUCE       own to parts: the mean, this rank's      GATHER
ENTER        one value to own: a whole parameter      MEAN
MEAN         own to own, which agree                  MEAN
SUM          partial sums of parts to own: a norm     the mean, into parts
MAX          the largest of parts to own              none
SPREAD       own, which agree, into parts: a scale    n times own
LAY          own, which agree, to parts: this rank's  n times own, zero elsewhere
OWN          a part, taken for a value of its own     one n-th
PART         own, taken for a part                    n times
===========  =======================================  ===============================
"""

from __future__ import annotations

from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.linear_maps import LinearMap

GATHER = LinearMap("all_gather", "V", "M")
REDUCE = LinearMap("psum_scatter", "M", "V", power=-1)
MEAN = LinearMap("psum", "M", "M", power=-1)
ENTER = LinearMap("enter", "M", "M", power=-1)
SUM = LinearMap("psum", "P", "M")
MAX = LinearMap("pmax", "P", "M")
SPREAD = LinearMap("cast", "M", "R")
LAY = LinearMap("slice", "M", "V")
OWN = LinearMap("cast", "V", "M")
PART = LinearMap("cast", "M", "V")


class LawError(ValueError):
    """A value or gradient that must be replicated would differ between ranks."""


def check_samples(x: Tensor, what: str, mapped: bool | None = None) -> None:
    """Raises where the gradient by ``x`` would be a mean of unlike samples.

    Args:
        x: one value, or parts of one, about to become the rank's own.
        what: names it; ``mapped``: whether what it meets is mapped around the
            derivative, if anybody knows.

    Raises:
        LawError: the derivative is taken sample by sample.
    """
    level = _torch.differentiated_at(x)
    if mapped is None:
        mapped = any(n < level for n in _torch.mapping_levels())
    if level and mapped:
        raise LawError(
            f"per-sample (vmapped) derivatives by {what}: sample k of this rank would "
            "be averaged with sample k of the others. Take them inside a unit that has "
            "the parameters to itself: ff.unit(lambda params, batch: vmap(grad(loss), "
            "(None, 0))(params, batch), whole=True)"
        )
