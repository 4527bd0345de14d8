"""The parameters to evaluate with, where training keeps others than these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.optim.leaves import Tree, along, floating
from fsfunc.optim.matching import Matched
from fsfunc.sharded.leaf import is_sharded


def eval_params(opt_state: Any, params: Tree) -> Tree:
    """The averages that an optimizer keeps, as parameters to evaluate and to publish.

    Args:
        opt_state: of an optimizer in which somewhere is `ema`, `swa` or
            `schedule_free`, or a state of one's own with a method ``evaluated(params)``
            that gives a tree like them, with None for leaves that it does not have.
        params: those that are trained, of the same step.

    Returns:
        a tree like ``params``, in their layouts and dtypes; what is not averaged is as
        it is there. It may share memory with the state: read it before the next donated
        step.

    Raises:
        ValueError: nothing in the state is averaged.

    Cost: no communication; at most a copy of the rank's parameters.

    >>> import torch
    >>> from fsfunc.optim import chain, clip_by_value, ema, sgd
    >>> optimizer = chain(clip_by_value(1.0), ema(sgd(0.5), 0.5))
    >>> w, state = torch.zeros(1), optimizer.init(torch.zeros(1))
    >>> for _ in range(2):
    ...     w, state = optimizer.apply(-torch.ones(1), state, w)
    >>> w, eval_params(state, w)
    (tensor([1.]), tensor([0.7500]))
    """
    found = [state.evaluated(params) for state in _averaging(opt_state)]
    if not found:
        raise ValueError(
            "nothing in this state is averaged: give the state of an optimizer made by "
            "ff.ema, ff.swa or ff.schedule_free (of a TrainState its opt_state)"
        )
    leaves, treedef = tree.flatten(params, is_sharded)
    for average in found:
        column = along(params, treedef, average, "averages")
        leaves = [
            old if new is None else new for old, new in zip(leaves, column, strict=True)
        ]
    chosen = tree.unflatten(treedef, leaves)
    matched = Matched.of(floating(params), floating(chosen))
    dtypes = {b.dtype for b in matched.buffers[0].tensors}
    if dtypes == {b.dtype for b in matched.buffers[1].tensors} and len(dtypes) < 2:
        return chosen
    cast = matched.summed(_cast)
    casted = along(params, treedef, cast, "averages")
    return tree.unflatten(
        treedef,
        [old if x is None else x for old, x in zip(leaves, casted, strict=True)],
    )


def _cast(p: Tensor, average: Tensor) -> Tensor:
    return average.to(p.dtype)


def _averaging(state: Any) -> Iterator[Any]:
    """The outermost states in ``state`` that keep averages."""
    if callable(getattr(type(state), "evaluated", None)):
        yield state
    elif isinstance(state, Mapping):
        for inner in state.values():
            yield from _averaging(inner)
    elif isinstance(state, (tuple, list)):
        for inner in state:
            yield from _averaging(inner)
