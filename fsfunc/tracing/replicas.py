"""Comparison of what ranks give to a sharded call, and get from it.

What must be equal on all of them is compared, and raises; batches that should differ,
as each rank trains on its own rows, are compared too, and warn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.collective_ops import COMPARING, Watcher
from fsfunc.comm.comparison import RanksDiffer, Section, agree, digest_of
from fsfunc.comm.descriptions import has_values, told, whole_values
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Here
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import Frame
from fsfunc.core.gradient_checks import nearly_agree, norm_and_sum
from fsfunc.runtime.generators import generator_states
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.sharded.plain_leaves import WHOLE, placement_of

Together = Sequence[tuple[tuple[str, ...], str]]  # axes, and why: `compare_batches`


def compare_whole(
    chosen: Sequence[Any], is_whole: Callable[[Tensor], bool], where: RankGroup
) -> None:
    """Raises where ranks differentiate unequal values of a replicated leaf.

    Args:
        chosen: the differentiated arguments; ``is_whole``: whether a leaf of theirs is
            replicated.

    Raises:
        RanksDiffer: on every rank.
    """
    paths, leaves, _ = tree.flatten_with_paths(chosen, is_leaf=is_sharded)
    mine = [x if isinstance(x, Tensor) and is_whole(x) else None for x in leaves]
    if any(x is not None for x in mine):
        agree(where, whole_values(paths, mine, where.link.notes))


def unnamed_axes(f: Callable[..., Any], handlers: Any, leaves: Any, at: Here) -> Any:
    """The axes of a mesh over which neither a transform nor a layout says anything.

    Args:
        f: the function within; ``handlers``: the interpretations around it.
        leaves: of the state.
    """
    named = {a for h in handlers for a in getattr(h, "axes", ())}
    named |= {
        a for h in getattr(f, "interpretations", ()) for a in getattr(h, "axes", ())
    }
    named |= {a for x in leaves if is_sharded(x) for a in x.layout.axes}
    return tuple(a for a, n in at.mesh.axes.items() if n > 1 and a not in named)


SPLIT, STAGES = "parameters are split over it", "stages lie along it"


def compare_batches(rest: Any, where: RankGroup, because: str) -> None:
    """Raises if ranks that must be given one batch are given different ones.

    Args:
        because: the reason why they compute one batch together; "" along axes over
            which nothing is summed, whose ranks would train apart.
    """
    paths, leaves, _ = tree.flatten_with_paths(rest, is_leaf=is_sharded)
    values = whole_values(paths, leaves, where.link.notes)
    others = [
        (repr(p), describe_tensor(x.shape, x.dtype))
        for p, x in zip(paths, leaves, strict=True)
        if isinstance(x, Tensor) and not has_values(x)
    ]
    names = _names(where.axis)
    title = f"the ranks along {names} are given unlike batches, and " + (
        f"{because}: together they compute one batch"
        if because
        else f"nothing in the step sums over {names}: their parameters would differ"
    )
    advice = (
        f"Give the ranks along {names} one batch, ff.local_batch(batch, mesh, axes) of "
        "the other axes"
    )
    if because != STAGES:
        advice += f"; or shard over {names} too"
    if not because:
        advice += (
            f", or replicate={where.axis[0]!r}; or, to train separately, make each a "
            "program of its own"
        )
    agree(where, Section(title, [*values.lines, *others], advice))


class Claims(Watcher):
    """A context: what is done inside to what is one value, ``said`` as (who, what)."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []

    def claimed(self, x: Any, what: str) -> None:
        if not isinstance(x, Tensor):
            self.said.append((what, x))

    def __enter__(self) -> Claims:
        self._token = COMPARING.set(self)
        return self

    def __exit__(self, *_: Any) -> None:
        COMPARING.reset(self._token)

    @contextmanager
    def again(self, calls: Sequence[Any]) -> Iterator[None]:
        """Inside, adds what is claimed to those of ``calls`` that are due, and this."""
        due = [call for call in calls if isinstance(call, DueCall)]
        if not due:
            yield
            return
        with (inside := Claims()):
            yield
        for call in due:
            call.said += [*self.said, *inside.said]


class DueCall(Claims):
    """A call of a step in which the ranks compare what must be equal.

    Args:
        number: its number since the state was laid out: 1, 2, 4, 8 and so on.
        batch: its arguments after the state.
    """

    def __init__(self, number: int, batch: Any):
        super().__init__()
        self.number, self.batch = number, batch


