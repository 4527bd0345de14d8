"""Values that are no tensors, as JSON and back: for headers of recordings.

A value that JSON cannot have, such as an object of the user's, becomes ``UNSTORABLE``;
the header then has the name of its class, for the message of ``replay``.
"""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsfunc.checkpoint.headers import dtype_name
from fsfunc.sharded import placements

_PLAIN = {bool, int, float, str, type(None)}  # types that JSON has itself
_KINDS = (
    placements.Flat,
    placements.Split,
    placements.Owned,
    placements.Own,
    placements.Whole,
)
_PLACEMENTS = {kind.__name__: kind for kind in _KINDS}
UNSTORABLE = object()  # stands for a value that cannot be stored


def as_json(x: Any) -> Any:
    """Returns a value as JSON, or ``UNSTORABLE``.

    A value that JSON does not have itself becomes {name of its class: its content}.
    """
    cls = type(x)
    if cls in _PLAIN:
        return x
    if cls in (tuple, list, torch.Size):
        items = [as_json(item) for item in x]
        return UNSTORABLE if UNSTORABLE in items else {cls.__name__: items}
    if cls is dict:
        items = [[as_json(key), as_json(item)] for key, item in x.items()]
        return (
            UNSTORABLE if any(UNSTORABLE in pair for pair in items) else {"dict": items}
        )
    if (numpy := sys.modules.get("numpy")) and isinstance(x, numpy.generic):
        encoded = [x.dtype.str, base64.b64encode(x.tobytes()).decode()]
        return UNSTORABLE if x.dtype.hasobject or x.dtype.names else {"numpy": encoded}
    encoders = {
        complex: lambda: [x.real, x.imag],
        bytes: lambda: base64.b64encode(x).decode(),
        torch.dtype: lambda: dtype_name(x),
        torch.device: lambda: str(x),
    }
    return {cls.__name__: encoders[cls]()} if cls in encoders else UNSTORABLE


def from_json(json: Any) -> Any:
    """Returns the value that ``as_json`` made this JSON of."""
    if not isinstance(json, dict):
        return json
    ((kind, x),) = json.items()
    decoders: dict[str, Callable[[], Any]] = {
        "tuple": lambda: tuple(map(from_json, x)),
        "list": lambda: list(map(from_json, x)),
        "dict": lambda: {from_json(key): from_json(item) for key, item in x},
        "Size": lambda: torch.Size(map(from_json, x)),
        "complex": lambda: complex(*x),
        "bytes": lambda: base64.b64decode(x),
        "dtype": lambda: getattr(torch, x),
        "numpy": lambda: _numpy_number(*x),
        "device": lambda: torch.device(x),
        "odd": lambda: UNSTORABLE,
    }
    return decoders[kind]()


def _numpy_number(dtype: str, bits: str) -> Any:
    import numpy  # here, since torch and fsfunc run without it

    return numpy.frombuffer(base64.b64decode(bits), dtype)[0]


def name_if_unstorable(json: Any, cls: type) -> Any:
    """Returns the JSON, or for ``UNSTORABLE`` the name of the value's class."""
    return (
        {"odd": f"{cls.__module__}:{cls.__qualname__}"} if json is UNSTORABLE else json
    )


def placement_as_json(part: placements.Placement | placements.Own) -> list[Any]:
    """Returns a part of a layout, a dataclass, as [name of its class, its fields]."""
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return [type(part).__name__, {name: as_json(x) for name, x in fields.items()}]


def placement_of(json: Sequence[Any]) -> Any:
    """Returns the part of a layout that ``placement_as_json`` made this JSON of."""
    class_name, fields = json
    return _PLACEMENTS[class_name](**{name: from_json(x) for name, x in fields.items()})
