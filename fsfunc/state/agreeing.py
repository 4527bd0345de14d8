"""Comparison of ranks that lay out a state; errors are raised on all of them.

Ranks that lay a state out for unlike programs would later wait for each other, or train
on unlike parameters. So `placing.lay_out` works inside `together`: the ranks compare
their programs before memory is taken, and say at the end whether one of them raised;
then all raise, and no rank is left waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from fsfunc.tree.types import Leaf, PyTree

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
        fn: the function.
        recorder: its record.
        handlers: the interpretations that lay leaves out.
        here: the rank.
        split_axes: the axes that leaves are split over.
    """

    fn: Callable[..., Any]
    recorder: Recorder
    handlers: Sequence[Any]
    here: Here
    split_axes: set[str]

    @property
    def transforms(self) -> Sequence[Any]:
        """All transforms of the function, or else those that lay out."""
        return getattr(self.fn, "interpretations", ()) or self.handlers

    def together(self) -> SharedBatchAxes:
        """Returns the axes whose ranks are given one batch, and why.

        See `compare_batches`.
        """
        mesh, recorder = self.here.mesh, self.recorder
        means = {a for h in self.transforms for a in getattr(h, "axes", ())}
        # Nothing is summed over these: on other rows the ranks would train apart.
        unused = {*mesh.axes} - self.split_axes - recorder.axes - means
        stages = {axis for h in self.handlers for axis in h.same_batch}
        reasons = [(stages, STAGES_REASON), (self.split_axes - means, SPLIT_REASON)]
        if recorder.returns_new_leaves:
            reasons.insert(1, (unused, ""))
        ordered = [
            (tuple(a for a in mesh.axes if a in axes), why) for axes, why in reasons
        ]
        return [
            (axes, why) for axes, why in ordered if axes and mesh.axis_size(axes) > 1
        ]


class Agreement:
    """The comparisons of the ranks that lay out a state together, as far as made.

    Attributes:
        where: the ranks that compare; None without other ranks.
        are_processes: whether they are processes. Simulated ranks all raise anyway.
        compared: whether programs were compared.
        checked_together: the ranks that have still to exchange constants of the type
            check, or None.
        made_lines: what is compared at the end: leaves that a user's function has made.
    """

    def __init__(self, fn: Callable[..., Any], layouts: LayoutRules | None):
        laying = [h for h in getattr(fn, "interpretations", ()) if h.lays_out]
        self.where: RankGroup | None = None
        self.checked_together: RankGroup | None = None
        self.compared: bool = False
        self.made_lines: Lines = []
        if laying:
            rank_here = here(laying[0].mesh)
            split_axes = rank_here.mesh.expand(axes_of(layouts or {}))
            axes = {a for h in laying for a in h.axes} | {*split_axes}
            self.where = compared_ranks(rank_here, axes)
        # Only ranks that share a process share notes.
        self.are_processes: bool = (
            self.where is not None and self.where.link.notes is None
        )

    def compare_made(self, t: PyTree) -> None:
        """Compares the whole leaves that a function has made beside the parameters."""
        if (where := self.where) is None:
            return
        paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
        section = section_of_values(paths, leaves, where.link.notes)
        # Processes compare once, at the end, with what was raised: see `end`.
        if self.are_processes:
            self.made_lines = section.lines
        else:
            agree(where, section)

    def all_know(self, known: bool) -> bool:
        """Returns whether all ranks know already what they are about to compare.

        Then none of them does; else all do, also those that know.

        Args:
            known: whether this rank does.

        Raises:
            RanksDiffer: on every rank: one of them has raised.

        Cost: one gather of 32 bytes.
        """
        if self.where is not None:
            # Two digests, as where ranks compare programs, or say what they raised.
            program = unlike_steps([("raised", "nothing")])
            flag = (b"known" if known else b"new").ljust(16)
            _, flags = agree(self.where, program, flag, waits=True)
            known = all(x == b"known".ljust(16) for x in flags)
        self.compared = known
        return known

    def compare_programs(
        self,
        program: RecordedProgram,
        batch: tuple[PyTree, ...],
        lines: Callable[[], Lines],
        values: Callable[[], Section],
    ) -> None:
        """Raises on every rank if the ranks' programs or values differ.

        Args:
            batch: the arguments of the program beside the state.
            lines: returns what else is compared of the program.
            values: returns what is compared of the leaves' values.
        """
        rank_here, handlers = program.here, program.handlers
        recorder = program.recorder
        axes = program.split_axes.union(*(h.axes for h in handlers))
        where = compared_ranks(rank_here, axes)
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
            self.checked_together = get_group(shardings[0].axes, rank_here)
        together = program.together()
        for axes, because in together:
            compare_batches(batch, get_group(axes, rank_here), because)
        for h in shardings:
            h.first_calls.on_layout(
                rank_here.rank, recorder.returns_new_leaves, together
            )
        for h in handlers:
            h.ran(rank_here)

    def end(self, raised: str) -> None:
        """Tells the other ranks what this one raised; they do the same.

        Here an error is a line of what is compared, and needs no message of its own:
        where the others are still to compare programs, it meets those.
        """
        self.exchange(())
        sections = [Section(_TITLE, [("raised", raised), *self.made_lines])]
        if not self.compared:
            sections.append(Section(_TITLE, []))  # in place of whole parameters
        if self.are_processes and self.where is not None:
            agree(self.where, *sections)

    def exchange(self, lines: Lines) -> Mapping[int, Lines]:
        """Returns each rank's lines; empty where all ranks have the same."""
        where, self.checked_together = self.checked_together, None
        if not self.are_processes or where is None:
            return {}
        return differing_lines(lines, where)


