"""Records of steps that several plans share: `sharing_records`.

A search plans one loss under many stacks of transforms. Which leaves units take, and in
which order, many of them decide alike: so the first plan records its step, and those
that the caller says are recorded alike use its record (`placing`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# By shapes and rules, what `placing` keeps of a recording: see there.
Records = dict[Hashable, Any]

_RECORDS: ContextVar[Records | None] = ContextVar("fsfunc_records", default=None)


@contextmanager
def sharing_records(records: Records) -> Iterator[None]:
    """Inside, steps that are laid out for abstract meshes share one record.

    Args:
        records: what was recorded so far, to which this adds. All steps that it is
            given for make the same unit calls on parts of the same shapes, in the same
            dtypes, under transforms that lay leaves out of the same types, on meshes
            of the same axes: nothing here can check that. They may differ in
            ``zero``, in what is computed again and in what is donated.
    """
    token = _RECORDS.set(records)
    try:
        yield
    finally:
        _RECORDS.reset(token)


def records_here() -> Records | None:
    """Returns the records that steps share here; None if each is recorded anew."""
    return _RECORDS.get()
