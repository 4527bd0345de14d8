"""torch's own optimizers as pairs of functions, over whole or sharded leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.core.frames import frame, inside
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Tree, map_flat
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Optimizer, check_not_negative
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.optim.torch_probe import Kept, as_numbers, at_rest, probe, run_step

_NOT_ELEMENTWISE = {
    "LBFGS": ("it takes a closure, and directions of the whole", "ff.sharded_adam"),
    "Adafactor": ("it keeps sums over rows and columns of a matrix", "ff.adafactor"),
    "Muon": ("it orthogonalises a matrix", "ff.muon"),
    "SparseAdam": ("it takes sparse gradients", "ff.sharded_adam"),
}
_REFUSED = {
    "capturable": "steps are counted on the host, where nothing waits for them",
    "differentiable": "take ff.sharded_adam or ff.sgd, whose update differentiates",
}


class TorchState(NamedTuple):
    """How many updates were made, and what the class keeps.

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
    """Any elementwise optimizer of torch's kind, over whole or sharded leaves.

    Args:
        kind: the class, such as ``torch.optim.RMSprop``, or one of the user's own. It
            is tried on twelve numbers here and now: what it does to a part of a
            parameter must be that part of what it does to the whole, a matrix as a
            vector. What shows only in longer or larger ones stays unseen.
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
        ValueError: a class that is not elementwise, looks at ``p.ndim``, or carries
            more than it keeps for a parameter, as in a group; ``capturable`` and
            ``differentiable``; a state of another class; an update without ``params``,
            or that somebody differentiates.
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
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"from_torch takes a torch.optim class, not {kind!r}")
    name = kind.__name__
    known = getattr(torch.optim, name, None) is kind
    if known and name in _NOT_ELEMENTWISE:
        why, instead = _NOT_ELEMENTWISE[name]
        raise ValueError(f"{name} cannot run on shards: {why}; take {instead}")
    for option, why in _REFUSED.items():
        if options.get(option):
            raise ValueError(f"from_torch({name}) does without {option}: {why}")
    if lr is not None and not callable(lr):
        check_not_negative(lr=lr)

    given = _Given(kind, lr, options)
    functions = _TorchFunctions(given, _kept_by(given))
    made = Optimizer(functions.init, functions.update, prepare=functions.prepare)
    known = {"kind": kind, **given.at(0)([torch.zeros(1)]).defaults}
    return made.known_as("from_torch", known if lr is None else {**known, "lr": lr})


@dataclass(frozen=True, eq=False)
class _Given:
    """A class of torch's kind, and the options for it."""

    kind: type[torch.optim.Optimizer]
    lr: float | Schedule | None
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def plain(self) -> dict[str, Any]:
        """The options that take torch's own kernel off, for a few numbers."""
        return {"fused": False} if self.options.get("fused") else {}

    def at(self, count: int, **other: Any) -> Callable[..., torch.optim.Optimizer]:
        """What makes the class's optimizers after so many updates."""
        lr = {} if self.lr is None else {"lr": rate_at(self.lr, count)}
        return lambda params: self.kind(params, **{**lr, **self.options, **other})


def _kept_by(given: _Given) -> Kept:
    """What the class keeps, as it is found on a few numbers."""
    name, plain = given.name, given.plain
    # A rate of 0, as a warm-up starts with, would show nothing.
    still = given.lr is not None and not rate_at(given.lr, 0)
    tried = {**plain, "lr": 1e-2} if still else plain
    kept = probe(given.at(0, **tried), name)
    if still:
        first = probe(given.at(0, **plain), name)
        kept = replace(kept, numbers=first.numbers, moments=first.moments)
    if given.at(0)([torch.zeros(1)]).defaults.get("foreach", False) is None:
        # What torch takes on a GPU may write where what it takes here does not.
        writes = probe(given.at(0, **tried, foreach=True), name).writes_gradients
        kept = replace(kept, writes_gradients=writes)
    return kept


