"""What an optimizer of torch's kind keeps, found out by trying it on a few numbers.

Such a class says neither what it keeps for a parameter nor what that is before the
first step, nor whether it treats each element by itself. All three show on twelve
numbers: what it keeps, and where each part starts, is noted as it is stored; and eight
steps of the parts must be the parts of eight steps of the whole, in whatever shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch

__all__ = ["Kept", "at_rest", "probe", "run_step"]

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Numbers = dict[str, Any]

_REAL = torch.zeros(1)
_LENGTH, _CUT, _STEPS = 12, 5, 8  # RAdam's sixth step is of another kind than its first
_SHAPES = (3, 4), (1, 3, 2, 2)  # of those twelve: a matrix, and filters
# Of vars(optimizer): looked at one by one, and torch's note of a check it has made.
_TOLD = {"state", "param_groups", "_need_device_dtype_check_for_fused"}
_PARAMETER = object()  # a moment that starts as the parameter does


@dataclass(frozen=True)
class Kept:
    """What a class keeps for a parameter.

    Args:
        numbers: by name, what is one number for all elements, before the first step.
        dtypes: of those numbers that torch keeps in a tensor.
        moments: by name, what every element of a moment is before the first step.
        own: the moments with a dtype of their own, not that of the parameter.
        afresh: whether a first step differs from others in more than these.
        writes_gradients: whether a step writes into the gradients.
    """

    numbers: Numbers = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    moments: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, torch.dtype] = field(default_factory=dict)
    afresh: bool = False
    writes_gradients: bool = False

    def start(self, name: str, p: Tensor) -> Tensor:
        """A moment of ``p`` before the first step."""
        value = self.moments[name]
        if value is _PARAMETER:
            return p.detach().clone()
        return torch.full_like(p, value, dtype=self.own.get(name))


def run_step(
    make: Make,
    kept: Kept,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Mapping[str, Sequence[Tensor]],
    numbers: Numbers,
    *,
    first: bool,
    devices: Mapping[str, torch.device] | None = None,
) -> dict[str, Any]:
    """Write one step into params and moments: what the class now keeps in numbers.

    The tensors are dense; ``devices`` tells where a number's tensor lies.
    """
    optimizer = make([torch.empty(0, dtype=p.dtype, device=p.device) for p in params])
    flat = [_flat(p.detach()) for p in params]
    given: list[dict[str, Tensor]] = []
    counters = _filled(numbers, kept.dtypes, devices or {}, len(flat))
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


def _filled(
    numbers: Numbers,
    dtypes: Mapping[str, torch.dtype],
    devices: Mapping[str, torch.device],
    count: int,
) -> dict[str, Sequence[Any]]:
    """``count`` times each number as torch keeps it, to be written one by one.

    They are filled in, not copied: no device is waited for.
    """
    made: dict[str, Sequence[Any]] = {}
    for name, value in numbers.items():
        if name in dtypes:
            how: Any = {"dtype": dtypes[name], "device": devices.get(name, "cpu")}
            made[name] = torch.full((count,), value, **how).unbind()
        else:
            made[name] = [value] * count
    return made


@contextmanager
def at_rest() -> Iterator[None]:
    """Inside, plain tensors of the host, whatever is on around."""
    with _torch.beneath_functorch(), _torch.beneath_modes(_REAL), torch.device("cpu"):
        yield


def probe(make: Make, name: str) -> Kept:
    """What the class that ``make`` makes optimizers of keeps.

    Raises:
        ValueError: it cannot step a part of a parameter as it would the whole.
    """
    with at_rest(), torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)
        draw = lambda dtype: torch.randn(  # noqa: E731
            _LENGTH, generator=generator, dtype=dtype
        )
        single, double = torch.float32, torch.float64
        try:
            kept = _noted(make, *((draw(t), draw(t)) for t in (single, double)))
            start, grads = draw(double), [draw(double) for _ in range(_STEPS)]
            return _checked(make, kept, start, grads)
        except _Refused as reason:
            raise ValueError(
                f"{name} cannot run on shards: {reason}; take ff.sharded_adam, ff.sgd "
                "or an elementwise class, such as torch.optim.RMSprop; for norms of "
                "leaves ff.lamb, ff.lars, or an optimizer made with ff.leaf_norms"
            ) from reason.__cause__


class _Refused(Exception):
    pass


class _Notes(dict):
    """A parameter's state that remembers what was first stored under each name."""

    def __init__(self, given: Mapping[str, Any]):
        self.first: dict[str, Any] = {}
        super().__init__()
        for name, value in given.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        copy = value.clone() if isinstance(value, Tensor) else value
        self.first.setdefault(name, copy)
        super().__setitem__(name, value)


