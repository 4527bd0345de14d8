"""``donate``: let a step write into the state that it was given."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.frames import frame, inside
from fsfunc.holding import is_held
from fsfunc.sharded import Sharded, is_sharded

__all__ = ["donate"]

_GONE = (
    "this state was donated to a step, which writes into it: go on with the state that "
    "the step returned (and give each simulated rank a state of its own, as init_state "
    "and place do)"
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

    A state that is being saved (``save_async``) is left as it is: the step then works
    as without `donate`, in memory of its own.

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
        leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
        if any(map(_spent, leaves)):
            refuse_spent(state)
        # The step sees other objects over the same memory: these ones can be marked.
        mine = _aliases(leaves)
        parts = [x._local if isinstance(x, Sharded) else x for x in leaves]
        before = [version(x) for x in parts]
        given = tree.unflatten(treedef, mine)
        _mark(leaves, _GONE)  # from now on: simulated ranks may share plain tensors
        try:
            free = not is_held(x for x in parts if isinstance(x, Tensor))
            with inside(replace(outer, donated=free)):
                out = step(given, *args, **keywords)
        except BaseException as error:
            spoiled = before != [version(x) for x in parts]
            _mark(leaves, _SPOILED if spoiled else "")
            if spoiled:
                error.add_note(_SPOILED)
            raise
        return out

    return run


def refuse_spent(t: Any) -> None:
    """Raises where a leaf of ``t`` was donated.

    Raises:
        RuntimeError: names the first such leaf, and what became of it.
    """
    paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
    for path, x in zip(paths, leaves, strict=True):
        if why := _spent(x):
            raise RuntimeError(f"{path!r}: {why}")


def spend(leaves: list[Any], why: str) -> None:
    """Marks leaves as given away: using them raises ``why``."""
    _mark(leaves, why)


def restore(t: Any) -> None:
    """``t`` is as good as before: the step that it was donated to only was planned."""
    _mark(tree.leaves(t, is_leaf=is_sharded), "")


def _spent(x: Any) -> str:
    return x.spent if isinstance(x, Sharded) else _SPENT.get(id(x), ("",))[0]


# id -> (why, weak reference): tensors have no place for a mark of their own.
_SPENT: dict[int, tuple[str, Any]] = {}


def _aliases(leaves: list[Any]) -> list[Any]:
    """Other objects over the same memory, but for what lies there a second time.

    An average that starts as the parameters themselves must not change when they do.
    """
    out, ends = [], defaultdict(list)
    parts = [x._local if isinstance(x, Sharded) else x for x in leaves]
    keys = [_torch.storage_key(x) if isinstance(x, Tensor) else 0 for x in parts]
    times = Counter(keys)
    for leaf, x, key in zip(leaves, parts, keys, strict=True):
        if not isinstance(x, Tensor):
            out.append(leaf)
            continue
        again = times[key] > 1 and _overlaps(_reach(x), ends[key])
        if isinstance(leaf, Sharded):
            home = None if again else leaf.home
            out.append(Sharded(x.clone() if again else x, leaf.layout, home))
        else:
            out.append(x.clone() if again else x.detach())
    return out


def _reach(x: Tensor) -> tuple[int, int]:
    """(first, last + 1) element of its storage that ``x`` holds."""
    start = int(x.storage_offset())
    steps = zip(x.shape, x.stride(), strict=True)
    last = start + sum((n - 1) * step for n, step in steps)
    return (start, int(last + 1)) if x.numel() else (start, start)


def _overlaps(span: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    """Whether ``span`` meets one of ``others``, to which it is added."""
    meets = any(span[0] < stop and start < span[1] for start, stop in others)
    others.append(span)
    return meets


def version(part: Any) -> int:
    """How often a leaf's part was written to: a gather does not count."""
    counted = isinstance(part, Tensor) and not part.is_inference()
    return part._version if counted else 0


def _mark(leaves: list[Any], why: str) -> None:
    for x in leaves:
        if isinstance(x, Sharded):
            x.spent = why
        elif isinstance(x, Tensor):
            key = id(x)
            drop = lambda _, key=key: _SPENT.pop(key, None)  # noqa: E731
            _SPENT[key] = (why, weakref.ref(x, drop))
            if not why:
                del _SPENT[key]
