"""Matching of a target's leaves with a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.checkpoint.stored import Stored, StoredTensor
from fsfunc.optim.leaves import origins
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe
from fsfunc.tree.structure import TreeMismatch, matches, nearest

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
        TreeMismatch: leaves are there on one side alone.
        ValueError: a leaf differs in kind, shape or dtype; two take the same one; an
            option names nothing.
    """
    paths, leaves, _ = tree.flatten_with_paths(target, is_leaf=is_sharded)
    here = dict(zip(paths, leaves, strict=True))
    there = {**stored.tensors, **stored.values}
    sources = _renamed(_chosen(paths, only), rename)
    _check_once(paths, "two leaves of the target have the path {!r}")
    _check_once(sources.values(), "two leaves of the target would both take {!r}")
    missing = [path for path, name in sources.items() if name not in there]
    extra = there.keys() - set(sources.values()) if only is None else set()
    found = {p: _as(here[p], there[n]) for p, n in sources.items() if n in there}
    if missing and (strict or not found):
        path, name = missing[0], sources[missing[0]]
        as_ = "" if name == path else f", which is to be {name!r} there"
        raise TreeMismatch(
            f"{stored.path} has no {path!r}{as_} (and {len(missing) - 1} others): near "
            f"are {nearest(name, there)}"
        )
    if strict and extra:
        raise TreeMismatch(
            f"{stored.path} holds {min(extra)!r} (and {len(extra) - 1} others), which "
            "no leaf of the target takes: name what to read by only=, or give "
            "strict=False"
        )
    _check_kinds(stored, here, found, sources, cast)
    _check_origins(target, here, found)
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
        found = [path for path in paths if only(path)]
    else:
        patterns = [f"{p}/**" for p in ([only] if isinstance(only, str) else only)]
        each = {p: [path for path in paths if matches(p, path)] for p in patterns}
        idle = [p[:-3] for p, some in each.items() if not some]
        if idle:
            raise ValueError(
                f"only={idle[0]!r} fits no path of the target: near are "
                f"{nearest(idle[0], paths)}"
            )
        chosen = {path for some in each.values() for path in some}
        found = [path for path in paths if path in chosen]
    if not found:
        raise ValueError(f"only= chooses none of the target's {len(paths)} leaves")
    return found


def _renamed(paths: list[str], rename: Rename | None) -> dict[str, str]:
    """By path in the target, the path in the checkpoint."""
    if rename is None or callable(rename):
        return {path: rename(path) if rename else path for path in paths}
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
            f"are {nearest(min(idle), paths)}"
        )
    return found


def _check_once(names: Iterable[str], says: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(says.format(name))
        seen.add(name)


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
        if not {"codes", "scales"}.isdisjoint(path.split("/")):
            way = _CODED
        raise ValueError(
            f"cannot load {stored.path}: {path!r}{as_} is {_say(found[path])} in the "
            f"checkpoint and {_say(here[path])} in the target{more}; {way}"
        )


def _check_origins(
    target: Any, here: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    """Raises where parameters are read, and what a step makes them of is kept."""
    for at, name, own in origins(target):
        for path in found if own not in found else ():
            shape, due = getattr(here[path], "shape", None), here[own].shape
            alike = shape is not None and due in (shape, shape[1:])  # of a copy too
            ending = not name or f"/{path}".endswith(f"/{name}")
            if alike and ending and not path.startswith(f"{at}/"):
                raise ValueError(_ORIGINS.format(path, own))


_ORIGINS = (
    "{!r} is read, and {!r} is not, of which steps make it, so that it would be lost: "
    "read both; or load the parameters first, and make the state of them, by "
    "ff.init_state or the optimizer's init"
)
_CODED = (
    "moments in 8 bits have a scale for each block of what one rank holds, and load "
    "where the parameters lie as they did: with that mesh, zero and units. Load the "
    'rest, by only=["params", "step"] of a TrainState, and the moments begin anew'
)


def _casts(there: Any, here: Any) -> bool:
    """True if a leaf differs in dtype alone, and all values can be converted."""
    a, b = _kind(there), _kind(here)
    if type(a) is not tuple or type(b) is not tuple or a[0] != b[0]:
        return False
    kinds: set[torch.dtype] = {a[1], b[1]}
    if all(d.is_floating_point for d in kinds) or all(d.is_complex for d in kinds):
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
