"""States of torch's elementwise optimizers, and one step of them.

A table tells it of torch's own classes. Of another class, which its caller calls
elementwise, one step on two numbers shows the names and the first values.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Options = Mapping[str, Any]
Numbers = dict[str, Any]

_PARAMETER = object()  # a moment that starts as the parameter does


@dataclass(frozen=True)
class Kept:
    """The state of one parameter.

    Args:
        numbers: by name, what is one number for all elements, before the first step.
        moments: by name, what every element of a moment is before the first step.
        tensors: the numbers that are kept in a tensor: its dtype and device.
        unlike: the moments in another dtype than the parameter.
        afresh: whether the class makes its first state itself, in its first step.
        writes_gradients: whether a step may write into the gradients.
    """

    numbers: Numbers
    moments: Mapping[str, Any]
    tensors: Mapping[str, tuple[torch.dtype, torch.device]] = field(
        default_factory=dict
    )
    unlike: Mapping[str, torch.dtype] = field(default_factory=dict)
    afresh: bool = False
    writes_gradients: bool = False

    def start(self, name: str, p: Tensor) -> Tensor:
        """A moment of ``p`` before the first step."""
        value = self.moments[name]
        if value is _PARAMETER:
            return p.detach().clone()
        return torch.full_like(p, value)


# torch's own: numbers and moments before the first step, by the options


def _adam(o: Options) -> tuple[Numbers, Numbers]:
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(o["amsgrad"])
    return {"step": 0.0}, dict.fromkeys(names, 0.0)


def _rmsprop(o: Options) -> tuple[Numbers, Numbers]:
    names = ["square_avg"] + ["momentum_buffer"] * (o["momentum"] > 0)
    return {"step": 0.0}, dict.fromkeys(names + ["grad_avg"] * bool(o["centered"]), 0.0)


def _zeros(*moments: str, **numbers: float) -> Callable[[Options], Any]:
    return lambda o: ({"step": 0.0, **numbers}, dict.fromkeys(moments, 0.0))


_TABLE: dict[type, Callable[[Options], tuple[Numbers, Numbers]]] = {
    torch.optim.ASGD: lambda o: (
        {"step": 0.0, "eta": float(o["lr"]), "mu": 1.0},
        {"ax": 0.0},
    ),
    torch.optim.Adadelta: _zeros("square_avg", "acc_delta"),
    torch.optim.Adagrad: lambda o: (
        {"step": 0.0},
        {"sum": float(o["initial_accumulator_value"])},
    ),
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adamax: _zeros("exp_avg", "exp_inf"),
    torch.optim.NAdam: _zeros("exp_avg", "exp_avg_sq", mu_product=1.0),
    torch.optim.RAdam: _zeros("exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Rprop: lambda o: (
        {"step": 0.0},
        {"prev": 0.0, "step_size": float(o["lr"])},
    ),
    torch.optim.SGD: lambda o: ({}, {"momentum_buffer": 0.0} if o["momentum"] else {}),
}


def is_elementwise(kind: type) -> bool:
    """True for a class in the table of torch's own."""
    return kind in _TABLE


def kept_by_torch(kind: type, o: Options, device: torch.device) -> Kept:
    """The state of a class in the table.

    Args:
        o: the options of its parameter group.
        device: of the parameters.
    """
    numbers, moments = _TABLE[kind](o)
    fused = bool(o.get("fused"))
    wide = torch.get_default_dtype() == torch.float64 and not fused
    dtype = torch.float64 if wide else torch.float32
    there = fused or kind is torch.optim.ASGD
    foreach = o.get("foreach") is not False and not fused  # None: on a GPU
    return Kept(
        {k: torch.tensor(v, dtype=dtype).item() for k, v in numbers.items()},
        moments,
        dict.fromkeys(numbers, (dtype, device if there else torch.device("cpu"))),
        afresh=bool(o.get("dampening")),  # SGD: its first momentum is the gradient
        writes_gradients=foreach and bool(o.get("nesterov")),  # SGD adds the momentum
    )


# Another class, observed in one step


class _Notes(UserDict):
    """A parameter's state that remembers what was first stored under each name."""

    def __init__(self, given: Mapping[str, Any]):
        self.first: dict[str, Any] = {}
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        copy = value.clone() if isinstance(value, Tensor) else value
        self.first.setdefault(name, copy)
        super().__setitem__(name, value)


