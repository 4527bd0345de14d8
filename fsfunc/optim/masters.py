"""Parameters of 16 bits that are rounded from float32 copies."""

from __future__ import annotations

from typing import Any, NamedTuple

from fsfunc.optim.leaves import Tree
from fsfunc.optim.optimizer import (
    Optimizer,
    State,
    described,
)
from fsfunc.optim.widening import Narrow, Widened

__all__ = ["MasterState", "master_weights"]


class MasterState(NamedTuple):
    """The parameters in float32, and what the optimizer within keeps.

    ``master`` is a tree like the parameters, in the same layout, with None for leaves
    that are not of 16 bits: these are their own masters.
    """

    master: Any
    inner: State


@described
def master_weights(optimizer: Optimizer) -> Optimizer:
    """``optimizer`` on float32 copies of float16 and bfloat16 parameters.

    The copies lie in its state, as the parameters lie, and it alone updates them; the
    parameters are these, rounded to the nearest. Leaves of other dtypes it updates as
    they are.

    Returns:
        the optimizer; its state is a `MasterState`. Gradients are of the parameters'
        dtype, or of any other.

    Raises:
        TreeMismatch: the copies do not fit the parameters; names the path.

    Cost: nothing is sent. 4 bytes a parameter of 16 bits on the rank: with
    `sharded_adam` 14 for parameter, copy and moments, and one pass that reads 4 and
    writes 2.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.

    >>> import torch
    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = master_weights(sgd(2.0**-10))
    >>> w, g = torch.ones(2, dtype=torch.bfloat16), torch.tensor([1.0, -1.0])
    >>> state = optimizer.init(w)
    >>> for _ in range(8):
    ...     w, state = optimizer.apply(g, state, w)
    >>> w, state.master
    (tensor([0.9922, 1.0078], dtype=torch.bfloat16), tensor([0.9922, 1.0078]))
    """
    return _Masters(optimizer).functions()


class _Masters(Widened):
    def init(self, params: Tree) -> MasterState:
        low = Narrow(params)
        master = low.floats()
        return MasterState(master, self.optimizer.init(low.merged(params, master)))

    def wide(self, state: MasterState, low: Narrow) -> Tree:
        return low.merged(low.params, state.master)

    def after(self, state: MasterState, wide: Tree, inner: State) -> MasterState:
        return MasterState(wide, inner)
