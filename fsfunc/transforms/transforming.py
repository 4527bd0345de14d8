"""Applying a transform to a unit, a loss or a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fsfunc.core.frames import Interpretation, frame
from fsfunc.runtime.scopes import refuse_compiled
from fsfunc.sharded.inputs import check_function


def transformed(
    f: Callable[..., Any],
    handler: Interpretation,
) -> Callable[..., Any]:
    """``f`` with an interpretation in reach of every unit and gradient call inside.

    What all transforms come down to, and how one of your own is applied.

    Args:
        f: a unit, a loss, or a train step.
        handler: an ``Interpretation``: what is to become of these calls.

    >>> import torch, fsfunc as ff
    >>> class Named(ff.Interpretation):
    ...     def unit(self, run, call):
    ...         print("calls", call.name)
    ...         return run
    >>> layer = ff.unit(lambda w, x: w * x)
    >>> transformed(lambda w: layer(w, 2.0), Named())(torch.tensor(3.0))
    calls <lambda>
    tensor(6.)
    """

    check_function(f, handler.called or "transformed")

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
