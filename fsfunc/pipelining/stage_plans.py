"""Traced losses cut into stages: what each stage computes, receives and sends.

A loss is traced once for each shape of microbatch (`tracing.tracer.trace`, on fake
tensors), which gives its unit calls and what each depends on. `cut` splits the calls
into runs of consecutive ones, a run for each stage::

    calls:    embed  block  block | block  block  head      stages=[3, 3]
    stage 0:  embed  block  block | ──output of call 2──▶   stage 1

`handler` asks `Cuts.cut_for` for the cut of each microbatch, and `stages.StageRun`
obeys it.
All programs of one loss are cut at the same calls, as parameters lie where their calls
run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import inf, isfinite

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Transformed
from fsfunc.core.outcomes import GradientCall
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.groups import recorded_tensor
from fsfunc.tracing.programs import Origins, Program, Spec, Value
from fsfunc.tracing.tracer import trace
from fsfunc.tree.types import Leaf, PyTree

# As the user says where stages begin: how many calls each has, or the names of calls.
Stages = Sequence[int] | Sequence[str] | None


@dataclass(frozen=True)
class StagePlan:
    """One stage of a program.

    Args:
        number: its place among the stages.
        calls: the numbers of its unit calls; it ends after the last of them.
        receives: the values of earlier stages that its calls (in the last stage the
            loss too) depend on.
        leaves: the paths of the parameters that its unit calls are given.
        reads: the paths of the parameters that the loss reads outside units, for what
            this stage computes.
        makes_loss: whether it is the last stage, which computes the loss.
    """

    number: int
    calls: range
    receives: tuple[Value, ...]
    leaves: frozenset[str]
    reads: frozenset[str]
    makes_loss: bool


@dataclass(frozen=True)
class Cut:
    """A program in stages, and the values that travel between them."""

    program: Program
    stages: tuple[StagePlan, ...]

    @cached_property
    def stage_of_call(self) -> dict[int, int]:
        """The stage of each unit call, by the call's number."""
        return {k: stage.number for stage in self.stages for k in stage.calls}

    @cached_property
    def messages(self) -> dict[tuple[int, int], tuple[Value, ...]]:
        """By (producer stage, consumer stage): the values sent for each microbatch."""
        values_between: dict[tuple[int, int], list[Value]] = {}
        for stage in self.stages:
            for value in stage.receives:
                key = self.stage_of_call[value.call], stage.number
                values_between.setdefault(key, []).append(value)
        return {key: tuple(values) for key, values in values_between.items()}

    def consumers(self, stage: int) -> list[tuple[int, tuple[Value, ...]]]:
        """Returns the stages that depend on this one, with the values that they use."""
        return [
            (consumer, values)
            for (producer, consumer), values in self.messages.items()
            if producer == stage
        ]

    def producers_of(self, stage: int) -> list[tuple[int, list[Value]]]:
        """Returns the stages that this one sends gradients to, and of which values."""
        return [
            (producer, self.gradient_values(producer, consumer))
            for producer, consumer in self.messages
            if consumer == stage
        ]

    def gradient_values(self, producer: int, consumer: int) -> list[Value]:
        """Returns the values between two stages whose gradients are sent back."""
        values = self.messages[producer, consumer]
        return [value for value in values if self.spec(value).requires_grad]

    def spec(self, value: Value) -> Spec:
        """Returns the shape, dtype and device of a value."""
        return self.program.calls[value.call].outputs.leaves[value.leaf]

    @cached_property
    def placeholders(self) -> tuple[tuple[Leaf, ...], ...]:
        """For each unit call the leaves of its output, as fake tensors."""
        mode = fake_modes.fake_mode_of(())

        def make_placeholder(x: Spec | Leaf) -> Leaf:
            if not isinstance(x, Spec):
                return x
            # They serve later runs too, so a memory counter of this run must not see
            # them: they are made beneath all modes.
            with _torch.beneath_all_modes(), mode:
                return torch.empty(x.shape, dtype=x.dtype, device=x.device)

        return tuple(
            tuple(map(make_placeholder, call.outputs.leaves))
            for call in self.program.calls
        )


