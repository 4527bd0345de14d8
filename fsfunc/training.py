"""The state of training: ``TrainState``, and ``init_state``, which lays it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fsfunc import tree
from fsfunc.placing import place
from fsfunc.sharded import is_sharded

__all__ = ["TrainState", "init_state"]


@dataclass(frozen=True)
class TrainState:
    """Parameters, the optimizer's state, the step count, and whatever else is carried.

    It is a pytree. Any other pytree is as good a state; this one knows how to apply
    gradients.
    """

    params: Any
    opt_state: Any = None
    step: int = 0
    extra: Any = field(default_factory=dict)

    def apply_gradients(self, grads: Any, optimizer: Any, **changes: Any) -> TrainState:
        """The state after one update by ``optimizer`` (of the state's own make)."""
        tree.check_same_structure(
            self.params, grads, what="gradients", against="the parameters",
            is_leaf=lambda x: x is None or is_sharded(x),  # None: not differentiated
        )  # fmt: skip
        if self.opt_state is None:
            raise ValueError(
                "this state has no optimizer state: make it by ff.init_state(step, "
                "params, optimizer, batch), or TrainState(params, optimizer.init("
                "params))"
            )
        params, opt_state = optimizer.apply(grads, self.opt_state, self.params)
        return replace(
            self, params=params, opt_state=opt_state, step=self.step + 1, **changes
        )

    def replace(self, **changes: Any) -> TrainState:
        """The state with some fields changed."""
        return replace(self, **changes)


tree.register_node(
    TrainState,
    lambda s: ((s.params, s.opt_state, s.step, s.extra), None),
    lambda _, children: TrainState(*children),
    names=("params", "opt_state", "step", "extra"),
)


def init_state(
    step: Callable[..., Any],
    params_or_init_fn: Any,
    optimizer: Any,
    batch: Any,
    record: str = "fake",
) -> TrainState:
    """The first state of ``step``, each rank holding its part.

    The step is run once on fake tensors to see which leaves its units take.

    Args:
        step: ``(state, batch) -> (state, metrics)``, transformed.
        params_or_init_fn: the whole parameters, or a function that returns them; on
            every rank the same.
        optimizer: its ``init`` gives the optimizer's state, made on the parts alone.
        batch: of the shapes that the step will see (its values are not read).
        record: ``"real"`` runs one real call, where fake tensors cannot go on.

    Raises:
        RuntimeError: the step asks a fake tensor for its value; names the line.
        ValueError: a leaf is read inside and outside units.

    Cost: nothing is sent. One run on fake tensors, one copy of the rank's part.
    """
    params = params_or_init_fn
    if callable(params_or_init_fn):
        params = params_or_init_fn()

    def run(params: Any, batch: Any) -> Any:
        return step(TrainState(params, optimizer.init(params)), batch)

    run.interpretations = getattr(step, "interpretations", ())  # type: ignore
    placed = place(run, params, batch, record=record)
    return TrainState(placed, optimizer.init(placed))
