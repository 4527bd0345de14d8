"""The first state of a step: ``init_state``, ``abstract_state``.

Both lay the parameters out by `placing.lay_out`, recorded from the state with which the
step begins; then the optimizer makes its state of the laid out parameters, so that
moments have the layouts of these. ``abstract_state`` does so on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    overload,
)

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.comparison import Lines
from fsfunc.comm.descriptions import describe_lines
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import frame, transformed
from fsfunc.optim.schedules import ask_schedules_and_masks
from fsfunc.runtime.memory_spaces import Store, moments_go_to
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import lay_leaves
from fsfunc.state.agreeing import together
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.leaf_sources import Deferred, GivenLeaves, Shapes, defer
from fsfunc.state.placing import LayoutRequest, lay_out, rank_local_leaves
from fsfunc.state.train_state import OptimizerLike, TrainState, known_optimizer
from fsfunc.tracing.recorder import Recorder
from fsfunc.transforms.offloading import moved_to, stores_of
from fsfunc.transforms.sharded_calls import Sharding
from fsfunc.tree.types import Leaf, PyTree

if TYPE_CHECKING:
    from fsfunc.transforms.local.averaging import LocalState

_P = ParamSpec("_P")
# Bound to Any, so that a lambda may do with its parameters what it likes.
_Params = TypeVar("_Params", bound=Any)
_State = TypeVar("_State", bound=Any)


# What an editor sees: a state of the parameters that it is made of. The leaves of these
# become `Sharded`, and are typed as the tensors that they stand for: a tree keeps its
# type through `place`, `load` and `unshard`, as model functions read it.
@overload
def init_state(
    step: Callable[Concatenate[TrainState[_Params], _P], Any],
    params_or_init_fn: _Params | Callable[[], _Params],
    optimizer: OptimizerLike,
    *batch: PyTree,
    record: Literal["fake", "real"] = "fake",
    extra: PyTree = None,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> TrainState[_Params]: ...
@overload
def init_state(
    step: Callable[Concatenate[LocalState[TrainState[_Params]], _P], Any],
    params_or_init_fn: _Params | Callable[[], _Params],
    optimizer: OptimizerLike,
    *batch: PyTree,
    record: Literal["fake", "real"] = "fake",
    extra: PyTree = None,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> LocalState[TrainState[_Params]]: ...
@overload
def init_state(
    step: Callable[Concatenate[_State, _P], Any],
    params_or_init_fn: PyTree,
    optimizer: Callable[[Any], Any],
    *batch: PyTree,
    record: Literal["fake", "real"] = "fake",
    extra: PyTree = None,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> _State: ...
@api_boundary
def init_state(
    step: Callable[..., Any],
    params_or_init_fn: PyTree,
    optimizer: OptimizerLike | Callable[[Any], Any],
    *batch: PyTree,
    record: Literal["fake", "real"] = "fake",
    extra: PyTree = None,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> PyTree:
    """Returns the initial state of ``step``, of which each rank has its part.

    The step is run on fake tensors to find the leaves that its units take. The state
    is a `TrainState`; under ``local_sgd`` and the like it is a `LocalState` of one.

    A function that returns the parameters is run on fake tensors too; its values are
    then made leaf by leaf, this rank's part alone. Each operator draws random numbers
    from a stream of its own, seeded by one number of its generator: so the values
    differ from those of a plain ``init_fn()``, but depend neither on the mesh nor on
    the transforms; the same seed gives the same bits.

    Args:
        step: ``(state, *batch) -> (state, metrics)``, transformed.
        params_or_init_fn: the whole parameters, or a function that returns them; the
            same on every rank.
        optimizer: its ``init`` is called with the laid out parameters, and gives its
            state their layouts. For another state than a `TrainState` of one optimizer,
            a function from the laid out parameters to the state: see below.
        batch: of the shapes that the step will see (its values are not read).
        record: ``"real"`` runs one real call on the whole parameters, for steps that
            cannot run on fake tensors.
        extra: the value of ``state.extra``: any tree, the same on every rank, whose
            leaves are sharded if units take them, and replicated otherwise; or a
            function of the laid out parameters: what ``tree.map`` makes from a leaf has
            the layout of that leaf (an average of the weights), all else is replicated.
        layouts: by pattern of a parameter's path, how it is split over axes that split
            the work of one loss: see ``place``. By pattern of a path in the state, such
            as ``"extra/h"``, an ``Own(axis)`` for a value of each rank's own.
        like: by pattern of a path in the tree ``extra``, the path of the parameters
            whose layouts it has ("" is all of them): see ``place``.

    Raises:
        RuntimeError: the step or the function reads a fake tensor's value, or the
            function calls a collective; names the line.
        RanksDiffer: on every rank, if the ranks' steps, parameters, optimizers or their
            numbers differ, or their functions draw from different numbers. See
            ``place``.

    Warns as ``place`` does, where nothing of the state is cut.

    Optimizers are compared by their arguments: schedules by their rates at some counts,
    masks by their values for each leaf; your own by the names of its functions, and its
    ``configuration`` if it has one. So are the optimizers that the step applies. A
    number that a closure holds is compared where it is combined with gradients; inside
    units, or in a metric, it is each rank's own.

    Cost: over processes a gather of 32 bytes and two of 16. Whole parameters: each is
    read once, and the rank's part copied. A function: beside the rank's part, a block
    of 131072 elements of a leaf that is filled with a number, drawn, or computed
    element by element, as by ``torch.nn.init``. Any other leaf (``orthogonal_``, or a
    part of a ``torch.cat``) is made whole on each rank, with what it is computed from,
    and so is what the function asks a number of (``trunc_normal_``, since torch 2.12):
    one leaf at a time.

    It runs on fake tensors:

    =================  ================================================================
    the init function  once
    the step           recorded: once, without backward passes; if that raises, whole.
                       (The first and the last of simulated ranks; others share it.)
    the step again     typed, on this rank's parts, under ``shard``; where there is
                       nothing to type, recorded, to see whether it repeats itself
    =================  ================================================================

    The first real call runs no more, if its batch is of these shapes.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda w, x: torch.tanh(x @ w))
    >>> optimizer = ff.sharded_adam(0.1)
    >>> step = optimizer(ff.value_and_grad(lambda w, x: layer(w, x).sum()))
    >>> x, seed = torch.ones(2, 4), torch.Generator()
    >>> init = lambda: torch.randn(4, 4, generator=seed.manual_seed(0))
    >>> alone = ff.init_state(step, init, optimizer, x)
    >>> mesh = ff.make_mesh({"data": 8}, "simulated")
    >>> def main():
    ...     state = ff.init_state(ff.shard(step, mesh, "data"), init, optimizer, x)
    ...     return state.params.local.numel(), ff.unshard(state.params)
    >>> size, params = ff.spmd(main, mesh)()[3]
    >>> size, torch.equal(params, alone.params)
    (2, True)

    An average of the weights, that lies as they do:

    >>> average = lambda params: {"ema": params}
    >>> def main():
    ...     s = ff.init_state(ff.shard(step, mesh, "data"), init, optimizer, x,
    ...                       extra=average)
    ...     return s.extra["ema"].layout == s.params.layout
    >>> ff.spmd(main, mesh)()[3]
    True

    Two models, each with its optimizer, in the state of a step over both:

    >>> def begin(w):
    ...     return {k: ff.TrainState(w[k], optimizer.init(w[k])) for k in w}
    >>> def train(s, x):
    ...     return {k: step(s[k], x)[0] for k in s}
    >>> def main():
    ...     models = {"g": torch.ones(4, 4), "d": torch.ones(4, 4)}
    ...     s = ff.init_state(ff.shard(train, mesh, "data"), models, begin, x)["d"]
    ...     return s.opt_state.mu.layout == s.params.layout
    >>> ff.spmd(main, mesh)()[3]
    True
    """
    check_function(step, "init_state")
    request = LayoutRequest(
        step, params_or_init_fn, batch, GivenLeaves(), record, layouts, like
    )
    return _make_state(request, _first_state(optimizer, extra))


@overload
def abstract_state(
    step: Callable[Concatenate[TrainState[_Params], _P], Any],
    params_or_init_fn: _Params | Callable[[], _Params],
    optimizer: OptimizerLike,
    *batch: PyTree,
    extra: PyTree = None,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> TrainState[_Params]: ...
@overload
def abstract_state(
    step: Callable[Concatenate[LocalState[TrainState[_Params]], _P], Any],
    params_or_init_fn: _Params | Callable[[], _Params],
    optimizer: OptimizerLike,
    *batch: PyTree,
    extra: PyTree = None,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> LocalState[TrainState[_Params]]: ...
@overload
def abstract_state(
    step: Callable[Concatenate[_State, _P], Any],
    params_or_init_fn: PyTree,
    optimizer: Callable[[Any], Any],
    *batch: PyTree,
    extra: PyTree = None,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> _State: ...
@api_boundary
def abstract_state(
    step: Callable[..., Any],
    params_or_init_fn: PyTree,
    optimizer: OptimizerLike | Callable[[Any], Any],
    *batch: PyTree,
    extra: PyTree = None,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> PyTree:
    """Returns the state that ``init_state`` would make, of "meta" tensors.

    These have shapes and layouts alone.

    What ``ff.load`` needs to know of the state that it is to make.

    Args: as for :func:`init_state`.

    Raises: as for :func:`init_state`.

    Cost: no memory; nothing is drawn, and what ranks compare is all that is sent.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 4}, "simulated")
    >>> layer = ff.unit(lambda w, x: x @ w)
    >>> optimizer = ff.sharded_adam(0.1)
    >>> step = optimizer(ff.value_and_grad(lambda w, x: layer(w, x).sum()))
    >>> def main():
    ...     init = lambda: torch.randn(1 << 16, 1 << 16)
    ...     sharded = ff.shard(step, mesh, "data")
    ...     return ff.abstract_state(sharded, init, optimizer, torch.ones(1, 1 << 16))
    >>> w = ff.spmd(main, mesh)()[0].params
    >>> w.local.device, w.local.numel() == 2**32 / 4
    (device(type='meta'), True)
    """
    check_function(step, "abstract_state")
    request = LayoutRequest(
        step, params_or_init_fn, batch, Shapes(), layouts=layouts, like=like
    )
    return _make_state(request, _first_state(optimizer, extra))


@dataclass(frozen=True)
class _FirstState:
    """Makes the initial state of laid out parameters.

    Args:
        optimizer: the optimizer, or the function that makes the state.
        extra: the tree ``extra``, if one was given.
        make_extra: the function that makes ``extra``, if that was given.
    """

    optimizer: Any
    extra: PyTree = None
    make_extra: Callable[[PyTree], PyTree] | None = None

    def __call__(self, params: PyTree, extra: PyTree) -> PyTree:
        if not hasattr(self.optimizer, "init"):
            return self.optimizer(params)
        extra = self.make_extra(params) if self.make_extra is not None else extra
        return TrainState(params, self.optimizer.init(params), extra=extra)

    @property
    def is_users(self) -> bool:
        """Whether a function of the user's makes leaves beside the parameters."""
        return self.make_extra is not None or not hasattr(self.optimizer, "init")


