"""The programs of a pipelined function: one for each shape of microbatch, cut alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.frames import Transformed
from fsfunc.core.outcomes import GradientCall
from fsfunc.pipelining.stage_plans import Cut, Stages, cut
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.groups import plain
from fsfunc.tracing.tracer import trace


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
            args = tree.map(plain, call.args, is_leaf=is_sharded)
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
        owned = tuple(x.layout.owned for x in leaves if isinstance(x, Sharded))
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
        for part in leaf.layout.owned if isinstance(leaf, Sharded) else ():
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
        where = x.device if is_sharded(x) else _torch.device_of(x)
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
