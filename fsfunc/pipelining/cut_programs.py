"""The programs of a pipelined function: one for each shape of microbatch, cut alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.pipelining.microbatches import Part, kind_of
from fsfunc.pipelining.stage_plans import Cut, Stages, cut
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.leaves import plain
from fsfunc.tracing.programs import Program, Spec
from fsfunc.tracing.tracer import trace

__all__ = ["Cuts"]


class Cuts:
    """What the losses of a pipelined function have shown.

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

    def of(
        self,
        fn: Callable[..., Any],
        part: Part,
        argnums: Sequence[int],
        number: int = 0,
    ) -> Cut:
        """The stages of a loss, for a microbatch of these shapes; a penalty has none.

        Args:
            number: of the step's gradient calls, in each of which the loss is one.
        """
        chosen = [part.args[i] for i in argnums]
        flat, structure = tree.flatten(chosen, is_leaf=is_sharded)
        kinds = tuple(map(kind_of, flat))
        loss = number, _code(fn), structure
        # Of split leaves a unit may make parts, of other shapes.
        split = any(isinstance(x, Sharded) and x.layout.splits for x in flat)
        key = (loss, part.shapes, kinds, split)
        if key not in self.known:
            args = tree.map(plain, part.args, is_leaf=is_sharded)
            fn, args = _first(fn, args, argnums)
            program = trace(fn, args, part.keywords)
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
        """Raises, on every rank alike, where a stage would not have what it reads.

        That is a leaf that lies with another stage, or a part of one that is read
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

    def refuse_rows(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        keywords: dict[str, Any],
        argnums: Sequence[int],
    ) -> None:
        """Raises where a batch is differentiated, which is not cut as the rest of it.

        A leaf as long as the batch may be part of it, or parameters by chance. What a
        unit has in its first argument are parameters. Of the rest the loss tells, which
        is tried on fake tensors with a longer batch: it needs no longer parameters. Nor
        may they be longer, but for what the loss itself reads of a tree of parameters,
        and gives no unit the rows of.
        """
        fn, (chosen, *others) = _first(fn, tuple(args), argnums)
        chosen = tree.map(plain, chosen, is_leaf=is_sharded)
        given = tree.map(plain, (others, keywords), is_leaf=is_sharded)
        paths, leaves, treedef = tree.flatten_with_paths(chosen, is_leaf=is_sharded)
        batch, structure = tree.flatten(given, is_leaf=is_sharded)
        rows = {len(x) for x in filter(_is_cut, batch)}
        long = [i for i, x in enumerate(leaves) if _is_cut(x) and {len(x)} == rows]
        key = "rows", _code(fn), treedef, structure, *map(kind_of, (*leaves, *batch))
        if not long or key in self.checked:
            return

        mode = _torch.fake_mode_of((*leaves, *batch))

        def longer(x: Any) -> Any:
            """A stand-in of twice the rows, which nobody sees being made."""
            if not _is_cut(x):
                return x
            shape, device = (2 * len(x), *x.shape[1:]), _torch.device_of(x)
            with _torch.beneath_all_modes(), mode:
                return torch.empty(shape, dtype=x.dtype, device=device)

        def runs(which: Collection[int], alone: bool = False) -> Program | None:
            """The loss of these leaves, and but for ``alone`` the batch, twice as long.

            None if it does not take them.
            """
            own = [longer(x) if i in which else x for i, x in enumerate(leaves)]
            rest = given if alone else tree.map(longer, given, is_leaf=is_sharded)
            others, named = rest
            try:
                with _torch.quiet_fakes():
                    return trace(fn, (tree.unflatten(treedef, own), *others), named)
            except Exception:
                return None

        def grows(i: int) -> bool:
            """Whether units return more rows where a leaf has more."""
            more = runs([i], alone=True)
            return more is not None and _rows(more) != _rows(program)

        program = trace(fn, (chosen, *given[0]), given[1])
        used, own, inputs = set(program.loss.reads), set[str](), set[str]()
        for call in program.calls:
            used |= call.params | call.reads
            own |= call.own
            inputs |= call.params - call.own
        long = [i for i in long if paths[i] in used - own]
        at = {path: _argument(path, argnums) for path in paths}
        kin = {at[path][0] for path in own}  # arguments that hold parameters
        odd = [
            i
            for i in long
            if paths[i] in inputs or at[paths[i]][0] not in kin or grows(i)
        ]
        fit = odd and (runs(odd) or any(runs([i]) for i in odd))
        if long and (fit or not runs(())):
            told = [f"argument {k}" + (f" at {where!r}" if where else "")
                    for k, where in (at[paths[i]] for i in odd or long)]  # fmt: skip
            raise ValueError(_ROWS.format(", ".join(told), *rows))
        self.checked.add(key)

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
    "own gradient call beside the pipelined one, in the same step: "
    "ff.value_and_grad(penalty)(params), and the two gradients are added by tree.map"
)


_ROWS = (
    "{} is differentiated, and is as long as the batch, {} rows, of which it seems to "
    "be a part: a pipeline takes what it differentiates for parameters, and does not "
    "cut it. Gradients by rows come from ff.accumulate(ff.pipeline(f, ..., "
    "n_microbatches=1), n, batch_argnums=...), which cuts them; parameters are what a "
    "unit takes as its first argument"
)


def _argument(path: str, argnums: Sequence[int]) -> tuple[int, str]:
    """Which argument of the gradient call a leaf is in, and where in it."""
    if tuple(argnums) == (0,):
        return 0, path
    first, _, rest = path.partition("/")
    return argnums[int(first)], rest


def _rows(program: Program) -> list[Any]:
    """The lengths of what unit calls return."""
    outputs = [x for call in program.calls for x in call.outputs.leaves]
    return [x.shape[:1] if isinstance(x, Spec) else None for x in outputs]


def _is_cut(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _place(unit: str) -> str:
    return f"for what unit {unit!r} is given" if unit else "for the loss"


def _code(fn: Any) -> Any:
    """What a function is, also where it is made anew for every step."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", fn)


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
