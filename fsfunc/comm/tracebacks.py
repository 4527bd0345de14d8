"""Errors leave the library without its frames: ``api_boundary``, ``full_traceback``.

Of the traceback of an error that leaves the outermost public function, the frames of
the user's code stay, those that the library called too, and a note tells how many of
fsfunc's, torch's and optree's are left out. They are taken out of the error itself,
once, as it leaves: then Python, logging, notebooks, pytest and torchrun print the same,
and no hook is set in any of them. Those of the error itself stay in the note, for a
debugger, and so they live as long as the error, as before; those of errors that it was
raised from go. ``FSFUNC_TRACEBACK=full``, read as an error leaves, turns this off.

Source: ``jax._src.traceback_util``, whose mode "remove_frames" it is.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

import torch

from fsfunc.comm.attribution import OWNERS

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LeftOut(str):
    """The note on frames that are left out; ``traceback`` has all."""

    traceback: TracebackType | None = None

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (str(self),)  # an error may be pickled, a traceback may not


def api_boundary(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """``fn``, a public function, out of which errors come with short tracebacks."""

    @functools.wraps(fn)
    def run(*args: _P.args, **keywords: _P.kwargs) -> _R:
        try:
            return fn(*args, **keywords)
        except BaseException as error:
            leave_out(error)
            raise  # adds no frame of ours

    return run


def leave_out(error: BaseException) -> None:
    """Leaves the library's frames out of an error, if its caller is the outermost.

    To be called by a public function as the error leaves it, right before ``raise``.
    """
    if torch.compiler.is_dynamo_compiling():  # which follows what handles errors
        return
    frame: FrameType | None = sys._getframe(1)
    while (frame := frame.f_back) is not None:
        if _is_ours(frame) and frame.f_code.co_name != "<module>":  # `python -m` is one
            return
    if os.environ.get("FSFUNC_TRACEBACK") == "full":
        return
    whole, count, last = error.__traceback__, 0, ""
    for one in _chain(error):
        found = list(entries(one.__traceback__))
        kept = [x for x in found if OWNERS[x.tb_frame.f_code.co_filename] == "user"]
        # One that was handled around this call is the user's, with torch's frames.
        if kept and not any(_is_ours(x.tb_frame) for x in found):
            continue
        if one is error and found[-1:] != kept[-1:]:
            last = f", the last at {_place(found[-1])}"
        count += len(found) - len(kept)
        BaseException.with_traceback(one, joined(kept))  # its class may have another
    if count and not notes_left(error):
        note = LeftOut(_NOTE.format(count, "s" * (count != 1), last))
        note.traceback = whole
        with suppress(Exception):  # notes that are no list, errors that are frozen
            error.add_note(note)


def notes_left(error: BaseException) -> list[LeftOut]:
    """The notes of an error on frames that are left out, one at most."""
    with suppress(Exception):  # `__notes__` may be anything
        return [x for x in error.__notes__ if isinstance(x, LeftOut)]
    return []


def full_traceback(error: BaseException | None = None) -> TracebackType | None:
    """The traceback of an error with all of its frames, for a debugger.

    An error leaves the library without the frames of fsfunc and torch, which nobody
    reads; the environment variable ``FSFUNC_TRACEBACK=full`` leaves all in. A debugger
    enters them by ``pdb.post_mortem(ff.full_traceback())``. They are kept in the last
    of ``error.__notes__``, and live as long as the error: who keeps an error, and frees
    its tensors by ``error.with_traceback(None)``, takes its notes away too. Of an error
    that it was raised from, they are to be had by ``FSFUNC_TRACEBACK=full`` alone.

    Args:
        error: by default the one that is being handled, or else the last that nobody
            handled, as in a notebook.

    >>> import traceback, torch, fsfunc as ff
    >>> names = lambda t: [x.name for x in traceback.extract_tb(t)]
    >>> try:
    ...     ff.value_and_grad(lambda w: w.sum(5))(torch.ones(2))
    ... except IndexError as error:
    ...     names(ff.full_traceback(error))[:3]
    ['<module>', '__call__', 'run']
    """
    error = error or sys.exception() or getattr(sys, "last_value", None)
    if error is None:
        return None
    if not (notes := notes_left(error)):
        return error.__traceback__
    inner = list(entries(notes[0].traceback))
    ours = {id(x.tb_frame) for x in inner}
    outer = [x for x in entries(error.__traceback__) if id(x.tb_frame) not in ours]
    return joined([*outer, *inner])


_NOTE = (
    "{} frame{} of fsfunc and torch left out{}: FSFUNC_TRACEBACK=full shows all, and "
    "pdb.post_mortem(ff.full_traceback(error)) enters them"
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, those that it was raised from or in, and those of a group."""
    seen, todo = set[int](), [error]
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            around = [x for x in (one.__cause__, one.__context__) if x is not None]
            within = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            todo += [*around, *within]


def entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Those of a traceback, the outermost first."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def joined(entries: list[TracebackType]) -> TracebackType | None:
    """A new traceback of these entries."""
    made = None
    for x in reversed(entries):
        made = TracebackType(made, x.tb_frame, x.tb_lasti, x.tb_lineno)
    return made


def _is_ours(frame: FrameType) -> bool:
    return OWNERS[frame.f_code.co_filename] in ("fsfunc", "anybody")


def _place(entry: TracebackType) -> str:
    """``package/file.py:line``."""
    path = Path(entry.tb_frame.f_code.co_filename)
    names = [i for i, part in enumerate(path.parts) if part in ("fsfunc", "torch")]
    return f"{'/'.join(path.parts[names[-1] if names else -1 :])}:{entry.tb_lineno}"