def _noted(make: Make, *pairs: tuple[Tensor, Tensor]) -> Kept:
    """What two first steps store, in single and in double precision."""
    seen, written = [], False
    for p, g in pairs:
        q, before = p.clone(), g.clone()
        q.grad = g
        optimizer = make([q])
        optimizer.state[q] = notes = _Notes(optimizer.state[q])
        try:
            optimizer.step()
        except Exception as error:
            raise _Refused(f"its step fails on a vector ({error})") from error
        seen.append((p, notes.first, dict(optimizer.state[q])))
        written |= not torch.equal(before, g)
    numbers, dtypes, moments, own = {}, {}, {}, {}
    (p, first, after), (its_p, its_first, its_after) = seen
    for name, value in after.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape == () or isinstance(value, (bool, int, float)):
            numbers[name] = first.get(name, 0)
            if isinstance(value, Tensor):
                dtypes[name] = value.dtype
                numbers[name] = torch.as_tensor(numbers[name]).item()
        elif isinstance(value, Tensor) and shape == (_LENGTH,):
            moments[name] = _value(first.get(name), p, its_first.get(name), its_p)
            if its_after[name].dtype != its_p.dtype:
                own[name] = value.dtype
        elif value is not None:
            what = f"a tensor of shape {shape}" if shape else type(value).__name__
            raise _Refused(
                f"of a parameter of shape ({_LENGTH},) it keeps {name!r}, {what}, "
                "which is neither one number nor one for each element"
            )
    return Kept(numbers, dtypes, moments, own, writes_gradients=written)


def _value(first: Any, p: Tensor, its_first: Any, its_p: Tensor) -> Any:
    """What every element of a moment started as; 0 where that cannot be told."""
    if not isinstance(first, Tensor) or not isinstance(its_first, Tensor):
        return 0
    if torch.equal(first, p) and torch.equal(its_first, its_p):
        return _PARAMETER
    value = its_first[0]
    alike = torch.equal(its_first, value.expand(_LENGTH))
    same = torch.equal(first, value.to(first.dtype).expand(_LENGTH))
    return value.item() if alike and same else 0


def _checked(make: Make, kept: Kept, start: Tensor, grads: list[Tensor]) -> Kept:
    """``kept``, once steps of the parts are seen to be parts of the steps."""
    p, state = _steps_itself(make, start, grads)
    last = as_numbers({name: state[name] for name in kept.numbers})
    kept = _carried_on(make, kept, start, grads, (p, last))
    for part in (slice(_CUT), slice(_CUT, None)):
        found, numbers = _steps(make, kept, start, grads, part)
        # Not to the bit: some kernels treat the last few elements otherwise.
        if not torch.allclose(found, p[part], rtol=1e-10, atol=1e-10, equal_nan=True):
            raise _Refused(
                "it is not elementwise: a step of a part of a parameter is not that "
                "part of the step"
            )
        for name, value in numbers.items():
            if value != last[name]:
                raise _Refused(
                    f"what it keeps as {name!r} depends on all elements of a parameter"
                )
    for shape in _SHAPES:
        found, its_state = _steps_shaped(make, start, grads, shape)
        same = torch.equal(found.view(-1), p) and its_state.keys() == state.keys()
        if not same or any(its_state[name] != last[name] for name in last):
            raise _Refused(
                f"a parameter of shape {shape} is stepped otherwise than its elements "
                "in a row, which is how parts are stepped (a rule that depends on "
                "p.ndim or p.shape is to be one optimizer for each kind of leaf, by "
                "ff.partition)"
            )
    return kept


