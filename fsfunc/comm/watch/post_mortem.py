"""``full_traceback``: the frames that were left out of an error, for a debugger."""

from __future__ import annotations

import sys
from types import TracebackType

from fsfunc.comm.tracebacks import entries, joined, notes_left


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