def cut(program: Program, stages: Stages = None, n: int | None = None) -> Cut:
    """Cuts a program into stages.

    Args:
        program: the loss's.
        stages: how many unit calls each stage has; or the call at which each stage
            begins, the first of a unit by its name, call k (from 0) as ``name:k``; by
            default balanced by FLOPs.
        n: how many stages there are; by default as many as ``stages`` says.

    Returns:
        the stages, and what travels between them: outputs of unit calls alone. What the
        loss does between the calls, each stage that needs it does for itself.

    Raises:
        ValueError: more stages than unit calls, an empty stage, counts that do not sum
            up, a name that no call has, or stages out of order; or random numbers that
            the loss draws outside units and two stages use.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda p, x: x * p)
    >>> def loss(p, x):
    ...     first = layer(p[0], x)
    ...     return (layer(p[2], layer(p[1], first)) + first).sum()
    >>> parts = cut(ff.program(loss, [torch.ones(2)] * 3, torch.ones(2)), [1, 1, 1])
    >>> parts.consumers(0)
    [(1, (Value(call=0, leaf=0),)), (2, (Value(call=0, leaf=0),))]
    >>> parts.stages[2].receives, sorted(parts.stages[2].leaves)
    ((Value(call=0, leaf=0), Value(call=1, leaf=0)), ['2'])
    """
    ranges = _call_ranges(program, stages, n)
    origins = [_origins(program, calls) for calls in ranges]
    _check_draws(program, origins)
    return Cut(
        program,
        tuple(
            StagePlan(
                number=s,
                calls=calls,
                receives=tuple(sorted(v for v in o.needs if v.call not in calls)),
                leaves=frozenset[str]().union(
                    *(program.calls[c].params for c in calls)
                ),
                reads=o.reads,
                makes_loss=s == len(ranges) - 1,
            )
            for s, (calls, o) in enumerate(zip(ranges, origins, strict=True))
        ),
    )


def _origins(program: Program, calls: range) -> Origins:
    """Returns the origins of all that a stage computes."""
    origins = Origins()
    for number in calls:
        origins = origins | program.calls[number].origins
    is_last = calls.stop == len(program.calls)
    return origins | program.loss.origins if is_last else origins


def _check_draws(program: Program, origins: Sequence[Origins]) -> None:
    """Raises if two stages use one draw of random numbers between units.

    Each stage runs that part of the loss itself, and would draw other numbers.
    """
    for k, draw in enumerate(program.draws):
        stages = [s for s, o in enumerate(origins) if k in o.draws]
        if len(stages) > 1:
            raise ValueError(
                f"{program.name} draws random numbers outside every unit, by {draw.op} "
                f"at {draw.line}, which stages {stages} use: each would draw its "
                "own. Draw them in a unit, whose output is then sent"
            )


def _call_ranges(program: Program, stages: Stages, n: int | None) -> list[range]:
    """Returns the numbers of the unit calls of each stage.

    Raises:
        ValueError: what is no cut into stages of one call at least.
    """
    names = [call.name for call in program.calls]
    n_stages = n if stages is None else len(stages)
    starts: list[int] = []
    if n_stages and 0 < n_stages <= len(names) and n in (None, n_stages):
        if stages is None:
            counts = balance([call.flops for call in program.calls], n_stages)
            starts = [*accumulate(counts[:-1], initial=0)]
        elif all(isinstance(begin, str) for begin in stages):
            starts = [_find_call(names, str(begin)) for begin in stages]
        elif all(type(begin) is int for begin in stages) and sum(
            map(int, stages)
        ) == len(names):
            starts = [*accumulate(map(int, stages[:-1]), initial=0)]
    ranges = [range(*ends) for ends in pairwise([*starts, len(names)])]
    if not ranges or starts[0] or not all(ranges):
        runs = [(name, len([*r])) for name, r in groupby(names)]
        calls_text = ", ".join(name if k == 1 else f"{name} x{k}" for name, k in runs)
        requested = "" if n is None else f"{n} stages"
        requested += "" if stages is None else f"{requested and ', '}stages={stages!r}"
        raise ValueError(
            f"{requested or 'no stages'}, but {program.name} has {len(names)} unit "
            f"calls ({calls_text}): each stage has at least one. Give counts that sum "
            "to them, or the names, in order, of those at which stages begin, the "
            "first of all too"
        )
    return ranges


