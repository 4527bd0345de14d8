"""Optimizers that treat each element by itself: an equation, and all that runs it.

An `ElementRule` is the equation of a paper, written once by operations that
differentiate, and perhaps a kernel of torch's that makes the same step in one pass over
memory. `elementwise_optimizer` makes an optimizer of it:

- ``update`` composes the operations of the equation;
- ``apply`` runs the kernel, or writes what the equation gives;
- ``jit`` compiles the equation to one pass, where there is no kernel;
- a `Codec` decides how moments are stored: as they are, in float16 with a scale
  (`ScaledCodec`), or in 8 bits (`coded_moments`).

`adam` and `descent` are such rules; LAMB, Muon and Shampoo use them within.
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
from fsfunc.optim.optimizer import Optimizer, Phases, State, apply_updates, from_phases
from fsfunc.optim.places import bring_with_decay, computing_device, some_offloaded
from fsfunc.optim.reductions import all_finite, read_flag
from fsfunc.optim.schedules import check_params_given
from fsfunc.sharded.leaf import is_sharded

Kernel = Callable[..., None]  # (params, grads, *moments, weight_decay=), all lists
# (numbers, param, grad, *moments, decay) -> (update, *moments); update() is a tensor
Equation = Callable[..., Sequence[Any]]
Numbers = Sequence[float | Tensor]  # what an equation takes that changes by the step
Count = int | Tensor  # of updates; a 0-dim tensor while a step is recorded

CHUNK = 1 << 17
"""Elements worked on at a time on a CPU: few enough to stay in its cache."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ElementRule:
    """The equation of an optimizer, for one element.

    Args:
        name: what errors call it.
        state: makes the state: a named tuple of a count, and of a tree like the
            parameters for each moment.
        moments: the number of moments; what the state has beyond them is None.
        numbers: ``numbers(count)`` returns what changes from step to step, such as the
            learning rate.
        equation: ``equation(numbers, param, grad, *moments, decay) -> (update,
            *moments)``, of tensors of one dtype. ``update()`` is what is added to the
            parameter; it is a function, so that a caller who needs the moments alone
            does not compute it. ``decay`` is a number, or a tensor where it differs
            within a flat buffer.
        kernel: ``kernel(count)(params, grads, *moments, weight_decay=)`` writes the
            same step into lists of dense tensors of one dtype.
        weight_decay, mask: the decay of a leaf.
        moment_decay: of a moment that gains (1 - moment_decay) of what is new: ``init``
            warns where its dtype has too few bits for that. 0 for no warning.
    """

    name: str
    state: Callable[..., Any]
    moments: int
    numbers: Callable[[Any], Numbers]
    equation: Equation
    kernel: Callable[[Any], Kernel] | None = None
    weight_decay: float = 0.0
    mask: Mask | None = None
    moment_decay: float = 0.0

    def make_state(self, count: Count, moments: Sequence[Tree]) -> State:
        """Returns the state of these moments; its one field is None without any."""
        return self.state(count, *(moments or (None,)))

    def match_trees(
        self, grads: Tree, params: Tree, moments: Sequence[Tree]
    ) -> Matched:
        """Matches the trees of an update, which may have no ``params``."""
        if self.weight_decay:
            check_params_given(params, self.name)
        return Matched.of(grads if params is None else params, grads, *moments)

    def leaf_decays(self, matched: Matched) -> list[float]:
        return matched.decays(self.weight_decay, self.mask)

    def rule_at(self, count: Count) -> Rule:
        """Returns the out-of-place rule of a step: the update, then the moments."""
        numbers = self.numbers(count)

        def step(p: Tensor, g: Tensor, *moments_and_decay: Any) -> list[Tensor]:
            *moments, decay = moments_and_decay
            u, *new = _run_equation(self.equation, numbers, (p, g, *moments), decay)
            return [u(), *(x.to(m.dtype) for x, m in zip(new, moments, strict=True))]

        return step

    def kernel_at(self, count: Count) -> Kernel:
        """Returns the fused kernel of a step, or one that writes by the equation."""
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
    equation: Equation, numbers: Numbers, row: Sequence[Tensor], decay: Decay
) -> Sequence[Any]:
    """Runs an equation in the widest dtype of the parameter and its moments."""
    dtype = row[0].dtype
    for m in row[2:]:
        dtype = torch.promote_types(dtype, m.dtype)
    return equation(numbers, *(x.to(dtype) for x in row), decay)