def _first_state(optimizer: Any, extra: PyTree | Callable[..., Any]) -> _FirstState:
    if callable(extra):
        return _FirstState(optimizer, {}, extra)
    if extra is not None and not hasattr(optimizer, "init"):
        raise ValueError(
            "init_state: extra= goes with an optimizer: a function that makes the "
            "state from the parameters makes all of it"
        )
    return _FirstState(optimizer, {} if extra is None else extra)


def _make_state(request: LayoutRequest, first_state: _FirstState) -> PyTree:
    """Makes the first state, under the transforms of ``request.fn``.

    Args:
        request: its ``t`` may be a function that makes the parameters; its ``source``
            says what is wanted of leaves that are given: values, or shapes.
        first_state: makes the state of laid out parameters.
    """
    step, params, source = request.fn, request.t, request.source
    handlers: Any = getattr(step, "interpretations", ())
    with together(step, request.layouts) as agreement:
        # Values are there, or a function makes each rank's part of them below.
        if isinstance(params, torch.nn.Module):  # which can be called
            raise TypeError(_MODULE.format(type(params).__name__))
        if callable(params):
            only_shapes = isinstance(source, Shapes)
            params, deferred = defer(params, request.batch, draws=not only_shapes)
            source = source if only_shapes else deferred
        # A real call of the step needs all values.
        if request.record == "real" and isinstance(source, Deferred):
            params = tree.map(source.copied, params, is_leaf=is_sharded)
            source = GivenLeaves()

        # The step is recorded from the state that it begins with. Where there is a tree
        # beside the parameters, leaves and rules have the paths that they have in both.
        extra, begin = first_state.extra, first_state
        has_extra = bool(tree.leaves(extra, is_leaf=is_sharded))
        for sharding in [h for h in handlers if isinstance(h, Sharding)]:
            if first_state.is_users:
                begin = transformed(begin, sharding)  # whose laws hold for what it does

        def run(whole: PyTree, *batch: PyTree) -> PyTree:
            state = begin(*(whole if has_extra else (whole, extra)))
            # The library makes moments of whole leaves with other flags than of parts,
            # as in the type check, whose numbers are compared with the record's.
            if isinstance(tracer := frame().tracer, Recorder):
                given = tracer.numbers_given
                given[:] = [x for x in given if not (x.by_library and x.has_flags)]
            return step(state, *batch)

        def optimizer_lines() -> Lines:
            optimizer = known_optimizer(first_state.optimizer)
            asked = ask_schedules_and_masks(params)
            return describe_lines("optimizer", optimizer, asked)

        run.interpretations = handlers  # type: ignore[attr-defined]
        # Patterns of splits name paths of parameters; those of rank-local values name
        # paths of the state, of which the optimizer's part is not there yet.
        rules, like = request.layouts or {}, request.like
        own_rules = {p: rule for p, rule in rules.items() if isinstance(rule, Own)}
        splits = {p: rule for p, rule in rules.items() if p not in own_rules}
        early_rules = {
            p: rule
            for p, rule in own_rules.items()
            if p.split("/")[0] in ("params", "extra")
        }
        rank_local = rank_local_leaves(
            step, {"params": params, "extra": extra}, early_rules
        )
        if has_extra:
            splits = {f"params/{p}": rule for p, rule in splits.items()}
            like = {
                f"extra/{p}".strip("/"): f"params/{q}".strip("/")
                for p, q in (like or {}).items()
            }
        else:
            rank_local = {p.partition("/")[2]: rule for p, rule in rank_local.items()}

        # Each leaf is made, and laid out, one after the other: this rank's part of it.
        laid = lay_out(
            replace(
                request, fn=run, t=_Whole(params, extra) if has_extra else params,
                source=source, layouts=splits, like=like, rank_local=rank_local,
                more_lines=optimizer_lines, makes_first_state=True,
                called=(step, first_state.optimizer, first_state.make_extra),
            ),
            agreement,
        )  # fmt: skip
        source.release()

        # The first state is made of laid out parameters, so what the optimizer keeps of
        # them has layouts like theirs.
        laid, extra = laid if has_extra else (laid, extra)
        store = stores_of(step).moments
        with moments_go_to(store):
            state = first_state(laid, extra)
        state = _copy_shared(state, (laid, extra), first_state.is_users, source, store)
        state = lay_leaves(state, rank_local_leaves(step, state, own_rules))
        if first_state.is_users:
            agreement.compare_made(state)
        for transform in handlers:
            state = transform.first_state(state)
        return state