def _find_call(names: list[str], stage: str) -> int:
    """Returns the number of the call ``name`` or ``name:k``, or -1 if none is so."""
    name, _, k = stage.rpartition(":")
    if not name or not k.isdecimal():
        name, k = stage, "0"
    matches = [i for i, call_name in enumerate(names) if call_name == name]
    return matches[int(k)] if int(k) < len(matches) else -1


Number = int | float


@api_boundary
def balance(costs: Sequence[Number], n: int) -> list[int]:
    """Splits calls into ``n`` consecutive stages so that the costliest is cheapest.

    Returns how many calls each stage has. Of several such cuts it is the most even one:
    least sum of squares of the stages' costs, then of their counts.

    ==========================  =================================================
    FairScale                   here
    ==========================  =================================================
    ``balance_by_time``         ``balance(times, n)``
    ``balance_by_size``         ``balance([c.activations + 2 * c.weights
                                for c in program(...).calls], n)``
    ``auto_shard``              ``balance([c.weights for c in ....calls], n)``
    ``pipeline``'s default      ``balance([c.flops for c in ....calls], n)``
    ==========================  =================================================

    Args:
        costs: of each call, in any unit; not negative.
        n: the number of stages; each gets at least one call.

    Raises:
        ValueError: fewer calls than stages, or a negative or infinite cost.

    Cost: O(n k^2) for k calls at most; stages that cost too much are not tried.

    Source: Bárány and Grinberg, Block partitions of sequences (2015), the problem.

    >>> balance([1, 2, 3, 4, 5, 6], 3)
    [3, 2, 1]
    """
    if not 1 <= n <= len(costs) or not all(isfinite(x) and x >= 0 for x in costs):
        raise ValueError(
            f"balance({costs}, {n}): it takes finite costs, not below 0, of each call, "
            "and at least one call for each of at least one stage"
        )
    prefix_sums = [*accumulate(costs, initial=0)]
    # Twice the same search: for the least cost of the largest stage, and then, within
    # that limit, for the most even cut. One order of pairs would not do: a cut that is
    # best up to a call by (largest, evenness) need not begin the best of all.
    (limit, _), _ = _best(prefix_sums, n, inf, _largest)
    return _best(prefix_sums, n, limit, _evenness)[1]


# What is to be least of a cut; pairs compare by the first number, then the second.
CutCost = tuple[Number, int]


def _largest(so_far: CutCost, cost: Number, count: int) -> CutCost:
    """Returns the cost of the largest stage, after one more of this cost and count."""
    return max(so_far[0], cost), 0


def _evenness(so_far: CutCost, cost: Number, count: int) -> CutCost:
    """Returns (sum of squared costs, sum of squared counts), after one more stage."""
    return so_far[0] + cost**2, so_far[1] + count**2


