"""The unit, the phase and the user's source line of a collective or an error.

Ledgers and error messages name who called a collective: the ``label`` in force (which
unit, forward or backward), and the innermost line of the stack that is the user's code,
not fsfunc's or torch's. Whose code a frame runs is told by the path of its file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

import optree
import torch

from fsfunc.runtime.scopes import Scoped

# How the paths of fsfunc's source files begin.
_OURS = str(Path(__file__).parent.parent) + os.sep
# The same of torch and optree, and of functions that torch has generated.
_TORCHS: tuple[str, ...] = (
    *(str(Path(str(m.__file__)).parent) + os.sep for m in (torch, optree)),
    *("<frozen ", "<eval_with_key>"),
)
# Files of fsfunc whose functions call a function of the user's for each leaf.
_ANYBODYS: tuple[str, ...] = tuple(
    os.path.join(_OURS, "tree", f) for f in ("functions.py", "structure.py")
)
# Files of Python whose wrappers call what they decorate.
_DECORATORS: tuple[str, ...] = contextlib.__file__, functools.__file__
# Functions that pass on a call: those of modes, and of a leaf that is recorded, for its
# operators and attributes. Who called is further out.
_PASSES_ON: set[str] = {
    *("__torch_function__", "__torch_dispatch__", "dispatch"),
    *("passed_on", "__getattr__"),
}

_LABEL: ContextVar[tuple[str, str]] = ContextVar("fsfunc_label", default=("", ""))
INTERNAL: ContextVar[bool] = ContextVar("fsfunc_internal", default=False)


class _Owners(dict[str, str]):
    """By the path of a source file, whose code it has: "user", "fsfunc", "torch", ...

    A dict that fills itself, as each collective asks of many frames. "anybody" is code
    of fsfunc that calls functions which the user or fsfunc gave it: it does not tell
    who called.
    """

    def __missing__(self, path: str) -> str:
        if path.startswith(_OURS):
            owner = "anybody" if path in _ANYBODYS else "fsfunc"
        elif path.startswith(_TORCHS) or path in _DECORATORS:
            owner = "torch"
        else:
            # The stack of a new thread begins in Python's file: a call that comes from
            # there alone has no line of the user's.
            owner = "thread" if path == threading.__file__ else "user"
        self[path] = owner
        return owner


OWNERS = _Owners()


class label(Scoped):
    """Attributes the collectives inside to a unit and phase."""

    def __init__(self, unit: str, phase: str):
        self.var, self.value = _LABEL, (unit, phase)


def current_label() -> tuple[str, str]:
    """Returns the (unit, phase) in force."""
    return _LABEL.get()


class internal(Scoped):
    """Marks what runs inside as the library's code (with False, as the user's)."""

    def __init__(self, value: bool = True):
        self.var, self.value = INTERNAL, value


def is_internal() -> bool:
    """Returns whether the library's code runs, not the user's function."""
    return INTERNAL.get()


def source_line() -> str:
    """Returns ``file:line`` of the innermost caller outside fsfunc and torch."""
    frame: FrameType | None = sys._getframe(1)
    # The same loop as `_innermost_user_frame`: each collective asks, and a call costs.
    while frame is not None and OWNERS[frame.f_code.co_filename] != "user":
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _innermost_user_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the first frame from this one outwards that is the user's."""
    while frame is not None and OWNERS[frame.f_code.co_filename] != "user":
        frame = frame.f_back
    return frame


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside fsfunc and torch, which caused it."""
    frame = _innermost_user_frame(caller := sys._getframe(1)) or caller
    module_globals = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module_globals.get("__name__"),
        # By it a warning is shown once a line, as Python does.
        module_globals.setdefault("__warningregistry__", {}),
    )


def traceback_line(error: BaseException) -> str:
    """Returns ``file:line`` of the innermost frame of ``error`` that is the user's."""
    line, trace = "?", error.__traceback__
    # A traceback goes inwards: the last of the user's frames is the innermost.
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if OWNERS[name] == "user":
            line = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def called_by_user(frame: FrameType) -> bool:
    """Returns whether the code of this frame is the user's."""
    return OWNERS[frame.f_code.co_filename] == "user"


def called_by_fsfunc() -> bool:
    """Returns whether torch was called by fsfunc itself, not by a user's function."""
    frame = sys._getframe(1)
    caller_file = frame.f_code.co_filename  # of fsfunc: a mode that torch has called
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        # Frames of torch are passed over, too: it calls operators for its own caller.
        # "anybody" counts as the user, who may have given it a function of torch's, as
        # in `tree.map(torch.relu, x)`.
        if name != caller_file and code.co_name not in _PASSES_ON:
            if (owner := OWNERS[name]) != "torch":
                return owner == "fsfunc"
        frame = frame.f_back
    return False
