"""Optimizers that treat each element by itself: an equation, and all that runs it.

An `ElementRule` is the equation of a paper, written once, by operations that
differentiate, and perhaps a kernel of torch's that makes the same step in one pass over
memory. What runs them knows no optimizer: an update composes the equation, an apply is
given the kernel or writes what the equation gives, ``jit`` compiles it to one pass, and
a `Codec` says how the moments are stored (also in float16 with a scale; in 8 bits, see
`coded_moments`). `elementwise_optimizer` makes the optimizer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.core.frames import frame
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    map_flat,
    select_leaves,
    warn_narrow_moments,
    zeros_like,
)
from fsfunc.optim.matching import Decay, Matched, Rule, wrong_state_error
from fsfunc.optim.optimizer import Optimizer, Phases, apply_updates, from_phases
from fsfunc.optim.places import bring_with_decay, computing_device, some_offloaded
from fsfunc.optim.reductions import all_finite, holds
from fsfunc.optim.schedules import check_params_given
from fsfunc.sharded.leaf import is_sharded

Kernel = Callable[..., None]
# (numbers, param, grad, *moments, decay) -> (update, *moments); update() is a tensor
Equation = Callable[..., Sequence[Any]]

CHUNK = 1 << 17
"""Elements worked on at a time on a CPU: few enough to stay in its cache."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ElementRule:
    """The equation of an optimizer, of one element.

    Args:
        name: what errors call it.
        state: a named tuple of a count, and of a tree like the parameters for each
            moment.
        moments: the number of moments; what the state has beyond them is None.
        numbers: ``numbers(count)``: what changes from step to step, such as the rate.
        equation: ``equation(numbers, param, grad, *moments, decay) -> (update,
            *moments)``, of tensors of one dtype; ``update()`` is what the parameter
            gains (a function, as who asks for the moments alone need not compute it),
            and ``decay`` a number, or a tensor where it differs within a flat buffer.
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
    equation: Equation
    kernel: Callable[[Any], Kernel] | None = None
    weight_decay: float = 0.0
    mask: Mask | None = None
    memory: float = 0.0

    def make_state(self, count: Any, moments: Sequence[Tree], *more: Any) -> Any:
        """The state of these moments."""
        return self.state(count, *(moments or (None,)), *more)

    def match_trees(
        self, grads: Tree, params: Tree, moments: Sequence[Tree]
    ) -> Matched:
        """The trees of an update, which may have no ``params``."""
        if self.weight_decay:
            check_params_given(params, self.name)
        return Matched.of(grads if params is None else params, grads, *moments)

    def leaf_decays(self, matched: Matched) -> list[float]:
        return matched.decays(self.weight_decay, self.mask)

    def rule_at(self, count: Any) -> Rule:
        """The equation in the widest dtype of parameter and moments."""
        numbers = self.numbers(count)

        def step(p: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
            *moments, decay = rest
            u, *new = _run_equation(self.equation, numbers, (p, g, *moments), decay)
            return [u(), *(x.to(m.dtype) for x, m in zip(new, moments, strict=True))]

        return step

    def kernel_at(self, count: Any) -> Kernel:
        """The fused kernel, or one that writes what the equation gives."""
        if self.kernel is not None:
            return self.kernel(count)
        numbers = self.numbers(count)

        def write(*columns: Sequence[Tensor], weight_decay: float) -> None:
            for row in zip(*columns, strict=True):
                for p, g, *moments in cache_sized_chunks(row):
                    u, *new = self.equation(numbers, p, g, *moments, weight_decay)
                    p.add_(u())
                    for m, x in zip(moments, new, strict=True):
                        m.copy_(x)

        return write


def _run_equation(
    equation: Equation, numbers: Any, row: Sequence[Tensor], decay: Decay
) -> Sequence[Any]:
    """The equation's results in the widest dtype of parameter and moments."""
    dtype = row[0].dtype
    for m in row[2:]:
        dtype = torch.promote_types(dtype, m.dtype)
    return equation(numbers, *(x.to(dtype) for x in row), decay)


