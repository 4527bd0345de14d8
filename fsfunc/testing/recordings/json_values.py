"""Values that are no tensors, as JSON and back, and a mark for those that are none."""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsfunc.checkpoint.headers import dtype_name
from fsfunc.sharded import placements

_PLAIN = {bool, int, float, str, type(None)}  # as JSON has them
_KINDS = (
    placements.Flat,
    placements.Split,
    placements.Owned,
    placements.Own,
    placements.Whole,
)
_PLACEMENTS = {kind.__name__: kind for kind in _KINDS}
ODD = object()  # in the place of a value that no file has


def as_json(x: Any) -> Any:
    """Returns a value as JSON; a mark for one that it cannot have."""
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind in (tuple, list, torch.Size):
        items = [as_json(item) for item in x]
        return ODD if ODD in items else {kind.__name__: items}
    if kind is dict:
        items = [[as_json(key), as_json(item)] for key, item in x.items()]
        return ODD if any(ODD in pair for pair in items) else {"dict": items}
    if (numpy := sys.modules.get("numpy")) and isinstance(x, numpy.generic):
        bits = [x.dtype.str, base64.b64encode(x.tobytes()).decode()]
        return ODD if x.dtype.hasobject or x.dtype.names else {"numpy": bits}
    made = {
        complex: lambda: [x.real, x.imag],
        bytes: lambda: base64.b64encode(x).decode(),
        torch.dtype: lambda: dtype_name(x),
        torch.device: lambda: str(x),
    }
    return {kind.__name__: made[kind]()} if kind in made else ODD


def from_json(said: Any) -> Any:
    """Returns the value of its JSON."""
    if not isinstance(said, dict):
        return said
    ((kind, x),) = said.items()
    made: dict[str, Callable[[], Any]] = {
        "tuple": lambda: tuple(map(from_json, x)),
        "list": lambda: list(map(from_json, x)),
        "dict": lambda: {from_json(key): from_json(item) for key, item in x},
        "Size": lambda: torch.Size(map(from_json, x)),
        "complex": lambda: complex(*x),
        "bytes": lambda: base64.b64decode(x),
        "dtype": lambda: getattr(torch, x),
        "numpy": lambda: _numpy_number(*x),
        "device": lambda: torch.device(x),
        "odd": lambda: ODD,
    }
    return made[kind]()


def _numpy_number(dtype: str, bits: str) -> Any:
    import numpy  # which a program without it does not need

    return numpy.frombuffer(base64.b64decode(bits), dtype)[0]


def told(said: Any, kind: type) -> Any:
    """Returns ``said``, or the name of a class of which no value can be kept."""
    return {"odd": f"{kind.__module__}:{kind.__qualname__}"} if said is ODD else said


def placement_as_json(part: Any) -> Any:
    """Returns a part of a layout, a dataclass, as its class's name and its fields."""
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return [type(part).__name__, {name: as_json(x) for name, x in fields.items()}]


def placement_of(said: Sequence[Any]) -> Any:
    """Returns the part of a layout that `placement_as_json` made this of."""
    kind, fields = said
    return _PLACEMENTS[kind](**{name: from_json(x) for name, x in fields.items()})
