"""Runs of transformers' models without data, whose rows are taken for whole sequences.

Its models look into values where the caller gave none: in positions that they count
themselves for sequences that are packed into one row, and in a mask of ones that they
make themselves for padding. A real call reads off the values that there is neither. A
run without values would plan a mask, which takes attention twice the time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from fsfunc import _torch


class _Row(NamedTuple):
    """What the rows of a call are: one sequence each; without padding."""

    is_single: bool = False
    is_full: bool = False


_ROW: ContextVar[_Row] = ContextVar("fsfunc_row")
_NO_ROW = _Row()
_LOCK = threading.Lock()
# transformers' own functions by name, while calls without data run, and how many do:
# simulated ranks are threads.
_originals: dict[str, Callable[..., Any]] = {}
_running: list[object] = []


@contextmanager
def taking_whole_rows(
    args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Iterator[None]:
    """Lets transformers take each row for one whole sequence, in runs without data.

    Positions that the caller gives may begin anew within a row, and a mask may hide
    tokens: these stay masked.

    Args:
        args, keywords: those of the model's call.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None or not _torch.fake_active():
        yield
        return
    given = {name for name, x in keywords.items() if x is not None}
    row = _Row(
        is_single=len(args) < 3 and "position_ids" not in given,
        is_full=len(args) < 2
        and not any(name.endswith("attention_mask") for name in given),
    )
    token, run = _ROW.set(row), object()
    with _LOCK:
        if not _running:
            _install(masks)
        _running.append(run)
    try:
        yield
    finally:
        _ROW.reset(token)
        with _LOCK:
            _running.remove(run)
            if not _running:
                for name, function in _originals.items():
                    setattr(masks, name, function)
                _originals.clear()


def _install(masks: Any) -> None:
    """Puts functions in place of transformers' that ask what the rows of a call are."""
    replacements = {
        "find_packed_sequence_indices": _find_packed,
        "_ignore_causal_mask_sdpa": _ignores_mask,
        "_ignore_bidirectional_mask_sdpa": _ignores_mask,
    }
    for name, make in replacements.items():
        function = getattr(masks, name, None)
        if function is not None:
            _originals[name] = function
            setattr(masks, name, make(function))


def _find_packed(function: Callable[..., Any]) -> Callable[..., Any]:
    def find_packed_sequence_indices(*args: Any, **keywords: Any) -> Any:
        if _ROW.get(_NO_ROW).is_single:
            return None
        return function(*args, **keywords)

    return find_packed_sequence_indices


def _ignores_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    def ignores_mask(padding_mask: Any, *args: Any, **keywords: Any) -> Any:
        is_full = _ROW.get(_NO_ROW).is_full
        return function(None if is_full else padding_mask, *args, **keywords)

    return ignores_mask
