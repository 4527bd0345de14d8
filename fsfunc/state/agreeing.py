"""Comparison of ranks that lay out a state; errors are raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.backends.link import CollectiveMismatch, PeerFailed
from fsfunc.comm.comparison import Lines, RanksDiffer, Section, agree, differing_lines
from fsfunc.comm.descriptions import describe_value, section_of_values
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Here, here
from fsfunc.core.frames import Interpretation, transformed
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.state.layout_rules import LayoutRules, axes_of
from fsfunc.tracing.recorder import Recorder
from fsfunc.tracing.replicas import (
    SPLIT_REASON,
    STAGES_REASON,
    SharedBatchAxes,
    compare_batches,
)
from fsfunc.transforms.sharded_calls import Sharding

_TITLE = "ranks lay out a state, and not all alike"
_UNLIKE = "ranks lay out for unlike steps"
_LIKE = (
    "Run the same step, by the same optimizer and numbers, on every rank; what one of "
    "them alone is to report, compute on all"
)


@dataclass(frozen=True)
class RecordedProgram:
    """What a rank lays a state out for: a function, as it was recorded.

    Args:
        handlers: the interpretations that lay leaves out.
        over: the axes that leaves are split over.
    """

    fn: Callable[..., Any]
    recorder: Recorder
    handlers: Sequence[Any]
    at: Here
    over: set[str]

    @property
    def transforms(self) -> Sequence[Any]:
        return getattr(self.fn, "interpretations", ()) or self.handlers

    def together(self) -> SharedBatchAxes:
        """The axes whose ranks are given one batch, and why (see `compare_batches`)."""
        mesh, recorder = self.at.mesh, self.recorder
        means = {a for h in self.transforms for a in getattr(h, "axes", ())}
        apart = {*mesh.axes} - self.over - recorder.axes - means
        same = {axis for h in self.handlers for axis in h.same_batch}
        each = [(same, STAGES_REASON), (self.over - means, SPLIT_REASON)]
        if recorder.returns_new_leaves:
            each.insert(1, (apart, ""))
        found = [(tuple(a for a in mesh.axes if a in axes), why) for axes, why in each]
        return [(axes, why) for axes, why in found if axes and mesh.axis_size(axes) > 1]


class Agreement:
    """The comparisons of the ranks that lay out a state together, as far as made.

    ``where`` is None without other ranks; ``apart``: whether they are processes (all
    simulated ranks raise anyway); ``compared``: whether programs were compared;
    ``among``: the ranks that still have to exchange constants of the type check;
    ``made``: what is compared at the end.
    """

    def __init__(self, fn: Callable[..., Any], layouts: LayoutRules | None):
        laying = [h for h in getattr(fn, "interpretations", ()) if h.lays_out]
        self.where: RankGroup | None = None
        self.among: RankGroup | None = None
        self.compared = False
        self.made: Lines = []
        if laying:
            at = here(laying[0].mesh)
            axes = {a for h in laying for a in h.axes} | {*axes_of(layouts or {})}
            self.where = compared(at, axes)
        self.apart = self.where is not None and self.where.link.notes is None

    def compare_made(self, t: Any) -> None:
        """Compares the whole leaves that a function has made beside the parameters."""
        if (where := self.where) is None:
            return
        paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
        section = section_of_values(paths, leaves, where.link.notes)
        if self.apart:
            self.made = section.lines
        else:
            agree(where, section)

    def compare_programs(
        self,
        program: RecordedProgram,
        rest: Any,
        lines: Callable[[], Lines],
        values: Callable[[], Section],
    ) -> None:
        """Raises on every rank if the ranks' programs or values differ."""
        at, handlers, recorder = program.at, program.handlers, program.recorder
        where = compared(at, program.over.union(*(h.axes for h in handlers)))
        if where is None:
            return
        transforms = enumerate(program.transforms)
        text = [
            ("raised", "nothing"),  # a rank that has raised names its error here
            *((f"transform {i}", describe_value(h)) for i, h in transforms),
            *lines(),
            *recorder.comparison_lines(),
        ]
        agree(where, unlike_steps(text), values())
        self.compared = True
        if where.link.notes is not None:
            where.link.after_others()
        shardings = [h for h in handlers if isinstance(h, Sharding)]
        if shardings:
            self.among = get_group(shardings[0].axes, at)
        together = program.together()
        for axes, because in together:
            compare_batches(rest, get_group(axes, at), because)
        for h in shardings:
            h.first_calls.on_layout(at.rank, recorder.returns_new_leaves, together)
        for h in handlers:
            h.ran(at)

    def end(self, raised: str) -> None:
        """Tells the other ranks what this one raised; they do the same.

        Here an error is a line of what is compared, and needs no message of its own:
        where the others are still to compare programs, it meets those.
        """
        self.exchange(())
        sections = [Section(_TITLE, [("raised", raised), *self.made])]
        if not self.compared:
            sections.append(Section(_TITLE, []))  # in place of whole parameters
        if self.apart and self.where is not None:
            agree(self.where, *sections)

    def exchange(self, lines: Lines) -> Mapping[int, Lines]:
        """The lines of each rank among whom there is one that has others."""
        among, self.among = self.among, None
        return differing_lines(lines, among) if self.apart and among is not None else {}


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
                agreement.end(f"{type(error).__name__}: {error}")
        raise
    agreement.compared = True
    agreement.end("nothing")


def compared(at: Here, axes: set[str]) -> RankGroup | None:
    """The ranks along some axes, if they are there to be compared."""
    if not at.link.moves_data or at.link.vmap_level is not None:
        return None  # what is planned has no others, and a vmap mesh one program
    return get_group(tuple(a for a in at.mesh.axes if a in axes), at)


def unlike_steps(lines: Lines) -> Section:
    """The lines of the program that a rank lays out for."""
    return Section(_UNLIKE, lines, _LIKE)


def kind_of(x: Any) -> Any:
    """The shape and dtype of a tensor, the type of any other leaf."""
    return (x.shape, x.dtype) if isinstance(x, Tensor | Sharded) else type(x)


def opaque(kinds: Iterable[Any]) -> bool:
    """True if one of the leaves of these kinds may change as a step runs."""
    return not _FIXED.issuperset(k for k in kinds if type(k) is not tuple)


_FIXED = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}


def same_functions(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """True if functions of two ranks call one object, under transforms told alike."""
    return all(map(_is_same, ours, theirs))


def _is_same(f: Any, other: Any) -> bool:
    ours, theirs = (getattr(x, "interpretations", ()) for x in (f, other))
    alike = len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    return alike and _beneath(f) is _beneath(other)


def _alike(h: Any, other: Any) -> bool:
    """True of one interpretation, and of two of the library's with equal arguments."""
    if h is other:
        return True
    ours = type(h) is type(other) and type(h).__module__.startswith("fsfunc.")
    return ours and () != h.configuration == other.configuration


def _beneath(f: Any) -> Any:
    """The function that transforms were applied to."""
    while getattr(f, "__code__", None) is _TRANSFORMED:
        f = f.__wrapped__
    return f


_TRANSFORMED = transformed(lambda: None, Interpretation()).__code__
