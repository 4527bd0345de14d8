"""How a transform reaches what it is applied to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fsfunc.core.frames import Interpretation, frame
from fsfunc.runtime.compiled import refuse_compiled

__all__ = ["transformed"]


def transformed(
    f: Callable[..., Any],
    handler: Interpretation,
) -> Callable[..., Any]:
    """``f`` with ``handler`` in reach of every unit and gradient call inside."""

    @functools.wraps(f)
    def run(*args: Any, **keywords: Any) -> Any:
        refuse_compiled("a transformed function")
        tracer = frame().tracer
        meant = handler if tracer is None else tracer.standing_for(handler)
        return meant.call(f, args, keywords)

    # Known from outside: wrapping a transformed function keeps its attributes.
    inner = getattr(f, "interpretations", ())
    run.interpretations = (*inner, handler)  # type: ignore[attr-defined]
    return run