class Replicas:
    """Comparison of the batches and states of ranks that must have the same.

    They are compared in calls 1, 2, 4, 8 and so on: ranks that differ later, as a
    branch that no type check has seen makes them, are found in twice the time.

    Attributes:
        updates: whether the function returns a state, if that is all it returns.
        draws: whether the function draws from torch's default generators.
        together: the axes whose ranks are given one batch, from the last layout.
        calls: the number of calls, by rank, since the state was laid out.
    """

    def __init__(self) -> None:
        self.updates, self.draws, self.together = False, False, ()
        self.calls: dict[int, int] = {}

    def laid_out(self, rank: int, updates: bool, together: Together) -> None:
        self.updates, self.together = updates, tuple(together)
        self.calls.pop(rank, None)  # a new state is compared anew

    def begin(self, batch: Any, at: Here) -> int:
        """Compares the batch of a call if that is due: returns its number, else 0."""
        if not at.link.moves or at.link.level is not None or _torch.fake_active():
            return 0
        n = self.calls[at.rank] = self.calls.get(at.rank, 0) + 1
        if n & (n - 1) or _torch.functorch_active():
            return 0
        for axes, because in self.together:
            compare_batches(batch, group(axes, at), because)
            if self.draws and because:
                _compare_generators(group(axes, at), because)
        return n

    def end(
        self, f: Any, found: Frame, given: Any, out: Any, call: DueCall, equal: Any
    ) -> bool:
        """Compares what a call claimed, and the state that it returned.

        Args:
            f: the function; ``found``: the frame that it ran in.
            given: the structure of its first argument; ``out``: what it returned.
            equal: the axes along which ranks may be given equal batches.

        Returns:
            whether it returned a state.

        Raises:
            RanksDiffer: names the leaves, the ranks, and the ways out.

        Cost: each leaf compared is read once; a gather of 16 bytes a set of axes over
        processes, and of 16 a leaf along axes over which others are split. In the first
        call the batch is read once too, for another gather of 16 bytes.
        """
        at, (leaves, structure) = found.here, tree.flatten(out, is_leaf=is_sharded)
        pair = issubclass(structure.type or int, tuple) and structure.num_children > 0
        first = structure.child(0) if pair else None
        if at is None or not (first == given or self.updates and structure == given):
            return False
        leaves = leaves[: given.num_leaves]
        _compare_claims(call.said, _over(f, found, leaves, at), at)
        means = {a for a in at.mean if at.mesh.axes[a] > 1}
        apart = {a for a, size in at.mesh.axes.items() if size > 1} - means
        if apart:
            apart &= {*unnamed_axes(f, found.handlers, leaves, at)}
        for over in (apart, means):
            for axes, values in _one_value(leaves, given, over, at):
                _compare_state(values, group(axes, at), over is apart)
        split = {a for x in leaves if is_sharded(x) for a in x.layout.split_axes}
        for axes, values in _one_value(leaves, given, split - means, at):
            _compare_near(values, group(axes, at))
        if given.is_leaf() and not is_sharded(leaves[0]):
            return False  # but a loss, where a tensor is all that was given
        if call.number == 1 and (apart := _in_order(means - {*equal}, at)):
            warn_of_equal(call.batch, apart, at)
        return True


def _names(axes: Sequence[str]) -> str:
    """Axes in words, for messages."""
    return " and ".join(map(repr, axes))


def _in_order(axes: Container[str], at: Here) -> tuple[str, ...]:
    """Those of these axes that have several ranks, in the order of the mesh."""
    return tuple(a for a, n in at.mesh.axes.items() if n > 1 and a in axes)


def _over(f: Any, found: Frame, leaves: Any, at: Here) -> tuple[str, ...]:
    """The axes whose ranks make one update: of means, of parts, and of stages."""
    handlers = [*found.handlers, *getattr(f, "interpretations", ())]
    over = {a for h in handlers if h.lays_out for a in getattr(h, "axes", ())}
    over |= {a for x in leaves if is_sharded(x) for a in x.layout.axes}
    return _in_order(over.union(at.mean), at)


def _compare_claims(claims: Any, axes: tuple[str, ...], at: Here) -> None:
    """Raises where ranks update what is one value by unlike optimizers or numbers."""
    if not axes:
        return
    distinct = dict.fromkeys(tuple(told(who, x)) for who, x in claims)
    lines: dict[str, str] = {}
    for said in distinct:
        for key, text in said:
            while key in lines and lines[key] != text:
                key += "'"
            lines[key] = text
    names = _names(axes)
    title = f"the ranks along {names} update one state by unlike optimizers or numbers"
    agree(group(axes, at), Section(title, [*lines.items()], _ALIKE))


_ALIKE = (
    "Each would step its part at a rate of its own. Make them of what is equal on all "
    "ranks: of the count, or of ff.pmean of what each measures, carried in the state"
)


def _compare_near(leaves: dict[str, Any], where: RankGroup) -> None:
    """Compares leaves that ranks compute alike, with kernels that may round apart."""
    numbers = {
        path: norm_and_sum(x)
        for path, x in leaves.items()
        if has_values(x) and differentiable(x) and x.numel()
    }
    if not numbers:
        return
    _, odd, norms = nearly_agree(numbers, where, 1e-3)
    if odd is not None:
        raise RanksDiffer(
            f"the ranks along {_names(where.axis)}, over which parameters are split, "
            f"return other values of {odd!r}, which is one value on all of them (norms "
            f"{norms}): give them one batch and one seed, let nothing outside units "
            f"depend on the rank, and take ff.pmean(x, {where.axis[0]!r}) of what does"
        )


