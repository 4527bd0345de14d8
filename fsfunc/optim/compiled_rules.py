"""The updates of elementwise optimizers as compiled kernels, under ``jit``.

One pass over memory where the equation alone takes one for each operation. Numbers that
change from step to step (rates, corrections of a bias) and sizes are no part of what is
compiled: a rule is compiled once for each set of dtypes, with a decay and without.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.core.frames import frame
from fsfunc.optim.matching import Decay, Matched
from fsfunc.optim.places import some_offloaded

Formula = Callable[..., Any]


def compiled_writer(rule: Any, count: Any, matched: Matched) -> Any:
    """The compiled kernel that writes a rule's step; None where the plain one is run.

    That is outside of ``jit``, while a step is recorded, where something is offloaded,
    and where the rule has a fused kernel of torch's, which is as fast.
    """
    compiler = frame().compiler
    if compiler is None or rule.kernel is not None and not compiler.whole:
        return None  # a fused kernel is no node of a graph
    if not (matched.active if compiler.whole else _is_plain(matched)):
        return None
    if (numbers := _Numbers.of(rule, count, compiler.whole)) is None:
        return None
    made = partial(_writing, rule.formula, len(numbers.values))
    run = compiler.update(rule, made, f"the update of {rule.name}")

    def write(*columns: Sequence[Tensor], weight_decay: float) -> None:
        for row in zip(*columns, strict=True):
            if row[0].numel() > 1 and _are_dense([row[0], *row[2:]]):
                flat = list(map(_flat, row))
                run(numbers.on(row[0].device, weight_decay), *flat)
            else:
                u, *new = rule.step(count)(*row, weight_decay)
                for x, y in zip((row[0], *row[2:]), (row[0] + u, *new), strict=True):
                    x.copy_(y)

    return write


def compiled_direction(rule: Any, count: Any, matched: Matched) -> Any:
    """``step(param, grad, *moments, decay) -> [update]``, compiled; None as above."""
    if (compiler := frame().compiler) is None or not _is_plain(matched):
        return None
    if (numbers := _Numbers.of(rule, count)) is None:
        return None
    made = partial(_directing, rule.formula, len(numbers.values))
    run = compiler.update(rule, made, f"the direction of {rule.name}")

    def step(p: Tensor, *rest: Any) -> list[Tensor]:
        *others, decay = rest
        if p.numel() < 2:
            return rule.step(count)(p, *rest)[:1]
        shaped = list(map(_flat, (p, *others)))
        if isinstance(decay, Tensor):
            at = (*numbers.on(p.device, 0.0), decay.reshape(-1))
        else:
            at = numbers.on(p.device, decay)
        return [run(at, *shaped).view(p.shape)]

    return step


def _is_plain(matched: Matched) -> bool:
    """True if real tensors are updated, all on the device."""
    if frame().tracer is not None or _torch.fake_active() or not matched.active:
        return False
    return not some_offloaded(*(b.tensors for b in matched.buffers))


def _are_dense(tensors: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, tensors))


def _flat(x: Tensor) -> Tensor:
    """``x`` as all that is given look alike: of one dim, and a view of nothing."""
    return x.contiguous().view(-1).detach()


class _Numbers:
    """The numbers of one step, as tensors: no other number is compiled anew."""

    def __init__(self, values: Sequence[Any], plain: bool = False):
        self.values, self.plain = values, plain
        self.made: dict[Any, tuple[Tensor, ...]] = {}

    @classmethod
    def of(cls, rule: Any, count: Any, whole: bool = False) -> _Numbers | None:
        """Those of a rule; None where one is a choice, not a number.

        ``whole``: in a step that is one graph they stay what they are, choices too.
        """
        values = rule.numbers(count)
        known = all(type(x) in (int, float) or isinstance(x, Tensor) for x in values)
        return cls(values, whole) if known or whole else None

    def on(self, device: torch.device, decay: float) -> Sequence[Any]:
        """They and the decay, if any, on a device: each a tensor without a dim."""
        if self.plain:
            return (*self.values, decay) if decay else self.values
        if (device, decay) not in self.made:
            values = (*self.values, decay) if decay else self.values
            how: Any = {"dtype": torch.float64, "device": device}
            found = [torch.as_tensor(x, **how) for x in values]
            self.made[device, decay] = torch.stack(found).unbind()
        return self.made[device, decay]


def _stepped(formula: Formula, count: int, numbers: Any, row: Any) -> Any:
    """(update, *moments) in the widest dtype of parameter and moments."""
    decay: Decay = numbers[count] if len(numbers) > count else 0.0
    dtype = row[0].dtype
    for m in row[2:]:
        dtype = torch.promote_types(dtype, m.dtype)
    return formula(*numbers[:count])(*(x.to(dtype) for x in row), decay)


def _writing(formula: Formula, count: int) -> Callable[..., None]:
    def update(numbers: Any, p: Tensor, g: Tensor, *moments: Tensor) -> None:
        u, *new = _stepped(formula, count, numbers, (p, g, *moments))
        p.add_(u())
        for m, x in zip(moments, new, strict=True):
            m.copy_(x)

    return _apart(update)


def _directing(formula: Formula, count: int) -> Callable[..., Tensor]:
    def update(numbers: Any, p: Tensor, g: Tensor, *moments: Tensor) -> Tensor:
        return _stepped(formula, count, numbers, (p, g, *moments))[0]()

    return _apart(update)


def _apart(fn: Any) -> Any:
    """``fn`` with a code of its own: what is compiled of a code is limited."""
    code = fn.__code__.replace()
    return types.FunctionType(code, fn.__globals__, closure=fn.__closure__)
