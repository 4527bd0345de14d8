"""Errors leave the library without its frames: ``api_boundary``, ``full_traceback``.

When an error leaves the outermost public function, its traceback loses the frames of
fsfunc, torch and optree. The frames of the user's code stay, also those that the
library called, and a note tells how many were left out. They are taken out of the error
itself, once, as it leaves: so Python, logging, notebooks, pytest and torchrun all print
the same, and no hook is set in any of them. The note stores all frames of the error
itself, for a debugger: they live as long as the error, as they do in Python. Frames
left out of the errors that it was raised from are dropped. ``FSFUNC_TRACEBACK=full``,
read as an error leaves, turns this off.

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
    """The note on frames that are left out; ``traceback`` has all frames."""

    traceback: TracebackType | None = None

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (str(self),)  # an error may be pickled, a traceback may not


def api_boundary(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a public function so that errors leave it with short tracebacks."""

    @functools.wraps(fn)
    def run(*args: _P.args, **keywords: _P.kwargs) -> _R:
        try:
            return fn(*args, **keywords)
        except BaseException as error:  # an interrupt also shows where the user was
            leave_out(error)
            raise  # adds no frame of ours

    return run


def leave_out(error: BaseException) -> None:
    """Leaves the library's frames out of an error, if its caller is the outermost.

    To be called by a public function as the error leaves it, right before ``raise``.
    """
    if torch.compiler.is_dynamo_compiling():  # which follows what handles errors
        return
    # Only the outermost public function shortens: inside another one of fsfunc's the
    # error is not on its way to the user yet.
    frame: FrameType | None = sys._getframe(1)
    while (frame := frame.f_back) is not None:
        if _is_ours(frame) and frame.f_code.co_name != "<module>":  # `python -m` is one
            return
    if os.environ.get("FSFUNC_TRACEBACK") == "full":
        return
    full, count, last = error.__traceback__, 0, ""
    for linked in _chain(error):
        frames = list(entries(linked.__traceback__))
        users = [x for x in frames if OWNERS[x.tb_frame.f_code.co_filename] == "user"]
        # An error that was being handled around this call is the user's: it did not
        # come through fsfunc, and keeps torch's frames.
        if users and not any(_is_ours(x.tb_frame) for x in frames):
            continue
        # The note is on this error alone. It names the frame that raised, unless that
        # is the user's and so the last one shown.
        if linked is error and frames[-1:] != users[-1:]:
            last = f", the last at {_place(frames[-1])}"
        count += len(frames) - len(users)
        # Not `linked.with_traceback`: its class may have a method of that name.
        BaseException.with_traceback(linked, joined(users))
    # An error that is raised again later has its note, with its first traceback.
    if count and not notes_left(error):
        note = LeftOut(_NOTE.format(count, "s" * (count != 1), last))
        note.traceback = full
        with suppress(Exception):  # notes that are no list, errors that are frozen
            error.add_note(note)


def notes_left(error: BaseException) -> list[LeftOut]:
    """Returns the notes of an error on frames that are left out, one at most."""
    with suppress(Exception):  # `__notes__` may be anything
        return [x for x in error.__notes__ if isinstance(x, LeftOut)]
    return []


def full_traceback(error: BaseException | None = None) -> TracebackType | None:
    """Returns the traceback of an error with all of its frames, for a debugger.

    An error leaves the library without the frames of fsfunc and torch, which nobody
    reads; the environment variable ``FSFUNC_TRACEBACK=full`` leaves all in. A debugger
    enters them by ``pdb.post_mortem(ff.full_traceback())``. They are stored in the last
    of ``error.__notes__``, and live as long as the error: code that stores an error and
    frees its tensors by ``error.with_traceback(None)`` must drop its notes too. For the
    errors that it was raised from, only ``FSFUNC_TRACEBACK=full`` shows all frames.

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
    # Python adds a frame for each caller that the error passes after it left the
    # library.
    inner = list(entries(notes[0].traceback))
    inner_ids = {id(x.tb_frame) for x in inner}
    outer = [x for x in entries(error.__traceback__) if id(x.tb_frame) not in inner_ids]
    return joined([*outer, *inner])


_NOTE = (
    "{} frame{} of fsfunc and torch left out{}: FSFUNC_TRACEBACK=full shows all, and "
    "pdb.post_mortem(ff.full_traceback(error)) enters them"
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, those that it was raised from or in, and those of a group."""
    visited, todo = set[int](), [error]  # errors may refer to each other in a circle
    while todo:
        err = todo.pop()
        if id(err) not in visited:
            visited.add(id(err))
            yield err
            around = [x for x in (err.__cause__, err.__context__) if x is not None]
            within = err.exceptions if isinstance(err, BaseExceptionGroup) else ()
            todo += [*around, *within]


def entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yields the entries of a traceback, the outermost first."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def joined(entries: list[TracebackType]) -> TracebackType | None:
    """Makes a new traceback of these entries, which stay linked as they are."""
    trace = None
    for x in reversed(entries):
        trace = TracebackType(trace, x.tb_frame, x.tb_lasti, x.tb_lineno)
    return trace


def _is_ours(frame: FrameType) -> bool:
    return OWNERS[frame.f_code.co_filename] in ("fsfunc", "anybody")


def _place(entry: TracebackType) -> str:
    """Returns ``package/file.py:line``."""
    path = Path(entry.tb_frame.f_code.co_filename)
    names = [i for i, part in enumerate(path.parts) if part in ("fsfunc", "torch")]
    return f"{'/'.join(path.parts[names[-1] if names else -1 :])}:{entry.tb_lineno}"
