"""Calls of torch that may wait for ever, and are waited for no longer than is said.

A call to torch's store sends a question and reads the answer, without a limit where the
process that keeps the store is stopped.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Unanswered(TimeoutError):
    """A call that has not returned in time; its thread still waits for the answer."""


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """``call()``, made in a thread of its own.

    Raises:
        Unanswered: it takes longer; nothing can end it, so it goes on in that thread.

    >>> within(5, lambda: 3)
    3
    """
    over = threading.Event()
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), daemon=True)
    thread.start()
    if not over.wait(seconds):
        raise Unanswered(f"timed out: no answer in {seconds:.0f} s")
    thread.join()
    try:
        if errors:
            raise errors[0]
        return results[0]
    finally:
        errors.clear()  # its traceback holds this frame
