"""How a transform reaches what it is applied to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsfunc.compiled import refuse_compiled
from fsfunc.frames import Interpretation, frame, inside

__all__ = ["transformed"]


def transformed(
    f: Callable[..., Any],
    handler: Interpretation,
    call: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """``f`` with ``handler`` in reach of every unit and gradient call inside.

    Args:
        call: ``(f, args, keywords) -> out`` replaces the plain call, where a transform
            also has something to do before and after.
    """

    @functools.wraps(f)
    def run(*args: Any, **keywords: Any) -> Any:
        refuse_compiled("a transformed function")
        if call is not None:
            return call(f, args, keywords)
        outer = frame()
        with inside(replace(outer, handlers=(*outer.handlers, handler))):
            return f(*args, **keywords)

    # Known from outside: wrapping a transformed function keeps its attributes.
    inner = getattr(f, "interpretations", ())
    run.interpretations = (*inner, handler)  # type: ignore[attr-defined]
    return run
