"""Leaves whose memory was given away: to use one raises, and says why.

A donated step writes its new state over the old one, and marks the old leaves here, so
that nobody reads new values as old ones. A `Sharded` leaf has a field for that. A plain
tensor has none: its class is replaced by one that raises, as torch does with
uninitialized parameters. That costs nothing before, and a tenth of a microsecond then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Parameter

from fsfunc import _torch, tree
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.tree import nodes
from fsfunc.tree.types import Args, Keywords, Leaf, PyTree


class Spent:
    """A mixin for tensors whose memory was given away: using one raises."""

    why: str
    original_class: type

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Args = (),
        kwargs: Keywords | None = None,
    ) -> NoReturn:
        for x in tree.leaves((args, kwargs)):
            if isinstance(x, Spent):
                x.refuse()
        raise RuntimeError(cls.why)

    def refuse(self) -> NoReturn:
        with _torch.as_plain_tensors():  # else reading the shape would raise, too
            tensor = describe_tensor(self.shape, self.dtype)  # type: ignore[attr-defined]
        raise RuntimeError(f"{tensor}: {self.why}")

    def __repr__(self) -> str:
        return f"a spent {self.original_class.__name__}: {self.why}"


@lru_cache(maxsize=64)
def _spent_class(original: type, why: str) -> type:
    attributes = {"original_class": original, "why": why}
    kind = type(f"Spent{original.__name__}", (Spent, original), attributes)
    # torch.func would wrap the tensor; but first it flattens its arguments.
    nodes.refuse(kind, lambda x: x.refuse())
    return kind


def spend(leaf: Leaf, why: str) -> None:
    """Marks a leaf as given away: using it raises ``why``."""
    if isinstance(leaf, Sharded):
        leaf.why_unusable, leaf = why, leaf._part
    if isinstance(leaf, Tensor):
        original = leaf.original_class if isinstance(leaf, Spent) else type(leaf)
        leaf.__class__ = _spent_class(original, why)


def spend_all(leaves: Iterable[Leaf], why: str) -> None:
    """Marks each of ``leaves`` as given away, as `spend` does, and faster."""
    classes = {kind: _spent_class(kind, why) for kind in (Tensor, Parameter)}
    # By class, for the usual kinds: a donated step marks all leaves of its state.
    for leaf in leaves:
        if (kind := type(leaf)) in classes:
            leaf.__class__ = classes[kind]
        elif kind is Sharded and leaf._part is None:  # there is no tensor to mark
            leaf.why_unusable = why
        else:
            spend(leaf, why)


def any_unusable(leaves: Sequence[Leaf]) -> bool:
    """Returns whether a use of one of ``leaves`` would raise, as it was donated."""
    # By the few classes first, and in lists: each donated step asks it of all leaves.
    if any([issubclass(kind, Spent) for kind in set(map(type, leaves))]):
        return True
    return any([x.why_unusable for x in filter(is_sharded, leaves)])


def unspend(leaf: Leaf) -> None:
    """Undoes `spend`."""
    if isinstance(leaf, Sharded):
        leaf.why_unusable, leaf = "", leaf._part
    if isinstance(leaf, Spent):
        leaf.__class__ = leaf.original_class


def why_unusable(leaf: Leaf) -> str:
    """Returns the error that a use of a leaf raises; empty where it raises none."""
    if isinstance(leaf, Sharded):
        return leaf.why_unusable
    return leaf.why if isinstance(leaf, Spent) else ""


def refuse_unusable(t: PyTree) -> None:
    """Raises where a leaf of ``t`` was donated.

    Raises:
        RuntimeError: names the first such leaf, and why it is gone.
    """
    leaves = tree.leaves(t, is_leaf=is_sharded)
    for i, x in enumerate(leaves if any_unusable(leaves) else ()):
        if why := why_unusable(x):
            path = tree.paths(t, is_leaf=is_sharded)[i]
            raise RuntimeError(f"{path!r}: {why}")
