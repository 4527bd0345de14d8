"""Optimizers of torch's kind as pairs of functions, over whole or sharded leaves.

What a class keeps of a parameter comes from a table, or, of one that is not torch's,
from the caller, with which each step is compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.optim.descent import is_misread
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import Tree, filled_like
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Optimizer, Phases, update_from_apply
from fsfunc.optim.schedules import Schedule, check_numbers, rate_at

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Options = Mapping[str, Any]
Numbers = dict[str, Any]

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
    known = kind in _KNOWN_STATES
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
    return made.described_as("from_torch", described)


@dataclass(frozen=True, eq=False)
class _TorchFunctions:
    """The functions of such an optimizer."""

    kind: type[torch.optim.Optimizer]
    lr: float | Schedule | None
    options: dict[str, Any]
    word: dict[str, Any]  # what a class keeps that is not torch's, by its caller
    known: dict[torch.device, ParameterState] = field(default_factory=dict)

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

    def kept(self, device: torch.device = _HOST) -> ParameterState:
        """The state of a parameter."""
        if device not in self.known:
            if self.word:
                made = declared_state(**self.word, device=device)
            else:
                made = known_state(self.kind, self.defaults, device)
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
        make, after = self.at(state.count), self._following(state)

        def kernel(ps: Any, gs: Any, *ms: Any) -> None:
            moments = dict(zip(kept.moments, ms, strict=True))
            here = self.kept(_torch.device_of(ps[0]))
            try:
                made = run_step(make, here, ps, gs, moments, state)
                if here.told:
                    _check_numbers_alike(self.name, made, after)
            except Exception as error:
                # Without data a step that reads a number of its own ends here: what it
                # would still have computed is missing in a plan.
                if not _torch.is_data_dependent(error):
                    raise

        yield
        params, *moments = run_kernel(matched, kernel)
        kept_now = dict(zip(kept.moments, moments, strict=True))
        return params, TorchState(state.count + 1, after, kept_now)

    def _following(self, state: TorchState) -> dict[str, Any]:
        """The numbers after a step, which follow from those before it."""
        with plain_context():
            p = torch.zeros(2, device=_HOST)
            kept = self.kept()
            moments = {k: [kept.start(k, p)] for k in kept.moments}
            plain = {"fused": False} if self.defaults.get("fused") else {}
            make = self.at(state.count, **plain)
            return plain_numbers(run_step(make, kept, [p], [p.clone()], moments, state))

    def update(
        self, grads: Tree, state: TorchState, params: Tree = None
    ) -> tuple[Tree, TorchState]:
        if params is None:
            raise ValueError(
                f"{self.name} writes into parameters: call update(grads, state, params)"
            )
        return update_from_apply(self.apply, grads, state, params)


def _check_numbers_alike(
    name: str, made: dict[str, Any], after: dict[str, Any]
) -> None:
    """Raise ValueError where numbers of a step follow from parameters or gradients."""
    there = {k: x for k, x in made.items() if not (isinstance(x, Tensor) and x.is_cuda)}
    for k, x in plain_numbers(there).items():
        if x != after[k]:
            raise ValueError(
                f"{name} is not elementwise: its number {k!r} follows from parameters "
                f"or gradients ({after[k]} where these are 0, and here {x})"
            )


# What a class keeps of a parameter


@dataclass(frozen=True)
class ParameterState:
    """The state of one parameter.

    Args:
        numbers: by name, what is one number for all elements, before the first step.
        moments: by name, what every element of a moment is before the first step.
        tensors: the numbers that are kept in tensors: their dtype and device.
        afresh: whether the class makes its first state itself, in its first step.
        writes_gradients: whether a step may write into the gradients.
        told: whether all of this is a caller's word.
    """

    numbers: Numbers
    moments: Mapping[str, float]
    tensors: Mapping[str, tuple[torch.dtype, torch.device]]
    afresh: bool
    writes_gradients: bool
    told: bool = False

    def start(self, name: str, p: Tensor) -> Tensor:
        """A moment of ``p`` before the first step."""
        return torch.full_like(p, self.moments[name])


# torch's own: numbers and moments before the first step, by the options


def _adam_state(o: Options) -> tuple[Numbers, Numbers]:
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(o["amsgrad"])
    return {"step": 0.0}, dict.fromkeys(names, 0.0)


def _rmsprop_state(o: Options) -> tuple[Numbers, Numbers]:
    names = ["square_avg"] + ["momentum_buffer"] * (o["momentum"] > 0)
    return {"step": 0.0}, dict.fromkeys(names + ["grad_avg"] * bool(o["centered"]), 0.0)


def _zero_moments(*moments: str, **numbers: float) -> Callable[[Options], Any]:
    return lambda o: ({"step": 0.0, **numbers}, dict.fromkeys(moments, 0.0))


_KNOWN_STATES: dict[type, Callable[[Options], tuple[Numbers, Numbers]]] = {
    torch.optim.ASGD: lambda o: (
        {"step": 0.0, "eta": float(o["lr"]), "mu": 1.0},
        {"ax": 0.0},
    ),
    torch.optim.Adadelta: _zero_moments("square_avg", "acc_delta"),
    torch.optim.Adagrad: lambda o: (
        {"step": 0.0},
        {"sum": float(o["initial_accumulator_value"])},
    ),
    torch.optim.Adam: _adam_state,
    torch.optim.AdamW: _adam_state,
    torch.optim.Adamax: _zero_moments("exp_avg", "exp_inf"),
    torch.optim.NAdam: _zero_moments("exp_avg", "exp_avg_sq", mu_product=1.0),
    torch.optim.RAdam: _zero_moments("exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: _rmsprop_state,
    torch.optim.Rprop: lambda o: (
        {"step": 0.0},
        {"prev": 0.0, "step_size": float(o["lr"])},
    ),
    torch.optim.SGD: lambda o: ({}, {"momentum_buffer": 0.0} if o["momentum"] else {}),
}


def known_state(kind: type, o: Options, device: torch.device) -> ParameterState:
    """The state of a class in the table.

    Args:
        o: the options of its parameter group.
        device: of the parameters.
    """
    numbers, moments = _KNOWN_STATES[kind](o)
    fused = bool(o.get("fused"))
    wide = torch.get_default_dtype() == torch.float64 and not fused
    dtype = torch.float64 if wide else torch.float32
    there = fused or kind is torch.optim.ASGD
    foreach = o.get("foreach") is not False and not fused  # None: on a GPU
    rounded = {
        k: torch.tensor(v, dtype=dtype, device="cpu").item() for k, v in numbers.items()
    }
    return ParameterState(
        rounded,
        moments,
        dict.fromkeys(numbers, (dtype, device if there else torch.device("cpu"))),
        afresh=bool(o.get("dampening")),  # SGD: its first momentum is the gradient
        writes_gradients=foreach and bool(o.get("nesterov")),  # SGD adds the momentum
    )


def declared_state(
    moments: Numbers, numbers: Numbers, device: torch.device
) -> ParameterState:
    """The state of another class, as its caller gives it.

    A number given as a tensor is kept in one, beside the parameters unless it is given
    on the host.
    """
    check_numbers(**moments, **numbers)
    tensors = {
        k: (x.dtype, x.device if x.device.type == "cpu" else device)
        for k, x in numbers.items()
        if isinstance(x, Tensor)
    }
    plain = plain_numbers(numbers)
    return ParameterState(
        plain, moments, tensors, afresh=True, writes_gradients=True, told=True
    )


# One step


def run_step(
    make: Make,
    kept: ParameterState,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Mapping[str, Sequence[Tensor]],
    state: TorchState,
) -> dict[str, Any]:
    """Writes one step into params and moments; returns what is now kept in numbers.

    The tensors are dense.

    Args:
        make: the class with its options of this step.
        state: tells the count and the numbers.

    Raises:
        ValueError: a class keeps something else than its caller says.
    """
    flat = [_flat_view(p.detach()) for p in params]
    given = [
        {k: _flat_view(m[i]) for k, m in moments.items()} for i in range(len(flat))
    ]
    for p, g in zip(flat, grads, strict=True):
        p.grad = _flat_view(g.clone() if kept.writes_gradients else g)
    if state.count == 0 and kept.afresh:
        optimizer = make(flat)
    else:
        optimizer = make([torch.empty(0, dtype=p.dtype, device=p.device) for p in flat])
        optimizer.param_groups[0]["params"] = flat
        optimizer.state = defaultdict(dict)
        counters = _repeat_numbers(state.numbers, kept, len(flat))
        for i, p in enumerate(flat):
            mine = {k: x[i] for k, x in counters.items()}
            optimizer.state[p] = {**mine, **given[i]}
    before = _carried_values(optimizer) if kept.told else {}
    optimizer.step()
    found: Any = optimizer.state
    if kept.told:
        _check_carries_nothing(optimizer, before)
        for p, whole in zip(flat, params, strict=True):
            _check_declared(type(optimizer).__name__, kept, p, found[p])
            if not p.is_set_to(there := _flat_view(whole.detach())):
                there.copy_(p)  # what the class put in its place, as by ``p.data = ``
    for p, parts in zip(flat, given, strict=True):
        for name, m in parts.items():
            if found[p][name] is not m:
                m.copy_(found[p][name])
    return {name: found[flat[0]][name] for name in state.numbers}


def _carried_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values of an optimizer beside its parameters and their state, as words."""
    group = optimizer.param_groups[0]
    held = {k: x for k, x in vars(optimizer).items() if k not in _PER_PARAMETER}
    held |= {f"param_groups[0][{k!r}]": x for k, x in group.items() if k != "params"}
    return {k: list(map(_fingerprint, tree.leaves(x))) for k, x in held.items()}


