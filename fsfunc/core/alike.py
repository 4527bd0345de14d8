"""Whether ranks that share the work of one loss have like gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.crossings import LawError
from fsfunc.comm.groups import RankGroup, group, strided
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Mesh, here, maybe_here
from fsfunc.core.frames import frame
from fsfunc.sharded.leaf import is_sharded

__all__ = ["check_alike", "check_first", "heard_first"]

# By mesh, the losses that a rank has once differentiated.
_DONE: WeakKeyDictionary[Mesh, set[Any]] = WeakKeyDictionary()


def heard_first(fn: Callable[..., Any]) -> set[str] | None:
    """For the first gradient call of a loss, what gathers the axes that it asks."""
    at = maybe_here()
    if at is None or not at.link.moves or at.mesh.backend == "vmap":
        return None
    f = frame()
    if f.path or f.runtimes or _torch.functorch_active() or _torch.forward_ad_active():
        return None
    known = _DONE.setdefault(at.mesh, set())
    return None if (at.rank, _code(fn)) in known else set()


def check_first(
    fn: Callable[..., Any], heard: set[str], chosen: Sequence[Any], grads: Sequence[Any]
) -> None:
    """:func:`check_alike` along axes that a loss has asked, where no ``shard`` does so.

    Only where leaves are split over such an axis, of what else is in their trees: then
    it splits the work of one loss. What others do by hand is theirs.
    """
    at = here()
    taken = {a for h in frame().handlers for a in getattr(h, "axes", ())}
    for axis in sorted(heard - taken):
        own = [
            (x, g)
            for x, g in zip(chosen, grads, strict=True)
            if g is not None
            and any(
                is_sharded(leaf) and axis in leaf.layout.split_axes
                for leaf in tree.leaves(x, is_leaf=is_sharded)
            )
        ]
        if own:
            trees, found = zip(*own, strict=True)
            check_alike(trees, found, lambda _: True, group(axis, at))
    _DONE[at.mesh].add((at.rank, _code(fn)))


def check_alike(
    chosen: Sequence[Any],
    grads: Sequence[Any],
    is_one_value: Callable[[Tensor], bool],
    where: RankGroup,
) -> None:
    """Raises where ranks that share the work of one loss have unlike gradients.

    Of what is one value along an axis without a mean the gradient is one value too. It
    differs where a parameter met values that vary along the axis, and did not enter.

    Raises:
        LawError: on every rank; names the leaf, and the way out.

    Cost: a gather of two numbers a leaf; it is in no ledger.
    """
    paths, leaves, treedef = tree.flatten_with_paths(tuple(chosen), is_leaf=is_sharded)
    found: list[Any] = treedef.flatten_up_to(tuple(grads))  # type: ignore[arg-type]
    names, numbers = [], []
    for path, x, g in zip(paths, leaves, found, strict=True):
        if is_sharded(x) and set(x.layout.axes).isdisjoint(where.axis):
            g = None if g is None else g._local
        elif not isinstance(x, Tensor) or not is_one_value(x):
            continue
        if isinstance(g, Tensor) and g.is_floating_point():
            wide = strided(g).detach().double()
            names.append(path.partition("/")[2])
            numbers.append(torch.stack([torch.linalg.vector_norm(wide), wide.sum()]))
    if not names:
        return
    with silence(), label("", "gradients that should be alike"):
        every = where.start("all_gather", torch.stack(numbers)).wait()
    every = every.view(where.size, len(names), 2).cpu()
    norms = every[..., :1].amax(0)
    unlike = ((every - every[:1]).abs() > 0.02 * norms).any(-1).any(0)
    if bool(unlike.any()):
        name = names[int(unlike.nonzero()[0])]
        norms = ", ".join(f"{n:.4g}" for n in every[:, names.index(name), 0].tolist())
        raise LawError(
            f"the gradient by {name!r} differs along {where.name}, where the loss is "
            f"one value (norms {norms}): a whole parameter that meets what varies "
            f'there must enter by ff.pcast(w, {where.name}, to="V"), which sums its '
            "gradient. Where ranks along it have samples of their own, make it an axis "
            "of the shard"
        )


def _code(fn: Any) -> Any:
    """What a function is, also where it is made anew for every step."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return getattr(fn, "__code__", type(fn))