def _best(
    prefix_sums: list[Number],
    n: int,
    limit: Number,
    extend: Callable[[CutCost, Number, int], CutCost],
) -> tuple[CutCost, list[int]]:
    """Returns the least cost of a cut, and the cut as counts, by dynamic programming.

    ``best[i]`` is the least cost of a cut of the first i calls into ``stage`` stages,
    and ``last_begins[stage - 1][i]`` where the last stage of that cut begins.

    Args:
        prefix_sums: of the calls' costs; ``limit``: the most that a stage may cost.
        extend: (cost of a cut, its next stage's cost and count) -> cost of both.
    """
    k, empty = len(prefix_sums) - 1, (0, 0)
    best: list[CutCost] = [empty, *([(inf, 0)] * k)]
    last_begins: list[list[int]] = []
    for stage in range(1, n + 1):
        extended: list[CutCost] = [(inf, 0)] * (k + 1)
        last_begin = [0] * (k + 1)
        for i in range(stage, k + 1):
            for j in range(i - 1, stage - 2, -1):
                cost = prefix_sums[i] - prefix_sums[j]
                # A last stage that begins earlier costs more: once it alone is as bad
                # as the best cut so far, no earlier beginning is better.
                if cost > limit or extend(empty, cost, 0) >= extended[i]:
                    break
                candidate = extend(best[j], cost, i - j)
                if candidate < extended[i]:
                    extended[i], last_begin[i] = candidate, j
        best = extended
        last_begins.append(last_begin)
    counts, end = [], k
    for last_begin in reversed(last_begins):
        counts.append(end - last_begin[end])
        end = last_begin[end]
    return best[k], counts[::-1]


class Cuts:
    """The cuts of a pipelined function's losses, one for each shape of microbatch.

    Args:
        stages: where to cut, as the user gave it.
        owners: the coordinate along ``axis`` of each stage's rank.
    """

    stages: Stages
    owners: Sequence[int]
    axis: str

    def __init__(self, stages: Stages, owners: Sequence[int], axis: str):
        self.stages, self.owners, self.axis = stages, owners, axis
        self.cut_by_key: dict[tuple[Hashable, ...], Cut] = {}
        self.checked_layouts: set[tuple[Hashable, ...]] = set()

    def learn(self, other: Cuts) -> None:
        """Adopts the cuts of ``other``: later programs are cut at the same calls."""
        for key, cut in other.cut_by_key.items():
            self.cut_by_key.setdefault(key, cut)

    def cut_for(self, call: GradientCall, number: int = 0) -> Cut:
        """Returns the loss of a call in stages; it traces what it has not seen.

        A loss without units and batch, such as a penalty on parameters, has no stages.

        Args:
            call: the gradient call on one microbatch.
            number: its place among the gradient calls of a step.
        """
        differentiated = [call.args[i] for i in call.argnums]
        others = [None if i in call.argnums else x for i, x in enumerate(call.args)]
        leaves, structure = tree.flatten(differentiated, is_leaf=is_sharded)
        other_leaves, other_structure = tree.flatten(
            (others, call.keywords), is_leaf=is_sharded
        )
        kinds = tuple(map(_kind, [*leaves, *other_leaves]))
        loss_key = number, _code(call.fn), structure
        # A unit may be given parts of a leaf that is split, which have other shapes.
        is_split = any(isinstance(x, Sharded) and x.layout.splits for x in leaves)
        key = loss_key, other_structure, kinds, is_split, _casts()
        if key not in self.cut_by_key:
            args = tree.map(recorded_tensor, call.args, is_leaf=is_sharded)
            fn, args = _parameters_first(call.fn, args, call.argnums)
            program = trace(fn, args, call.keywords)
            stages = self.stages
            earlier = next(
                (c for k, c in self.cut_by_key.items() if k[0] == loss_key), None
            )
            # The state was laid out for the first program's stages. Balanced anew, by
            # the FLOPs of other shapes, calls would move away from their parameters.
            if earlier is not None:
                names = [[c.name for c in p.calls] for p in (earlier.program, program)]
                if names[0] != names[1]:
                    raise ValueError(
                        f"a microbatch of other shapes makes other unit calls: "
                        f"{names[1]}, not {names[0]}; the stages would differ"
                    )
                stages = [len(stage.calls) for stage in earlier.stages]
            is_penalty = not program.calls and not program.loss.origins.batch
            self.cut_by_key[key] = (
                Cut(program, ())
                if is_penalty
                else cut(program, stages, len(self.owners))
            )
        return self.cut_by_key[key]

    def check(self, cuts: Iterable[Cut], params: PyTree) -> None:
        """Raises on every rank if a stage would not have a leaf that it reads.

        That is a leaf that lies with another stage, or a sharded one that is read
        outside units: an operation there would see this rank's part as the whole.

        Args:
            params: what the loss has as its first argument.
        """
        # Once for each cut and layout, and not in each step.
        leaves = tree.leaves(params, is_leaf=is_sharded)
        stage_parts = tuple(x.layout.owners for x in leaves if isinstance(x, Sharded))
        for cut in {id(cut): cut for cut in cuts}.values():
            if not cut.stages or (id(cut), stage_parts) in self.checked_layouts:
                continue
            paths = tree.paths(params, is_leaf=is_sharded)
            leaf_at = dict(zip(paths, leaves, strict=True))
            for call in (*cut.program.calls, cut.program.loss):
                for path in sorted(call.reads):
                    if isinstance(leaf := leaf_at.get(path), Sharded):
                        unit_name = getattr(call, "name", "")
                        raise ValueError(
                            _READ.format(leaf.layout, _describe_reader(unit_name))
                        )
            for stage in cut.stages:
                for path in sorted(stage.leaves):
                    self.check_leaf(leaf_at.get(path), self.owners[stage.number])
            self.checked_layouts.add((id(cut), stage_parts))

    def check_leaf(self, leaf: Leaf, rank: int) -> None:
        """Raises if ``leaf`` lies on another rank of the pipeline."""
        for part in leaf.layout.owners if isinstance(leaf, Sharded) else ():
            if part.axis == self.axis and part.coordinate != rank:
                raise ValueError(
                    f"{leaf.layout} is read by a stage on {self.axis}={rank}: it "
                    "was laid out for other stages; place it anew for this step"
                )