def cache_sized_chunks(row: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Tensors of one shape in pieces that stay in a CPU's cache."""
    first = row[0]
    if first.numel() <= CHUNK or first.device.type != "cpu":
        return iter([row])
    if not all(x.is_contiguous() for x in row):
        return iter([row])
    return zip(*(x.view(-1).split(CHUNK) for x in row), strict=True)


class Codec:
    """Storage of moments: here as they are, in a dtype of their own if given."""

    elementwise_optimizer = compiles = True
    state: Any = None  # in place of a rule's

    def __init__(self, dtype: torch.dtype | None = None):
        self.dtype = dtype

    def init(self, rule: ElementRule, params: Tree) -> Any:
        if rule.memory and self.state is None:  # moments without a scale
            warn_narrow_moments(rule.name, rule.memory, params, self.dtype)
        moments = [zeros_like(params, self.dtype) for _ in range(rule.moments)]
        return rule.make_state(0, moments)

    def phases(
        self,
        rule: ElementRule,
        grads: Tree,
        state: Any,
        params: Tree,
        returns_params: bool,
    ) -> Phases:
        kind = self.state or rule.state
        if type(state) is not kind:
            raise wrong_state_error(rule.name.split(" ")[0], state, kind)
        count, moments = state[0], state[1 : 1 + rule.moments]
        matched = rule.match_trees(grads, params, moments)
        decays = rule.leaf_decays(matched)
        if returns_params and not matched.differentiated:
            write = compiled_kernel(rule, count, matched) if self.compiles else None
            kernel = write or rule.kernel_at(count)
            yield
            result, *new = run_kernel(matched, kernel, decays, cast=write is None)
        else:
            result, *new = matched.map_rule(rule.rule_at(count), decays)
            yield
            result = apply_updates(params, result) if returns_params else result
        return result, rule.make_state(count + 1, new)


def elementwise_optimizer(rule: ElementRule, codec: Codec) -> Optimizer:
    """Makes the optimizer of an equation, whose moments are stored by a codec.

    >>> class State(NamedTuple):
    ...     count: int
    ...     m: Any
    >>> def equation(numbers, p, g, m, decay):  # m = 0.9 m + g, p = p - rate m
    ...     (rate,), m = numbers, 0.9 * m + g
    ...     return lambda: -rate * m, m
    >>> rule = ElementRule(
    ...     name="heavy_ball", state=State, moments=1, equation=equation,
    ...     numbers=lambda count: (0.5,),
    ... )
    >>> optimizer, w = elementwise(rule, Codec()), torch.ones(2)
    >>> optimizer.apply(torch.ones(2), optimizer.init(w), w)
    (tensor([0.5000, 0.5000]), State(count=1, m=tensor([1., 1.])))
    """
    init, phases = partial(codec.init, rule), partial(codec.phases, rule)
    return from_phases(init, phases, elementwise=codec.elementwise)


_MAX_SCALE, _GROWTH_INTERVAL = 2.0**16, 2000
_FLOAT16_MAX = torch.finfo(torch.float16).max


class ScaledCodec(Codec):
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

    elementwise_optimizer = compiles = False  # one scale for all

    def __init__(self, state: Callable[..., Any]):
        super().__init__(torch.float16)
        self.state = state

    def init(self, rule: ElementRule, params: Tree) -> Any:
        return self.state(*super().init(rule, params), _MAX_SCALE, 0)

    def phases(
        self,
        rule: ElementRule,
        grads: Tree,
        state: Any,
        params: Tree,
        returns_params: bool,
    ) -> Phases:
        matched = rule.match_trees(grads, params, state[1 : 1 + rule.moments])
        scaled, scale, lost = _choose_scale(rule, matched, state)
        step = super().phases(scaled, grads, state, params, returns_params)
        result, (count, *moments) = yield from step
        if not lost:
            good = 0 if scale != state.scale else state.good_steps + 1
            return result, self.state(count, *moments, scale, good)
        if any(
            _without_gradient(matched)
        ):  # what has no gradient stands for what it did
            moments = [_halve_without_gradient(matched, m) for m in moments]
        return result, self.state(count, *moments, scale, 0)


class _ScaleChoice(NamedTuple):
    """The step of scaled moments that all ranks agree on."""

    rule: ElementRule
    scale: float
    lost: bool  # whether the moments are set to 0


def _choose_scale(rule: ElementRule, matched: Matched, state: Any) -> _ScaleChoice:
    largest, scale = _largest_magnitudes(rule, matched, state), state.scale
    more = state.good_steps + 1 >= _GROWTH_INTERVAL and scale < _MAX_SCALE
    more = more and not any(_without_gradient(matched))
    if more and _fit_float16(matched, largest, scale * 2):
        return _ScaleChoice(
            _scaled_rule(rule, state.scale, scale * 2), scale * 2, False
        )
    if _fit_float16(matched, largest, scale):
        return _ScaleChoice(_scaled_rule(rule, state.scale, scale), scale, False)
    if scale / 2 < 1:
        raise RuntimeError(
            f"float16 moments overflow at a scale of {scale:g}, and 1 is the "
            "least: gradients are not finite, or too large for float16; the state "
            "is as it was. Clip them, or give moment_dtype=torch.bfloat16"
        )
    return _ScaleChoice(_scaled_rule(rule, state.scale, 0.0), scale / 2, True)


def _without_gradient(matched: Matched) -> list[bool]:
    """By leaf, true for moments of a parameter that has no gradient in this step."""
    active, moments = set(matched.active), matched.trees[2]
    return [m is not None and i not in active for i, m in enumerate(moments)]


def _halve_without_gradient(matched: Matched, moments: Tree) -> Tree:
    """``moments``, those that rest halved."""
    resting = _without_gradient(matched)
    rest = select_leaves(matched.treedef, resting, moments)
    halved = map_flat(lambda tensors: [t / 2 for t in tensors], rest)
    return select_leaves(matched.treedef, resting, halved, moments)


def _scaled_rule(rule: ElementRule, old: float, new: float) -> ElementRule:
    """The rule of moments that are kept times a scale; 0 forgets them."""

    def equation(numbers: Any, p: Tensor, g: Tensor, *rest: Any) -> list[Any]:
        *moments, decay = rest
        p, g, *moments = _widen([p, g, *moments])
        u, *made = rule.equation(numbers, p, g, *(m / old for m in moments), decay)
        if new == 1:
            return [u, *made]
        return [u, *(m * new if new else torch.zeros_like(m) for m in made)]

    def kernel(count: Any) -> Kernel:
        write = rule.kernel_at(count)

        def scaled(*columns: Sequence[Tensor], weight_decay: float) -> None:
            for row in zip(*columns, strict=True):
                for piece in cache_sized_chunks(row):
                    wide = _widen(piece)
                    torch._foreach_div_(wide[2:], old)
                    write(*([x] for x in wide), weight_decay=weight_decay)
                    for x in wide[2:]:
                        x.mul_(new) if new else x.zero_()
                    for x, made in zip(piece, wide, strict=True):
                        if x is not made and x is not piece[1]:
                            x.copy_(made)

        return scaled

    return replace(rule, equation=equation, kernel=kernel)


def _widen(row: Sequence[Tensor]) -> list[Tensor]:
    """A row in the widest of its dtypes, float32 at least."""
    dtypes = [x.dtype for x in row]
    wide = reduce(torch.promote_types, dtypes, torch.float32)
    return [x.to(wide) for x in row]


def _largest_magnitudes(
    rule: ElementRule, matched: Matched, state: Any
) -> list[Tensor]:
    """By flat tensor, the largest magnitude of the next moments: [1]."""
    plain = _scaled_rule(rule, state.scale, 1.0)
    step = partial(plain.equation, plain.numbers(state.count))
    columns = [b.tensors for b in matched.buffers]
    decays = matched.decays_by_buffer(rule.leaf_decays(matched))
    found = []
    with torch.no_grad():
        for *row, decay in zip(*columns, decays, strict=True):
            *row, decay = bring_with_decay(row, decay)
            most = torch.zeros(1, dtype=torch.float32, device=row[0].device)
            if not row[0].numel():
                pieces = ()
            elif isinstance(decay, Tensor):
                pieces = [row]  # whose decay is of the whole
            else:
                pieces = cache_sized_chunks(row)
            for piece in pieces:
                for m in step(*piece, decay)[1:]:
                    low, high = torch.aminmax(m)  # of a NaN both are
                    most = torch.maximum(most, torch.maximum(-low, high).float())
            found.append(most)
    return found


def _fit_float16(matched: Matched, largest: Sequence[Tensor], scale: float) -> bool:
    """True if the next moments, times ``scale``, fit float16 on every rank."""
    leaves = [matched.trees[0][matched.active[k[0]]] for k in matched.leaf_positions]
    found = []
    for leaf, p, most in zip(leaves, matched.buffers[0].tensors, largest, strict=True):
        most = most.to(computing_device(p))  # ranks agree on their devices
        flag = torch.where(
            most * scale < _FLOAT16_MAX, torch.zeros_like(most), torch.inf
        )
        found.append(leaf.with_local(flag) if is_sharded(leaf) else flag)
    return holds(all_finite(found))


# Under ``jit`` an update is one pass over memory where the equation alone takes one for
# each operation. Numbers that change from step to step (rates, corrections of a bias)
# and sizes are no part of what is compiled: a rule is compiled once for each set of
# dtypes, with a decay and without.


def compiled_kernel(rule: ElementRule, count: Any, matched: Matched) -> Any:
    """The compiled kernel that writes a rule's step; None where the plain one is run.

    That is outside of ``jit``, while a step is recorded, where something is offloaded,
    and where the rule has a fused kernel of torch's, which is as fast.
    """
    compiler = frame().compiler
    if compiler is None or rule.kernel is not None and not compiler.whole:
        return None  # a fused kernel is no node of a graph
    if not (matched.active if compiler.whole else _is_on_device(matched)):
        return None
    if (numbers := _StepNumbers.of(rule, count, compiler.whole)) is None:
        return None
    made = partial(_writing_update, rule.equation, len(numbers.values))
    run = compiler.update(rule, made, f"the update of {rule.name}")

    def write(*columns: Sequence[Tensor], weight_decay: float) -> None:
        for row in zip(*columns, strict=True):
            if row[0].numel() > 1 and all(
                x.is_contiguous() for x in (row[0], *row[2:])
            ):
                flat = list(map(_uniform_view, row))
                run(numbers.on(row[0].device, weight_decay), *flat)
            else:
                u, *new = rule.rule_at(count)(*row, weight_decay)
                for x, y in zip((row[0], *row[2:]), (row[0] + u, *new), strict=True):
                    x.copy_(y)

    return write


def compiled_direction(rule: ElementRule, count: Any, matched: Matched) -> Any:
    """``step(param, grad, *moments, decay) -> [update]``, compiled; None as above."""
    if (compiler := frame().compiler) is None or not _is_on_device(matched):
        return None
    if (numbers := _StepNumbers.of(rule, count)) is None:
        return None
    made = partial(_returning_update, rule.equation, len(numbers.values))
    run = compiler.update(rule, made, f"the direction of {rule.name}")

    def step(p: Tensor, *rest: Any) -> list[Tensor]:
        *others, decay = rest
        if p.numel() < 2:
            return [rule.rule_at(count)(p, *rest)[0]]
        shaped = list(map(_uniform_view, (p, *others)))
        if isinstance(decay, Tensor):
            at = (*numbers.on(p.device, 0.0), decay.reshape(-1))
        else:
            at = numbers.on(p.device, decay)
        return [run(at, *shaped).view(p.shape)]

    return step


def _is_on_device(matched: Matched) -> bool:
    """True if real tensors are updated, all on the device."""
    if frame().tracer is not None or _torch.fake_active() or not matched.active:
        return False
    return not some_offloaded(*(b.tensors for b in matched.buffers))


def _uniform_view(x: Tensor) -> Tensor:
    """``x`` as all that is given look alike: of one dim, and a view of nothing."""
    return x.contiguous().view(-1).detach()


class _StepNumbers:
    """The numbers of one step, as tensors: no other number is compiled anew."""

    def __init__(self, values: Sequence[Any], plain: bool = False):
        self.values, self.plain = values, plain
        self.made: dict[Any, tuple[Tensor, ...]] = {}

    @classmethod
    def of(
        cls, rule: ElementRule, count: Any, whole: bool = False
    ) -> _StepNumbers | None:
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


def _writing_update(equation: Equation, count: int) -> Callable[..., None]:
    def update(numbers: Any, p: Tensor, g: Tensor, *moments: Tensor) -> None:
        decay = numbers[count] if len(numbers) > count else 0.0
        u, *new = _run_equation(equation, numbers[:count], (p, g, *moments), decay)
        p.add_(u())
        for m, x in zip(moments, new, strict=True):
            m.copy_(x)

    return _with_own_code(update)


def _returning_update(equation: Equation, count: int) -> Callable[..., Tensor]:
    def update(numbers: Any, p: Tensor, g: Tensor, *moments: Tensor) -> Tensor:
        decay = numbers[count] if len(numbers) > count else 0.0
        return _run_equation(equation, numbers[:count], (p, g, *moments), decay)[0]()

    return _with_own_code(update)


def _with_own_code(fn: Any) -> Any:
    """``fn`` with a code of its own: what is compiled of a code is limited."""
    code = fn.__code__.replace()
    return types.FunctionType(code, fn.__globals__, closure=fn.__closure__)