@contextmanager
def together(
    fn: Callable[..., Any], layouts: LayoutRules | None
) -> Iterator[Agreement]:
    """Returns a context in which ranks lay out; if one of them raises, all do.

    Raises:
        RanksDiffer: another rank has raised: says which, and what.

    Cost: over processes two gathers of 16 bytes.
    """
    agreement = Agreement(fn, layouts)
    try:
        yield agreement
    except (PeerFailed, CollectiveMismatch):
        raise  # the others know
    except Exception as error:
        # A comparison of programs has raised on all ranks: then there is none to tell.
        if agreement.compared or not isinstance(error, RanksDiffer):
            with suppress(RanksDiffer):
                agreement.end(f"{type(error).__name__}: {error}")
        raise
    agreement.compared = True
    agreement.end("nothing")


def compared_ranks(rank_here: Here, axes: set[str]) -> RankGroup | None:
    """Returns the ranks along some axes, if they are there to be compared."""
    # A plan has no other ranks, and a vmap mesh one program.
    if not rank_here.link.moves_data or rank_here.link.vmap_level is not None:
        return None
    return get_group(tuple(a for a in rank_here.mesh.axes if a in axes), rank_here)


def unlike_steps(lines: Lines) -> Section:
    """Returns the section of lines that say which program a rank lays out for."""
    return Section(_UNLIKE, lines, _LIKE)


Kind: TypeAlias = tuple[torch.Size, torch.dtype] | type  # of a leaf: see `kind_of`


def kind_of(x: Leaf) -> Kind:
    """Returns the shape and dtype of a tensor, the type of any other leaf."""
    return (x.shape, x.dtype) if isinstance(x, Tensor | Sharded) else type(x)


def any_mutable(kinds: Iterable[Kind]) -> bool:
    """Returns whether a leaf of one of these kinds may change as a step runs."""
    return not _FIXED.issuperset(k for k in kinds if type(k) is not tuple)


_FIXED: set[Any] = {
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device,
}  # fmt: skip


def same_functions(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Returns whether functions of two ranks call one object, under equal transforms.

    Args:
        ours: what this rank calls.
        theirs: what another one calls, in the same order.
    """
    return all(map(_is_same, ours, theirs))


def _is_same(f: Callable[..., Any], other: Callable[..., Any]) -> bool:
    ours, theirs = (getattr(x, "interpretations", ()) for x in (f, other))
    are_equal = len(ours) == len(theirs) and all(map(_are_equal, ours, theirs))
    return are_equal and _beneath(f) is _beneath(other)


def _are_equal(h: Interpretation, other: Interpretation) -> bool:
    """Returns whether two interpretations do the same.

    Two of the library's do, with equal arguments; of the user's own nobody knows.
    """
    if h is other:
        return True
    ours = type(h) is type(other) and type(h).__module__.startswith("fsfunc.")
    return ours and () != h.configuration == other.configuration


def _beneath(f: Any) -> Any:
    """Returns the function that transforms were applied to."""
    while getattr(f, "__code__", None) is _TRANSFORMED:
        f = f.__wrapped__
    return f


_TRANSFORMED = transformed(lambda: None, Interpretation()).__code__
