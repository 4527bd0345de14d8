"""Optimizers of torch's kind as pairs of functions, over whole or sharded leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.optim.descent import is_misread
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Tree, filled_like
from fsfunc.optim.matching import Matched, update_of
from fsfunc.optim.optimizer import Optimizer, Phases, finished
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.optim.torch_classes import (
    Kept,
    as_numbers,
    at_rest,
    is_elementwise,
    kept_as_told,
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
    parameters, in the same layout, with None for leaves that have no derivative.
    """

    count: int
    numbers: dict[str, Any]
    moments: dict[str, Any]


@api_boundary
def from_torch(
    kind: type[torch.optim.Optimizer],
    *,
    lr: float | Schedule | None = None,
    elementwise: bool = False,
    moments: Mapping[str, float] | None = None,
    numbers: Mapping[str, Any] | None = None,
    **options: Any,
) -> Optimizer:
    """An elementwise optimizer of torch's kind, over whole or sharded leaves.

    Args:
        kind: the class: one of torch's own, such as ``torch.optim.RMSprop``, or, with
            ``elementwise``, any other.
        lr: a number, or ``schedule(count)`` giving one; the class's own without it.
        elementwise: your word that a class which is not torch's treats each element by
            itself, whatever the shape of the parameter, draws no random numbers, and
            carries from step to step only what it keeps in ``state[parameter]``.
        moments: of such a class, by name, what it keeps there for each element, and
            what that is before the first step.
        numbers: by name, what it keeps there as one number, and what that is before
            the first step; a 0-dim tensor where it keeps it in one (on the host, or
            else beside the parameters).
        options: passed on to the class. Parameter groups: see `partition`, `masked`.

    Returns:
        the optimizer; its state is a `TorchState`. ``apply`` gives the bits of the
        class on one device (with ``fused``, whose kernels treat the last few elements
        of a tensor otherwise, to rounding); ``update`` the difference that it makes, so
        the sum agrees to rounding. A step is counted for all leaves, also for those
        that have no gradient in it: one whose first gradient comes late goes without
        what a first step does otherwise (as ``SGD``, which does not dampen it).

    Raises:
        TypeError: an optimizer, and not its class.
        ValueError: a class of torch's that is not elementwise, or another one without
            ``elementwise``, or one that keeps something else than you say (before
            anything is written); ``capturable`` and ``differentiable``; a state of
            another class; an update without ``params``, or one that is differentiated.
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
    if not isinstance(kind, type):
        raise TypeError(
            "from_torch takes a class and its options, as in from_torch(torch.optim."
            f"AdamW, lr=1e-3), and is given an object of {type(kind).__name__}; it "
            "needs no parameters: those come with the state"
        )
    name = kind.__name__
    if kind in _NOT_ELEMENTWISE:
        why, instead = _NOT_ELEMENTWISE[kind]
        raise ValueError(f"{name} cannot run on shards: {why}; take {instead}")
    known = is_elementwise(kind)
    if not (known or elementwise):
        raise ValueError(
            f"{name} is not in the table of torch's elementwise optimizers. If it "
            "treats each element by itself, whatever the shape of a parameter, say "
            f"from_torch({name}, elementwise=True, moments={{...}}, numbers={{...}}), "
            "with what it keeps in state[parameter]; or write its equation as "
            "ff.Optimizer(init, update); if it takes norms of leaves, see ff.lamb, "
            "ff.lars and ff.leaf_norms"
        )
    if known and (moments or numbers):
        raise ValueError(f"what {name} keeps is known: leave moments and numbers out")
    for option, why in _REFUSED.items():
        if options.get(option):
            raise ValueError(f"from_torch({name}) does without {option}: {why}")

    told = {"moments": dict(moments or {}), "numbers": dict(numbers or {})}
    word = {} if known else told
    functions = _TorchFunctions(kind, lr, options, word)
    functions.kept()  # which raises where that is no word
    f = functions
    made = Optimizer(f.init, f.update, f.apply, elementwise=True)
    described = {"kind": kind, **word, **functions.defaults}
    if lr is not None:
        described["lr"] = lr
    return made.known_as("from_torch", described)


@dataclass(frozen=True, eq=False)
class _TorchFunctions:
    """The functions of such an optimizer."""

    kind: type[torch.optim.Optimizer]
    lr: float | Schedule | None
    options: dict[str, Any]
    word: dict[str, Any]  # what a class keeps that is not torch's, by its caller
    known: dict[torch.device, Kept] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kind.__name__

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options of the class at the first step."""
        return self.at(0)([torch.zeros(1, device=_HOST)]).defaults

    def at(self, count: int, **other: Any) -> Callable[..., torch.optim.Optimizer]:
        """The class with its options after so many updates."""
        lr = {} if self.lr is None else {"lr": rate_at(self.lr, count)}
        return lambda params: self.kind(params, **{**lr, **self.options, **other})

    def kept(self, device: torch.device = _HOST) -> Kept:
        """The state of a parameter."""
        if device not in self.known:
            if self.word:
                made = kept_as_told(**self.word, device=device)
            else:
                made = kept_by_torch(self.kind, self.defaults, device)
            self.known[device] = made
        return self.known[device]

    def init(self, params: Tree) -> TorchState:
        kept = self.kept()

        moments = {k: filled_like(params, x) for k, x in kept.moments.items()}
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

    def apply(self, grads: Tree, state: TorchState, params: Tree) -> Phases:
        matched, kept = self._matched(grads, state, params), self.kept()
        make, first = self.at(state.count), state.count == 0
        after = self._following(state)

        def kernel(ps: Any, gs: Any, *ms: Any) -> None:
            moments = dict(zip(kept.moments, ms, strict=True))
            here = self.kept(_torch.device_of(ps[0]))
            try:
                made = run_step(make, here, ps, gs, moments, state.numbers, first=first)
                if here.told:
                    _check_alike(self.name, made, after)
            except Exception as error:
                # Without data a step that reads a number of its own ends here: what it
                # would still have computed is missing in a plan.
                if not _torch.is_data_dependent(error):
                    raise

        yield
        params, *moments = fused(matched, kernel)
        kept_now = dict(zip(kept.moments, moments, strict=True))
        return params, TorchState(state.count + 1, after, kept_now)

    def _following(self, state: TorchState) -> dict[str, Any]:
        """The numbers after a step, which follow from those before it."""
        with at_rest():
            p = torch.zeros(2, device=_HOST)
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
        apply = lambda *args: finished(self.apply(*args))  # noqa: E731
        return update_of(apply, grads, state, params)


def _check_alike(name: str, made: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise ValueError where numbers of a step follow from parameters or gradients."""
    there = {k: x for k, x in made.items() if not (isinstance(x, Tensor) and x.is_cuda)}
    for k, x in as_numbers(there).items():
        if x != after[k]:
            raise ValueError(
                f"{name} is not elementwise: its number {k!r} follows from parameters "
                f"or gradients ({after[k]} where these are 0, and here {x})"
            )
