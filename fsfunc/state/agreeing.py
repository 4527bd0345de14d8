"""Errors while laying out, raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsfunc import tree
from fsfunc.comm.backends.link import CollectiveMismatch, PeerFailed
from fsfunc.comm.comparison import (
    Lines,
    RanksDiffer,
    Section,
    compare,
    unlike,
    whole_values,
)
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Here, here
from fsfunc.sharded.leaf import is_sharded
from fsfunc.state.layout_rules import LayoutRules, axes_of

__all__ = ["Agreement", "compared", "together"]

_TITLE = "ranks lay out a state, and not all alike"


class Agreement:
    """The processes that lay out for one function, and how far they have come.

    ``where`` is None where there are none, or simulated ranks, which all raise anyway;
    ``compared``: whether they have said what they are about to do; ``among``: those who
    have yet to exchange what they would compute; ``made``: what is compared at the end.
    """

    def __init__(self, fn: Callable[..., Any], layouts: LayoutRules | None):
        laying = [h for h in getattr(fn, "interpretations", ()) if h.lays_out]
        self.where: RankGroup | None = None
        self.among: RankGroup | None = None
        self.simulated: RankGroup | None = None
        self.compared = False
        self.made: Lines = []
        if laying:
            at = here(laying[0].mesh)
            axes = {a for h in laying for a in h.axes} | {*axes_of(layouts or {})}
            if at.link.notes is None:
                self.where = compared(at, axes)
            else:
                self.simulated = compared(at, axes)

    def compare_made(self, t: Any) -> None:
        """Compares the whole leaves that a function has made beside the parameters."""
        where = self.where or self.simulated
        if where is None:
            return
        paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
        section = whole_values(paths, leaves, where.link.notes)
        if where is self.simulated:
            compare([section], where)
        else:
            self.made = section.lines

    def exchange(self, lines: Lines) -> dict[int, Lines]:
        """The lines of each rank among whom there is one that has others."""
        among, self.among = self.among, None
        if self.where is None or among is None:
            return {}
        return unlike(lines, among)


@contextmanager
def together(
    fn: Callable[..., Any], layouts: LayoutRules | None
) -> Iterator[Agreement]:
    """Inside, ranks lay out for ``fn``; if one of them raises, the others do too.

    Raises:
        RanksDiffer: another rank has raised: says which, and what.

    Cost: over processes two gathers of 16 bytes.
    """
    agreement = Agreement(fn, layouts)
    try:
        yield agreement
    except (PeerFailed, CollectiveMismatch):
        raise  # they know
    except Exception as error:
        if agreement.compared or not isinstance(error, RanksDiffer):
            with suppress(RanksDiffer):
                _say(agreement, f"{type(error).__name__}: {error}")
        raise
    agreement.compared = True
    _say(agreement, "nothing")


def _say(agreement: Agreement, what: str) -> None:
    """Exchanges the outcome with the other ranks, which do the same."""
    agreement.exchange(())
    said = [Section(_TITLE, [("raised", what), *agreement.made])]
    if not agreement.compared:
        said.append(Section(_TITLE, []))  # in place of whole parameters
    if agreement.where is not None:
        compare(said, agreement.where)


def compared(at: Here, axes: set[str]) -> RankGroup | None:
    """The ranks along some axes, if they are there to be compared."""
    if not at.link.moves or at.link.level is not None:
        return None  # what is planned has no others, and a vmap mesh one program
    return group(tuple(a for a in at.mesh.axes if a in axes), at)
