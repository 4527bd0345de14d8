"""Comparison of values that must be equal on all ranks of a sharded call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.comparison import Section, compare, whole_values
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Here
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.plain_leaves import WHOLE, laid_as


def compare_whole(
    chosen: Sequence[Any], is_whole: Callable[[Tensor], bool], where: RankGroup
) -> None:
    """Raises where ranks differentiate unequal values of a replicated leaf.

    Args:
        chosen: the differentiated arguments; ``is_whole``: whether a leaf of theirs is
            replicated.

    Raises:
        RanksDiffer: on every rank.
    """
    paths, leaves, _ = tree.flatten_with_paths(chosen, is_leaf=is_sharded)
    mine = [x if isinstance(x, Tensor) and is_whole(x) else None for x in leaves]
    if any(x is not None for x in mine):
        compare([whole_values(paths, mine, where.link.notes)], where)


def unnamed_axes(f: Callable[..., Any], handlers: Any, leaves: Any, at: Here) -> Any:
    """The axes of a mesh over which neither a transform nor a layout says anything.

    Args:
        f: the function within; ``handlers``: the interpretations around it.
        leaves: of the state.
    """
    named = {a for h in handlers for a in getattr(h, "axes", ())}
    named |= {
        a for h in getattr(f, "interpretations", ()) for a in getattr(h, "axes", ())
    }
    named |= {a for x in leaves if is_sharded(x) for a in x.layout.axes}
    return tuple(a for a, n in at.mesh.axes.items() if n > 1 and a not in named)


def compare_replicas(
    args: tuple[Any, ...], out: Any, axes: tuple[str, ...], at: Here
) -> None:
    """Raises on every rank if ranks along ``axes`` return different states.

    Whatever made them differ (seeds, ``axis_index``, batches) shows in the state that a
    first step returns, whose leaves must be equal along these axes.

    Args:
        args: the arguments of the call, of which the first is the state.
        out: what it returned, first the new state; leaves without layouts may differ,
            and so may everything else (a loss and its gradients).

    Raises:
        RanksDiffer: names the leaves, the ranks, and the ways out.

    Cost: each leaf is read once; one gather of 16 bytes over processes.
    """
    if not (axes and at.link.moves and at.link.level is None and _is_state(args, out)):
        return
    paths, leaves, _ = tree.flatten_with_paths(out[0], is_leaf=is_sharded)
    one = {
        path: x.local if is_sharded(x) else x
        for path, x in zip(paths, leaves, strict=True)
        if is_sharded(x) or laid_as(x) == WHOLE
    }
    if not one:
        return
    where = group(axes, at)
    names = " and ".join(map(repr, axes))
    values = whole_values([*one], [*one.values()], where.link.notes)
    title = (
        f"the ranks along {names} come to unlike states by their first step, and "
        f"nothing in it brings them together: no transform and no layout names {names}"
    )
    advice = (
        f"Give the ranks along {names} one batch and one seed (torch.manual_seed), let "
        "nothing that trains depend on ff.axis_index of it; or shard over it too, or "
        f"replicate={axes[0]!r}; or, if they are to train apart, make each of them a "
        "program by itself"
    )
    compare([Section(title, values.lines, advice)], where)


def _is_state(args: tuple[Any, ...], out: Any) -> bool:
    """Whether the first of what was returned has the structure of the state given."""
    if not (args and isinstance(out, tuple) and out):
        return False
    given, returned = (
        tree.flatten(x, is_leaf=is_sharded)[1] for x in (args[0], out[0])
    )
    return given == returned
