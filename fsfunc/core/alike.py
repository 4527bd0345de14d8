"""Whether ranks that share the work of one loss have like gradients."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.crossings import LawError
from fsfunc.comm.groups import group, strided
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import here, maybe_here
from fsfunc.core.frames import frame
from fsfunc.sharded.leaf import is_sharded

__all__ = ["check_alike", "check_beside", "heard_here"]

# By who asks: how often the gradients of a rank, a loss and an axis were compared.
_TIMES: WeakKeyDictionary[Any, Counter[Any]] = WeakKeyDictionary()
_ENOUGH = 10  # where some are zero, as behind weights that begin so, till it tells


def heard_here() -> set[str] | None:
    """What is to gather the axes that a loss asks, where its gradients are compared."""
    at = maybe_here()
    if at is None or not at.link.moves or at.mesh.backend == "vmap":
        return None
    if _torch.transforms_active():
        return None
    return set()


def check_beside(
    fn: Callable[..., Any], heard: set[str], chosen: Sequence[Any], grads: Sequence[Any]
) -> None:
    """:func:`check_alike` of a gradient call that no ``shard`` is around.

    Only along axes over which leaves are split, of what else is in their trees: such an
    axis splits the work of one loss. What others do by hand is theirs.
    """

    def split(x: Any) -> set[str]:
        leaves = tree.leaves(x, is_leaf=is_sharded)
        return {a for x in leaves if is_sharded(x) for a in x.layout.split_axes}

    pairs = zip(chosen, grads, strict=True)
    over = [set() if g is None else split(x) for x, g in pairs]
    for axis in sorted(heard & set().union(*over)):
        own = [i for i, axes in enumerate(over) if axis in axes]
        trees, found = [chosen[i] for i in own], [grads[i] for i in own]
        check_alike(here().mesh, fn, trees, found, lambda _: True, axis)


def check_alike(
    owner: Any,
    fn: Callable[..., Any],
    chosen: Sequence[Any],
    grads: Sequence[Any],
    is_one_value: Callable[[Tensor], bool],
    axis: str,
) -> None:
    """Raises where ranks that share the work of one loss have unlike gradients.

    Of what is one value along an axis without a mean the gradient is one value too. It
    differs where a parameter met values that vary along the axis, and did not enter. It
    is looked at in the first call of a loss, and while gradients are zero in ten.

    Args:
        owner: whose calls are counted: the transform's, or the mesh's.

    Raises:
        LawError: on every rank; names the leaf, and the way out.

    Cost: a gather of two numbers a leaf; it is in no ledger.
    """
    at = here()
    times, key = _TIMES.setdefault(owner, Counter()), (at.rank, _code(fn), axis)
    taken = {a for h in frame().handlers for a in getattr(h, "axes", ())}
    if axis in taken or times[key] >= _ENOUGH:
        return
    where = group(axis, at)
    paths, leaves, treedef = tree.flatten_with_paths(tuple(chosen), is_leaf=is_sharded)
    found: list[Any] = treedef.flatten_up_to(tuple(grads))  # type: ignore[arg-type]
    names, numbers = [], []
    for path, x, g in zip(paths, leaves, found, strict=True):
        if is_sharded(x) and set(x.layout.axes).isdisjoint(where.axis):
            g = None if g is None else g._local
        elif not isinstance(x, Tensor) or not is_one_value(x):
            continue
        if isinstance(g, Tensor) and g.is_floating_point() and g.numel():
            wide = strided(g).detach().double()
            names.append(path.partition("/")[2])
            numbers.append(torch.stack([torch.linalg.vector_norm(wide), wide.sum()]))
    if not names:
        times[key] = _ENOUGH
        return
    with silence(), label("", "gradients that should be alike"):
        every = where.start("all_gather", torch.stack(numbers)).wait()
    every = every.view(where.size, len(names), 2).cpu()
    norms = every[..., :1].amax(0)
    zeros = bool((norms == 0).any())
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
    times[key] += 1 if zeros else _ENOUGH


def _code(fn: Any) -> Any:
    """What a function is, also where it is made anew for every step."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return getattr(fn, "__code__", type(fn))
