"""Optimizers that treat each element by itself, made of one equation.

A rule is the equation of a paper, by operations that differentiate. A codec says how
its moments are stored, and a fused kernel may do the same step in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fsfunc.optim.block_codes import CHUNK
from fsfunc.optim.compiled_rules import compiled_writer
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    chosen,
    computing_device,
    map_flat,
    warn_narrow_moments,
    zeros_like,
)
from fsfunc.optim.matching import Matched, Rule, unlike
from fsfunc.optim.norms import all_finite, holds
from fsfunc.optim.optimizer import Optimizer, Phases, apply_updates, by_phases
from fsfunc.optim.places import brought_with
from fsfunc.optim.schedules import check_params_given
from fsfunc.runtime.memory_spaces import any_offloaded
from fsfunc.sharded.leaf import is_sharded

Kernel = Callable[..., None]
# (param, grad, *moments, decay) -> (update, *moments), where update() is a tensor
Equation = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class ElementRule:
    """The equation of an optimizer, of one element.

    Args:
        name: what errors call it.
        state: a named tuple of a count, and of a tree like the parameters for each
            moment.
        moments: the number of moments; what the state has beyond them is None.
        numbers: ``numbers(count)``: what changes from step to step, such as the rate.
        formula: ``formula(*numbers)(param, grad, *moments, decay) -> (update,
            *moments)``, of tensors of one dtype; ``update()`` is what the parameter
            gains, and ``decay`` a number, or a tensor where it differs within a flat
            buffer.
        kernel: ``kernel(count)(params, grads, *moments, weight_decay=)`` writes the
            same step into lists of dense tensors of one dtype.
        weight_decay, mask: the decay of a leaf.
        memory: of moments that gain (1 - memory) of what is new, their decay: ``init``
            warns where they lie in too few bits for that.
    """

    name: str
    state: Callable[..., Any]
    moments: int
    numbers: Callable[[Any], tuple[Any, ...]]
    formula: Callable[..., Equation]
    kernel: Callable[[Any], Kernel] | None = None
    weight_decay: float = 0.0
    mask: Mask | None = None
    memory: float = 0.0

    def equation(self, count: Any) -> Equation:
        """The formula of one step."""
        return self.formula(*self.numbers(count))

    def after(self, count: Any, moments: Sequence[Tree], *more: Any) -> Any:
        """The state of these moments."""
        return self.state(count, *(moments or (None,)), *more)

    def matched(self, grads: Tree, params: Tree, moments: Sequence[Tree]) -> Matched:
        """The trees of an update, which may have no ``params``."""
        if self.weight_decay:
            check_params_given(params, self.name)
        return Matched.of(grads if params is None else params, grads, *moments)

    def decays(self, matched: Matched) -> list[float]:
        return matched.decays(self.weight_decay, self.mask)

    def step(self, count: Any) -> Rule:
        """The equation in the widest dtype of parameter and moments."""
        equation = self.equation(count)

        def step(p: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
            *moments, decay = rest
            dtype = p.dtype
            for m in moments:
                dtype = torch.promote_types(dtype, m.dtype)
            u, *new = equation(*(x.to(dtype) for x in (p, g, *moments)), decay)
            return [u(), *(x.to(m.dtype) for x, m in zip(new, moments, strict=True))]

        return step

    def writer(self, count: Any) -> Kernel:
        """The fused kernel, or one that writes what the equation gives."""
        if self.kernel is not None:
            return self.kernel(count)
        equation = self.equation(count)

        def write(*columns: Sequence[Tensor], weight_decay: float) -> None:
            for row in zip(*columns, strict=True):
                for p, g, *moments in chunks(row):
                    u, *new = equation(p, g, *moments, weight_decay)
                    p.add_(u())
                    for m, x in zip(moments, new, strict=True):
                        m.copy_(x)

        return write


def chunks(row: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Tensors of one shape in pieces that stay in a CPU's cache."""
    first = row[0]
    if first.numel() <= CHUNK or first.device.type != "cpu":
        return iter([row])
    if not all(x.is_contiguous() for x in row):
        return iter([row])
    return zip(*(x.view(-1).split(CHUNK) for x in row), strict=True)


