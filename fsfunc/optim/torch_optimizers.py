"""`from_torch`: a class of ``torch.optim`` as a pair of functions, over any leaves.

Each step makes an object of the class over the flat buffers that this rank holds, gives
it the state that fsfunc has stored, calls its ``step()``, and reads the state again. An
elementwise optimizer does not notice that the buffers are parts of many leaves.

What a class stores of a parameter must be known before its first step, as a state is
laid out and checkpointed like the parameters. Of torch's own classes a table knows it
(`_KNOWN_STATES`); of others the caller declares it, and each step is compared with
that.
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
from fsfunc.tree.types import Leaf, PyTree

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Options = Mapping[str, Any]  # of a parameter group
Numbers = dict[str, Any]  # numbers or 0-dim tensors, by torch's name

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
    moments: dict[str, PyTree]


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
    """Makes an optimizer of a class of ``torch.optim``, for whole or sharded leaves.

    The class must be elementwise: it treats each element of a parameter by itself.

    Args:
        kind: the class: one of torch's own, such as ``torch.optim.RMSprop``, or, with
            ``elementwise``, any other.
        lr: a number, or ``schedule(count)`` giving one; the class's own without it.
        elementwise: for a class that is not torch's: True if it treats each element by
            itself, whatever the shape of the parameter, draws no random numbers, and
            carries from step to step only what it stores in ``state[parameter]``.
        moments: the names of what such a class stores there for each element, and the
            value of each before the first step.
        numbers: the names of what it stores there as one number, and the value of each
            before the first step: a 0-dim tensor if it stores it in one (on the host,
            or else beside the parameters).
        options: passed on to the class. For parameter groups see `partition`, `masked`.

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

    names = {"moments": dict(moments or {}), "numbers": dict(numbers or {})}
    declared = {} if known else names
    f = _TorchFunctions(kind, lr, options, declared)
    f.state_on()  # raises if what is declared is no number
    optimizer = Optimizer(f.init, f.update, f.apply, elementwise=True)
    arguments = {"kind": kind, **declared, **f.defaults}
    if lr is not None:
        arguments["lr"] = lr
    return optimizer.described_as("from_torch", arguments)


