"""``local_sgd``: ranks train copies, and average their parameters every few steps.

Its base class, also of ``slowmo`` and ``gossip``, runs each step so::

    copy of this rank = unstack(state)      no communication: layouts alone change
    new, metrics      = step(copy, batch)
    params            = synchronize(...)    means, slow momentum, or an exchange
    state             = stack(new)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal, label
from fsfunc.comm.comparison import Section, agree
from fsfunc.comm.descriptions import describe_lines, section_of_values
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Axis, Here, Mesh, check_mesh, here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Frame, Interpretation, frame, inside, transformed
from fsfunc.core.tracers import Tracer
from fsfunc.optim.leaves import origins
from fsfunc.optim.schedules import ask_schedules_and_masks
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.plain_leaves import check_laid_out, find_rank_local, lay_leaves
from fsfunc.sharded.spent import spend, why_unusable
from fsfunc.transforms.local.averaging import (
    LocalState,
    StackLayouts,
    apply_kernel,
    assign,
    average,
)
from fsfunc.tree.types import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")
_State = TypeVar("_State", bound=Any)


@api_boundary
def local_sgd(
    step: Callable[Concatenate[_State, _P], tuple[_State, _R]],
    mesh: Mesh,
    axis: Axis,
    *,
    every: int,
) -> Callable[Concatenate[LocalState[_State], _P], tuple[LocalState[_State], _R]]:
    """Runs ``step`` on ranks along ``axis`` that each train a copy of the state.

    After each ``every`` steps the floating parameters become their mean over the axis.
    The rest of the state (moments, counts, statistics) stays the rank's own, and so
    are the metrics. ``every=1`` with plain SGD is data parallelism.

    Apply it to the result of transforms that lay parameters out over other axes:
    ``local_sgd(shard(step, mesh, "data"), mesh, "node", every=8)``. Ranks along the
    axis are given batches of their own: ``ff.local_batch(batch, mesh, ("node",
    "data"))``.

    Args:
        step: ``step(state, *batch) -> (state, metrics)``, over any state that has
            ``params`` and ``replace(params=...)``, as a `TrainState`.
        axis: the mesh axis, or several.
        every: the number of steps between two averages.

    Returns:
        A step over a `LocalState`, which ``ff.init_state(step, ...)`` makes. From
        another state all ranks begin with copies of it, which they compare. A
        `LocalState` is saved with the copies of all ranks; ``ff.consensus(state)`` is
        their mean.

    Raises:
        ValueError: ``every`` below 1; an axis that a transform inside takes; another
            state, `master_weights` or `schedule_free` in it, or another kind of step.
        RanksDiffer: the ranks' first states differ.

    Cost: in one of ``every`` steps one all-reduce of the rank's floating parameters,
    in float32 at least: 2(n-1)/n of their bytes; else nothing is sent over the axis.
    While they are reduced, a second copy of the parameters.

    Source: Stich, Local SGD converges fast and communicates little, 2019.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"node": 2}, "simulated")
    >>> optimizer = ff.sgd(0.5)
    >>> step = optimizer(ff.value_and_grad(lambda w, x: w * x))
    >>> step = ff.local_sgd(step, mesh, "node", every=2)
    >>> def main():
    ...     x = torch.tensor(1.0 + mesh.rank)
    ...     state, seen = ff.init_state(step, torch.tensor(0.0), optimizer, x), []
    ...     for _ in range(2):
    ...         state, _ = step(state, x)
    ...         seen.append(state.copies.params.local.item())
    ...     return seen, ff.consensus(state).params.item()
    >>> ff.spmd(main, mesh)()
    [([-0.5, -1.5], -1.5), ([-1.0, -1.5], -1.5)]
    """
    # The state that goes in and out is another than the inner step's.
    return cast(Any, transformed(step, LocalSGD(mesh, axis, every)))


class LocalUpdates(Interpretation):
    """A step on each rank's own copy, after which ranks along an axis synchronise.

    Args:
        every: the number of steps between two synchronisations.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    def __init__(self, mesh: Mesh, axis: Axis, every: int):
        self.mesh, self.axes = mesh, check_mesh(mesh, self.called).check(axis)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"{self.called}(every={every!r}): steps, at least 1")
        self.every = every
        self.stacks: StackLayouts = StackLayouts(mesh, self.axes)

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (("axis", self.axes), ("every", self.every))

    # What the ranks do together

    def first_fields(self, params: PyTree, where: RankGroup) -> dict[str, Any]:
        """Returns fields of the first state, of the parameters that all begin from."""
        return {}

    def before_step(
        self, state: LocalState, params: PyTree, where: RankGroup
    ) -> PyTree | None:
        """Returns what :meth:`synchronize` needs of the parameters before the step."""
        return None

    def synchronize(
        self,
        state: LocalState,
        from_before: PyTree | None,
        params: PyTree,
        step: int,
        where: RankGroup,
    ) -> tuple[PyTree, dict[str, Any]]:
        """Returns the rank's parameters after a step, and changed fields of the state.

        Args:
            state: before the step; ``params``: the rank's own, after it.
            from_before: what :meth:`before_step` returned.
            step: how many steps were made, this one too.
            where: the ranks that synchronise.
        """
        raise NotImplementedError

    # Calls

    def recorded(self, recorder: Tracer) -> Interpretation:
        return _OnPlainState(self)

    def first_state(self, state: PyTree) -> LocalState:
        """Returns the first `LocalState`, of a state that is equal on every rank.

        Raises:
            RanksDiffer: it is not.
        """
        _check_state(state, f"{self.called} begins from", "state")
        if origin := next(origins(state), None):
            raise ValueError(_ORIGINS.format(self.called, origin[-1]))
        this_rank = self.here(self.mesh)
        where = get_group(self.axes, this_rank)
        coordinates = this_rank.mesh.coordinates(this_rank.rank)
        with internal(), torch.no_grad():
            # Copies that begin apart would never be one model. Nor would those of ranks
            # that synchronise otherwise, by another `every`, rate or graph: the section
            # of steps compares these. (In a plan there are no values to compare.)
            if this_rank.link.moves_data:
                paths, leaves, _ = tree.flatten_with_paths(state, is_leaf=is_sharded)
                parts = [x.local if is_sharded(x) else x for x in leaves]
                lines = describe_lines(self.called, self, ask_schedules_and_masks(()))
                steps = Section("ranks that train by themselves meet unlike", lines)
                agree(
                    where, steps, section_of_values(paths, parts, this_rank.link.notes)
                )
            fields = self.first_fields(state.params, where)
            copies = self.stacks.stack(state, coordinates)
        return LocalState(copies, 0, axis=self.axes, **fields)

    def call(
        self,
        f: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        """Runs ``f`` on the rank's copy, and synchronises the ranks."""
        outer = frame()
        # Within `shard` the leaves would be parts over its axes, and no stacks.
        if any(h.lays_out for h in outer.handlers):
            raise ValueError(
                f"{self.called} inside a transform that lays parameters out: it goes "
                f'around, as in {self.called}(shard(step, mesh, "data"), mesh, '
                f'"node", ...)'
            )
        this_rank = self.here(self.mesh)
        where = get_group(self.axes, this_rank)
        coordinates = this_rank.mesh.coordinates(this_rank.rank)
        state = self._check_arguments(args, keywords)
        copy = self.stacks.unstack(state.copies, coordinates)
        if (path := find_rank_local(copy)) is not None:
            raise ValueError(_OWN.format(self.called, path))
        # A `shard` within takes only leaves that are laid out, and unstacked ones are
        # new tensors. The leaves of a plain state are as the caller laid them out.
        if isinstance(args[0], LocalState):
            lay_leaves(copy)
        # A `donate` around knows the tensors of the stacks. The copies are more tensors
        # over that memory: unknown, they would keep the optimizer from writing it.
        if outer.donated is not None:
            outer.donated.add(tree.leaves(copy, is_leaf=is_sharded))
        # `internal`, here and below: these operators are the library's, not the step's.
        with internal(), torch.no_grad():
            params = getattr(copy, "params", None)
            from_before = self.before_step(state, params, where)
        try:
            with inside(self.enter(outer, this_rank)):
                new, *metrics = self._check_output(f(copy, *args[1:], **keywords))
        finally:  # a donated step within has used the state up, or spoiled it
            _mark_spent(copy, args[0])
        # Along the mesh's other axes a leaf of a copy is one value, or parts, by its
        # layout. `lay_leaves` will call every plain one equal in the next call: so here
        # one that the step returned without a layout is refused.
        others = where.size < this_rank.mesh.size
        if others and isinstance(args[0], LocalState) and this_rank.link.moves_data:
            check_laid_out(tree.leaves(new, is_leaf=is_sharded), [new])
        fields: dict[str, Any] = {}
        with internal(), torch.no_grad(), label("", self.called):
            params, fields = self.synchronize(
                state, from_before, new.params, state.count + 1, where
            )
            if params is not new.params:
                new = new.replace(params=params)
            copies = self.stacks.stack(new, coordinates)
        self.ran(this_rank)
        state = replace(state, copies=copies, count=state.count + 1, **fields)
        return (state, *metrics)

    def _check_output(self, out: PyTree) -> tuple[PyTree, ...]:
        """Checks what a step returned: its state, and whatever it adds."""
        if not isinstance(out, tuple) or not out:
            raise ValueError(
                f"{self.called} of a function that returns a {type(out).__name__}: a "
                "step returns (state, metrics)"
            )
        _check_state(out[0], f"the step under {self.called} returns", "state")
        return out

    def enter(self, outer: Frame, this_rank: Here) -> Frame:
        """Returns the frame of a call, whose units draw numbers of the rank's own."""
        coordinates = this_rank.mesh.coordinates(this_rank.rank)
        own = tuple((coordinates[a], self.mesh.axes[a]) for a in self.axes)
        new_places, handlers = (*outer.batch_places, *own), (*outer.handlers, self)
        # Ranks train copies: a collective of the step over these axes is refused.
        at = replace(
            this_rank, independent_axes=(*this_rank.independent_axes, *self.axes)
        )
        return replace(outer, handlers=handlers, batch_places=new_places, here=at)

    def _check_arguments(
        self, args: tuple[PyTree, ...], keywords: dict[str, PyTree]
    ) -> LocalState:
        """Returns the state that a call was given; it must not be differentiated."""
        if not args:
            raise ValueError(
                f"{self.called}: the state is the first argument of a step"
            )
        # Asked by `grad_fn`, as a module's parameter requires gradients without being
        # in a graph. Tensors that torch.func wraps have none to ask.
        leaves = tree.leaves(args[0])
        in_graph = any(isinstance(x, Tensor) and x.grad_fn is not None for x in leaves)
        if _torch.functorch_active() or in_graph and torch.is_grad_enabled():
            raise ValueError(
                f"{self.called} of a step that is differentiated: the exchange of the "
                "ranks has no derivative; differentiate inside the step"
            )
        if not isinstance(args[0], LocalState):
            return self.first_state(args[0])
        if args[0].axis != self.axes:
            raise ValueError(
                f"{self.called} over {self.axes} is given a state of copies over "
                f"{args[0].axis}: begin from ff.consensus(state)"
            )
        return args[0]


class LocalSGD(LocalUpdates):
    """The interpretation of ``local_sgd``."""

    called = "local_sgd"

    def synchronize(
        self,
        state: LocalState,
        from_before: PyTree | None,
        params: PyTree,
        step: int,
        where: RankGroup,
    ) -> tuple[PyTree, dict[str, Any]]:
        if step % self.every or where.size == 1:  # one rank is the mean itself
            return params, {}
        return apply_kernel(assign, params, average(params, where))[0], {}


class _OnPlainState(Interpretation):
    """A transform of this kind while a step is recorded, on a plain state.

    A recording finds the layouts of one copy. It is not stacked until these are known.

    Args:
        handler: the transform.
    """

    def __init__(self, handler: LocalUpdates):
        self.handler, self.axes, self.called = handler, handler.axes, handler.called

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return self.handler.configuration

    def call(
        self,
        f: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        outer = frame()
        entered = self.handler.enter(outer, here(self.handler.mesh))
        handlers = (*outer.handlers, self)
        with inside(entered.replace(handlers=handlers)):
            return f(*args, **keywords)


def _check_state(state: PyTree, subject: str, noun: str) -> None:
    """Raises unless a state can be trained; ``subject`` begins the message."""
    if not (hasattr(state, "params") and hasattr(state, "replace")):
        raise ValueError(
            f"{subject} a {type(state).__name__}: a {noun} has .params and "
            ".replace(params=...), as ff.TrainState has"
        )


def _mark_spent(copy: PyTree, argument: PyTree) -> None:
    """Marks the leaves of an argument whose copies a step has used up."""
    copies = argument.copies if isinstance(argument, LocalState) else argument
    copy_leaves, leaves = (tree.leaves(t, is_leaf=is_sharded) for t in (copy, copies))
    for x, leaf in zip(copy_leaves, leaves, strict=True):
        # A `donate` around marks its own argument, and says so in its own words.
        if (reason := why_unusable(x)) and frame().donated is None:
            spend(leaf, reason)


_ORIGINS = (
    "{} synchronises parameters, and the optimizer makes them of {!r}, which is the "
    "rank's own: the next step would undo it. Give another optimizer: for "
    "master_weights of one float32 parameters, and ff.precision(step, "
    "compute=torch.bfloat16) within"
)
_OWN = (
    "{}: {!r} is each rank's own along the axes of a shard within, and its copies have "
    "no mean: keep it outside of the state"
)
