"""The linear maps of ``shard`` by type, ``pcast``, and checks of arguments.

Under ``shard`` the loss is the mean of the losses of n ranks. A rank's own values are
paired with their cotangents by the mean over ranks (M), the parts of a sharded leaf by
the sum over ranks (V), and a replicated value once. Between these types there are the
following maps (the fused path of ``shard`` divides by n by itself):

===========  =======================================  ===============================
map          forward                                  transpose
===========  =======================================  ===============================
GATHER       parts to own: a unit's parameters        REDUCE
REDUCE       own to parts: this rank's of the mean    GATHER
ENTER        replicated to own: a whole parameter     MEAN
MEAN         own to own, equal on all ranks           MEAN
TOTAL        own to own, equal on all ranks: the sum  TOTAL
SUM          partial sums of parts to own: a norm     the mean, into parts
MAX          the maximum over parts to own            none
SPREAD       own, equal on all, for parts: a scale    n times own
LAY          own, equal on all, to this rank's part   n times own, zero elsewhere
OWN          a part as a value of the rank's own      1/n
PART         a value of the rank's own as a part      n
===========  =======================================  ===============================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.collective_ops import over
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap, meanings
from fsfunc.comm.mesh import Axis

GATHER = LinearMap("all_gather", "V", "M")
REDUCE = LinearMap("psum_scatter", "M", "V", power=-1)
MEAN = LinearMap("psum", "M", "M", power=-1)
TOTAL = LinearMap("psum", "M", "M")
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
    """Raises if the gradient by ``x`` would average different samples of the ranks.

    Args:
        x: a replicated value, or parts of one, about to become the rank's own.
        what: its name; ``mapped``: whether the values that it is combined with are
            mapped by a vmap around the derivative, if that is known.

    Raises:
        LawError: the derivative is taken sample by sample.
    """
    level = _torch.differentiation_level(x)
    if mapped is None:
        mapped = any(n < level for n in _torch.vmap_levels())
    if level and mapped:
        raise LawError(
            f"per-sample (vmapped) derivatives by {what}: sample k of this rank would "
            "be averaged with sample k of the others. Take them inside a unit that has "
            "the parameters to itself: ff.unit(lambda params, batch: vmap(grad(loss), "
            "(None, 0))(params, batch), whole=True)"
        )


def checked_dim(x: Tensor, dim: int, name: str = "dim") -> int:
    """A dim of ``x``, not negative.

    Raises:
        ValueError: ``x`` has no such dim.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}={dim}: the tensor has shape {tuple(x.shape)}")
    return dim % x.ndim


def check_cut(x: Tensor, dim: int, where: RankGroup, op: str) -> int:
    """A dim that is split evenly over the ranks, not negative.

    Raises:
        ValueError: its size is no multiple of their number.
    """
    dim = checked_dim(x, dim)
    if x.shape[dim] % where.size:
        raise ValueError(
            f"cannot {op} a tensor of shape {tuple(x.shape)} over axis "
            f"{where.name} of size {where.size} along dim {dim}: {x.shape[dim]} is "
            f"not a multiple of {where.size}; pad it"
        )
    return dim


def typed(where: RankGroup, op: str, of: str, to: str, **fields: Any) -> LinearMap:
    """The linear map of ``op`` between two types over the axis of ``where``.

    Raises:
        ValueError: there is none.
    """
    legal = meanings(op)
    if where.mean:  # a value is the rank's own, or was asked for as one value
        legal = [row for row in legal if set(row.split("->")) <= {"V", "I"}]
    _check_types(where, op, f"{of}->{to}", legal)
    if where.mean:
        of, to = of.replace("V", "M"), to.replace("V", "M")
    return LinearMap(op, of, to, **fields)


def _check_types(where: RankGroup, op: str, row: str, legal: Iterable[str]) -> None:
    """Raises if an op has no map between two types.

    Raises:
        ValueError: names those that it has.
    """
    if row not in legal:
        what = ", under shard a mean of losses," if where.mean else ""
        raise ValueError(
            f"{op} {row} over {where.name}{what} has no meaning; it has: "
            f"{', '.join(legal)}"
        )


_CASTS = {"I->V", "I->R", "R->V", "R->I", "V->P"}
_CASTS_UNDER_SHARD = {"I->V": ENTER, "S->V": OWN, "V->S": PART}


def pcast(x: Any, axis: Axis, *, to: str, of: str = "I") -> Any:
    """``x`` with another type over ``axis``; nothing moves in the forward pass.

    Transpose: I->V a psum of what varies; I->R a psum of parts (Megatron's f); R->V
    and V->P each other; R->I what the first rank holds.

    Under ``shard``, I->V is how a replicated value, such as a parameter, enters the
    ranks' losses: its gradient is their mean. S->V takes this rank's part of a sharded
    leaf for a tensor of its own, and V->S is the inverse, to compute on parts
    separately. Their transposes are divided by n, and multiplied by n.

    Args:
        x: tensors; the result shares their memory.
        of, to: the types before and after: I->V, I->R, R->V, R->I or V->P; over axes
            of ``shard`` I->V, S->V or V->S.

    Raises:
        ValueError: another pair of types.

    Cost: nothing forward; I->V and I->R one all-reduce backward.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> share = lambda x: (ff.pcast(x, "data", to="V") * ff.axis_index("data")).sum()
    >>> main = lambda: torch.func.grad(share)(torch.ones(1)).item()
    >>> ff.spmd(main, mesh)()
    [1.0, 1.0]
    """

    def how(leaf: Tensor, where: RankGroup) -> LinearMap:
        row, known = f"{of}->{to}", _CASTS_UNDER_SHARD if where.mean else _CASTS
        _check_types(where, "pcast", row, sorted(known))
        return _CASTS_UNDER_SHARD[row] if where.mean else LinearMap("cast", of, to)

    return over(x, axis, how)
