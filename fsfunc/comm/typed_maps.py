"""The linear maps of ``shard`` by type, ``pcast``, and checks of arguments.

Under ``shard`` the loss is the mean of the losses of n ranks. A rank-local value is
paired with its cotangent by the mean over ranks (M), a part of a sharded leaf by the
sum over ranks (V), and a replicated value once (see ``linear_maps``). Between these
types there are the following maps (the fused path of ``shard`` divides by n itself):

=============  ========================================  ==============================
map            forward                                   transpose
=============  ========================================  ==============================
GATHER         parts to local: a unit's parameters       REDUCE
REDUCE         local to parts: the mean, this part       GATHER
ENTER          replicated to local: a whole parameter    MEAN
MEAN           local to local, equal on all ranks        MEAN
TOTAL          local to local, equal: the sum            TOTAL
SUM            partial sums of parts to local: a norm    the mean, into parts
MAX            the maximum over parts to local           none
SPREAD         local, equal on all, for parts: a scale   n times local
TAKE_PART      local, equal on all, to this rank's part  n times local, zero elsewhere
PART_AS_LOCAL  a part as a rank-local value              1/n
LOCAL_AS_PART  a rank-local value as a part              n
=============  ========================================  ==============================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.collective_ops import apply_over
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import AxisType, LinearMap, legal_types
from fsfunc.comm.mesh import Axis

_Tree = TypeVar("_Tree")

GATHER = LinearMap("all_gather", "V", "M")
REDUCE = LinearMap("psum_scatter", "M", "V", power=-1)
MEAN = LinearMap("psum", "M", "M", power=-1)
TOTAL = LinearMap("psum", "M", "M")
ENTER = LinearMap("enter", "M", "M", power=-1)
SUM = LinearMap("psum", "P", "M")
MAX = LinearMap("pmax", "P", "M")
SPREAD = LinearMap("cast", "M", "R")
TAKE_PART = LinearMap("slice", "M", "V")
PART_AS_LOCAL = LinearMap("cast", "V", "M")
LOCAL_AS_PART = LinearMap("cast", "M", "V")


class LawError(ValueError):
    """A value or gradient that must be replicated would differ between ranks."""


def check_samples(x: Tensor, name: str, mapped: bool | None = None) -> None:
    """Raises if the gradient by ``x`` would average different samples of the ranks.

    Args:
        x: a replicated value, or parts of one, about to become rank-local.
        name: its name, for the message.
        mapped: whether the values that it is combined with are mapped by a vmap around
            the derivative, if that is known.

    Raises:
        LawError: the derivative is taken sample by sample.
    """
    level = _torch.differentiation_level(x)
    if mapped is None:  # vmap(grad(...)): a map outside of the derivative
        mapped = any(n < level for n in _torch.vmap_levels())
    if level and mapped:
        raise LawError(
            f"per-sample (vmapped) derivatives by {name}: sample k of this rank would "
            "be averaged with sample k of the others. Take them inside a unit that has "
            "the parameters to itself: ff.unit(lambda params, batch: vmap(grad(loss), "
            "(None, 0))(params, batch), whole=True)"
        )


def checked_dim(x: Tensor, dim: int, name: str = "dim") -> int:
    """Returns ``dim`` of ``x`` as one that is not negative.

    Raises:
        ValueError: ``x`` has no such dim.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}={dim}: the tensor has shape {tuple(x.shape)}")
    return dim % x.ndim


def check_cut(x: Tensor, dim: int, group: RankGroup, op: str) -> int:
    """Returns a dim that is split evenly over the ranks, as one that is not negative.

    Raises:
        ValueError: its size is no multiple of their number.
    """
    dim = checked_dim(x, dim)
    if x.shape[dim] % group.size:
        raise ValueError(
            f"cannot {op} a tensor of shape {tuple(x.shape)} over axis "
            f"{group.name} of size {group.size} along dim {dim}: {x.shape[dim]} is "
            f"not a multiple of {group.size}; pad it"
        )
    return dim


def typed_map(group: RankGroup, op: str, of: str, to: str, **fields: Any) -> LinearMap:
    """Returns the linear map of ``op`` between two types over the axis of ``group``.

    Args:
        fields: those of the `LinearMap`, such as ``dim=``.

    Raises:
        ValueError: there is none.
    """
    legal = legal_types(op)
    # Under shard a value is rank-local, or was asked for as one value: R and P are for
    # axes that split the work of one loss.
    if group.loss_is_mean:
        legal = [row for row in legal if set(row.split("->")) <= {"V", "I"}]
    _check_types(group, op, f"{of}->{to}", legal)
    if group.loss_is_mean:
        of, to = of.replace("V", "M"), to.replace("V", "M")
    return LinearMap(op, of, to, **fields)


def _check_types(group: RankGroup, op: str, row: str, legal: Iterable[str]) -> None:
    """Raises if an op has no map between two types.

    Raises:
        ValueError: names those that it has.
    """
    # One value over axes of a mean has another derivative than over the others.
    if group.partly_mean and row != "V->V":
        raise ValueError(
            f"{op} {row} over {group.name}, of which shard averages over some alone: "
            "call it for these, and then for the others"
        )
    if row not in legal:
        context = ", under shard a mean of losses," if group.loss_is_mean else ""
        raise ValueError(
            f"{op} {row} over {group.name}{context} has no meaning; it has: "
            f"{', '.join(legal)}"
        )


_CASTS = {"I->V", "I->R", "R->V", "R->I", "V->P"}
# S is a part of a sharded leaf: of type V, where V stands for M (see `typed_map`).
_CASTS_UNDER_SHARD = {"I->V": ENTER, "S->V": PART_AS_LOCAL, "V->S": LOCAL_AS_PART}


def pcast(x: _Tree, axis: Axis, *, to: AxisType, of: AxisType = "I") -> _Tree:
    """Returns ``x`` with another type over ``axis``; nothing moves in the forward pass.

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

    def make_map(leaf: Tensor, group: RankGroup) -> LinearMap:
        row, legal = f"{of}->{to}", _CASTS_UNDER_SHARD if group.loss_is_mean else _CASTS
        _check_types(group, "pcast", row, sorted(legal))
        return (
            _CASTS_UNDER_SHARD[row] if group.loss_is_mean else LinearMap("cast", of, to)
        )

    return apply_over(x, axis, make_map)
