"""Whether a stored tree is the one that a target asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.checkpointing.manifest import Leaf, Stored
from fsfunc.placements import describe
from fsfunc.sharded import Sharded, is_sharded

__all__ = ["check_match", "within"]


def within(stored: Stored, at: str) -> Stored:
    """The subtree of ``stored`` at the path ``at``, its paths beginning there.

    Raises:
        KeyError: there is no such path.
    """
    if not at:
        return stored
    tensors, values = _below(stored.tensors, at), _below(stored.values, at)
    if not tensors and not values:
        tops = sorted({p.partition("/")[0] for p in (*stored.tensors, *stored.values)})
        raise KeyError(f"{stored.path} holds nothing at {at!r}; at its top are {tops}")
    return replace(stored, tensors=tensors, values=values)


def _below(found: dict[str, Any], at: str) -> dict[str, Any]:
    inside = {p[len(at) + 1 :]: x for p, x in found.items() if p.startswith(f"{at}/")}
    return {"": found[at]} if at in found else inside


def check_match(stored: Stored, target: Any) -> None:
    """Raises where ``target`` is not laid over the same paths, shapes and dtypes.

    Raises:
        TreeMismatch: the paths differ; names the smallest subtree that does.
        ValueError: a leaf differs in kind, shape or dtype.
    """
    paths, leaves, _ = tree.flatten_with_paths(target, is_leaf=is_sharded)
    here = dict(zip(paths, leaves, strict=True))
    there = {**stored.tensors, **stored.values}
    if len(here) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise ValueError(f"two leaves of the target have the path {twice!r}")
    if here.keys() != there.keys():
        tree.check_same_structure(
            _nested(here),
            _nested(there),
            what=f"the state saved at {stored.path}",
            against="the target",
        )
    faults = [
        f"{path!r} is {_say(there[path])} in the checkpoint and {_say(leaf)} in the "
        "target"
        for path, leaf in here.items()
        if _kind(there[path]) != _kind(leaf)
    ]
    if faults:
        more = f" (and {len(faults) - 1} others differ)" if len(faults) > 1 else ""
        raise ValueError(
            f"cannot load {stored.path}: {faults[0]}{more}; give a target of the "
            "shapes and dtypes that were saved, and convert what comes back"
        )


def _nested(paths: Iterable[str]) -> Any:
    """Nested dicts with a leaf at each path."""
    top: dict[str, Any] = {}
    for path in paths:
        *way, last = path.split("/")
        node = top
        for step in way:
            inner = node.setdefault(step, {})
            if not isinstance(inner, dict):  # a leaf, and leaves below: odd keys
                inner = node[step] = {}
            node = inner
        node.setdefault(last, 0)
    return top


def _kind(x: Any) -> Any:
    if isinstance(x, Leaf | Sharded | Tensor):
        return tuple(x.shape), x.dtype
    return type(x)


def _say(x: Any) -> str:
    if isinstance(x, Leaf | Sharded | Tensor):
        return f"a tensor {describe(tuple(x.shape), x.dtype)}"
    return f"a {type(x).__name__} ({x!r})"