class Codec:
    """Storage of moments: here as they are, in a dtype of their own if given."""

    elementwise = compiles = True
    state: Any = None  # in place of a rule's

    def __init__(self, dtype: torch.dtype | None = None):
        self.dtype = dtype

    def init(self, rule: ElementRule, params: Tree) -> Any:
        if rule.memory and self.state is None:  # moments without a scale
            warn_narrow_moments(rule.name, rule.memory, params, self.dtype)
        moments = [zeros_like(params, self.dtype) for _ in range(rule.moments)]
        return rule.after(0, moments)

    def phases(
        self, rule: ElementRule, grads: Tree, state: Any, params: Tree, adds: bool
    ) -> Phases:
        kind = self.state or rule.state
        if type(state) is not kind:
            raise unlike(rule.name.split(" ")[0], state, kind)
        count, moments = state[0], state[1 : 1 + rule.moments]
        matched = rule.matched(grads, params, moments)
        decays = rule.decays(matched)
        if adds and not matched.differentiated:
            write = compiled_writer(rule, count, matched) if self.compiles else None
            kernel = write or rule.writer(count)
            yield
            result, *new = fused(matched, kernel, decays, cast=write is None)
        else:
            result, *new = matched.composed(rule.step(count), decays)
            yield
            result = apply_updates(params, result) if adds else result
        return result, rule.after(count + 1, new)


def elementwise(rule: ElementRule, codec: Codec) -> Optimizer:
    """The optimizer of an equation, whose moments are stored by a codec."""
    init, phases = partial(codec.init, rule), partial(codec.phases, rule)
    return by_phases(init, phases, elementwise=codec.elementwise)


_LARGEST, _INTERVAL = 2.0**16, 2000
_LIMIT = torch.finfo(torch.float16).max


class Scaled(Codec):
    """Moments kept in float16, times a scale that ranks share.

    Moments that would overflow on one rank are set to 0 on all, after the step, and the
    scale is halved; after 2000 good steps it doubles again, up to 2^16.

    Args:
        state: as a rule's, with the scale and the steps since it last changed behind.

    Raises:
        RuntimeError: moments overflow at a scale of 1; on every rank, the state as it
            was.

    Cost: the equation once more, one pmax of one number over the mesh, and one wait for
    it.

    Source: FairScale 0.4.13, ``Adam(precision=Precision.PURE_FP16)``.
    """

    elementwise = compiles = False  # one scale for all

    def __init__(self, state: Callable[..., Any]):
        super().__init__(torch.float16)
        self.state = state

    def init(self, rule: ElementRule, params: Tree) -> Any:
        return self.state(*super().init(rule, params), _LARGEST, 0)

    def phases(
        self, rule: ElementRule, grads: Tree, state: Any, params: Tree, adds: bool
    ) -> Phases:
        matched = rule.matched(grads, params, state[1 : 1 + rule.moments])
        scaled, scale, lost = self._chosen(rule, matched, state)
        step = super().phases(scaled, grads, state, params, adds)
        result, (count, *moments) = yield from step
        if not lost:
            good = 0 if scale != state.scale else state.good_steps + 1
            return result, self.state(count, *moments, scale, good)
        if any(_resting(matched)):  # what has no gradient stands for what it did
            moments = [_halved(matched, m) for m in moments]
        return result, self.state(count, *moments, scale, 0)

    def _chosen(
        self, rule: ElementRule, matched: Matched, state: Any
    ) -> tuple[ElementRule, float, bool]:
        """The step that all ranks agree on, its scale, and whether moments are lost."""
        largest, scale = _largest(rule, matched, state), state.scale
        more = state.good_steps + 1 >= _INTERVAL and scale < _LARGEST
        more = more and not any(_resting(matched))
        if more and _fit(matched, largest, scale * 2):
            return _scaled(rule, state.scale, scale * 2), scale * 2, False
        if _fit(matched, largest, scale):
            return _scaled(rule, state.scale, scale), scale, False
        if scale / 2 < 1:
            raise RuntimeError(
                f"float16 moments overflow at a scale of {scale:g}, and 1 is the "
                "least: gradients are not finite, or too large for float16; the state "
                "is as it was. Clip them, or give moment_dtype=torch.bfloat16"
            )
        return _scaled(rule, state.scale, 0.0), scale / 2, True


