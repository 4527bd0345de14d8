"""Checks of what a gradient call is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.shard_linear_maps import LawError
from fsfunc.core.outcomes import GradientCall
from fsfunc.sharded.inputs import arguments, refuse
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import is_sharded

__all__ = ["check_differentiable", "check_gathered", "check_rows"]


def check_differentiable(chosen: list[Any], names: list[str]) -> None:
    """Raises where nothing that is differentiated is a floating tensor.

    Raises:
        TypeError: names the arguments, and what is there.
    """
    refuse("array", "value_and_grad", chosen, *names)
    leaves = tree.leaves(chosen, is_leaf=is_sharded)
    leaves = [x.layout if is_sharded(x) else x for x in leaves]
    kinds = [x.dtype for x in leaves if isinstance(x, Tensor | Layout)]
    if kinds and not any(kind.is_floating_point for kind in kinds):
        raise TypeError(
            f"value_and_grad by {', '.join(names)}: nothing there is a floating tensor "
            f"(the first is {kinds[0]}), and all gradients would be None; "
            "x.to(torch.float32) has one"
        )


def check_gathered(path: tuple[str, ...], chosen: Any) -> None:
    """Raises where a unit's body differentiates by what only a unit in it gathers.

    Raises:
        LawError: it would be the derivative of the ranks' mean, not this rank's own.
    """
    for x in tree.leaves(chosen, is_leaf=is_sharded):
        if is_sharded(x) and x.layout.flat is not None:
            raise LawError(
                f"a derivative is taken inside unit {'/'.join(path)!r} by {x.name!r}, "
                "which only a unit within it gathers: it would be that of the mean "
                "over the ranks, where a unit's derivatives are the rank's own. Make "
                f"{path[0]!r} ff.unit(fn, whole=True), which gathers all that it is "
                "given, or take the derivative outside"
            )


def check_rows(call: GradientCall, total: Tensor) -> None:
    """Raises where a loss is NaN as it is a mean over no rows.

    Its value is read only where an argument that is not differentiated has no rows.

    Raises:
        ValueError: names the arguments.
    """
    names = [*arguments(len(call.args)), *call.keywords]
    given = [*call.args, *call.keywords.values()]
    for i, (name, value) in enumerate(zip(names, given, strict=True)):
        if i in call.argnums or isinstance(total, _torch.FakeTensor):
            continue
        for x in tree.leaves(value, is_leaf=is_sharded):
            if isinstance(x, Tensor) and x.ndim and not x.shape[0] and total.isnan():
                raise ValueError(
                    f"the loss is NaN, and {name} has no rows (a tensor of shape "
                    f"{tuple(x.shape)}): a mean over no rows is no number. Leave the "
                    "batch out, or return ff.Weighted(sum, number of rows)"
                )
