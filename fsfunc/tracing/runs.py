"""Running something on tensors without data: what all who trace a step have in common.

Nothing is computed or sent, no ledger hears of it, the generators stand as before at
the end, and what is compiled runs plainly. Who traces adds what it looks at: a
:class:`~fsfunc.frames.Tracer` in the frame, a watcher of moves, modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from fsfunc import _torch, tree
from fsfunc.comm.backends.abstract import AbstractLink
from fsfunc.comm.ledgers import Ledger, only, silence
from fsfunc.comm.mesh import Here, NoMesh, asking, here, place_here
from fsfunc.compiled import plainly
from fsfunc.fake_errors import told_where
from fsfunc.generators import generators_kept

__all__ = ["place_without_data", "without_data"]


def place_without_data(link: Callable[[int], Any] = AbstractLink) -> Here | None:
    """The place of whoever asks, whose link sends nothing; None without a mesh."""
    try:
        at = here()
    except NoMesh:
        return None
    return replace(at, link=link(at.rank))


@contextmanager
def without_data(
    values: Any,
    at: Here | None = None,
    *,
    fake: bool = True,
    remembers: bool = True,
    log: Ledger | None = None,
    asked: set[str] | None = None,
    told: tuple[str, str] | None = None,
) -> Iterator[Any]:
    """Inside, nothing is computed or sent; gives the mode of fake tensors.

    Args:
        values: what will be given: fake tensors among them bring their mode. One that
            is on already stays, as tensors of two modes cannot meet.
        at: the rank that runs, whose link moves nothing; None where the step names its
            own mesh, or none.
        fake: False where the tensors have data, of which only nothing is sent.
        remembers: see ``remembering_nothing``.
        log: the ledger that hears what would be sent; by default none.
        asked: is given the axes along which somebody asks for his place.
        told: (who, what to do instead), for the error where a value is asked for.
    """
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        stack.enter_context(silence() if log is None else only(log))
        stack.enter_context(plainly())
        mode = _torch.fake_mode()
        if fake and mode is None:
            mode = stack.enter_context(_torch.fake_mode_of(tree.leaves(values)))
            if not remembers:
                stack.enter_context(_torch.remembering_nothing(mode))
        if asked is not None:
            stack.enter_context(asking(asked))
        if at is not None:
            stack.enter_context(place_here(at))
        if told is not None:
            stack.enter_context(told_where(*told))
        yield mode