def _compare_generators(where: RankGroup, because: str) -> None:
    """Raises if the default generators of ranks that compute one batch differ.

    Not along axes of a mean: there numbers that are drawn are each rank's own.
    """
    states = {g.device.type: state for g, state in generator_states()}
    names = _names(where.axis)
    title = (
        f"the ranks along {names} draw apart, as the default generators stand, and "
        f"{because}: what they draw is one value"
    )
    advice = (
        f"Seed the ranks along {names} alike, torch.manual_seed(seed); what each is to "
        f"draw of its own it draws within ff.nn.own_draws({where.axis[0]!r})"
    )
    given = [*states], [*states.values()], where.link.notes
    agree(where, whole_values(*given, title, advice))


def _one_value(
    leaves: Sequence[Any], structure: Any, over: set[str], at: Here
) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """The leaves that must be equal, by path, for each set of axes among ``over``.

    Leaves without layouts may differ, and so may those of each rank's own.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    axes = _in_order(over, at)
    for i, x in enumerate(leaves if axes else ()):
        along = axes
        if is_sharded(x):
            cut = x.layout.axes
            along = tuple(a for a in axes if a not in cut)
            x = x.local if along else None
        elif isinstance(x, Tensor) and placement_of(x) != WHOLE:
            continue
        if along:
            found.setdefault(along, {})[_paths(structure)[i]] = x
    return [*found.items()]


@lru_cache(64)
def _paths(structure: Any) -> list[str]:
    return tree.paths_of(structure)


def _compare_state(leaves: dict[str, Any], where: RankGroup, apart: bool) -> None:
    """Compares leaves that are one value along an axis.

    Args:
        apart: whether no transform and no layout names it.
    """
    names, axis = _names(where.axis), where.axis[0]
    what = f"the ranks along {names} return different states"
    if apart:
        title = (
            f"{what}, which nothing in a step makes equal: no transform and no layout "
            f"names {names}"
        )
        advice = (
            f"Give the ranks along {names} one batch and one seed (torch.manual_seed), "
            "let nothing that trains depend on ff.axis_index of it; or shard over it "
            f"too, or replicate={axis!r}; or, to train separately, make each of "
            "them a program by itself"
        )
    else:
        title = f"{what}, of leaves that are one value on all of them"
        advice = (
            "What is made of a rank's own (its data, its place, its clock, numbers of "
            "its own generators) goes into the state by ff.pmean; or lay the leaf out "
            f"as each rank's own, by layouts={{path: ff.Own({axis!r})}}"
        )
    given = [*leaves], [*leaves.values()], where.link.notes
    agree(where, whole_values(*given, title, advice))


# Batches that should differ


def warn_of_equal(batch: Any, axes: tuple[str, ...], at: Here) -> None:
    """Warns where all ranks along one of ``axes`` are given equal batches.

    Not of batches without rows, or of rows that are all alike, as those of a part are
    the same as those of the whole.

    Cost: the batch is read once; over processes a gather of 16 bytes, in no ledger.
    """
    paths, leaves, _ = tree.flatten_with_paths(batch, is_leaf=is_sharded)
    where = group(axes, at)
    values = whole_values(paths, leaves, where.link.notes)
    rows = [x for x in leaves if has_values(x) and x.ndim and x.numel()]
    # Of simulated ranks the last one that comes is told the digests.
    found = agree(where, digest_of(values.lines if rows else []))
    quiet = where.link.notes is None and where.index  # its first process says it
    if not found or digest_of([]) in found[0] or quiet:
        return
    (every,) = found
    sizes = [at.mesh.axes[a] for a in axes]
    same = [a for i, a in enumerate(axes) if _equal_along(i, sizes, every)]
    if same and not all(map(_is_one_row, rows)):
        names, n = _names(same), at.mesh.axis_size(tuple(same))
        every_axis, over = (a[0] if len(a) == 1 else tuple(a) for a in (axes, same))
        warn(_EQUAL.format(names, n, every_axis, over))


def _equal_along(i: int, sizes: Sequence[int], every: Sequence[bytes]) -> bool:
    """True if the ranks that differ in coordinate ``i`` alone have equal digests."""
    places = itertools.product(*map(range, sizes))
    by_place = dict(zip(places, every, strict=True))
    return all(x == by_place[*p[:i], 0, *p[i + 1 :]] for p, x in by_place.items())


def _is_one_row(x: Tensor) -> bool:
    """True if all rows of a tensor are alike; of one row, its elements."""
    with torch.no_grad():
        x = x.flatten() if len(x) == 1 else x
        return bool((x == x[:1]).all())


_EQUAL = (
    "the ranks along {} are given equal batches: all {} train on the same rows. Give "
    "each its own, ff.local_batch(batch, mesh, {!r}) of a batch that every rank holds; "
    "or say that it is meant, shard(..., equal_batches={!r})"
)
