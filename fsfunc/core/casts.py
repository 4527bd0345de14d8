"""The dtypes of ``precision``: of units, reductions and gradients.

``transforms.casting`` puts `Casts` into the frame. A unit call casts its parameters and
inputs by them on the way in (`units.Call`); ``shard`` gathers and reduces in them; and
the gradients of a call are cast at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tree.structure import matches
from fsfunc.tree.types import Leaf


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
        phrases = [_dtype_name(self.compute)]
        phrases += [f"{pattern} in {_dtype_name(d)}" for pattern, d in self.overrides]
        if self.reduce is not None:
            phrases.append(f"reduced in {_dtype_name(self.reduce)}")
        if self.gradients is not None:
            phrases.append(f"given in {_dtype_name(self.gradients)}")
        if self.output is not None:
            phrases.append(f"returned in {_dtype_name(self.output)}")
        return ", ".join(phrases)

    def of(self, name: str) -> torch.dtype | None:
        """Returns the compute dtype of a unit call, or of a parameter, by its name."""
        return _compute_dtype(self, name) if self.overrides else self.compute

    def each(self, name: str, treedef: tree.TreeDef) -> Sequence[torch.dtype | None]:
        """Returns the compute dtype of each parameter of a unit call."""
        if not self.overrides:
            return (self.compute,) * treedef.num_leaves
        try:
            return _compute_dtypes(self, name, treedef)
        except TypeError:  # a user's node may have static data that do not hash
            return _compute_dtypes.__wrapped__(self, name, treedef)


# Both are asked in every unit call, and match patterns: the answers are cached.
@lru_cache(maxsize=1024)
def _compute_dtype(casts: Casts, name: str) -> torch.dtype | None:
    for pattern, dtype in casts.overrides:
        if matches(pattern, name):
            return dtype
    return casts.compute


@lru_cache(maxsize=1024)
def _compute_dtypes(
    casts: Casts, name: str, treedef: tree.TreeDef
) -> tuple[torch.dtype | None, ...]:
    paths = tree.paths(tree.unflatten(treedef, range(treedef.num_leaves)))
    names = [f"{name}/{path}" if path else name for path in paths]
    return tuple(_compute_dtype(casts, parameter) for parameter in names)


def cast(x: Leaf, dtype: torch.dtype | None) -> Leaf:
    """Returns ``x`` in ``dtype``, if it is a floating tensor or a block of a split one.

    Other sharded leaves stay as they are: ``shard`` casts them as it gathers them, so
    that fewer bytes are sent.
    """
    if is_sharded(x) and x.layout.splits and x.layout.flat is None:
        return x.with_local(cast(x.local, dtype))
    is_floating = dtype is not None and isinstance(x, Tensor) and x.is_floating_point()
    return x.to(dtype) if is_floating and x.dtype != dtype else x


class HasDtype(Protocol):
    """A tensor, a layout, or what else has a dtype."""

    @property
    def dtype(self) -> torch.dtype: ...


def differentiable(x: HasDtype | Sharded) -> bool:
    """Returns whether a tensor, leaf or layout has a floating or complex dtype.

    >>> [differentiable(torch.zeros(1, dtype=d)) for d in (torch.cfloat, torch.int64)]
    [True, False]
    """
    return x.dtype.is_floating_point or x.dtype.is_complex


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "as given" if dtype is None else str(dtype).removeprefix("torch.")
