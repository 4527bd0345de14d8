"""``donate``: let a step write into the state that it was given."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.frames import frame, inside
from fsfunc.sharded import Sharded, is_sharded

__all__ = ["donate"]

_GONE = (
    "this state was donated to a step, which wrote into it: go on with the state that "
    "the step returned"
)
_SPOILED = (
    "a donated step raised after it had begun to write into this state: it is neither "
    "the old one nor the new one; start from a saved state"
)


def donate(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, which may write into the state (its first argument) it is given.

    The result is that of ``step``, in less memory: optimizers update in place. Using
    the donated state again raises.

    Raises:
        RuntimeError: a state that was donated before.

    Every check, norm and reduction of a step comes before its first write; a step that
    raises before it leaves the state as it was, one that raises after it marks the
    state as spoiled.

    >>> import torch, fsfunc as ff
    >>> optimizer = ff.sharded_adam(0.1)
    >>> step = ff.donate(optimizer(ff.value_and_grad(lambda w: (w**2).sum())))
    >>> w = torch.ones(2)
    >>> state, _ = step(ff.TrainState(w, optimizer.init(w)))
    >>> state.params.data_ptr() == w.data_ptr()
    True
    """

    @functools.wraps(step)
    def run(state: Any, *args: Any, **keywords: Any) -> Any:
        outer = frame()
        if outer.recorder is not None:
            return step(state, *args, **keywords)
        paths, leaves, treedef = tree.flatten_with_paths(state, is_leaf=is_sharded)
        for path, x in zip(paths, leaves, strict=True):
            why = x.spent if isinstance(x, Sharded) else _SPENT.get(id(x), ("",))[0]
            if why:
                raise RuntimeError(f"{path!r}: {why}")
        # The step sees other objects over the same memory: these ones can be marked.
        mine = _aliases(leaves)
        versions = [_version(x) for x in leaves]
        given = tree.unflatten(treedef, mine)
        try:
            with inside(replace(outer, donated=True)):
                out = step(given, *args, **keywords)
        except BaseException as error:
            if [_version(x) for x in leaves] != versions:
                _mark(leaves, _SPOILED)
                error.add_note(_SPOILED)
            raise
        _mark(leaves, _GONE)
        return out

    return run


# id -> (why, weak reference): tensors have no place for a mark of their own.
_SPENT: dict[int, tuple[str, Any]] = {}


def _aliases(leaves: list[Any]) -> list[Any]:
    """Other objects over the same memory, but for what lies there a second time.

    An average that starts as the parameters themselves must not change when they do.
    """
    ends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    out = []
    for leaf in leaves:
        x = leaf._local if isinstance(leaf, Sharded) else leaf
        if not isinstance(x, Tensor):
            out.append(leaf)
            continue
        reach = zip(x.shape, x.stride(), strict=True)
        start = x.storage_offset()
        stop = start + sum((n - 1) * step for n, step in reach) + 1 if x.numel() else 0
        taken = ends[_torch.storage_key(x)]
        again = any(start < b and a < stop for a, b in taken)
        taken.append((start, stop))
        if isinstance(leaf, Sharded):
            home = None if again else leaf.home
            out.append(Sharded(x.clone() if again else x, leaf.layout, home))
        else:
            out.append(x.clone() if again else x.detach())
    return out


def _version(x: Any) -> int:
    local = x._local if isinstance(x, Sharded) else x
    return local._version if isinstance(local, Tensor) else 0


def _mark(leaves: list[Any], why: str) -> None:
    for x in leaves:
        if isinstance(x, Sharded):
            x.spent = why
        elif isinstance(x, Tensor):
            key = id(x)
            drop = lambda _, key=key: _SPENT.pop(key, None)  # noqa: E731
            _SPENT[key] = (why, weakref.ref(x, drop))
