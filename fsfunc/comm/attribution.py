"""The unit, the phase and the user's source line of a collective or an error."""

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

_OURS = str(Path(__file__).parent.parent) + os.sep
# With torch's, those of trees, and of functions that torch has generated.
_TORCHS = (
    *(str(Path(str(m.__file__)).parent) + os.sep for m in (torch, optree)),
    *("<frozen ", "<eval_with_key>"),
)
# Of fsfunc, those that call what a user gives them.
_ANYBODYS = tuple(
    os.path.join(_OURS, "tree", f) for f in ("functions.py", "structure.py")
)
# Of Python, those that call what they decorate.
_DECORATORS = contextlib.__file__, functools.__file__
# Modes pass on a call, and so do operators and attributes of a leaf that is recorded.
_PASSES_ON = {
    *("__torch_function__", "__torch_dispatch__", "dispatch"),
    *("passed_on", "__getattr__"),
}

_LABEL: ContextVar[tuple[str, str]] = ContextVar("fsfunc_label", default=("", ""))
INTERNAL: ContextVar[bool] = ContextVar("fsfunc_internal", default=False)


class _Owners(dict[str, str]):
    """By the path of a source file: "user", or else whose code it has.

    What calls for anybody is as torch's: who called is asked of the frames around it.
    """

    def __missing__(self, path: str) -> str:
        if path.startswith(_OURS):
            owner = "anybody" if path in _ANYBODYS else "fsfunc"
        elif path.startswith(_TORCHS) or path in _DECORATORS:
            owner = "torch"
        else:
            owner = "thread" if path == threading.__file__ else "user"
        self[path] = owner
        return owner


OWNERS = _Owners()


class label(Scoped):
    """Attributes the collectives inside to a unit and phase."""

    def __init__(self, unit: str, phase: str):
        self.var, self.value = _LABEL, (unit, phase)


def current_label() -> tuple[str, str]:
    """The (unit, phase) in force."""
    return _LABEL.get()


class internal(Scoped):
    """Marks what runs inside as the library's code (with False, as the user's)."""

    def __init__(self, value: bool = True):
        self.var, self.value = INTERNAL, value


def is_internal() -> bool:
    """True if the library's code runs, not the user's function."""
    return INTERNAL.get()


def source_line() -> str:
    """``file:line`` of the innermost caller outside fsfunc and torch."""
    frame: FrameType | None = sys._getframe(1)
    # As `_users` has it; but each collective asks, and a call is a call.
    while frame is not None and OWNERS[frame.f_code.co_filename] != "user":
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from this one on that is outside fsfunc and torch."""
    while frame is not None and OWNERS[frame.f_code.co_filename] != "user":
        frame = frame.f_back
    return frame


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside fsfunc and torch, which caused it."""
    frame = _users(here := sys._getframe(1)) or here
    where = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        where.get("__name__"),
        where.setdefault("__warningregistry__", {}),
    )


def traceback_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame of ``error`` outside fsfunc and torch."""
    found, trace = "?", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if OWNERS[name] == "user":
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def called_by_user(frame: FrameType) -> bool:
    """True if the code of this frame is the user's."""
    return OWNERS[frame.f_code.co_filename] == "user"


def is_own_call() -> bool:
    """True if torch was called by fsfunc itself, not by a user's function."""
    frame = sys._getframe(1)
    here = frame.f_code.co_filename  # that of the caller, which is ours
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name != here and code.co_name not in _PASSES_ON:
            if (owner := OWNERS[name]) != "torch":
                return owner == "fsfunc"
        frame = frame.f_back
    return False