def cache_sized_chunks(row: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Cuts tensors of one shape into pieces that stay in a CPU's cache.

    A step of several operations then reads main memory once, and not once for each.
    """
    first = row[0]
    if first.numel() <= CHUNK or first.device.type != "cpu":
        return iter([row])
    if not all(x.is_contiguous() for x in row):
        return iter([row])
    return zip(*(x.view(-1).split(CHUNK) for x in row), strict=True)


class Codec:
    """How moments are stored: here as they are, in a dtype of their own if given."""

    elementwise = True  # whether a step of some leaves is that part of the whole step
    compiles = True  # whether ``jit`` may compile the step to one pass
    state: Callable[..., State] | None = None  # makes the state, in place of a rule's

    def __init__(self, dtype: torch.dtype | None = None):
        self.dtype = dtype

    def init(self, rule: ElementRule, params: Tree) -> State:
        """Returns the first state: a count of 0, and moments of 0."""
        if rule.moment_decay and self.state is None:  # moments without a scale
            warn_narrow_moments(rule.name, rule.moment_decay, params, self.dtype)
        moments = [zeros_like(params, self.dtype) for _ in range(rule.moments)]
        return rule.make_state(0, moments)

    def phases(
        self,
        rule: ElementRule,
        grads: Tree,
        state: State,
        params: Tree,
        returns_params: bool,
    ) -> Phases:
        """Makes a step: the ``phases`` of the optimizer, see `from_phases`."""
        state_type: Any = self.state or rule.state
        if type(state) is not state_type:
            raise wrong_state_error(rule.name.split(" ")[0], state, state_type)
        count, moments = state[0], state[1 : 1 + rule.moments]
        matched = rule.match_trees(grads, params, moments)
        decays = rule.leaf_decays(matched)
        if returns_params and not matched.differentiated:
            compiled = compiled_kernel(rule, count, matched) if self.compiles else None
            kernel = compiled or rule.kernel_at(count)
            yield
            # A compiled kernel reads any strides and dtypes: it needs no copies.
            cast = compiled is None
            new_params, *new = run_kernel(matched, kernel, decays, cast=cast)
            return new_params, rule.make_state(count + 1, new)
        updates, *new = matched.map_rule(rule.rule_at(count), decays)
        yield
        new_tree = apply_updates(params, updates) if returns_params else updates
        return new_tree, rule.make_state(count + 1, new)


def elementwise_optimizer(rule: ElementRule, codec: Codec) -> Optimizer:
    """Makes the optimizer of an equation, whose moments a codec stores.

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
    >>> optimizer, w = elementwise_optimizer(rule, Codec()), torch.ones(2)
    >>> optimizer.apply(torch.ones(2), optimizer.init(w), w)
    (tensor([0.5000, 0.5000]), State(count=1, m=tensor([1., 1.])))
    """
    init, phases = partial(codec.init, rule), partial(codec.phases, rule)
    return from_phases(init, phases, elementwise=codec.elementwise)


_MAX_SCALE, _GROWTH_INTERVAL = 2.0**16, 2000
_FLOAT16_MAX = torch.finfo(torch.float16).max


class ScaledCodec(Codec):
    """Stores moments in float16, multiplied by a scale that ranks share.

    If the moments would overflow on one rank, all ranks set them to 0 after the step
    and halve the scale. After 2000 good steps it doubles again, up to 2^16.

    Args:
        state: makes the state, as that of a rule, with two fields more at its end: the
            scale, and the steps since it last changed.

    Raises:
        RuntimeError: moments overflow at a scale of 1; on every rank, the state as it
            was.

    Cost: the equation once more, one pmax of one number over the mesh, and one wait for
    it.

    Source: FairScale 0.4.13, ``Adam(precision=Precision.PURE_FP16)``.
    """

    # One scale for all moments: a step of some leaves would change that of others.
    elementwise = compiles = False
    state: Callable[..., State]

    def __init__(self, state: Callable[..., Any]):
        super().__init__(torch.float16)
        self.state = state

    def init(self, rule: ElementRule, params: Tree) -> State:
        return self.state(*super().init(rule, params), _MAX_SCALE, 0)

    def phases(
        self,
        rule: ElementRule,
        grads: Tree,
        state: State,
        params: Tree,
        returns_params: bool,
    ) -> Phases:
        matched = rule.match_trees(grads, params, state[1 : 1 + rule.moments])
        scaled, scale, resets = _choose_scale(rule, matched, state)
        step = super().phases(scaled, grads, state, params, returns_params)
        new_tree, (count, *moments) = yield from step
        if not resets:
            good_steps = 0 if scale != state.scale else state.good_steps + 1
            return new_tree, self.state(count, *moments, scale, good_steps)
        # The step has set to 0 the moments of leaves with a gradient. The others stand
        # for what they did, so at half the scale they are halved.
        if any(_without_gradient(matched)):
            moments = [_halve_without_gradient(matched, m) for m in moments]
        return new_tree, self.state(count, *moments, scale, 0)


class _ScaleChoice(NamedTuple):
    """The step of scaled moments that all ranks agree on."""

    rule: ElementRule
    scale: float
    resets: bool  # whether the step sets the moments to 0


def _choose_scale(rule: ElementRule, matched: Matched, state: State) -> _ScaleChoice:
    """Finds the scale at which the next moments fit float16 on all ranks."""
    largest, scale = _largest_magnitudes(rule, matched, state), state.scale
    grows = state.good_steps + 1 >= _GROWTH_INTERVAL and scale < _MAX_SCALE
    # A moment without a gradient in this step is not written, so it cannot be rescaled.
    grows = grows and not any(_without_gradient(matched))
    if grows and _fit_float16(matched, largest, scale * 2):
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
    """Returns by leaf whether it has moments, and no gradient in this step."""
    active, moments = set(matched.active), matched.trees[2]
    return [m is not None and i not in active for i, m in enumerate(moments)]


def _halve_without_gradient(matched: Matched, moments: Tree) -> Tree:
    """Halves the moments of leaves that have no gradient in this step."""
    mask = _without_gradient(matched)
    without_gradient = select_leaves(matched.treedef, mask, moments)
    halved = map_flat(lambda tensors: [t / 2 for t in tensors], without_gradient)
    return select_leaves(matched.treedef, mask, halved, moments)


def _scaled_rule(rule: ElementRule, old: float, new: float) -> ElementRule:
    """Returns the rule for moments that are stored times a scale.

    Args:
        old: the scale at which they are read.
        new: the scale at which they are written; 0 sets them to 0.
    """

    def equation(
        numbers: Numbers, p: Tensor, g: Tensor, *moments_and_decay: Any
    ) -> list[Any]:
        *moments, decay = moments_and_decay
        p, g, *moments = _widen([p, g, *moments])
        u, *made = rule.equation(numbers, p, g, *(m / old for m in moments), decay)
        if new == 1:
            return [u, *made]
        return [u, *(m * new if new else torch.zeros_like(m) for m in made)]

    def kernel(count: Count) -> Kernel:
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
    """Returns a row in the widest of its dtypes, float32 at least."""
    dtypes = [x.dtype for x in row]
    wide = reduce(torch.promote_types, dtypes, torch.float32)
    return [x.to(wide) for x in row]


def _largest_magnitudes(
    rule: ElementRule, matched: Matched, state: State
) -> list[Tensor]:
    """Returns the largest magnitude of the next moments: [1], by flat tensor."""
    unscaled = _scaled_rule(rule, state.scale, 1.0)
    step = partial(unscaled.equation, unscaled.numbers(state.count))
    columns = [b.tensors for b in matched.buffers]
    decays = matched.decays_by_buffer(rule.leaf_decays(matched))
    magnitudes = []
    with torch.no_grad():
        for *row, decay in zip(*columns, decays, strict=True):
            *row, decay = bring_with_decay(row, decay)
            largest = torch.zeros(1, dtype=torch.float32, device=row[0].device)
            if not row[0].numel():
                pieces = ()
            elif isinstance(decay, Tensor):
                pieces = [row]  # a decay of the whole row cannot be cut with it
            else:
                pieces = cache_sized_chunks(row)
            for piece in pieces:
                for m in step(*piece, decay)[1:]:
                    low, high = torch.aminmax(m)  # with a NaN both are NaN
                    largest = torch.maximum(largest, torch.maximum(-low, high).float())
            magnitudes.append(largest)
    return magnitudes


def _fit_float16(matched: Matched, magnitudes: Sequence[Tensor], scale: float) -> bool:
    """Returns whether the next moments, times ``scale``, fit float16 on every rank."""
    leaves = [matched.trees[0][matched.active[k[0]]] for k in matched.leaf_positions]
    flags = []  # 0 or infinity: `all_finite` asks all ranks at once
    flats = matched.buffers[0].tensors
    for leaf, p, largest in zip(leaves, flats, magnitudes, strict=True):
        # Of an offloaded row the host computed it; the collective is the devices'.
        largest = largest.to(computing_device(p))
        fits = largest * scale < _FLOAT16_MAX
        flag = torch.where(fits, torch.zeros_like(largest), torch.inf)
        flags.append(leaf.with_local(flag) if is_sharded(leaf) else flag)
    return read_flag(all_finite(flags))


# Under ``jit`` an update is one pass over memory, where the equation alone takes one
# for each operation (Lion on 8.4M parameters: 16 ms in place of 38). Numbers that
# change from step to step (rates, corrections of a bias) and sizes are no part of what
# is compiled: a rule is compiled once for each set of dtypes, with a decay and without.


def compiled_kernel(rule: ElementRule, count: Count, matched: Matched) -> Kernel | None:
    """Returns the compiled kernel that writes a rule's step.

    None outside of ``jit``, while a step is recorded, where something is offloaded, and
    where the rule has a fused kernel of torch's, which is as fast.
    """
    compiler = frame().compiler
    # A step that is one graph takes the equation: a fused kernel is no node of a graph.
    if compiler is None or rule.kernel is not None and not compiler.whole:
        return None
    if not (matched.active if compiler.whole else _is_on_device(matched)):
        return None
    if (numbers := _StepNumbers.of(rule, count, compiler.whole)) is None:
        return None
    make = partial(_writing_update, rule.equation, len(numbers.values))
    run = compiler.update(rule, make, f"the update of {rule.name}")

    def write(*columns: Sequence[Tensor], weight_decay: float) -> None:
        for row in zip(*columns, strict=True):
            written = (row[0], *row[2:])
            # torch.compile makes code of its own for sizes of 0 and 1.
            if row[0].numel() > 1 and all(x.is_contiguous() for x in written):
                flat = list(map(_uniform_view, row))
                run(numbers.on(row[0].device, weight_decay), *flat)
            else:
                u, *new = rule.rule_at(count)(*row, weight_decay)
                for x, y in zip(written, (row[0] + u, *new), strict=True):
                    x.copy_(y)

    return write


def compiled_direction(
    rule: ElementRule, count: Count, matched: Matched
) -> Rule | None:
    """Returns ``step(param, grad, *moments, decay) -> [update]``, compiled.

    None outside of ``jit``, while a step is recorded, and where something is offloaded.
    """
    if (compiler := frame().compiler) is None or not _is_on_device(matched):
        return None
    if (numbers := _StepNumbers.of(rule, count)) is None:
        return None
    make = partial(_returning_update, rule.equation, len(numbers.values))
    run = compiler.update(rule, make, f"the direction of {rule.name}")

    def step(p: Tensor, *grad_moments_and_decay: Any) -> list[Tensor]:
        *grad_and_moments, decay = grad_moments_and_decay
        if p.numel() < 2:
            return [rule.rule_at(count)(p, *grad_moments_and_decay)[0]]
        flat = list(map(_uniform_view, (p, *grad_and_moments)))
        if isinstance(decay, Tensor):
            values = (*numbers.on(p.device, 0.0), decay.reshape(-1))
        else:
            values = numbers.on(p.device, decay)
        return [run(values, *flat).view(p.shape)]

    return step


def _is_on_device(matched: Matched) -> bool:
    """Returns whether real tensors are updated, all of them on the device."""
    if frame().tracer is not None or _torch.fake_active() or not matched.active:
        return False
    return not some_offloaded(*(b.tensors for b in matched.buffers))


def _uniform_view(x: Tensor) -> Tensor:
    """Returns ``x`` with one dim, as a tensor that is no view for autograd.

    All leaves then look alike to the compiler, which compiles an update once for all.
    """
    return x.contiguous().view(-1).detach()


class _StepNumbers:
    """The numbers of one step as tensors, so that another value compiles nothing anew.

    Args:
        values: what ``rule.numbers`` returned.
        in_graph: whether the step around is one graph, which takes them as they are.
    """

    def __init__(self, values: Numbers, in_graph: bool = False):
        self.values, self.in_graph = values, in_graph
        self.tensors: dict[tuple[torch.device, float], tuple[Tensor, ...]] = {}

    @classmethod
    def of(
        cls, rule: ElementRule, count: Count, in_graph: bool = False
    ) -> _StepNumbers | None:
        """Returns those of a rule; None where a value is a choice and no number.

        A choice, as whether a step is the first, is a bool: no tensor can stand for it.
        """
        values = rule.numbers(count)
        are_numbers = all(
            type(x) in (int, float) or isinstance(x, Tensor) for x in values
        )
        return cls(values, in_graph) if are_numbers or in_graph else None

    def on(self, device: torch.device, decay: float) -> Numbers:
        """Returns the values, and the decay if it is not 0, as 0-dim tensors there."""
        if self.in_graph:
            return (*self.values, decay) if decay else self.values
        if (device, decay) not in self.tensors:
            values = (*self.values, decay) if decay else self.values
            options: Any = {"dtype": torch.float64, "device": device}
            numbers = [torch.as_tensor(x, **options) for x in values]
            self.tensors[device, decay] = torch.stack(numbers).unbind()
        return self.tensors[device, decay]


def _writing_update(equation: Equation, count: int) -> Callable[..., None]:
    """Makes the function that is compiled: a step in place.

    Args:
        count: of the equation's numbers; one number more is the decay.
    """

    def update(numbers: Numbers, p: Tensor, g: Tensor, *moments: Tensor) -> None:
        decay = numbers[count] if len(numbers) > count else 0.0
        u, *new = _run_equation(equation, numbers[:count], (p, g, *moments), decay)
        p.add_(u())
        for m, x in zip(moments, new, strict=True):
            m.copy_(x)

    return _with_own_code(update)


def _returning_update(equation: Equation, count: int) -> Callable[..., Tensor]:
    """Makes the function that is compiled: the update alone, out of place."""

    def update(numbers: Numbers, p: Tensor, g: Tensor, *moments: Tensor) -> Tensor:
        decay = numbers[count] if len(numbers) > count else 0.0
        return _run_equation(equation, numbers[:count], (p, g, *moments), decay)[0]()

    return _with_own_code(update)


def _with_own_code(fn: types.FunctionType) -> types.FunctionType:
    """Copies a function, with a code object of its own.

    torch.compile counts recompilations by code object, and gives up after a few: rules
    that share one would use up each other's.
    """
    code = fn.__code__.replace()
    return types.FunctionType(code, fn.__globals__, closure=fn.__closure__)
