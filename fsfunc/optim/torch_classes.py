"""States of torch's elementwise optimizers, from a table, and one step of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Options = Mapping[str, Any]
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """The state of one parameter.

    Args:
        numbers: by name, what is one number for all elements, before the first step.
        moments: by name, what every element of a moment is before the first step.
        dtype, device: of the tensors that the numbers are kept in.
        afresh: whether the class makes its first state itself, in its first step.
        writes_gradients: whether a step may write into the gradients.
    """

    numbers: Numbers
    moments: Mapping[str, float]
    dtype: torch.dtype
    device: torch.device
    afresh: bool
    writes_gradients: bool

    def start(self, name: str, p: Tensor) -> Tensor:
        """A moment of ``p`` before the first step."""
        return torch.full_like(p, self.moments[name])


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
        dtype,
        device if there else torch.device("cpu"),
        afresh=bool(o.get("dampening")),  # SGD: its first momentum is the gradient
        writes_gradients=foreach and bool(o.get("nesterov")),  # SGD adds the momentum
    )


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


def _filled(numbers: Numbers, kept: Kept, count: int) -> dict[str, Sequence[Tensor]]:
    """``count`` times each number as torch keeps it, to be written one by one.

    They are filled in, not copied: no device is waited for.
    """
    how: dict[str, Any] = {"dtype": kept.dtype, "device": kept.device}
    return {k: torch.full((count,), x, **how).unbind() for k, x in numbers.items()}


def as_numbers(found: dict[str, Any]) -> Numbers:
    """A state's numbers as plain ones, where they lie on the host."""
    return {k: x.item() if isinstance(x, Tensor) else x for k, x in found.items()}


@contextmanager
def at_rest() -> Iterator[None]:
    """Inside, plain tensors of the host, whatever is on around."""
    with _torch.beneath_functorch(), _torch.beneath_all_modes(), torch.device("cpu"):
        yield