@dataclass(frozen=True, eq=False)
class _TorchFunctions:
    """The functions of a `from_torch` optimizer.

    Args:
        options: of the class, but ``lr``.
        declared: the arguments of `declared_state`; empty for torch's own classes.
        states: by device, the state of a parameter there: see `state_on`.
    """

    kind: type[torch.optim.Optimizer]
    lr: float | Schedule | None
    options: dict[str, Any]
    declared: dict[str, Any]
    states: dict[torch.device, ParameterState] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kind.__name__

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options of the class at the first step."""
        return self.class_at(0)([torch.zeros(1, device=_HOST)]).defaults

    def class_at(self, count: int, **other: Any) -> Make:
        """Returns the class with its options after so many updates."""
        lr = {} if self.lr is None else {"lr": rate_at(self.lr, count)}
        return lambda params: self.kind(params, **{**lr, **self.options, **other})

    def state_on(self, device: torch.device = _HOST) -> ParameterState:
        """Returns what the class stores of a parameter on a device."""
        if device not in self.states:
            if self.declared:
                state = declared_state(**self.declared, device=device)
            else:
                state = known_state(self.kind, self.defaults, device)
            self.states[device] = state
        return self.states[device]

    def init(self, params: Tree) -> TorchState:
        start = self.state_on()

        moments = {k: filled_like(params, x) for k, x in start.moments.items()}
        return TorchState(0, dict(start.numbers), moments)

    def _match(self, grads: Tree, state: TorchState, params: Tree) -> Matched:
        """Matches the trees of a step, and refuses steps that the class cannot make."""
        expected, name = self.state_on(), self.name
        names = [*state.numbers, *state.moments]
        if set(names) != {*expected.numbers, *expected.moments}:
            raise ValueError(
                f"the state keeps {names}, and {name} keeps "
                f"{[*expected.numbers, *expected.moments]}: make it with this "
                "optimizer's own init(params)"
            )
        moments = (state.moments[k] for k in expected.moments)
        matched = Matched.of(params, grads, *moments)
        if matched.differentiated:
            raise ValueError(
                f"torch's own step cannot be differentiated or batched, and {name} is "
                "called where it would be: take ff.sharded_adam or ff.sgd"
            )
        flats = matched.buffers[0].tensors
        if self.kind is torch.optim.SGD and self.defaults["fused"]:
            if any(map(is_misread, flats)):
                raise ValueError(
                    "torch's fused SGD gives wrong numbers of parameters of 16 bits on "
                    "a CPU: leave fused=True out, or take ff.sgd"
                )
        return matched

    def apply(self, grads: Tree, state: TorchState, params: Tree) -> Phases:
        matched, names = self._match(grads, state, params), self.state_on().moments
        # Numbers such as the step are one value for all leaves and ranks, so they are
        # computed once, on the host, and not read from a device after the step.
        make, next_numbers = self.class_at(state.count), self._next_numbers(state)

        def kernel(ps: list[Tensor], gs: list[Tensor], *ms: list[Tensor]) -> None:
            moments = dict(zip(names, ms, strict=True))
            expected = self.state_on(_torch.device_of(ps[0]))
            try:
                numbers = run_step(make, expected, ps, gs, moments, state)
                if expected.is_declared:
                    _check_numbers_alike(self.name, numbers, next_numbers)
            except Exception as error:
                # Without data a step that reads a number of its own ends here: what it
                # would still have computed is missing in a plan.
                if not _torch.is_data_dependent(error):
                    raise

        yield
        params, *trees = run_kernel(matched, kernel)
        new_moments = dict(zip(names, trees, strict=True))
        return params, TorchState(state.count + 1, next_numbers, new_moments)

    def _next_numbers(self, state: TorchState) -> Numbers:
        """Returns the numbers after a step, by a step of a parameter of two zeros."""
        with plain_context():
            p = torch.zeros(2, device=_HOST)
            start = self.state_on()
            moments = {k: [start.initial_moment(k, p)] for k in start.moments}
            unfused = {"fused": False} if self.defaults.get("fused") else {}
            make = self.class_at(state.count, **unfused)
            numbers = run_step(make, start, [p], [p.clone()], moments, state)
            return plain_numbers(numbers)

    def update(
        self, grads: Tree, state: TorchState, params: Tree = None
    ) -> tuple[Tree, TorchState]:
        if params is None:
            raise ValueError(
                f"{self.name} writes into parameters: call update(grads, state, params)"
            )
        return update_from_apply(self.apply, grads, state, params)


def _check_numbers_alike(name: str, numbers: Numbers, expected: Numbers) -> None:
    """Raises ValueError where numbers of a step follow from parameters or gradients.

    Args:
        expected: those after a step of zeros.
    """
    # Those on a GPU are not compared: reading them would wait for it.
    on_host = {
        k: x for k, x in numbers.items() if not (isinstance(x, Tensor) and x.is_cuda)
    }
    for k, x in plain_numbers(on_host).items():
        if x != expected[k]:
            raise ValueError(
                f"{name} is not elementwise: its number {k!r} follows from parameters "
                f"or gradients ({expected[k]} where these are 0, and here {x})"
            )


# What a class stores of a parameter


@dataclass(frozen=True)
class ParameterState:
    """What a class stores of one parameter in ``optimizer.state[p]``.

    Args:
        numbers: by name, the values that are one number for all elements, before the
            first step.
        moments: by name, the value of every element of a moment before the first step.
        tensors: the dtype and device of those numbers that are stored in tensors.
        makes_first_state: whether the class must make its first state itself, in its
            first step.
        writes_gradients: whether a step may write into the gradients.
        is_declared: whether a caller has declared all of this.
    """

    numbers: Numbers
    moments: Mapping[str, float]
    tensors: Mapping[str, tuple[torch.dtype, torch.device]]
    makes_first_state: bool
    writes_gradients: bool
    is_declared: bool = False

    def initial_moment(self, name: str, p: Tensor) -> Tensor:
        """Returns a moment of ``p`` before the first step."""
        return torch.full_like(p, self.moments[name])


# torch's own: numbers and moments before the first step, by the options


def _adam_state(options: Options) -> tuple[Numbers, Numbers]:
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(options["amsgrad"])
    return {"step": 0.0}, dict.fromkeys(names, 0.0)


def _rmsprop_state(options: Options) -> tuple[Numbers, Numbers]:
    names = ["square_avg"] + ["momentum_buffer"] * (options["momentum"] > 0)
    names += ["grad_avg"] * bool(options["centered"])
    return {"step": 0.0}, dict.fromkeys(names, 0.0)


def _zero_moments(
    *moments: str, **numbers: float
) -> Callable[[Options], tuple[Numbers, Numbers]]:
    return lambda options: ({"step": 0.0, **numbers}, dict.fromkeys(moments, 0.0))


# By class: from its options to (numbers, moments), as torch names and begins them.
_KNOWN_STATES: dict[type, Callable[[Options], tuple[Numbers, Numbers]]] = {
    torch.optim.ASGD: lambda options: (
        {"step": 0.0, "eta": float(options["lr"]), "mu": 1.0},
        {"ax": 0.0},
    ),
    torch.optim.Adadelta: _zero_moments("square_avg", "acc_delta"),
    torch.optim.Adagrad: lambda options: (
        {"step": 0.0},
        {"sum": float(options["initial_accumulator_value"])},
    ),
    torch.optim.Adam: _adam_state,
    torch.optim.AdamW: _adam_state,
    torch.optim.Adamax: _zero_moments("exp_avg", "exp_inf"),
    torch.optim.NAdam: _zero_moments("exp_avg", "exp_avg_sq", mu_product=1.0),
    torch.optim.RAdam: _zero_moments("exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: _rmsprop_state,
    torch.optim.Rprop: lambda options: (
        {"step": 0.0},
        {"prev": 0.0, "step_size": float(options["lr"])},
    ),
    torch.optim.SGD: lambda options: (
        {},
        {"momentum_buffer": 0.0} if options["momentum"] else {},
    ),
}


def known_state(kind: type, options: Options, device: torch.device) -> ParameterState:
    """Returns the state of a class in the table.

    Args:
        options: of its parameter group.
        device: of the parameters.
    """
    numbers, moments = _KNOWN_STATES[kind](options)
    # As torch's ``_get_scalar_dtype``: fused kernels count in float32 alone.
    fused = bool(options.get("fused"))
    wide = torch.get_default_dtype() == torch.float64 and not fused
    dtype = torch.float64 if wide else torch.float32
    on_device = fused or kind is torch.optim.ASGD  # others count on the host
    foreach = options.get("foreach") is not False and not fused  # None: on a GPU
    rounded = {
        k: torch.tensor(v, dtype=dtype, device="cpu").item() for k, v in numbers.items()
    }
    return ParameterState(
        rounded,
        moments,
        dict.fromkeys(numbers, (dtype, device if on_device else torch.device("cpu"))),
        # SGD with dampening: its first momentum is the gradient, undampened.
        makes_first_state=bool(options.get("dampening")),
        # SGD by foreach adds the momentum to the gradient in place.
        writes_gradients=foreach and bool(options.get("nesterov")),
    )


def declared_state(
    moments: Numbers, numbers: Numbers, device: torch.device
) -> ParameterState:
    """Returns the state of another class, as its caller declares it.

    A number given as a tensor is stored in one: on the host if it is given there,
    otherwise on the device of the parameters.
    """
    check_numbers(**moments, **numbers)
    tensors = {
        k: (x.dtype, x.device if x.device.type == "cpu" else device)
        for k, x in numbers.items()
        if isinstance(x, Tensor)
    }
    plain = plain_numbers(numbers)
    return ParameterState(
        plain,
        moments,
        tensors,
        makes_first_state=True,
        writes_gradients=True,
        is_declared=True,
    )


# One step


def run_step(
    make: Make,
    expected: ParameterState,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Mapping[str, Sequence[Tensor]],
    state: TorchState,
) -> Numbers:
    """Writes one step into params and moments; returns the numbers after it.

    The tensors are dense.

    Args:
        make: the class with its options of this step.
        expected: what the class stores of a parameter.
        state: has the count and the numbers before the step.

    Raises:
        ValueError: a class stores something else than its caller has declared.
    """
    flat = [_flat_view(p.detach()) for p in params]
    by_param = [
        {k: _flat_view(m[i]) for k, m in moments.items()} for i in range(len(flat))
    ]
    for p, g in zip(flat, grads, strict=True):
        p.grad = _flat_view(g.clone() if expected.writes_gradients else g)
    if state.count == 0 and expected.makes_first_state:
        optimizer = make(flat)
    else:
        # A class may make a state in its constructor, as Adagrad does: it is that of
        # empty tensors, and replaced by the one that is stored.
        optimizer = make([torch.empty(0, dtype=p.dtype, device=p.device) for p in flat])
        optimizer.param_groups[0]["params"] = flat
        optimizer.state = defaultdict(dict)
        numbers = _repeat_numbers(state.numbers, expected, len(flat))
        for i, p in enumerate(flat):
            own_numbers = {k: column[i] for k, column in numbers.items()}
            optimizer.state[p] = {**own_numbers, **by_param[i]}
    carried_before = _carried_values(optimizer) if expected.is_declared else {}
    optimizer.step()
    new_state: Any = optimizer.state
    if expected.is_declared:
        _check_carries_nothing(optimizer, carried_before)
        for p, param in zip(flat, params, strict=True):
            _check_declared(type(optimizer).__name__, expected, p, new_state[p])
            if not p.is_set_to(target := _flat_view(param.detach())):
                target.copy_(p)  # the class has put another tensor there: ``p.data = ``
    # Most classes write into the moments they are given; some put new ones there.
    for p, old_moments in zip(flat, by_param, strict=True):
        for name, m in old_moments.items():
            if new_state[p][name] is not m:
                m.copy_(new_state[p][name])
    return {name: new_state[flat[0]][name] for name in state.numbers}


def _carried_values(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Returns what an optimizer has beside parameters and their state, to compare."""
    group = optimizer.param_groups[0]
    values = {k: x for k, x in vars(optimizer).items() if k not in _PER_PARAMETER}
    values |= {f"param_groups[0][{k!r}]": x for k, x in group.items() if k != "params"}
    return {k: list(map(_fingerprint, tree.leaves(x))) for k, x in values.items()}


