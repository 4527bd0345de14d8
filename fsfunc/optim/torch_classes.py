"""States of torch's elementwise optimizers, from a table, and one step of them.

Of a class that is not torch's the caller gives what the table has of the others; each
step is compared with that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.optim.schedules import check_numbers

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Options = Mapping[str, Any]
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Kept:
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
    rounded = {
        k: torch.tensor(v, dtype=dtype, device="cpu").item() for k, v in numbers.items()
    }
    return Kept(
        rounded,
        moments,
        dict.fromkeys(numbers, (dtype, device if there else torch.device("cpu"))),
        afresh=bool(o.get("dampening")),  # SGD: its first momentum is the gradient
        writes_gradients=foreach and bool(o.get("nesterov")),  # SGD adds the momentum
    )


def kept_as_told(moments: Numbers, numbers: Numbers, device: torch.device) -> Kept:
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
    plain = as_numbers(numbers)
    return Kept(plain, moments, tensors, afresh=True, writes_gradients=True, told=True)


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

    Raises:
        ValueError: a class keeps something else than its caller says.
    """
    flat = [_flat(p.detach()) for p in params]
    given = [{k: _flat(m[i]) for k, m in moments.items()} for i in range(len(flat))]
    for p, g in zip(flat, grads, strict=True):
        p.grad = _flat(g.clone() if kept.writes_gradients else g)
    if first and kept.afresh:
        optimizer = make(flat)
    else:
        optimizer = make([torch.empty(0, dtype=p.dtype, device=p.device) for p in flat])
        optimizer.param_groups[0]["params"] = flat
        optimizer.state = defaultdict(dict)
        counters = _filled(numbers, kept, len(flat))
        for i, p in enumerate(flat):
            mine = {k: x[i] for k, x in counters.items()}
            optimizer.state[p] = {**mine, **given[i]}
    before = _carried(optimizer) if kept.told else {}
    optimizer.step()
    state: Any = optimizer.state
    if kept.told:
        _check_carried(optimizer, before)
        for p, whole in zip(flat, params, strict=True):
            _check_kept(type(optimizer).__name__, kept, p, state[p])
            if not p.is_set_to(there := _flat(whole.detach())):
                there.copy_(p)  # what the class put in its place, as by ``p.data = ``
    for p, parts in zip(flat, given, strict=True):
        for name, m in parts.items():
            if state[p][name] is not m:
                m.copy_(state[p][name])
    return {name: state[flat[0]][name] for name in numbers}


def _carried(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values of an optimizer beside its parameters and their state, as words."""
    group = optimizer.param_groups[0]
    held = {k: x for k, x in vars(optimizer).items() if k not in _OF_PARAMS}
    held |= {f"param_groups[0][{k!r}]": x for k, x in group.items() if k != "params"}
    return {k: list(map(_said, tree.leaves(x))) for k, x in held.items()}


_OF_PARAMS = {"param_groups", "state"}


def _said(x: Any) -> Any:
    return (id(x), x._version) if isinstance(x, Tensor) else repr(x)


def _check_carried(optimizer: torch.optim.Optimizer, before: Mapping[str, Any]) -> None:
    """Raise ValueError where a step has left more than states of parameters."""
    after, params = _carried(optimizer), optimizer.param_groups[0]["params"]
    found = [k for k, words in after.items() if before.get(k) != words]
    found += ["state of its own"] * (len(optimizer.state) > len(params))
    if found:
        raise ValueError(
            f"{type(optimizer).__name__} carries {', '.join(found)} from step to step, "
            "and of a class that is not torch's only what it keeps in state[parameter] "
            "is kept: write its equation as ff.Optimizer(init, update)"
        )


def _check_kept(name: str, kept: Kept, p: Tensor, state: Mapping[str, Any]) -> None:
    """Raise ValueError where the state of a parameter is not as its caller says."""
    said = dict.fromkeys(kept.moments, f"{p.dtype} for each element")
    said |= dict.fromkeys(kept.numbers, "a number")
    said |= {k: _number(*how) for k, how in kept.tensors.items()}
    found = {k: _form(x, p) for k, x in state.items() if x is not None}
    if found != said:
        raise ValueError(
            f"{name} keeps {found} in state[parameter], and from_torch({name}, "
            f"elementwise=True, moments=..., numbers=...) was told {said}: name what "
            "it keeps for each element as moments, what is one number as numbers. With "
            "other things, or other dtypes, it cannot run on parts"
        )


def _form(x: Any, p: Tensor) -> str:
    """The form in which a class keeps a value of a parameter, in words."""
    if not isinstance(x, Tensor):
        return "a number" if isinstance(x, (bool, int, float)) else type(x).__name__
    if not x.ndim:
        return _number(x.dtype, _torch.device_of(x))
    return f"{x.dtype} for each element" if x.shape == p.shape else str(x.shape)


def _number(dtype: torch.dtype, device: torch.device) -> str:
    return f"a number in {dtype} on {device}"


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 1 else x.view(-1)


def _filled(numbers: Numbers, kept: Kept, count: int) -> dict[str, Sequence[Any]]:
    """``count`` times each number as its class keeps it, to be written one by one.

    They are filled in, not copied: no device is waited for.
    """
    made: dict[str, Sequence[Any]] = {k: [x] * count for k, x in numbers.items()}
    for k, (dtype, device) in kept.tensors.items():
        full = torch.full((count,), numbers[k], dtype=dtype, device=device)
        made[k] = full.unbind()
    return made


def as_numbers(found: dict[str, Any]) -> Numbers:
    """A state's numbers as plain ones, where they lie on the host."""
    return {k: x.item() if isinstance(x, Tensor) else x for k, x in found.items()}


@contextmanager
def at_rest() -> Iterator[None]:
    """Inside, plain tensors of the host, whatever is on around."""
    with _torch.beneath_functorch(), _torch.beneath_all_modes(), torch.device("cpu"):
        yield