def observed(make: Make, name: str, dtype: torch.dtype, device: torch.device) -> Kept:
    """The state of a class that treats each element by itself, from one step.

    Raises:
        ValueError: it keeps something else than numbers and values for each element,
            or keeps them elsewhere.
    """
    with at_rest(), torch.random.fork_rng(devices=[]):
        start = torch.tensor([0.5, -1.0], dtype=dtype, device=device)
        p = start.clone()
        p.grad = torch.tensor([0.25, 0.5], dtype=dtype, device=device)
        optimizer = make([p])
        given = dict(optimizer.state[p])  # by a class that fills it when it is made
        optimizer.state[p] = notes = _Notes(given)
        before = _carried(optimizer)
        optimizer.step()
    carried = [k for k, v in _carried(optimizer).items() if before.get(k) != v]
    if carried or len(optimizer.state) > 1:
        raise ValueError(
            f"{name} carries {', '.join(carried) or 'state of its own'} from step to "
            "step, which is more than it keeps in state[parameter]; only that is kept"
        )
    numbers: Numbers = {}
    moments, tensors, unlike = {}, {}, {}
    for key, value in notes.items():
        if isinstance(value, (bool, int, float)):
            numbers[key] = notes.first[key] if given else type(value)()
        elif isinstance(value, Tensor) and not value.ndim:
            first = notes.first[key] if given else torch.zeros_like(value)
            numbers[key] = first.item()
            tensors[key] = value.dtype, value.device
        elif isinstance(value, Tensor) and value.shape == p.shape:
            if value.dtype != dtype:
                unlike[key] = value.dtype
            moments[key] = _value(notes.first[key], start)
        elif value is not None:
            shape = tuple(value.shape) if isinstance(value, Tensor) else None
            what = f"a tensor of shape {shape}" if shape else type(value).__name__
            raise ValueError(
                f"{name} is not elementwise: of a parameter of shape (2,) it keeps "
                f"{key!r}, {what}, which is neither one number nor one for each element"
            )
    return Kept(
        numbers, moments, tensors, unlike, afresh=not given, writes_gradients=True
    )


def _carried(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The plain values that an optimizer holds outside of its parameter's state."""
    group = optimizer.param_groups[0]
    held = {**vars(optimizer), **{f"param_groups[0][{k!r}]": group[k] for k in group}}
    plain = (bool, int, float, str)
    return {k: v for k, v in held.items() if isinstance(v, plain) and k[0] != "_"}


def _value(first: Tensor, p: Tensor) -> Any:
    """The first value of every element of a moment; 0 where they differ."""
    if torch.equal(first, p):
        return _PARAMETER
    return first[0].item() if first[0] == first[1] else 0.0


# One step


def run_step(
    make: Make,
    kept: Kept,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Mapping[str, Sequence[Tensor]],
    numbers: Numbers,
    *,
    first: bool,
) -> dict[str, Any]:
    """Writes one step into params and moments; returns what is now kept in numbers.

    The tensors are dense.
    """
    optimizer = make([torch.empty(0, dtype=p.dtype, device=p.device) for p in params])
    flat = [_flat(p.detach()) for p in params]
    given: list[dict[str, Tensor]] = []
    counters = _filled(numbers, kept, len(flat))
    state: Any = defaultdict(dict)
    for i, (p, g) in enumerate(zip(flat, grads, strict=True)):
        p.grad = _flat(g.clone() if kept.writes_gradients else g)
        given.append({k: _flat(m[i]) for k, m in moments.items()})
        if not (first and kept.afresh):
            state[p] = {**{k: x[i] for k, x in counters.items()}, **given[-1]}
    optimizer.param_groups[0]["params"] = flat
    optimizer.state = state
    optimizer.step()
    for p, parts in zip(flat, given, strict=True):
        for name, m in parts.items():
            if state[p][name] is not m:
                m.copy_(state[p][name])
    return {name: state[flat[0]][name] for name in numbers}


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 1 else x.view(-1)


def _filled(numbers: Numbers, kept: Kept, count: int) -> dict[str, Sequence[Any]]:
    """``count`` times each number as torch keeps it, to be written one by one.

    They are filled in, not copied: no device is waited for.
    """
    made: dict[str, Sequence[Any]] = {}
    for name, value in numbers.items():
        if name in kept.tensors:
            dtype, device = kept.tensors[name]
            full = torch.full((count,), value, dtype=dtype, device=device)
            made[name] = full.unbind()
        else:
            made[name] = [value] * count
    return made


def as_numbers(found: dict[str, Any]) -> Numbers:
    """A state's numbers as plain ones, where they lie on the host."""
    return {k: x.item() if isinstance(x, Tensor) else x for k, x in found.items()}


@contextmanager
def at_rest() -> Iterator[None]:
    """Inside, plain tensors of the host, whatever is on around."""
    with _torch.beneath_functorch(), _torch.beneath_all_modes(), torch.device("cpu"):
        yield