def _copy_shared(
    state: PyTree,
    laid: PyTree,
    is_users: bool,
    source: GivenLeaves,
    store: Store | None,
) -> PyTree:
    """Returns a state, with copies of leaves that share memory with others.

    A user's function may return its arguments, or tensors that it keeps: an average
    begins as the parameters. A donated step writes into its state, so these are copied.

    Args:
        laid: what the state was made of, which may be in it, once.
        is_users: whether a function of the user's made it.
        source: copies plain tensors.
        store: where the leaves that were made go to, if anywhere.
    """
    laid_leaves = tree.leaves(laid, is_leaf=is_sharded)
    unseen_ids, memory = set(map(id, laid_leaves)), set(map(_memory, laid_leaves))
    leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
    moved = []
    for i, x in enumerate(leaves):
        if id(x) in unseen_ids:
            unseen_ids.remove(id(x))  # where it occurs a second time, it is copied
            continue
        if is_sharded(x) and _memory(x) in memory:
            leaves[i] = x.with_local(x.local.clone())
        elif is_users and not is_sharded(x):
            leaves[i] = source.copied(x)
        if is_sharded(x) or not is_users:
            moved.append(i)
    if store is not None:
        settled = moved_to(store, [leaves[i] for i in moved])
        for i, x in zip(moved, settled, strict=True):
            leaves[i] = x
    return tree.unflatten(treedef, leaves)


def _memory(x: Leaf) -> int | None:
    """Returns the storage of a leaf; its part of a buffer is not made for that."""
    if is_sharded(x):
        x = x.local if x.packed is None else x.packed.flat
    return _torch.storage_key(x) if isinstance(x, Tensor) else None


class _Whole(NamedTuple):
    """Parameters and extra, under the names that they have in paths."""

    params: PyTree
    extra: PyTree


_MODULE = (
    "init_state is given a {}, a module, as parameters: ff.from_module(module) returns "
    "a function and the tree of its parameters; of a ParameterDict give dict(...) of "
    "it, of a ParameterList give list(...) of it"
)
