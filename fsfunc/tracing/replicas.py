"""Comparison of what ranks give to a sharded call, and get from it.

No type shows that the ranks of a tensor-parallel group were given unlike batches, or
that their replicated states have drifted apart: the values must be compared. This is
done in calls 1, 2, 4, 8 and so on, so that it costs nothing in the long run. What must
be equal and is not raises; batches that should differ, as each rank trains on its own
rows, and are equal warn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.collective_ops import COMPARING, Watcher
from fsfunc.comm.comparison import RanksDiffer, Section, agree, digest_of
from fsfunc.comm.descriptions import describe_lines, has_values, section_of_values
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Here
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import Frame, Interpretation
from fsfunc.core.gradient_checks import nearly_agree, norm_and_sum
from fsfunc.runtime.generators import generator_states
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.sharded.plain_leaves import WHOLE, placement_of
from fsfunc.tree import Leaf, PyTree, TreeDef

SharedBatchAxes: TypeAlias = Sequence[tuple[tuple[str, ...], str]]
"""Axes whose ranks must be given one batch, and the reason (see `compare_batches`)."""


def compare_whole(
    arguments: Sequence[PyTree], is_whole: Callable[[Tensor], bool], ranks: RankGroup
) -> None:
    """Raises where ranks differentiate unequal values of a replicated leaf.

    Args:
        arguments: the differentiated arguments.
        is_whole: returns whether a leaf of theirs is replicated.
        ranks: the ranks.

    Raises:
        RanksDiffer: on every rank.
    """
    paths, leaves, _ = tree.flatten_with_paths(arguments, is_leaf=is_sharded)
    replicated = [x if isinstance(x, Tensor) and is_whole(x) else None for x in leaves]
    if any(x is not None for x in replicated):
        agree(ranks, section_of_values(paths, replicated, ranks.link.notes))


def unnamed_axes(
    f: Callable[..., PyTree],
    handlers: Iterable[Interpretation],
    leaves: Iterable[Leaf],
    here: Here,
) -> tuple[str, ...]:
    """Returns the axes of the mesh that neither a transform nor a layout names.

    Args:
        f: the function, with the transforms within it.
        handlers: the interpretations around it.
        leaves: those of the state.
        here: the rank that runs.
    """
    named = {a for h in handlers for a in getattr(h, "axes", ())}
    named |= {
        a for h in getattr(f, "interpretations", ()) for a in getattr(h, "axes", ())
    }
    named |= {a for x in leaves if is_sharded(x) for a in x.layout.axes}
    return tuple(a for a, size in here.mesh.axes.items() if size > 1 and a not in named)


# Reasons why ranks compute one batch together.
SPLIT_REASON, STAGES_REASON = "parameters are split over it", "stages lie along it"


def compare_batches(batch: PyTree, ranks: RankGroup, reason: str) -> None:
    """Raises if ranks that must be given one batch are given different ones.

    Args:
        batch: the batch: the arguments after the state.
        ranks: the ranks.
        reason: the reason why they compute one batch together; "" along axes over
            which nothing is summed, whose ranks would train apart.
    """
    paths, leaves, _ = tree.flatten_with_paths(batch, is_leaf=is_sharded)
    values = section_of_values(paths, leaves, ranks.link.notes)
    # Of tensors without data (meta, fake) the shapes are compared.
    shape_lines = [
        (repr(p), describe_tensor(x.shape, x.dtype))
        for p, x in zip(paths, leaves, strict=True)
        if isinstance(x, Tensor) and not has_values(x)
    ]
    names = _axis_words(ranks.axis)
    title = f"the ranks along {names} are given unlike batches, and " + (
        f"{reason}: together they compute one batch"
        if reason
        else f"nothing in the step sums over {names}: their parameters would differ"
    )
    advice = (
        f"Give the ranks along {names} one batch, ff.local_batch(batch, mesh, axes) of "
        "the other axes"
    )
    if reason != STAGES_REASON:
        advice += f"; or shard over {names} too"
    if not reason:
        advice += (
            f", or replicate={ranks.axis[0]!r}; or, to train separately, make each a "
            "program of its own"
        )
    agree(ranks, Section(title, [*values.lines, *shape_lines], advice))


class Claims(Watcher):
    """A context that collects what is claimed inside to be equal on all ranks.

    Optimizers claim themselves and their numbers (``collective_ops.claim``).

    Attributes:
        claims: (who claims, what) of all that is no tensor.
    """

    def __init__(self) -> None:
        self.claims: list[tuple[str, Any]] = []

    def claimed_equal(self, x: Leaf, caller: str) -> None:
        if not isinstance(x, Tensor):
            self.claims.append((caller, x))

    def __enter__(self) -> Claims:
        self._token = COMPARING.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        COMPARING.reset(self._token)

    @contextmanager
    def repeat_for(self, comparisons: Sequence[object]) -> Iterator[None]:
        """Adds these claims, and those made inside, to the calls that are compared.

        A compiled step runs no Python: what it claimed as it was traced, it claims in
        each call.

        Args:
            comparisons: the contexts that ``begin_call`` gave: a :class:`DueCall` where
                the ranks compare the call, another context where they do not.
        """
        due = [x for x in comparisons if isinstance(x, DueCall)]
        if not due:
            yield
            return
        with (inside_claims := Claims()):
            yield
        for call in due:
            call.claims += [*self.claims, *inside_claims.claims]


class DueCall(Claims):
    """A call of a step after which the ranks compare what must be equal.

    Args:
        number: its number since the state was laid out: 1, 2, 4, 8 and so on.
        batch: its arguments after the state.
    """

    number: int
    batch: PyTree

    def __init__(self, number: int, batch: PyTree):
        super().__init__()
        self.number, self.batch = number, batch


class Replicas:
    """Compares the batches and states of ranks that must have the same.

    They are compared in calls 1, 2, 4, 8 and so on. If ranks come to differ in call n,
    by a branch that no type check has seen, that is found by call 2 n.

    Attributes:
        updates: whether the function returns new leaves: else what it returns, if it is
            a tree like the state, is gradients.
        draws: whether the function draws from torch's default generators.
        together: the axes whose ranks are given one batch, from the last layout.
        calls: the number of calls, by rank, since the state was laid out.
    """

    updates: bool
    draws: bool
    together: SharedBatchAxes

    def __init__(self) -> None:
        self.updates, self.draws, self.together = False, False, ()
        self.calls: dict[int, int] = {}

    def laid_out(self, rank: int, updates: bool, together: SharedBatchAxes) -> None:
        self.updates, self.together = updates, tuple(together)
        self.calls.pop(rank, None)  # a new state is compared anew

    def start_call(self, batch: PyTree, here: Here) -> int:
        """Compares the batch of a call that is due, and returns its number; else 0."""
        if (
            not here.link.moves_data
            or here.link.vmap_level is not None
            or _torch.fake_active()
        ):
            return 0
        n = self.calls[here.rank] = self.calls.get(here.rank, 0) + 1
        if n & (n - 1) or _torch.functorch_active():
            return 0
        for axes, reason in self.together:
            compare_batches(batch, get_group(axes, here), reason)
            if self.draws and reason:
                _compare_generators(get_group(axes, here), reason)
        return n

    def finish_call(
        self,
        f: Callable[..., PyTree],
        call_frame: Frame,
        state_def: TreeDef,
        out: PyTree,
        call: DueCall,
        equal_batch_axes: Iterable[str],
    ) -> bool:
        """Compares what a call claimed, and the state that it returned.

        Args:
            f: the function.
            call_frame: the frame that it ran in.
            state_def: the structure of its first argument.
            out: what it returned.
            call: what it claimed.
            equal_batch_axes: the axes along which ranks may be given equal batches.

        Returns:
            whether it returned a state.

        Raises:
            RanksDiffer: names the leaves, the ranks, and the ways out.

        Cost: each leaf compared is read once; a gather of 16 bytes a set of axes over
        processes, and of 16 a leaf along axes over which others are split. In the first
        call the batch is read once too, for another gather of 16 bytes.
        """
        here, (leaves, structure) = (
            call_frame.here,
            tree.flatten(out, is_leaf=is_sharded),
        )
        returns_tuple = (
            issubclass(structure.type or int, tuple) and structure.num_children > 0
        )
        first_def = structure.child(0) if returns_tuple else None
        if here is None or not (
            first_def == state_def or self.updates and structure == state_def
        ):
            return False
        leaves = leaves[: state_def.num_leaves]
        _compare_claims(call.claims, _update_axes(f, call_frame, leaves, here), here)
        # Along axes of the mean states are equal as gradients are averaged; along
        # others that nothing names, as each rank does the same. Along axes that split
        # leaves, kernels by which ranks compute what they share may round apart.
        mean_axes = {a for a in here.mean_axes if here.mesh.axes[a] > 1}
        unnamed = {a for a, size in here.mesh.axes.items() if size > 1} - mean_axes
        if unnamed:
            unnamed &= {*unnamed_axes(f, call_frame.handlers, leaves, here)}
        for axes_set in (unnamed, mean_axes):
            for axes, values in _replicated_leaves(leaves, state_def, axes_set, here):
                _compare_state(values, get_group(axes, here), axes_set is unnamed)
        split_axes = {a for x in leaves if is_sharded(x) for a in x.layout.split_axes}
        for axes, values in _replicated_leaves(
            leaves, state_def, split_axes - mean_axes, here
        ):
            _compare_near(values, get_group(axes, here))
        if state_def.is_leaf() and not is_sharded(leaves[0]):
            return False  # but a loss, where a tensor is all that was given
        if call.number == 1 and (
            batch_axes := _in_order(mean_axes - {*equal_batch_axes}, here)
        ):
            warn_of_equal_batches(call.batch, batch_axes, here)
        return True


def _axis_words(axes: Sequence[str]) -> str:
    """Returns axes in words, for messages."""
    return " and ".join(map(repr, axes))


def _in_order(axes: Container[str], here: Here) -> tuple[str, ...]:
    """Returns those of these axes that have several ranks, in the order of the mesh."""
    return tuple(a for a, size in here.mesh.axes.items() if size > 1 and a in axes)


def _update_axes(
    f: Callable[..., PyTree], call_frame: Frame, leaves: Iterable[Leaf], here: Here
) -> tuple[str, ...]:
    """Returns the axes whose ranks make one update: of means, parts, and stages."""
    handlers = [*call_frame.handlers, *getattr(f, "interpretations", ())]
    named = {a for h in handlers if h.lays_out for a in getattr(h, "axes", ())}
    named |= {a for x in leaves if is_sharded(x) for a in x.layout.axes}
    return _in_order(named.union(here.mean_axes), here)


def _compare_claims(
    claims: Iterable[tuple[str, Any]], axes: tuple[str, ...], here: Here
) -> None:
    """Raises where ranks update what is one value by unlike optimizers or numbers."""
    if not axes:
        return
    distinct = dict.fromkeys(
        tuple(describe_lines(claimant, x)) for claimant, x in claims
    )
    lines: dict[str, str] = {}
    for claim_lines in distinct:
        for key, text in claim_lines:
            # Two optimizers of one name are told apart by a prime.
            while key in lines and lines[key] != text:
                key += "'"
            lines[key] = text
    names = _axis_words(axes)
    title = f"the ranks along {names} update one state by unlike optimizers or numbers"
    agree(get_group(axes, here), Section(title, [*lines.items()], _CLAIMS_ADVICE))


_CLAIMS_ADVICE = (
    "Each would step its part at a rate of its own. Make them of what is equal on all "
    "ranks: of the count, or of ff.pmean of what each measures, carried in the state"
)


def _compare_near(leaves: dict[str, Leaf], ranks: RankGroup) -> None:
    """Raises where leaves differ by more than kernels round.

    For leaves that ranks compute alike, with kernels of unlike shapes.
    """
    numbers = {
        path: norm_and_sum(x)
        for path, x in leaves.items()
        if has_values(x) and differentiable(x) and x.numel()
    }
    if not numbers:
        return
    _, odd_path, norms = nearly_agree(numbers, ranks, 1e-3)
    if odd_path is not None:
        raise RanksDiffer(
            f"the ranks along {_axis_words(ranks.axis)}, over which parameters are "
            f"split, return other values of {odd_path!r}, which is one value on all of "
            f"them (norms {norms}): give them one batch and one seed, let nothing "
            "outside units depend on the rank, and take "
            f"ff.pmean(x, {ranks.axis[0]!r}) of what does"
        )


def _compare_generators(ranks: RankGroup, reason: str) -> None:
    """Raises if the default generators of ranks that compute one batch differ.

    Along axes of a mean they may: there numbers that are drawn are each rank's own.
    """
    states = {g.device.type: state for g, state in generator_states()}
    names = _axis_words(ranks.axis)
    title = (
        f"the ranks along {names} draw apart, as the default generators stand, and "
        f"{reason}: what they draw is one value"
    )
    advice = (
        f"Seed the ranks along {names} alike, torch.manual_seed(seed); what each is to "
        f"draw of its own it draws within ff.nn.own_draws({ranks.axis[0]!r})"
    )
    states_to_compare = [*states], [*states.values()], ranks.link.notes
    agree(ranks, section_of_values(*states_to_compare, title, advice))


def _replicated_leaves(
    leaves: Sequence[Leaf], structure: TreeDef, over: set[str], here: Here
) -> list[tuple[tuple[str, ...], dict[str, Leaf]]]:
    """Returns the leaves that must be equal, by path, for each set of axes.

    A leaf must be equal along those of ``over`` that do not cut it. Leaves without
    layouts may differ, and so may those of each rank's own.
    """
    leaves_by_axes: dict[tuple[str, ...], dict[str, Leaf]] = {}
    axes = _in_order(over, here)
    for i, x in enumerate(leaves if axes else ()):
        equal_axes = axes
        if is_sharded(x):
            cut_axes = x.layout.axes
            equal_axes = tuple(a for a in axes if a not in cut_axes)
            x = x.local if equal_axes else None
        elif isinstance(x, Tensor) and placement_of(x) != WHOLE:
            continue
        if equal_axes:
            leaves_by_axes.setdefault(equal_axes, {})[_paths(structure)[i]] = x
    return [*leaves_by_axes.items()]


@lru_cache(64)
def _paths(structure: TreeDef) -> list[str]:
    return tree.paths_of(structure)


def _compare_state(leaves: dict[str, Leaf], ranks: RankGroup, is_unnamed: bool) -> None:
    """Raises where leaves differ that are one value along an axis.

    Args:
        leaves: by path.
        ranks: the ranks along the axis.
        is_unnamed: whether no transform and no layout names it.
    """
    names, axis = _axis_words(ranks.axis), ranks.axis[0]
    subject = f"the ranks along {names} return different states"
    if is_unnamed:
        title = (
            f"{subject}, which nothing in a step makes equal: no transform and no "
            f"layout names {names}"
        )
        advice = (
            f"Give the ranks along {names} one batch and one seed (torch.manual_seed), "
            "let nothing that trains depend on ff.axis_index of it; or shard over it "
            f"too, or replicate={axis!r}; or, to train separately, make each of "
            "them a program by itself"
        )
    else:
        title = f"{subject}, of leaves that are one value on all of them"
        advice = (
            "What is made of a rank's own (its data, its place, its clock, numbers of "
            "its own generators) goes into the state by ff.pmean; or lay the leaf out "
            f"as each rank's own, by layouts={{path: ff.Own({axis!r})}}"
        )
    values = [*leaves], [*leaves.values()], ranks.link.notes
    agree(ranks, section_of_values(*values, title, advice))


# Batches that should differ


def warn_of_equal_batches(batch: PyTree, axes: tuple[str, ...], here: Here) -> None:
    """Warns where all ranks along one of ``axes`` are given equal batches.

    It does not where batches have no rows, or rows that are all alike: then equal parts
    of one batch are equal, too.

    Cost: the batch is read once; over processes a gather of 16 bytes, in no ledger.
    """
    paths, leaves, _ = tree.flatten_with_paths(batch, is_leaf=is_sharded)
    ranks = get_group(axes, here)
    values = section_of_values(paths, leaves, ranks.link.notes)
    rows = [x for x in leaves if has_values(x) and x.ndim and x.numel()]
    # Of simulated ranks only the last one that comes gets the digests.
    digests = agree(ranks, digest_of(values.lines if rows else []))
    is_silent = ranks.link.notes is None and ranks.index  # its first process says it
    if not digests or digest_of([]) in digests[0] or is_silent:
        return
    (rank_digests,) = digests
    sizes = [here.mesh.axes[a] for a in axes]
    equal_axes = [a for i, a in enumerate(axes) if _equal_along(i, sizes, rank_digests)]
    if equal_axes and not all(map(_has_equal_rows, rows)):
        names, count = _axis_words(equal_axes), here.mesh.axis_size(tuple(equal_axes))
        axes_argument, equal_argument = (
            a[0] if len(a) == 1 else tuple(a) for a in (axes, equal_axes)
        )
        warn(_EQUAL_BATCHES.format(names, count, axes_argument, equal_argument))


def _equal_along(i: int, sizes: Sequence[int], digests: Sequence[bytes]) -> bool:
    """Returns whether ranks that differ in coordinate ``i`` alone have equal digests.

    Args:
        sizes: those of the axes.
        digests: the digest of each rank, the last axis fastest.
    """
    all_coordinates = itertools.product(*map(range, sizes))
    digest_at = dict(zip(all_coordinates, digests, strict=True))
    return all(
        x == digest_at[*coordinates[:i], 0, *coordinates[i + 1 :]]
        for coordinates, x in digest_at.items()
    )


def _has_equal_rows(x: Tensor) -> bool:
    """Returns whether all rows of a tensor are alike; of one row, its elements."""
    with torch.no_grad():
        x = x.flatten() if len(x) == 1 else x
        return bool((x == x[:1]).all())


_EQUAL_BATCHES = (
    "the ranks along {} are given equal batches: all {} train on the same rows. Give "
    "each its own, ff.local_batch(batch, mesh, {!r}) of a batch that every rank holds; "
    "or say that it is meant, shard(..., equal_batches={!r})"
)