def _carried_on(
    make: Make,
    kept: Kept,
    start: Tensor,
    grads: list[Tensor],
    expected: tuple[Tensor, Numbers],
) -> Kept:
    """``kept`` with what makes steps from it those that the class makes itself."""
    # A number first seen after it was counted up began at 0.
    zeros = {name: type(value)() for name, value in kept.numbers.items()}
    first = kept.numbers
    for numbers, afresh in ((first, False), (zeros, False), (first, True)):
        kept = replace(kept, numbers=numbers, afresh=afresh)
        found, last = _steps(make, kept, start, grads, slice(None))
        if torch.equal(found, expected[0]) and last == expected[1]:
            return kept
    raise _Refused(
        "from step to step it carries more than it keeps in state[parameter], or it "
        "draws random numbers"
    )


def _steps_shaped(
    make: Make, start: Tensor, grads: list[Tensor], shape: tuple[int, ...]
) -> tuple[Tensor, Mapping[str, Any]]:
    try:
        return _steps_itself(make, start.view(shape), [g.view(shape) for g in grads])
    except _Refused:
        raise
    except Exception as error:
        raise _Refused(
            f"its step fails on a parameter of shape {shape} ({error})"
        ) from error


def _steps_itself(
    make: Make, start: Tensor, grads: list[Tensor]
) -> tuple[Tensor, Mapping[str, Any]]:
    """The parameter after the class's own steps, and what it keeps for it then."""
    p = start.clone()
    optimizer = make([p])
    before = _outside(optimizer, p)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
        after = _outside(optimizer, p)
        changed = [k for k in {**before, **after} if before.get(k) != after.get(k)]
        if changed:
            raise _Refused(
                f"it carries {', '.join(changed)} from step to step, which is more "
                "than it keeps in state[parameter]"
            )
    return p, optimizer.state[p]


def _outside(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, str]:
    """What an optimizer holds beside what it keeps for ``p``, as text."""

    def text(x: Any) -> str:
        if x is p:
            return "p"
        if isinstance(x, Tensor):
            return f"{x.dtype} {x.tolist()}"
        if isinstance(x, Mapping):
            return str([(text(k), text(v)) for k, v in x.items()])
        if isinstance(x, (list, tuple)):
            return str([text(v) for v in x])
        plain = isinstance(x, (bool, int, float, complex, str))
        return repr(x) if plain else str(id(x))

    held = {k: v for k, v in vars(optimizer).items() if k not in _TOLD}
    for i, group in enumerate(optimizer.param_groups):
        held |= {
            f"param_groups[{i}][{k!r}]": v for k, v in group.items() if k != "params"
        }
    held |= {f"state[{k!r}]": v for k, v in optimizer.state.items() if k is not p}
    return {k if "[" in k else repr(k): text(v) for k, v in held.items()}


def _steps(
    make: Make, kept: Kept, start: Tensor, grads: list[Tensor], part: slice
) -> tuple[Tensor, Numbers]:
    """A part of the parameter after the steps, and the numbers then."""
    p = start[part].clone()
    moments = {name: [kept.start(name, p)] for name in kept.moments}
    numbers = kept.numbers
    for t, g in enumerate(grads):
        found = run_step(
            make, kept, [p], [g[part].clone()], moments, numbers, first=t == 0
        )
        numbers = as_numbers(found)
    return p, numbers


def as_numbers(found: dict[str, Any]) -> Numbers:
    """What a step keeps as numbers, where these lie on the host."""
    return {k: x.item() if isinstance(x, Tensor) else x for k, x in found.items()}
