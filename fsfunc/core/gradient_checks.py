"""Checks of a gradient call: its arguments, and that ranks agree on gradients.

``autodiff.value_and_grad`` calls the checks of arguments before each call, and
`check_agreement` after it, where the loss has called collectives. The latter finds the
most common mistake of tensor parallelism: a whole parameter meets values that vary
along an axis without `pcast`, so that each rank has only its share of the gradient.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.groups import RankGroup, gather_stacked, get_group, to_strided
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import here, maybe_here
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import frame
from fsfunc.core.units import inside_unit
from fsfunc.sharded.inputs import refuse
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import PyTree


def check_differentiable(chosen: list[PyTree], names: list[str]) -> None:
    """Raises if no differentiated leaf is a floating or complex tensor.

    Args:
        chosen: the differentiated arguments.
        names: their names, for the message.

    Raises:
        TypeError: names the arguments, and the dtype that is there.
    """
    refuse("array", "value_and_grad", chosen, *names)
    leaves = tree.leaves(chosen, is_leaf=is_sharded)
    # A tree without tensors, as of a layer without parameters, has no gradient to lose.
    tensors = [x for x in leaves if isinstance(x, Tensor) or is_sharded(x)]
    if tensors and not any(map(differentiable, tensors)):
        raise TypeError(
            f"value_and_grad by {', '.join(names)}: nothing there is a floating tensor "
            f"(the first is {tensors[0].dtype}), and all gradients would be None; "
            "x.to(torch.float32) has one"
        )


def check_gathered(path: tuple[str, ...], chosen: Sequence[PyTree]) -> None:
    """Raises if a unit differentiates a leaf that only a nested unit gathers.

    Raises:
        LawError: it would be the derivative of the ranks' mean, not this rank's own.
    """
    # Units gather packed leaves alone: a block of a split one stays a block in all.
    for x in tree.leaves(chosen, is_leaf=is_sharded):
        if is_sharded(x) and x.layout.flat is not None:
            raise inside_unit(path, repr(x.name), "a unit")


def collective_axes() -> set[str] | None:
    """Returns a set to collect the axes of a loss's collectives; None without data."""
    rank = maybe_here()
    # The ranks of a vmap mesh are rows of one call, whose values Python cannot read.
    if rank is None or not rank.link.moves_data or rank.mesh.backend == "vmap":
        return None
    # Under torch.func gradients may be wrappers, whose values it cannot read either.
    return None if _torch.transforms_active() else set()


def check_agreement(
    fn: Callable[..., Any],
    axes: set[str],
    chosen: Sequence[PyTree],
    grads: Sequence[PyTree],
) -> None:
    """Raises if the gradient of a replicated leaf differs along an axis without a mean.

    It does where a parameter is combined with values that vary along the axis, without
    ``pcast``. Each leaf is compared in the first call in which its gradient is not
    zero. Without ``shard``, only arguments that have leaves split over the axis are
    compared.

    Args:
        fn: the loss.
        axes: the axes over which the loss called collectives.
        chosen: the differentiated arguments.
        grads: the gradient of each.

    Raises:
        LawError: on every rank; names the leaf, and the way out.

    Cost: a gather of two numbers a leaf, once; it is in no ledger.
    """
    rank_here, f = here(), frame()
    # Over the axes of `shard` gradients are means, and equal.
    averaged_axes = {a for h in f.handlers for a in getattr(h, "axes", ())}
    # What is still to compare is stored in the `shard`, or without one in the mesh.
    owner: Any = f.runtimes[-1][0] if f.runtimes else rank_here.mesh
    uncompared = owner.uncompared
    for axis in sorted(axes - averaged_axes):
        key = rank_here.rank, _code(fn), axis
        remaining = uncompared.get(key)  # paths; None before the first call
        if remaining is None or remaining:
            where = get_group(axis, rank_here)
            numbers = _numbers(chosen, grads, where, remaining)
            uncompared[key] = _compare(numbers, where) if numbers else set()


