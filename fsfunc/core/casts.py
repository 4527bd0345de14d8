"""The dtypes of ``precision``: of units, reductions and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.structure import matches


@dataclass(frozen=True)
class Casts:
    """The dtypes that ``precision`` asks for.

    Args:
        compute: of parameters and floating inputs inside units.
        reduce: of reductions of gradients; None: that of the parameters in the unit.
        output: of what a unit returns; None: not cast.
        overrides: (pattern, dtype) in place of ``compute``, by the name of a unit call,
            or of a parameter below it; None: not cast.
        gradients: of the final gradients; None: that of the parameters.
    """

    compute: torch.dtype
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    overrides: tuple[tuple[str, torch.dtype | None], ...] = ()
    gradients: torch.dtype | None = None

    def __str__(self) -> str:
        said = [_said(self.compute)]
        said += [f"{pattern} in {_said(dtype)}" for pattern, dtype in self.overrides]
        if self.reduce is not None:
            said.append(f"reduced in {_said(self.reduce)}")
        if self.gradients is not None:
            said.append(f"given in {_said(self.gradients)}")
        if self.output is not None:
            said.append(f"returned in {_said(self.output)}")
        return ", ".join(said)

    def of(self, name: str) -> torch.dtype | None:
        """The compute dtype of a unit call, or of a parameter, by its name."""
        return _of(self, name) if self.overrides else self.compute

    def each(self, name: str, treedef: tree.TreeDef) -> Sequence[torch.dtype | None]:
        """The compute dtype of each parameter of a unit call."""
        if not self.overrides:
            return (self.compute,) * treedef.num_leaves
        try:
            return _each(self, name, treedef)
        except TypeError:  # a user's node may have static data that do not hash
            return _each.__wrapped__(self, name, treedef)


@lru_cache(maxsize=1024)
def _of(casts: Casts, name: str) -> torch.dtype | None:
    for pattern, dtype in casts.overrides:
        if matches(pattern, name):
            return dtype
    return casts.compute


@lru_cache(maxsize=1024)
def _each(
    casts: Casts, name: str, treedef: tree.TreeDef
) -> tuple[torch.dtype | None, ...]:
    paths = tree.paths(tree.unflatten(treedef, range(treedef.num_leaves)))
    return tuple(_of(casts, f"{name}/{path}" if path else name) for path in paths)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """``x`` in ``dtype``, if it is a floating tensor or a block of a split one."""
    if is_sharded(x) and x.layout.splits and x.layout.flat is None:
        return x.with_local(cast(x.local, dtype))  # gathers cast other sharded leaves
    real = dtype is not None and isinstance(x, Tensor) and x.is_floating_point()
    return x.to(dtype) if real and x.dtype != dtype else x


def differentiable(x: Any) -> bool:
    """True of a tensor, a leaf or a layout of floating or complex dtype.

    >>> [differentiable(torch.zeros(1, dtype=d)) for d in (torch.cfloat, torch.int64)]
    [True, False]
    """
    return x.dtype.is_floating_point or x.dtype.is_complex


def _said(dtype: torch.dtype | None) -> str:
    return "as given" if dtype is None else str(dtype).removeprefix("torch.")
