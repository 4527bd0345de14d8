"""Checks of a gradient call: its arguments, and that ranks agree on gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
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


def check_differentiable(chosen: list[Any], names: list[str]) -> None:
    """Raises if no differentiated leaf is a floating or complex tensor.

    Raises:
        TypeError: names the arguments, and the dtype that is there.
    """
    refuse("array", "value_and_grad", chosen, *names)
    leaves = tree.leaves(chosen, is_leaf=is_sharded)
    given = [x for x in leaves if isinstance(x, Tensor) or is_sharded(x)]
    if given and not any(map(differentiable, given)):
        raise TypeError(
            f"value_and_grad by {', '.join(names)}: nothing there is a floating tensor "
            f"(the first is {given[0].dtype}), and all gradients would be None; "
            "x.to(torch.float32) has one"
        )


def check_gathered(path: tuple[str, ...], chosen: Any) -> None:
    """Raises if a unit differentiates a leaf that only a nested unit gathers.

    Raises:
        LawError: it would be the derivative of the ranks' mean, not this rank's own.
    """
    for x in tree.leaves(chosen, is_leaf=is_sharded):
        if is_sharded(x) and x.layout.flat is not None:
            raise inside_unit(path, repr(x.name), "a unit")


def collective_axes() -> set[str] | None:
    """A set to collect the axes of a loss's collectives in; None without real data."""
    at = maybe_here()
    if at is None or not at.link.moves_data or at.mesh.backend == "vmap":
        return None
    return None if _torch.transforms_active() else set()


def check_agreement(
    fn: Callable[..., Any], axes: set[str], chosen: Sequence[Any], grads: Sequence[Any]
) -> None:
    """Raises if the gradient of a replicated leaf differs along an axis without a mean.

    It does where a parameter is combined with values that vary along the axis, without
    ``pcast``. Each leaf is compared in the first call in which its gradient is not
    zero. Without ``shard``, only arguments that have leaves split over the axis are
    compared.

    Args:
        fn: the loss; ``axes``: those over which it called collectives.

    Raises:
        LawError: on every rank; names the leaf, and the way out.

    Cost: a gather of two numbers a leaf, once; it is in no ledger.
    """
    at, f = here(), frame()
    taken = {a for h in f.handlers for a in getattr(h, "axes", ())}
    owner: Any = f.runtimes[-1][0] if f.runtimes else at.mesh
    uncompared = owner.uncompared
    for axis in sorted(axes - taken):
        key = at.rank, _code(fn), axis
        left = uncompared.get(key)
        if left is None or left:
            where = get_group(axis, at)
            found = _numbers(chosen, grads, where, left)
            uncompared[key] = _compare(found, where) if found else set()


def _numbers(
    chosen: Sequence[Any], grads: Sequence[Any], where: RankGroup, left: set[str] | None
) -> dict[str, Tensor]:
    """The norm and the sum of each gradient to compare, by path."""
    runtimes = [runtime for _, runtime in frame().runtimes]
    paths, leaves, treedef = tree.flatten_with_paths(tuple(chosen), is_leaf=is_sharded)
    gradients: list[Any] = treedef.flatten_up_to(tuple(grads))  # type: ignore[arg-type]
    splits = {
        path.partition("/")[0]
        for path, x in zip(paths, leaves, strict=True)
        if is_sharded(x) and not set(x.layout.split_axes).isdisjoint(where.axis)
    }
    found = {}
    for path, x, g in zip(paths, leaves, gradients, strict=True):
        if left is not None and path not in left:
            continue
        if not runtimes and path.partition("/")[0] not in splits:
            continue
        if is_sharded(x) and set(x.layout.axes).isdisjoint(where.axis):
            g = None if g is None else g._local
        elif not isinstance(x, Tensor):
            continue
        elif runtimes and not any(r.ownership.is_replicated(x) for r in runtimes):
            continue
        if isinstance(g, Tensor) and differentiable(g) and g.numel():
            found[path] = norm_and_sum(g)
    return found


def norm_and_sum(x: Tensor) -> Tensor:
    """Two numbers by which tensors of several ranks are compared."""
    with _torch.beneath_modes(x):  # as floats: a finite field has nothing near
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

    Args:
        numbers: the `norm_and_sum` of each, by path.

    Cost: one gather of 16 bytes a tensor, which is in no ledger.
    """
    sent = torch.stack(list(numbers.values()))
    with silence(), label("", "values that should be equal"):
        with _torch.beneath_modes(sent):
            every = gather_stacked(sent, where)
            most = share * every[..., :1].amax(0)
            differ = ((every - every[:1]).abs() > most).any(-1).any(0)
    if not bool(differ.any()):
        return Near(every, None, "")
    i = int(differ.nonzero()[0])
    norms = ", ".join(f"{n:.4g}" for n in every[:, i, 0].tolist())
    return Near(every, list(numbers)[i], norms)


def _compare(found: dict[str, Tensor], where: RankGroup) -> set[str]:
    """Compares over ranks; returns the paths of gradients that are zero or not finite.

    Raises:
        LawError: a gradient differs.
    """
    every, odd, norms = nearly_agree(found, where, 0.02)
    if odd is not None:
        raise LawError(
            f"the gradient by {odd.partition('/')[2]!r} differs along "
            f"{where.name}, where the loss is one value (norms {norms}): a whole "
            "parameter that is combined with values that vary there must enter by "
            f'ff.pcast(w, {where.name}, to="V"), which sums its gradient. If ranks '
            "along it have samples of their own, make it an axis of the shard"
        )
    tells = (every[..., 0].amax(0) != 0) & every.isfinite().all(-1).all(0)
    return {path for path, told in zip(found, tells.tolist(), strict=True) if not told}


def _code(fn: Any) -> Any:
    """The code of a function, one object also where it is made anew for every step."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return getattr(fn, "__code__", type(fn))
