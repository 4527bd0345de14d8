"""Errors that name the line which asks a fake tensor for its value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsfunc import _torch
from fsfunc.comm.attribution import traceback_line
from fsfunc.runtime.scopes import plainly

__all__ = ["asks_for_a_value", "told_where"]


def asks_for_a_value(error: BaseException) -> bool:
    """True if ``error`` is a fake tensor refusing to tell a value."""
    return _torch.is_data_dependent(error) or str(error).startswith(".numpy()")


@contextmanager
def told_where(what: str, instead: str) -> Iterator[None]:
    """Replaces a refusal of fake tensors by an error that names the line.

    What is compiled runs plainly inside: see there.

    Args:
        what: who asked.
        instead: what to do about it, as the message goes on.

    Raises:
        RuntimeError: in place of torch's own error.
    """
    try:
        with plainly():
            yield
    except Exception as error:
        if not asks_for_a_value(error):
            raise
        raise RuntimeError(
            f"{what} asks for a tensor's value at {traceback_line(error)} (.item(), "
            f"`if tensor`, a boolean mask){instead}"
        ) from error