_PER_PARAMETER = {"param_groups", "state"}


def _fingerprint(x: Any) -> Any:
    return (id(x), x._version) if isinstance(x, Tensor) else repr(x)


def _check_carries_nothing(
    optimizer: torch.optim.Optimizer, before: Mapping[str, Any]
) -> None:
    """Raise ValueError where a step has left more than states of parameters."""
    after, params = _carried_values(optimizer), optimizer.param_groups[0]["params"]
    found = [k for k, words in after.items() if before.get(k) != words]
    found += ["state of its own"] * (len(optimizer.state) > len(params))
    if found:
        raise ValueError(
            f"{type(optimizer).__name__} carries {', '.join(found)} from step to step, "
            "and of a class that is not torch's only what it keeps in state[parameter] "
            "is kept: write its equation as ff.Optimizer(init, update)"
        )


def _check_declared(
    name: str, kept: ParameterState, p: Tensor, state: Mapping[str, Any]
) -> None:
    """Raise ValueError where the state of a parameter is not as its caller says."""
    said = dict.fromkeys(kept.moments, f"{p.dtype} for each element")
    said |= dict.fromkeys(kept.numbers, "a number")
    said |= {k: _describe_number(*how) for k, how in kept.tensors.items()}
    found = {k: _describe_value(x, p) for k, x in state.items() if x is not None}
    if found != said:
        raise ValueError(
            f"{name} keeps {found} in state[parameter], and from_torch({name}, "
            f"elementwise=True, moments=..., numbers=...) was told {said}: name what "
            "it keeps for each element as moments, what is one number as numbers. With "
            "other things, or other dtypes, it cannot run on parts"
        )


