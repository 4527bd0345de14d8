"""The state of training: ``TrainState``.

While a step is recorded, its train states note which optimizers they apply
(`noting_applied`): `placing` so learns which leaves of the state are moments, and gives
them the layouts of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar
from weakref import WeakValueDictionary

from fsfunc import tree
from fsfunc.comm.collective_ops import claim_equal
from fsfunc.optim.leaves import origins
from fsfunc.optim.optimizer import Optimizer
from fsfunc.printing.tables import Report
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.leaf_tables import state_table
from fsfunc.tree.types import PyTree

_Params = TypeVar("_Params")


class OptimizerLike(Protocol):
    """What a state asks of an optimizer: an `Optimizer`, or one of your own."""

    @property
    def init(self) -> Callable[..., Any]:
        """``init(params) -> opt_state``."""
        ...

    @property
    def apply(self) -> Callable[..., Any]:
        """``apply(grads, opt_state, params) -> (params, opt_state)``."""
        ...


class Applied(NamedTuple):
    """An optimizer that a train state applied, its state, and the parameters."""

    optimizer: Any
    opt_state: PyTree
    params: PyTree


_APPLIED: ContextVar[list[Applied] | None] = ContextVar("applied", default=None)


@contextmanager
def noting_applied() -> Iterator[list[Applied]]:
    """Yields a list in which train states note the optimizers that they apply."""
    token = _APPLIED.set(applied := [])
    try:
        yield applied
    finally:
        _APPLIED.reset(token)


@dataclass(frozen=True)
class TrainState(Generic[_Params]):
    """Parameters, the optimizer's state, the step count, and whatever else is carried.

    It is a pytree. Any other pytree is as good a state; this one knows how to apply
    gradients.

    Raises:
        ValueError: other parameters with the ``opt_state`` of a state that is still
            there, where that holds what the next step makes parameters of
            (`master_weights`, `schedule_free`). In `replace` name both if you mean it.
    """

    params: _Params
    opt_state: PyTree = None
    step: int = 0
    extra: PyTree = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A state is frozen, so new parameters beside an old `opt_state` come by
        # `dataclasses.replace` or the constructor: found by looking at all that live.
        for other in _STATES.valuerefs():
            if (state := other()) is None or state.opt_state is not self.opt_state:
                continue
            if state.params is not self.params:
                _check_origins(state.params, self)
        _STATES[id(self)] = self

    def apply_gradients(
        self, grads: _Params, optimizer: OptimizerLike, **changes: Any
    ) -> Self:
        """Returns the state after one update by ``optimizer``, whose state it has."""
        _check_fit(self.params, grads)
        if self.opt_state is None:
            raise ValueError(
                "this state has no optimizer state: make it by ff.init_state(step, "
                "params, optimizer, batch), or TrainState(params, optimizer.init("
                "params))"
            )
        if not isinstance(optimizer, Optimizer):  # which claims it itself
            claim_equal(
                known_optimizer(optimizer), "the optimizer that applies gradients"
            )
        if (applied := _APPLIED.get()) is not None:
            applied.append(Applied(optimizer, self.opt_state, self.params))
        params, opt_state = optimizer.apply(grads, self.opt_state, self.params)
        return replace(
            self, params=params, opt_state=opt_state, step=self.step + 1, **changes
        )

    def replace(self, **changes: Any) -> Self:
        """Returns the state with some fields changed."""
        # Naming it is the user's word that it belongs to the parameters. The copy is
        # another object than that of any other state, so nothing compares the two.
        if "opt_state" in changes:
            changes["opt_state"] = tree.map(lambda x: x, changes["opt_state"])
        return replace(self, **changes)

    def _report(self) -> Report:
        return state_table(self, "a train state, as one rank has it")

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: this rank's part of each leaf."""
        return self._report()._repr_html_()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # IPython's text
        printer.text(str(self._report()))


_STATES: WeakValueDictionary[int, TrainState[Any]] = (
    WeakValueDictionary()
)  # all that live

tree.register_node(
    TrainState,
    lambda s: ((s.params, s.opt_state, s.step, s.extra), None),
    lambda _, children: TrainState(*children),
    names=("params", "opt_state", "step", "extra"),
)


def known_optimizer(optimizer: Any) -> Any:
    """Returns what ranks compare of an optimizer; of a foreign one, its class."""
    is_ours = isinstance(optimizer, Optimizer) or not hasattr(optimizer, "init")
    return optimizer if is_ours else type(optimizer)


def _check_fit(params: PyTree, grads: PyTree) -> None:
    """Raises unless gradients have the structure of the parameters."""
    structure = tree.flatten(params, is_sharded)[1]
    if tree.fitted(structure, grads) is not None:  # the usual case, and a fast one
        return
    if structure == tree.flatten(grads, is_sharded)[1]:
        return
    tree.check_same_structure(
        params, grads, what="gradients", against="the parameters",
        is_leaf=lambda x: x is None or is_sharded(x),  # None: not differentiated
    )  # fmt: skip


def _check_origins(before: PyTree, state: TrainState) -> None:
    """Raises where parameters changed that the optimizer's state makes anew.

    Args:
        before: the parameters of a state with the same ``opt_state``.
    """
    if not (all_origins := list(origins(state.opt_state))):
        return
    params_before, params_now = (
        dict(zip(tree.paths(x, is_sharded), tree.leaves(x, is_sharded), strict=True))
        for x in (before, state.params)
    )
    for _, name, path in all_origins:
        if params_before.get(name) is not params_now.get(name):
            raise ValueError(_ORIGINS.format(name, path))


_ORIGINS = (
    "{!r} is another parameter than that of a state with the same opt_state, which "
    "makes it of {!r} in itself: the next step would undo it. Give state.replace("
    "params=..., opt_state=...): that of the new parameters, optimizer.init(params), "
    "or the state's own with these changed alike; or, of a state that is not stepped, "
    "opt_state=state.opt_state"
)
