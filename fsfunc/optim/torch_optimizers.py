"""torch's own optimizers as pairs of functions, over whole or sharded leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.optim.descent import is_misread
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Tree, map_flat
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Optimizer, update_of
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.optim.torch_classes import (
    Kept,
    as_numbers,
    at_rest,
    is_elementwise,
    kept_by_torch,
    run_step,
)

_NOT_ELEMENTWISE: dict[type, tuple[str, str]] = {
    torch.optim.LBFGS: (
        "it takes a closure, and directions of the whole",
        "ff.sharded_adam",
    ),
    torch.optim.Adafactor: (
        "it keeps sums over rows and columns of a matrix",
        "ff.adafactor",
    ),
    torch.optim.Muon: ("it orthogonalises a matrix", "ff.muon"),
    torch.optim.SparseAdam: ("it takes sparse gradients", "ff.sharded_adam"),
}
_HOST = torch.device("cpu")
_REFUSED = {
    "capturable": "steps are counted on the host, where nothing waits for them",
    "differentiable": "take ff.sharded_adam or ff.sgd, whose update differentiates",
}


class TorchState(NamedTuple):
    """The count of updates, and the state of the class.

    ``numbers`` has, by torch's name, what is one number for all elements, such as
    ``step``, as plain numbers; ``moments`` has, by torch's name, trees like the
    parameters, in the same layout, with None for leaves that are not floating tensors.
    """

    count: int
    numbers: dict[str, Any]
    moments: dict[str, Any]


def from_torch(
    kind: type[torch.optim.Optimizer],
    *,
    lr: float | Schedule | None = None,
    **options: Any,
) -> Optimizer:
    """One of torch's own elementwise optimizers, over whole or sharded leaves.

    Args:
        kind: the class, such as ``torch.optim.RMSprop``.
        lr: a number, or ``schedule(count)`` giving one; the class's own without it.
        options: passed on to the class. Parameter groups: see `partition`, `masked`.

    Returns:
        the optimizer; its state is a `TorchState`. ``apply`` gives the bits of the
        class on one device (with ``fused``, whose kernels treat the last few elements
        of a tensor otherwise, to rounding); ``update`` the difference that it makes, so
        the sum agrees to rounding. A step is counted for all leaves, also for those
        that have no gradient in it: one whose first gradient comes late goes without
        what a first step does otherwise (as ``SGD``, which does not dampen it).

    Raises:
        ValueError: a class of torch's that is not elementwise, or another one;
            ``capturable`` and ``differentiable``; a state of another class; an update
            without ``params``, or one that is differentiated.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: no communication. One call of the class's own step for each device and dtype,
    over the flat buffers of the leaves' units; in place under `donate` (a step of the
    class may make tensors of its own), else on copies of the rank's parameters and
    moments. ``fused=True`` is the fastest where the class has it.

    >>> optimizer = from_torch(torch.optim.RMSprop, lr=0.1, alpha=0.75)
    >>> w = torch.ones(2)
    >>> w, state = optimizer.apply(torch.ones(2), optimizer.init(w), w)
    >>> w, state.moments["square_avg"], state.numbers
    (tensor([0.8000, 0.8000]), tensor([0.2500, 0.2500]), {'step': 1.0})
    """
    name = kind.__name__
    if kind in _NOT_ELEMENTWISE:
        why, instead = _NOT_ELEMENTWISE[kind]
        raise ValueError(f"{name} cannot run on shards: {why}; take {instead}")
    if not is_elementwise(kind):
        raise ValueError(
            f"{name} is not in the table of torch's elementwise optimizers, and only "
            "those run on shards: write its equation as ff.Optimizer(init, update); if "
            "it takes norms of leaves, see ff.lamb, ff.lars and ff.leaf_norms"
        )
    for option, why in _REFUSED.items():
        if options.get(option):
            raise ValueError(f"from_torch({name}) does without {option}: {why}")

    functions = _TorchFunctions(kind, lr, options)
    made = Optimizer.of(functions, elementwise=True)
    described = {"kind": kind, **functions.defaults}
    if lr is not None:
        described["lr"] = lr
    return made.known_as("from_torch", described)


@dataclass(frozen=True, eq=False)
class _TorchFunctions:
    """The functions of such an optimizer."""

    kind: type[torch.optim.Optimizer]
    lr: float | Schedule | None
    options: dict[str, Any]
    known: dict[torch.device, Kept] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kind.__name__

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options of the class at the first step."""
        return self.at(0)([torch.zeros(1)]).defaults

    def at(self, count: int, **other: Any) -> Callable[..., torch.optim.Optimizer]:
        """The class with its options after so many updates."""
        lr = {} if self.lr is None else {"lr": rate_at(self.lr, count)}
        return lambda params: self.kind(params, **{**lr, **self.options, **other})

    def kept(self, device: torch.device = _HOST) -> Kept:
        """The state of a parameter."""
        if device not in self.known:
            self.known[device] = kept_by_torch(self.kind, self.defaults, device)
        return self.known[device]

    def init(self, params: Tree) -> TorchState:
        kept = self.kept()

        def started(k: str) -> Callable[[list[Tensor]], list[Tensor]]:
            return lambda ts: [kept.start(k, t) for t in ts]

        moments = {k: map_flat(started(k), params, rest=None) for k in kept.moments}
        return TorchState(0, dict(kept.numbers), moments)

    def _matched(self, grads: Tree, state: TorchState, params: Tree) -> Matched:
        kept, name = self.kept(), self.name
        found = [*state.numbers, *state.moments]
        if set(found) != {*kept.numbers, *kept.moments}:
            raise ValueError(
                f"the state keeps {found}, and {name} keeps "
                f"{[*kept.numbers, *kept.moments]}: make it with this optimizer's own "
                "init(params)"
            )
        out = Matched.of(params, grads, *(state.moments[k] for k in kept.moments))
        if out.differentiated:
            raise ValueError(
                f"torch's own step cannot be differentiated or batched, and {name} is "
                "called where it would be: take ff.sharded_adam or ff.sgd"
            )
        flats = out.buffers[0].tensors
        if self.kind is torch.optim.SGD and self.defaults["fused"]:
            if any(map(is_misread, flats)):
                raise ValueError(
                    "torch's fused SGD gives wrong numbers of parameters of 16 bits on "
                    "a CPU: leave fused=True out, or take ff.sgd"
                )
        return out

    def prepare(
        self, grads: Tree, state: TorchState, params: Tree
    ) -> Callable[[], tuple[Tree, TorchState]]:
        matched, kept = self._matched(grads, state, params), self.kept()
        make, first = self.at(state.count), state.count == 0

        def kernel(ps: Any, gs: Any, *ms: Any) -> None:
            moments = dict(zip(kept.moments, ms, strict=True))
            here = self.kept(_torch.device_of(ps[0]))
            try:
                run_step(make, here, ps, gs, moments, state.numbers, first=first)
            except Exception as error:
                # Without data a step that reads a number of its own ends here: what it
                # would still have computed is missing in a plan.
                if not _torch.is_data_dependent(error):
                    raise

        commit = fused(matched, kernel)

        def finish() -> tuple[Tree, TorchState]:
            params, *moments = commit()
            kept_now = dict(zip(kept.moments, moments, strict=True))
            return params, TorchState(state.count + 1, self._following(state), kept_now)

        return finish

    def _following(self, state: TorchState) -> dict[str, Any]:
        """The numbers after a step, which follow from those before it."""
        with at_rest():
            p = torch.zeros(1)
            kept = self.kept()
            moments = {k: [kept.start(k, p)] for k in kept.moments}
            plain = {"fused": False} if self.defaults.get("fused") else {}
            make = self.at(state.count, **plain)
            args = make, kept, [p], [p.clone()], moments, state.numbers
            return as_numbers(run_step(*args, first=state.count == 0))

    def update(
        self, grads: Tree, state: TorchState, params: Tree = None
    ) -> tuple[Tree, TorchState]:
        if params is None:
            raise ValueError(
                f"{self.name} writes into parameters: call update(grads, state, params)"
            )
        return update_of(self.prepare, grads, state, params)