_READ = (
    "{} is read outside units in a loss that a pipeline runs, {}: a stage has the "
    "parameters of its own units alone, and of these the rank's part. Read it inside "
    "a unit. A term of the loss that is of parameters alone, as a penalty is, has its "
    "own gradient call next to the pipelined one, in the same step: "
    "ff.value_and_grad(penalty)(params), and the two gradients are added by tree.map"
)


def _describe_reader(unit: str) -> str:
    return f"for what unit {unit!r} is given" if unit else "for the loss"


def _kind(x: Leaf) -> Hashable:
    """Returns what a program depends on: a leaf's shape, dtype and device, or value."""
    if isinstance(x, Tensor) or is_sharded(x):
        device = _torch.device_of(x) if isinstance(x, Tensor) else x.device
        return tuple(x.shape), x.dtype, device
    try:
        hash(x)
    except TypeError:
        return type(x)
    return x


def _casts() -> tuple[tuple[str, torch.dtype], ...]:
    """Returns autocast's dtypes, under which the same unit gives other dtypes."""
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    return tuple((k, torch.get_autocast_dtype(k)) for k in kinds)


def _code(fn: Callable[..., PyTree]) -> tuple[Hashable, ...]:
    """Returns the code objects of a function and of the transforms around it.

    A loss is often a closure or lambda that each step makes anew: its code object is
    the same, and so its program is found again. The transforms count too, as all that
    one transform returns has one code.
    """
    codes = []
    while isinstance(fn, functools.partial | Transformed):
        if isinstance(fn, Transformed):
            codes.append(fn.__code__)
        fn = fn.func if isinstance(fn, functools.partial) else fn._f
    return *codes, getattr(fn, "__code__", fn)


def _parameters_first(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...], argnums: Sequence[int]
) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Returns ``fn`` and its arguments with what is differentiated as the first.

    The tracer takes the first argument for the parameters.
    """
    if tuple(argnums) == (0,):
        return fn, args

    @functools.wraps(fn)
    def reordered(
        differentiated: Sequence[PyTree], others: Sequence[PyTree], **keywords: PyTree
    ) -> PyTree:
        arguments = list(others)
        for i, x in zip(argnums, differentiated, strict=True):
            arguments[i] = x
        return fn(*arguments, **keywords)

    others = [None if i in argnums else x for i, x in enumerate(args)]
    return reordered, ([args[i] for i in argnums], others)