@dataclass(frozen=True, eq=False)
class _TorchFunctions:
    """The functions of such an optimizer; ``found``: where it keeps its numbers."""

    given: _Given
    kept: Kept
    found: dict[torch.device, Mapping[str, torch.device]] = field(default_factory=dict)

    def init(self, params: Tree) -> TorchState:
        kept = self.kept

        def started(k: str) -> Callable[[list[Tensor]], list[Tensor]]:
            return lambda tensors: [kept.start(k, t) for t in tensors]

        map_flat(self._check_dtypes, params)
        moments = {k: map_flat(started(k), params, rest=None) for k in kept.moments}
        return TorchState(0, dict(kept.numbers), moments)

    def _check_dtypes(self, tensors: list[Tensor]) -> list[Tensor]:
        for t in tensors:
            for k, dtype in self.kept.own.items():
                if t.dtype != dtype:
                    raise ValueError(
                        f"{self.given.name} keeps {k!r} in {dtype}, whatever the "
                        f"parameters, and these are {t.dtype}: make them {dtype}"
                    )
        return tensors

    def _matched(self, grads: Tree, state: TorchState, params: Tree) -> Matched:
        kept, name = self.kept, self.given.name
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
        return out

    def prepare(
        self, grads: Tree, state: TorchState, params: Tree
    ) -> Callable[[], tuple[Tree, TorchState]]:
        matched, kept = self._matched(grads, state, params), self.kept
        make, found = self.given.at(state.count), []

        def kernel(ps: Any, gs: Any, *ms: Any, weight_decay: float) -> None:
            try:
                numbers = run_step(
                    make,
                    kept,
                    ps,
                    gs,
                    dict(zip(kept.moments, ms, strict=True)),
                    state.numbers,
                    first=state.count == 0,
                    devices=self._lying(_torch.device_of(ps[0])),
                )
            except Exception as error:
                # Without data a step that reads a number of its own ends here: what it
                # would still have computed is missing in a plan.
                if not _torch.is_data_dependent(error):
                    raise
            else:
                found[:] = [numbers] if all(map(_on_host, numbers.values())) else []

        commit = fused(matched, kernel, [0.0] * len(matched.active))

        def finish() -> tuple[Tree, TorchState]:
            params, *moments = commit()
            numbers = as_numbers(found[0]) if found else self._following(state)
            kept_now = dict(zip(kept.moments, moments, strict=True))
            return params, TorchState(state.count + 1, numbers, kept_now)

        return finish

    def _following(self, state: TorchState) -> dict[str, Any]:
        """The numbers after a step, where no step of this rank shows them."""
        with at_rest():
            p = torch.zeros(1)
            moments = {k: [self.kept.start(k, p)] for k in self.kept.moments}
            make = self.given.at(state.count, **self.given.plain)
            args = make, self.kept, [p], [p.clone()], moments, state.numbers
            return as_numbers(run_step(*args, first=state.count == 0))

    def update(
        self, grads: Tree, state: TorchState, params: Tree = None
    ) -> tuple[Tree, TorchState]:
        if params is None:
            raise ValueError(
                f"{self.given.name} writes into parameters: call "
                "update(grads, state, params)"
            )
        with inside(replace(frame(), donated=None)):
            new, state = self.prepare(grads, state, params)()
        matched = Matched.of(params, grads, new)
        updates, _ = matched.composed(
            lambda p, g, after, decay: (after - p, after), [0.0] * len(matched.active)
        )
        return updates, state

    def _lying(self, device: torch.device) -> Mapping[str, torch.device]:
        """Where torch keeps its numbers for parameters on ``device``."""
        if device.type == "cpu" or not self.kept.dtypes:
            return {}
        if device not in self.found:
            with at_rest():
                p = torch.zeros(1, device=device)
                p.grad = torch.zeros_like(p)
                optimizer = self.given.at(0)([p])
                optimizer.step()
                kept = optimizer.state[p]
                self.found[device] = {k: kept[k].device for k in self.kept.dtypes}
        return self.found[device]


def _on_host(x: Any) -> bool:
    """Whether the value of a number can be read without waiting for a device."""
    if isinstance(x, _torch.FakeTensor):
        return False
    return not isinstance(x, Tensor) or x.device.type == "cpu"
