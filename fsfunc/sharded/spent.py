"""Leaves whose memory was given away: to use one raises, and says why.

A `Sharded` leaf has a field for that. A plain tensor has none: its class is replaced
by one that raises, as torch does with uninitialized parameters. That costs nothing
before, and a tenth of a microsecond then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from fsfunc import _torch, tree
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe
from fsfunc.tree import nodes


class Spent:
    """A mixin for tensors whose memory was given away: using one raises."""

    why: str
    was: type

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for x in tree.leaves((args, kwargs)):
            if isinstance(x, Spent):
                x.refuse()
        raise RuntimeError(cls.why)

    def refuse(self) -> None:
        with _torch.as_plain_tensors():
            said = describe(self.shape, self.dtype)  # type: ignore[attr-defined]
        raise RuntimeError(f"{said}: {self.why}")

    def __repr__(self) -> str:
        return f"a spent {self.was.__name__}: {self.why}"


@lru_cache(maxsize=64)
def _spent(was: type, why: str) -> type:
    kind = type(f"Spent{was.__name__}", (Spent, was), {"was": was, "why": why})
    # torch.func would wrap the tensor; but first it flattens its arguments.
    nodes.refuse(kind, lambda x: x.refuse())
    return kind


def spend(leaf: Any, why: str) -> None:
    """Marks a leaf as given away: using it raises ``why``."""
    if isinstance(leaf, Sharded):
        leaf.spent, leaf = why, leaf._part
    if isinstance(leaf, Tensor):
        was = leaf.was if isinstance(leaf, Spent) else type(leaf)
        leaf.__class__ = _spent(was, why)


def spend_all(leaves: Iterable[Any], why: str) -> None:
    """Marks each of ``leaves``."""
    kinds = {was: _spent(was, why) for was in (Tensor, Parameter)}
    for leaf in leaves:
        if (was := type(leaf)) in kinds:
            leaf.__class__ = kinds[was]
        elif was is Sharded and leaf._part is None:
            leaf.spent = why
        else:
            spend(leaf, why)


def any_spent(leaves: Sequence[Any]) -> bool:
    """True if one of ``leaves`` was donated."""
    if any([issubclass(kind, Spent) for kind in set(map(type, leaves))]):
        return True
    return any([x.spent for x in filter(is_sharded, leaves)])


def unspend(leaf: Any) -> None:
    """Undoes `spend`."""
    if isinstance(leaf, Sharded):
        leaf.spent, leaf = "", leaf._part
    if isinstance(leaf, Spent):
        leaf.__class__ = leaf.was


def why_spent(leaf: Any) -> str:
    """The reason why a leaf is spent; empty where it is not."""
    if isinstance(leaf, Sharded):
        return leaf.spent
    return leaf.why if isinstance(leaf, Spent) else ""


def refuse_spent(t: Any) -> None:
    """Raises where a leaf of ``t`` was donated.

    Raises:
        RuntimeError: names the first such leaf, and why it is gone.
    """
    leaves = tree.leaves(t, is_leaf=is_sharded)
    for i, x in enumerate(leaves if any_spent(leaves) else ()):
        if why := why_spent(x):
            path = tree.paths(t, is_leaf=is_sharded)[i]
            raise RuntimeError(f"{path!r}: {why}")