def _describe_value(x: Any, p: Tensor) -> str:
    """The form in which a class keeps a value of a parameter, in words."""
    if not isinstance(x, Tensor):
        return "a number" if isinstance(x, (bool, int, float)) else type(x).__name__
    if not x.ndim:
        return _describe_number(x.dtype, _torch.device_of(x))
    return f"{x.dtype} for each element" if x.shape == p.shape else str(x.shape)


def _describe_number(dtype: torch.dtype, device: torch.device) -> str:
    return f"a number in {dtype} on {device}"


def _flat_view(x: Tensor) -> Tensor:
    return x if x.ndim == 1 else x.view(-1)


def _repeat_numbers(
    numbers: Numbers, kept: ParameterState, count: int
) -> dict[str, Sequence[Any]]:
    """``count`` times each number as its class keeps it, to be written one by one.

    They are filled in, not copied: no device is waited for.
    """
    made: dict[str, Sequence[Any]] = {k: [x] * count for k, x in numbers.items()}
    for k, (dtype, device) in kept.tensors.items():
        full = torch.full((count,), numbers[k], dtype=dtype, device=device)
        made[k] = full.unbind()
    return made


def plain_numbers(found: dict[str, Any]) -> Numbers:
    """A state's numbers as plain ones, where they lie on the host."""
    return {k: x.item() if isinstance(x, Tensor) else x for k, x in found.items()}


@contextmanager
def plain_context() -> Iterator[None]:
    """Inside, plain tensors of the host, whatever is on around."""
    with _torch.beneath_functorch(), _torch.beneath_all_modes(), torch.device("cpu"):
        yield
