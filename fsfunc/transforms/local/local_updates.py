"""``local_sgd``: ranks train copies, and average their parameters every few steps.

Its base class, also of ``slowmo`` and ``gossip``, runs the step on the rank's own copy,
and then synchronises the parameters by :meth:`LocalUpdates.meet`.
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
from fsfunc.core.frames import Interpretation, frame, inside, transformed
from fsfunc.optim.leaves import origins
from fsfunc.optim.schedules import ask_schedules_and_masks
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.plain_leaves import check_laid_out, find_rank_local, lay_leaves
from fsfunc.sharded.spent import spend, why_unusable
from fsfunc.transforms.local.averaging import (
    LocalState,
    Relabeled,
    assign,
    averages,
    written,
)

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
    """``step`` for ranks along ``axis`` that each train a copy of the state.

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

    def __init__(self, mesh: Mesh, axis: Axis, every: int):
        self.mesh, self.axes = mesh, check_mesh(mesh, self.called).check(axis)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"{self.called}(every={every!r}): steps, at least 1")
        self.every = every
        self.copies = Relabeled(mesh, self.axes)

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (("axis", self.axes), ("every", self.every))

    # What the ranks do together

    def remembers(self, params: Any, where: RankGroup) -> dict[str, Any]:
        """Fields of the first state, of the parameters that all begin from."""
        return {}

    def before(self, state: LocalState, params: Any, where: RankGroup) -> Any:
        """Holds something of the parameters while the step runs."""
        return None

    def meet(
        self, state: LocalState, held: Any, params: Any, step: int, where: RankGroup
    ) -> tuple[Any, dict[str, Any]]:
        """(the rank's parameters, changed fields of the state) after a step.

        Args:
            state: before the step; ``params``: the rank's own, after it.
            held: what :meth:`before` returned.
            step: how many steps were made, this one too.
        """
        raise NotImplementedError

    # Calls

    def recorded(self, recorder: Any) -> Interpretation:
        return _OnOneState(self)

    def first_state(self, state: Any) -> LocalState:
        """The first `LocalState`, of a state that is the same on every rank.

        Raises:
            RanksDiffer: it is not.
        """
        _check_state(state, f"{self.called} begins from", "state")
        if found := next(origins(state), None):
            raise ValueError(_ORIGINS.format(self.called, found[-1]))
        at = self.here(self.mesh)
        where, at_mesh = get_group(self.axes, at), at.mesh.coordinates(at.rank)
        with internal(), torch.no_grad():
            if at.link.moves_data:
                paths, leaves, _ = tree.flatten_with_paths(state, is_leaf=is_sharded)
                parts = [x.local if is_sharded(x) else x for x in leaves]
                said = describe_lines(self.called, self, ask_schedules_and_masks(()))
                steps = Section("ranks that train by themselves meet unlike", said)
                agree(where, steps, section_of_values(paths, parts, at.link.notes))
            more = self.remembers(state.params, where)
            copies = self.copies.stacked(state, at_mesh)
        return LocalState(copies, 0, axis=self.axes, **more)

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Runs ``f`` on the rank's copy, and synchronises the ranks."""
        before = frame()
        if any(h.lays_out for h in before.handlers):
            raise ValueError(
                f"{self.called} inside a transform that lays parameters out: it goes "
                f'around, as in {self.called}(shard(step, mesh, "data"), mesh, '
                f'"node", ...)'
            )
        at = self.here(self.mesh)
        where, coordinates = get_group(self.axes, at), at.mesh.coordinates(at.rank)
        state = self._own(args, keywords)
        mine = self.copies.copy(state.copies, coordinates)
        if (path := find_rank_local(mine)) is not None:
            raise ValueError(_OWN.format(self.called, path))
        if isinstance(args[0], LocalState):  # else as the caller laid it out
            lay_leaves(mine)
        if before.donated is not None:
            before.donated.add(tree.leaves(mine, is_leaf=is_sharded))
        with internal(), torch.no_grad():
            params = getattr(mine, "params", None)
            held = self.before(state, params, where)
        try:
            with inside(self.around(before, at)):
                new, *metrics = self._checked(f(mine, *args[1:], **keywords))
        finally:  # a donated step within has used the state up, or spoiled it
            _tell(mine, args[0])
        others = where.size < at.mesh.size  # along which a shard within has one value
        if others and isinstance(args[0], LocalState) and at.link.moves_data:
            check_laid_out(tree.leaves(new, is_leaf=is_sharded), [new])
        fields: dict[str, Any] = {}
        with internal(), torch.no_grad(), label("", self.called):
            params, fields = self.meet(state, held, new.params, state.count + 1, where)
            if params is not new.params:
                new = new.replace(params=params)
            copies = self.copies.stacked(new, coordinates)
        self.ran(at)
        state = replace(state, copies=copies, count=state.count + 1, **fields)
        return (state, *metrics)

    def _checked(self, out: Any) -> tuple[Any, ...]:
        """The state that a step returned, checked, and whatever it adds."""
        if not isinstance(out, tuple) or not out:
            raise ValueError(
                f"{self.called} of a function that returns a {type(out).__name__}: a "
                "step returns (state, metrics)"
            )
        _check_state(out[0], f"the step under {self.called} returns", "state")
        return out

    def around(self, before: Any, at: Here) -> Any:
        """The frame of a call, whose units draw numbers of the rank's own."""
        mine = tuple(
            (at.mesh.coordinates(at.rank)[a], self.mesh.axes[a]) for a in self.axes
        )
        varies, handlers = (*before.batch_places, *mine), (*before.handlers, self)
        at = replace(at, independent_axes=(*at.independent_axes, *self.axes))
        return replace(before, handlers=handlers, batch_places=varies, here=at)

    def _own(self, args: Any, keywords: Any) -> LocalState:
        """The state that a call was given, checked: it must not be differentiated."""
        if not args:
            raise ValueError(
                f"{self.called}: the state is the first argument of a step"
            )
        leaves = tree.leaves(args[0])
        taped = any(isinstance(x, Tensor) and x.grad_fn is not None for x in leaves)
        if _torch.functorch_active() or taped and torch.is_grad_enabled():
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

    def meet(
        self, state: LocalState, held: Any, params: Any, step: int, where: RankGroup
    ) -> tuple[Any, dict[str, Any]]:
        if step % self.every or where.size == 1:
            return params, {}
        return written(assign, params, averages(params, where))[0], {}


class _OnOneState(Interpretation):
    """A transform of this kind while a step is recorded, on a plain state."""

    def __init__(self, handler: LocalUpdates):
        self.handler, self.axes, self.called = handler, handler.axes, handler.called

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return self.handler.configuration

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        before, at = frame(), here(self.handler.mesh)
        around = self.handler.around(before, at)
        handlers = (*before.handlers, self)
        with inside(around.replace(handlers=handlers)):
            return f(*args, **keywords)


def _check_state(state: Any, who: str, what: str) -> None:
    if not (hasattr(state, "params") and hasattr(state, "replace")):
        raise ValueError(
            f"{who} a {type(state).__name__}: a {what} has .params and "
            ".replace(params=...), as ff.TrainState has"
        )


def _tell(mine: Any, given: Any) -> None:
    """Marks the leaves of a state whose copies a step has used up."""
    copies = given.copies if isinstance(given, LocalState) else given
    ours, theirs = (tree.leaves(t, is_leaf=is_sharded) for t in (mine, copies))
    for x, y in zip(ours, theirs, strict=True):
        if (why := why_unusable(x)) and frame().donated is None:
            spend(y, why)


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