def _numbers(
    chosen: Sequence[PyTree],
    grads: Sequence[PyTree],
    where: RankGroup,
    remaining: set[str] | None,
) -> dict[str, Tensor]:
    """Returns the norm and the sum of each gradient to compare, by path.

    Args:
        where: the ranks that compare.
        remaining: the paths to compare; None: all.
    """
    runtimes = [runtime for _, runtime in frame().runtimes]
    paths, leaves, treedef = tree.flatten_with_paths(tuple(chosen), is_leaf=is_sharded)
    gradients: list[Any] = treedef.flatten_up_to(tuple(grads))  # type: ignore[arg-type]
    # The arguments that have a leaf split over these ranks, by number.
    split_arguments = {
        path.partition("/")[0]
        for path, x in zip(paths, leaves, strict=True)
        if is_sharded(x) and not set(x.layout.split_axes).isdisjoint(where.axis)
    }
    numbers: dict[str, Tensor] = {}
    for path, x, g in zip(paths, leaves, gradients, strict=True):
        if remaining is not None and path not in remaining:
            continue
        # Without a `shard` nothing says that an argument is one value on all ranks; a
        # split leaf beside it does.
        if not runtimes and path.partition("/")[0] not in split_arguments:
            continue
        # `_local`, as `local` raises where a gradient is still to be reduced.
        if is_sharded(x) and set(x.layout.axes).isdisjoint(where.axis):
            g = None if g is None else g._local
        elif not isinstance(x, Tensor):  # each rank has its own part of it
            continue
        elif runtimes and not any(r.ownership.is_replicated(x) for r in runtimes):
            continue
        if isinstance(g, Tensor) and differentiable(g) and g.numel():
            numbers[path] = norm_and_sum(g)
    return numbers


def norm_and_sum(x: Tensor) -> Tensor:
    """Returns two numbers by which tensors of several ranks are compared.

    The norm does not see a sign, and the sum does.
    """
    # As floats, beneath the mode of a run in a finite field (`ff.prove`), which has no
    # norms, and where no number is near another.
    with _torch.beneath_modes(x):
        wide = to_strided(x).detach().resolve_conj()
        wide = (torch.view_as_real(wide) if x.is_complex() else wide).double()
        return torch.stack([torch.linalg.vector_norm(wide), wide.sum()])


class Near(NamedTuple):
    """Tensors of several ranks, compared by their `norm_and_sum`.

    Args:
        numbers: of each rank and tensor.
        odd: the path of the first tensor that differs, or None.
        norms: its norms, by rank, in words.
    """

    numbers: Tensor
    odd: str | None
    norms: str


def nearly_agree(numbers: dict[str, Tensor], where: RankGroup, share: float) -> Near:
    """Compares tensors over ranks, which may differ by a share of their norm.

    Equal values differ by rounding, where ranks add in another order.

    Args:
        numbers: the `norm_and_sum` of each, by path.

    Cost: one gather of 16 bytes a tensor, which is in no ledger.
    """
    sent = torch.stack(list(numbers.values()))
    with silence(), label("", "values that should be equal"):
        with _torch.beneath_modes(sent):
            by_rank = gather_stacked(sent, where)  # [ranks, tensors, 2]
            tolerance = share * by_rank[..., :1].amax(0)
            differ = ((by_rank - by_rank[:1]).abs() > tolerance).any(-1).any(0)
    if not bool(differ.any()):
        return Near(by_rank, None, "")
    i = int(differ.nonzero()[0])
    norms = ", ".join(f"{n:.4g}" for n in by_rank[:, i, 0].tolist())
    return Near(by_rank, list(numbers)[i], norms)


def _compare(numbers: dict[str, Tensor], where: RankGroup) -> set[str]:
    """Compares over ranks; returns the paths of gradients that are zero or not finite.

    These say nothing yet, and are compared again in the next call.

    Raises:
        LawError: a gradient differs.
    """
    by_rank, odd, norms = nearly_agree(numbers, where, 0.02)
    if odd is not None:
        raise LawError(
            f"the gradient by {odd.partition('/')[2]!r} differs along "
            f"{where.name}, where the loss is one value (norms {norms}): a whole "
            "parameter that is combined with values that vary there must enter by "
            f'ff.pcast(w, {where.name}, to="V"), which sums its gradient. If ranks '
            "along it have samples of their own, make it an axis of the shard"
        )
    compared = (by_rank[..., 0].amax(0) != 0) & by_rank.isfinite().all(-1).all(0)
    done = zip(numbers, compared.tolist(), strict=True)
    return {path for path, was_compared in done if not was_compared}


def _code(fn: Callable[..., Any]) -> Hashable:
    """Returns a function's code: one object, though each step makes the function anew.

    Of a callable that has none, the class.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return getattr(fn, "__code__", type(fn))
