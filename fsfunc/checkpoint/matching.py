"""Matching of a target's leaves with a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.checkpoint.stored import Stored, StoredTensor
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe
from fsfunc.tree.structure import TreeMismatch, matches

Only = str | Sequence[str] | Callable[[str], bool]
Rename = Mapping[str, str] | Callable[[str], str]

KEPT = object()  # in the place of what is taken: the leaf keeps its value


def matched(
    stored: Stored,
    target: Any,
    *,
    only: Only | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    strict: bool = True,
) -> list[Any]:
    """The source of each leaf: a `StoredTensor`, a number, string or bool, or `KEPT`.

    Args: as `load` has them.

    Raises:
        TreeMismatch: leaves are there on one side alone; names the smallest subtree.
        ValueError: a leaf differs in kind, shape or dtype; two take the same one; an
            option names nothing.
    """
    paths, leaves, _ = tree.flatten_with_paths(target, is_leaf=is_sharded)
    here = dict(zip(paths, leaves, strict=True))
    there = {**stored.tensors, **stored.values}
    if len(here) < len(paths):
        seen: set[str] = set()
        twice = next(p for p in paths if p in seen or seen.add(p))
        raise ValueError(f"two leaves of the target have the path {twice!r}")
    sources = _renamed(_chosen(paths, only), rename)
    _check_once(sources)
    missing = [path for path, name in sources.items() if name not in there]
    extra = there.keys() - set(sources.values()) if only is None else set()
    if strict and (missing or extra):
        if only is None and rename is None:
            tree.check_same_structure(
                _nested(here),
                _nested(there),
                what=f"the state saved at {stored.path}",
                against="the target",
            )
        raise _mismatch(stored, sources, missing, extra)
    found = {p: _as(here[p], there[n]) for p, n in sources.items() if n in there}
    if sources and not found:
        raise TreeMismatch(f"{_missing(stored, sources, missing)}; nothing else is")
    _check_kinds(stored, here, found, sources, cast)
    for path, leaf in here.items():
        if path not in found and _has_no_value(leaf):
            raise ValueError(
                f"{path!r} is not read, and the target has no value of it to keep: "
                "give one that init_state made"
            )
    return [found.get(path, KEPT) for path in paths]


def _chosen(paths: list[str], only: Only | None) -> list[str]:
    if only is None:
        return paths
    if callable(only):
        fits = only
    else:
        patterns = [only] if isinstance(only, str) else list(only)
        for pattern in patterns:
            if not any(matches(f"{pattern}/**", path) for path in paths):
                raise ValueError(
                    f"only={pattern!r} fits no path of the target: near are "
                    f"{_near(pattern, paths)}"
                )
        fits = lambda path: any(matches(f"{p}/**", path) for p in patterns)  # noqa: E731
    found = [path for path in paths if fits(path)]
    if not found:
        raise ValueError(f"only= chooses none of the target's {len(paths)} leaves")
    return found


def _renamed(paths: list[str], rename: Rename | None) -> dict[str, str]:
    """By path in the target, the path in the checkpoint."""
    if rename is None:
        return {path: path for path in paths}
    if callable(rename):
        return {path: rename(path) for path in paths}
    found: dict[str, str] = {}
    used: set[str] = set()
    for path in paths:
        fits = [old for old in rename if path == old or path.startswith(f"{old}/")]
        old = max(fits, key=len, default=None)
        found[path] = path if old is None else rename[old] + path[len(old) :]
        used |= {old} if old is not None else set()
    if idle := rename.keys() - used:
        raise ValueError(
            f"rename= names {min(idle)!r}, where the target has nothing to read: near "
            f"are {_near(min(idle), paths)}"
        )
    return found


def _check_once(sources: Mapping[str, str]) -> None:
    takers: dict[str, str] = {}
    for path, name in sources.items():
        if takers.setdefault(name, path) != path:
            raise ValueError(
                f"{takers[name]!r} and {path!r} would both take {name!r}: load them "
                "one after the other if that is meant"
            )


def _mismatch(
    stored: Stored, sources: Mapping[str, str], missing: list[str], extra: set[str]
) -> TreeMismatch:
    if missing:
        return TreeMismatch(_missing(stored, sources, missing))
    more = f" and {len(extra) - 1} others" if len(extra) > 1 else ""
    return TreeMismatch(
        f"{stored.path} holds {min(extra)!r}{more}, which no leaf of the target takes: "
        "name what to read by only=, or give strict=False"
    )


def _missing(stored: Stored, sources: Mapping[str, str], missing: list[str]) -> str:
    path, name = missing[0], sources[missing[0]]
    as_ = "" if name == path else f", which is to be {name!r} there"
    more = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
    near = _near(name, [*stored.tensors, *stored.values])
    return f"{stored.path} has no {path!r}{as_}{more}: near are {near}"


def _near(path: str, paths: Iterable[str]) -> list[str]:
    some = list(paths)[:10_000]  # it compares every two letters
    return get_close_matches(path, some, 3, 0.4) or some[:8]


def _check_kinds(
    stored: Stored,
    here: Mapping[str, Any],
    found: Mapping[str, Any],
    sources: Mapping[str, str],
    cast: bool,
) -> None:
    faults = [
        path
        for path, there in found.items()
        if _kind(there) != _kind(here[path])
        and not (cast and _casts(there, here[path]))
    ]
    if faults:
        path = faults[0]
        as_ = "" if sources[path] == path else f" (there {sources[path]!r})"
        more = f" (and {len(faults) - 1} others differ)" if len(faults) > 1 else ""
        way = (
            "cast=True converts between floating dtypes, and to wider integers"
            if not cast and _casts(found[path], here[path])
            else "give a target of the shapes and dtypes that were saved, and convert "
            "what comes back"
        )
        raise ValueError(
            f"cannot load {stored.path}: {path!r}{as_} is {_say(found[path])} in the "
            f"checkpoint and {_say(here[path])} in the target{more}; {way}"
        )


def _casts(there: Any, here: Any) -> bool:
    """True if a leaf differs in dtype alone, and all values can be converted."""
    a, b = _kind(there), _kind(here)
    if type(a) is not tuple or type(b) is not tuple or a[0] != b[0]:
        return False
    kinds: set[torch.dtype] = {a[1], b[1]}
    if all(dtype.is_floating_point for dtype in kinds):
        return True
    if torch.bool in kinds or any(d.is_complex or d.is_floating_point for d in kinds):
        return False
    old, new = map(torch.iinfo, (a[1], b[1]))
    return new.min <= old.min and old.max <= new.max


def _has_no_value(leaf: Any) -> bool:
    x = leaf.local if isinstance(leaf, Sharded) else leaf
    return isinstance(x, Tensor) and (
        x.device.type == "meta" or isinstance(x, _torch.FakeTensor)
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


def _as(here: Any, there: Any) -> Any:
    """The stored leaf; a target of a stack's own shape takes the stack whole."""
    if isinstance(there, StoredTensor) and there.own:
        if getattr(here, "shape", None) == there.shape:
            return there._replace(own={})
    return there


def _kind(x: Any) -> Any:
    if isinstance(x, StoredTensor) and x.own:
        return x.shape[1:], x.dtype
    if isinstance(x, Sharded):  # moments may be of another dtype than the layout says
        return tuple(x.shape), x.local.dtype
    if isinstance(x, StoredTensor | Tensor):
        return tuple(x.shape), x.dtype
    return type(x)


def _say(x: Any) -> str:
    if isinstance(x, StoredTensor):
        return f"a tensor {x}"
    if isinstance(x, Sharded | Tensor):
        return f"a tensor {describe(*_kind(x))}"
    return f"a {type(x).__name__} ({x!r})"