def _resting(matched: Matched) -> list[bool]:
    """By leaf, true for moments of a parameter that has no gradient in this step."""
    active, moments = set(matched.active), matched.trees[2]
    return [m is not None and i not in active for i, m in enumerate(moments)]


def _halved(matched: Matched, moments: Tree) -> Tree:
    """``moments``, those that rest halved."""
    resting = _resting(matched)
    rest = chosen(matched.treedef, resting, moments)
    halved = map_flat(lambda tensors: [t / 2 for t in tensors], rest)
    return chosen(matched.treedef, resting, halved, moments)


def _scaled(rule: ElementRule, old: float, new: float) -> ElementRule:
    """The rule of moments that are kept times a scale; 0 forgets them."""

    def formula(*numbers: Any) -> Equation:
        plain = rule.formula(*numbers)

        def step(p: Tensor, g: Tensor, *rest: Any) -> list[Any]:
            *moments, decay = rest
            p, g, *moments = _wide([p, g, *moments])
            u, *made = plain(p, g, *(m / old for m in moments), decay)
            if new == 1:
                return [u, *made]
            return [u, *(m * new if new else torch.zeros_like(m) for m in made)]

        return step

    def kernel(count: Any) -> Kernel:
        write = rule.writer(count)

        def scaled(*columns: Sequence[Tensor], weight_decay: float) -> None:
            for row in zip(*columns, strict=True):
                for piece in chunks(row):
                    wide = _wide(piece)
                    torch._foreach_div_(wide[2:], old)
                    write(*([x] for x in wide), weight_decay=weight_decay)
                    for x in wide[2:]:
                        x.mul_(new) if new else x.zero_()
                    for x, made in zip(piece, wide, strict=True):
                        if x is not made and x is not piece[1]:
                            x.copy_(made)

        return scaled

    return replace(rule, formula=formula, kernel=kernel)


def _wide(row: Sequence[Tensor]) -> list[Tensor]:
    """A row in the widest of its dtypes, float32 at least."""
    dtypes = [x.dtype for x in row]
    wide = reduce(torch.promote_types, dtypes, torch.float32)
    return [x.to(wide) for x in row]


def _largest(rule: ElementRule, matched: Matched, state: Any) -> list[Tensor]:
    """By flat tensor, the largest magnitude of the next moments: [1]."""
    step = _scaled(rule, state.scale, 1.0).equation(state.count)
    columns = [b.tensors for b in matched.buffers]
    with torch.no_grad():
        return [
            _most(*brought_with(row, decay), step=step)
            for *row, decay in zip(
                *columns, matched.spread(rule.decays(matched)), strict=True
            )
        ]


def _most(*given: Any, step: Equation) -> Tensor:
    *row, decay = given
    p = row[0]
    most = torch.zeros(1, dtype=torch.float32, device=p.device)
    if not p.numel():
        return most
    if isinstance(decay, Tensor):
        pieces = [(row, decay)]
    else:
        pieces = [(piece, decay) for piece in chunks(row)]
    for piece, by in pieces:
        for m in step(*piece, by)[1:]:
            low, high = torch.aminmax(m)  # of a NaN both are
            most = torch.maximum(most, torch.maximum(-low, high).float())
    return most


def _fit(matched: Matched, largest: Sequence[Tensor], scale: float) -> bool:
    """True if the next moments, times ``scale``, fit float16 on every rank."""
    leaves = [matched.trees[0][matched.active[k[0]]] for k in matched.members]
    if any_offloaded():  # ranks agree on their devices
        pairs = zip(largest, matched.buffers[0].tensors, strict=True)
        largest = [most.to(computing_device(p)) for most, p in pairs]
    flags = [
        torch.where(most * scale < _LIMIT, torch.zeros_like(most), torch.inf)
        for most in largest
    ]
    pairs = zip(leaves, flags, strict=True)
    found = [x.with_local(f) if is_sharded(x) else f for x, f in pairs]
    return holds(all_finite(found))
