"""Programs cut into stages, and what each stage then takes, gets and sends.

Of a pipelined function there is one for each shape of microbatch, all cut alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import inf, isfinite
from typing import Any

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

Stages = Sequence[int] | Sequence[str] | None


@dataclass(frozen=True)
class StagePlan:
    """One stage of a program.

    Args:
        number: its place among the stages.
        calls: the numbers of its unit calls; it ends after the last of them.
        receives: values of earlier stages that its calls, or the loss, depend on.
        leaves: paths of the parameters that its unit calls are given.
        reads: paths of the parameters read outside units on their behalf.
        makes_loss: whether it computes the loss: the last stage does.
    """

    number: int
    calls: range
    receives: tuple[Value, ...]
    leaves: frozenset[str]
    reads: frozenset[str]
    makes_loss: bool


@dataclass(frozen=True)
class Cut:
    """A program in stages: what each has, and what travels from one to another."""

    program: Program
    stages: tuple[StagePlan, ...]

    @cached_property
    def producers(self) -> dict[int, int]:
        """The stage of each unit call."""
        return {k: stage.number for stage in self.stages for k in stage.calls}

    @cached_property
    def messages(self) -> dict[tuple[int, int], tuple[Value, ...]]:
        """The values sent from one stage to another, for each microbatch."""
        found: dict[tuple[int, int], list[Value]] = {}
        for stage in self.stages:
            for value in stage.receives:
                key = self.producers[value.call], stage.number
                found.setdefault(key, []).append(value)
        return {key: tuple(values) for key, values in found.items()}

    def consumers(self, stage: int) -> list[tuple[int, tuple[Value, ...]]]:
        """The stages that depend on this one, with the values that they use."""
        return [(c, values) for (p, c), values in self.messages.items() if p == stage]

    def producers_of(self, stage: int) -> list[tuple[int, list[Value]]]:
        """The stages that this one depends on, with values whose gradients it gives."""
        return [(p, self.returned(p, c)) for p, c in self.messages if c == stage]

    def returned(self, producer: int, consumer: int) -> list[Value]:
        """The values between two stages whose gradients are sent back."""
        values = self.messages[producer, consumer]
        return [value for value in values if self.spec(value).requires_grad]

    def spec(self, value: Value) -> Spec:
        """The shape, dtype and device of a value."""
        return self.program.calls[value.call].outputs.leaves[value.leaf]

    @cached_property
    def stand_ins(self) -> tuple[tuple[Any, ...], ...]:
        """For each call the leaves of its output, without data."""
        mode = fake_modes.fake_mode_of(())

        def stand_in(x: Any) -> Any:
            if not isinstance(x, Spec):
                return x
            # They stay for other runs: memory counters of this one must not count them.
            with _torch.beneath_all_modes(), mode:
                return torch.empty(x.shape, dtype=x.dtype, device=x.device)

        return tuple(tuple(map(stand_in, c.outputs.leaves)) for c in self.program.calls)


def cut(program: Program, stages: Stages = None, n: int | None = None) -> Cut:
    """A program cut into ``stages``.

    Args:
        program: the loss's.
        stages: how many unit calls each stage has; or the call at which each stage
            begins, the first of a unit by its name, call k (from 0) as ``name:k``; by
            default balanced by FLOPs.
        n: how many stages there are; by default as many as ``stages`` says.

    Returns:
        what each stage takes, gets and sends. Only outputs of unit calls travel; what
        the loss does between the calls, each stage does for itself.

    Raises:
        ValueError: more stages than unit calls, an empty stage, counts that do not sum
            up, a name that no call has, or stages out of order; or random numbers that
            the loss draws outside units and two stages use.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda p, x: x * p)
    >>> def loss(p, x):
    ...     first = layer(p[0], x)
    ...     return (layer(p[2], layer(p[1], first)) + first).sum()
    >>> found = cut(ff.program(loss, [torch.ones(2)] * 3, torch.ones(2)), [1, 1, 1])
    >>> found.consumers(0)
    [(1, (Value(call=0, leaf=0),)), (2, (Value(call=0, leaf=0),))]
    >>> found.stages[2].receives, sorted(found.stages[2].leaves)
    ((Value(call=0, leaf=0), Value(call=1, leaf=0)), ['2'])
    """
    ranges = _ranges(program, stages, n)
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
    """The origins of all that a stage computes."""
    found = Origins()
    for number in calls:
        found = found | program.calls[number].origins
    last = calls.stop == len(program.calls)
    return found | program.loss.origins if last else found


def _check_draws(program: Program, origins: Sequence[Origins]) -> None:
    for k, draw in enumerate(program.draws):
        users = [s for s, o in enumerate(origins) if k in o.draws]
        if len(users) > 1:
            raise ValueError(
                f"{program.name} draws random numbers outside every unit, by {draw.op} "
                f"at {draw.line}, which stages {users} use: each would draw its "
                "own. Draw them in a unit, whose output is then sent"
            )


def _ranges(program: Program, stages: Stages, n: int | None) -> list[range]:
    """The unit calls of each stage, as numbers."""
    names = [call.name for call in program.calls]
    wanted = n if stages is None else len(stages)
    begins: list[int] = []
    if wanted and 0 < wanted <= len(names) and n in (None, wanted):
        if stages is None:
            counts = balance([call.flops for call in program.calls], wanted)
            begins = [*accumulate(counts[:-1], initial=0)]
        elif all(isinstance(s, str) for s in stages):
            begins = [_begin(names, str(s)) for s in stages]
        elif all(type(s) is int for s in stages) and sum(map(int, stages)) == len(
            names
        ):
            begins = [*accumulate(map(int, stages[:-1]), initial=0)]
    found = [range(*ends) for ends in pairwise([*begins, len(names)])]
    if not found or begins[0] or not all(found):
        runs = [(name, len([*r])) for name, r in groupby(names)]
        shown = ", ".join(name if k == 1 else f"{name} x{k}" for name, k in runs)
        asked = "" if n is None else f"{n} stages"
        asked += "" if stages is None else f"{asked and ', '}stages={stages!r}"
        raise ValueError(
            f"{asked or 'no stages'}, but {program.name} has {len(names)} unit calls "
            f"({shown}): each stage has at least one. Give counts that sum to them, or "
            "the names, in order, of those at which stages begin, the first of all too"
        )
    return found


def _begin(names: list[str], stage: str) -> int:
    """The call that a stage begins at, as ``name`` or ``name:k``; -1 for none."""
    name, _, k = stage.rpartition(":")
    if not name or not k.isdecimal():
        name, k = stage, "0"
    found = [i for i, called in enumerate(names) if called == name]
    return found[int(k)] if int(k) < len(found) else -1


Number = int | float


@api_boundary
def balance(costs: Sequence[Number], n: int) -> list[int]:
    """Numbers of consecutive calls for ``n`` stages, the largest stage's cost least.

    Among the cuts whose most costly stage costs least, the most even one: least sum of
    squares of the stages' costs, then of their counts.

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

    Cost: O(n k^2) for k calls at most: stages that cost too much are not looked into.

    Source: Bárány and Grinberg, Block partitions of sequences (2015), the problem.

    >>> balance([1, 2, 3, 4, 5, 6], 3)
    [3, 2, 1]
    """
    if not 1 <= n <= len(costs) or not all(isfinite(x) and x >= 0 for x in costs):
        raise ValueError(
            f"balance({costs}, {n}): it takes finite costs, not below 0, of each call, "
            "and at least one call for each of at least one stage"
        )
    spent = [*accumulate(costs, initial=0)]
    (limit, _), _ = _best(spent, n, inf, _largest)
    return _best(spent, n, limit, _evenness)[1]


CutCost = tuple[Number, int]  # of a cut: what is to be least


def _largest(before: CutCost, cost: Number, count: int) -> CutCost:
    """The cost of the largest stage, with one more of this cost and count."""
    return max(before[0], cost), 0


def _evenness(before: CutCost, cost: Number, count: int) -> CutCost:
    """(sum of squared costs, sum of squared counts), with one more stage."""
    return before[0] + cost**2, before[1] + count**2


def _best(
    spent: list[Number],
    n: int,
    limit: Number,
    value: Callable[[CutCost, Number, int], CutCost],
) -> tuple[CutCost, list[int]]:
    """The least value of a cut whose stages keep to the limits, and that cut.

    ``best[i]`` is that of the first i calls in so many stages. The cost of the last
    stage grows as it begins earlier: no further than it alone outweighs the best.
    """
    k, nothing = len(spent) - 1, (0, 0)
    best: list[CutCost] = [nothing, *([(inf, 0)] * k)]
    begins: list[list[int]] = []
    for stage in range(1, n + 1):
        longer: list[CutCost] = [(inf, 0)] * (k + 1)
        begin = [0] * (k + 1)
        for i in range(stage, k + 1):
            for j in range(i - 1, stage - 2, -1):
                cost = spent[i] - spent[j]
                if cost > limit or value(nothing, cost, 0) >= longer[i]:
                    break
                found = value(best[j], cost, i - j)
                if found < longer[i]:
                    longer[i], begin[i] = found, j
        best = longer
        begins.append(begin)
    counts, end = [], k
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return best[k], counts[::-1]


class Cuts:
    """The traced losses of a pipelined function, one for each shape of microbatch.

    Args:
        stages: as the user gave them.
        owners: by stage, where along ``axis`` it runs.
    """

    def __init__(self, stages: Stages, owners: Sequence[int], axis: str):
        self.stages, self.owners, self.axis = stages, owners, axis
        self.known: dict[Any, Cut] = {}
        self.checked: set[Any] = set()

    def learn(self, other: Cuts) -> None:
        """Takes over what ``other`` knows: later programs are cut as those were."""
        for key, found in other.known.items():
            self.known.setdefault(key, found)

    def of(self, call: GradientCall, number: int = 0) -> Cut:
        """The stages of a loss, for a microbatch of these shapes; a penalty has none.

        Args:
            call: the gradient call on one microbatch.
            number: its place among the gradient calls of a step.
        """
        chosen = [call.args[i] for i in call.argnums]
        others = [None if i in call.argnums else x for i, x in enumerate(call.args)]
        flat, structure = tree.flatten(chosen, is_leaf=is_sharded)
        more, form = tree.flatten((others, call.keywords), is_leaf=is_sharded)
        kinds = tuple(map(_kind, [*flat, *more]))
        loss = number, _code(call.fn), structure
        # Of split leaves a unit may make parts, of other shapes.
        split = any(isinstance(x, Sharded) and x.layout.splits for x in flat)
        key = loss, form, kinds, split, _casts()
        if key not in self.known:
            args = tree.map(recorded_tensor, call.args, is_leaf=is_sharded)
            fn, args = _first(call.fn, args, call.argnums)
            program = trace(fn, args, call.keywords)
            stages = self.stages
            before = next((c for k, c in self.known.items() if k[0] == loss), None)
            if before is not None:  # as the state is laid out
                names = [[c.name for c in p.calls] for p in (before.program, program)]
                if names[0] != names[1]:
                    raise ValueError(
                        f"a microbatch of other shapes makes other unit calls: "
                        f"{names[1]}, not {names[0]}; the stages would differ"
                    )
                stages = [len(stage.calls) for stage in before.stages]
            alone = not program.calls and not program.loss.origins.batch
            self.known[key] = (
                Cut(program, ()) if alone else cut(program, stages, len(self.owners))
            )
        return self.known[key]

    def check(self, cuts: Iterable[Cut], params: Any) -> None:
        """Raises on every rank if a stage would not have a leaf that it reads.

        That is a leaf of another stage, or a part of one that is read
        outside units: sums, scalings and noise there would be those of this stage.

        Args:
            params: what the loss has as its first argument.
        """
        leaves = tree.leaves(params, is_leaf=is_sharded)
        owned = tuple(x.layout.owners for x in leaves if isinstance(x, Sharded))
        for found in {id(found): found for found in cuts}.values():
            if not found.stages or (id(found), owned) in self.checked:
                continue
            paths = tree.paths(params, is_leaf=is_sharded)
            at = dict(zip(paths, leaves, strict=True))
            for call in (*found.program.calls, found.program.loss):
                for path in sorted(call.reads):
                    if isinstance(leaf := at.get(path), Sharded):
                        before = getattr(call, "name", "")
                        raise ValueError(_READ.format(leaf.layout, _place(before)))
            for stage in found.stages:
                for path in sorted(stage.leaves):
                    self.check_leaf(at.get(path), self.owners[stage.number])
            self.checked.add((id(found), owned))

    def check_leaf(self, leaf: Any, rank: int) -> None:
        """Raises where ``leaf`` belongs to another rank of the pipeline."""
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


def _place(unit: str) -> str:
    return f"for what unit {unit!r} is given" if unit else "for the loss"


def _kind(x: Any) -> Any:
    """The part of a leaf that a program depends on, for comparison."""
    if isinstance(x, Tensor) or is_sharded(x):
        where = _torch.device_of(x) if isinstance(x, Tensor) else x.device
        return tuple(x.shape), x.dtype, where
    try:
        hash(x)
    except TypeError:
        return type(x)
    return x


def _casts() -> tuple[Any, ...]:
    """The dtypes of autocast, under which the same unit gives other ones."""
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    return tuple((k, torch.get_autocast_dtype(k)) for k in kinds)


def _code(fn: Any) -> Any:
    """The code of a function, which stays when it is made anew for every step.

    Those around it too: all that one transform returns have one code.
    """
    codes = []
    while isinstance(fn, functools.partial | Transformed):
        if isinstance(fn, Transformed):
            codes.append(fn.__code__)
        fn = fn.func if isinstance(fn, functools.partial) else fn._f
    return *codes, getattr(fn, "__code__", fn)


def _first(
    fn: Callable[..., Any], args: tuple[Any, ...], argnums: Sequence[int]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``fn`` with what is differentiated as its first argument."""
    if tuple(argnums) == (0,):
        return fn, args

    @functools.wraps(fn)
    def reordered(chosen: Any, others: Any, **keywords: Any) -> Any:
        given = list(others)
        for i, x in zip(argnums, chosen, strict=True):
            given[i] = x
        return fn(*given, **keywords)

    others = [None if i in argnums else x for i, x in enumerate(args)]
    return reordered, ([args[i] for i in argnums], others)