_PER_PARAMETER = {"param_groups", "state"}


def _fingerprint(x: Leaf) -> tuple[int, int] | str:
    """Returns what changes if a tensor is replaced or written into, or a value is."""
    return (id(x), x._version) if isinstance(x, Tensor) else repr(x)


def _check_carries_nothing(
    optimizer: torch.optim.Optimizer, carried_before: Mapping[str, list[Any]]
) -> None:
    """Raises ValueError where a step has left more than states of parameters.

    Args:
        carried_before: the `_carried_values` before the step.
    """
    after, params = _carried_values(optimizer), optimizer.param_groups[0]["params"]
    carried = [k for k, values in after.items() if carried_before.get(k) != values]
    carried += ["state of its own"] * (len(optimizer.state) > len(params))
    if carried:
        raise ValueError(
            f"{type(optimizer).__name__} carries {', '.join(carried)} from step to "
            "step, and of a class that is not torch's only what it keeps in "
            "state[parameter] is kept: write its equation as ff.Optimizer(init, update)"
        )


def _check_declared(
    name: str, expected: ParameterState, p: Tensor, state: Mapping[str, Any]
) -> None:
    """Raises ValueError where the state of a parameter is not as declared."""
    declared = dict.fromkeys(expected.moments, f"{p.dtype} for each element")
    declared |= dict.fromkeys(expected.numbers, "a number")
    declared |= {
        k: _describe_number(dtype, device)
        for k, (dtype, device) in expected.tensors.items()
    }
    actual = {k: _describe_value(x, p) for k, x in state.items() if x is not None}
    if actual != declared:
        raise ValueError(
            f"{name} keeps {actual} in state[parameter], and from_torch({name}, "
            f"elementwise=True, moments=..., numbers=...) was told {declared}: name "
            "what it keeps for each element as moments, what is one number as numbers. "
            "With other things, or other dtypes, it cannot run on parts"
        )


def _describe_value(x: Leaf, p: Tensor) -> str:
    """Describes the form in which a class stores a value of a parameter."""
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
    numbers: Numbers, expected: ParameterState, count: int
) -> dict[str, Sequence[float | Tensor]]:
    """Returns each number ``count`` times, in the form in which its class stores it.

    A class writes each of them by itself, so they are separate.
    """
    columns: dict[str, Sequence[float | Tensor]] = {
        k: [x] * count for k, x in numbers.items()
    }
    for k, (dtype, device) in expected.tensors.items():
        # Filled on the device: a copy from the host would wait for it.
        full = torch.full((count,), numbers[k], dtype=dtype, device=device)
        columns[k] = full.unbind()
    return columns


def plain_numbers(numbers: Numbers) -> Numbers:
    """Returns a state's numbers as plain ones; those in tensors are read."""
    return {k: x.item() if isinstance(x, Tensor) else x for k, x in numbers.items()}


@contextmanager
def plain_context() -> Iterator[None]:
    """Inside, tensors are plain ones of the host, whatever modes are on around."""
    with _torch.beneath_functorch(), _torch.beneath_all_modes(), torch.device("cpu"):
        yield
