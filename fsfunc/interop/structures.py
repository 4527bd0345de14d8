"""A module as a function: its parts, the copies that run them, and their unit calls.

A module's forward reads its parameters and buffers as attributes, and may set others.
So each call borrows a copy of its own, for ranks, recomputes and recursive calls that
run at the same time. A copy's tables of parameters and buffers look up the arguments of
the call; attributes that a forward sets are dropped after the call.

torch's `functional_call` puts all tensors in their places before a module runs. Tables
are asked as it runs: so a parameter that is read outside every unit is gathered by that
read, in its turn among the gathers of units, and one that nobody reads never; a buffer
is copied when it is read; who reads after the call is over, as a backward within it
does, is refused, since the copy may be another call's by then; and what is set is told
where it is. No compiler takes such tables: a unit that ``jit`` compiles is a copy with
tensors on "meta", which `functional_call` runs by names within the unit, so that equal
layers share what is compiled.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.core.units import Unit, unit
from fsfunc.interop.attributes import Attributes
from fsfunc.interop.call_tensors import CallTensors, Knowledge, Tables
from fsfunc.interop.layer_plans import LayerPlan
from fsfunc.interop.module_tensors import Tensors, check_closures, computed
from fsfunc.interop.stubs import (
    Absent,
    LateHooks,
    Seen,
    are_filled,
    handed,
    hook_tables,
    make_stub,
    opened,
    run_late,
    shown_by,
    taken,
    without_caches,
)
from fsfunc.sharded.leaf import is_sharded

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Extras:
    """Results of a part beside its output.

    Args:
        mutable: the buffers that it wrote.
        fills: that it fills caches, which nobody will fill twice.
        shows: what modules within it are given, and return.
    """

    mutable: bool
    fills: bool
    shows: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if a unit gives its output, and no more."""
        return not (self.mutable or self.shows)


class PartResult(NamedTuple):
    """The output of a part, the buffers that it wrote, and what modules in it saw."""

    out: Any
    changed: dict[str, Tensor]
    seen: Seen


class Structure:
    """A module without its tensors, cut into units.

    Args:
        module: it is copied, and not kept.
        tensors: the module's.
        units: names of the modules that are units.
        plan: which of its layers are split.
    """

    def __init__(
        self, module: nn.Module, tensors: Tensors, units: Sequence[str], plan: LayerPlan
    ):
        self.template, self.plan = without_tensors(module, tensors), plan
        plan.install(self.template)
        first = {id(m): name for name, m in self.template.named_modules()}
        every = self.template.named_modules(remove_duplicate=False)
        self._first = {name: first[id(m)] for name, m in every}
        self.frozen, self.fixed = frozenset(tensors.frozen), tensors.overlapping
        self._fetches: dict[str, Unit] = {}
        self.parts = {name: _Part(self, name, None) for name in units}
        self.whole = self.parts.get("") or _Part(self, "", self._fetch)

    def call(
        self, params: Any, buffers: Any, args: Any, keywords: Any, mutable: bool
    ) -> tuple[Any, dict[str, Tensor]]:
        """The module's output, and the buffers that it wrote."""
        part, asked = self.whole, Extras(mutable, are_filled())
        if part is not self.parts.get(""):
            ran = part.run(params, buffers, args, keywords, asked)
            return ran.out, ran.changed
        params = {n: params[n] for n in part.params}
        buffers = {n: buffers[n] for n in part.buffers}
        ran = part.called(params, buffers, args, keywords, asked)
        return ran.out, ran.changed

    def units_within(self, name: str) -> dict[str, _Part]:
        """The units in a part, by their paths within it."""
        paths = [x for x, _ in self.template.get_submodule(name).named_modules() if x]
        full = {x: self._first[f"{name}.{x}" if name else x] for x in paths}
        return {x: self.parts[y] for x, y in full.items() if y in self.parts}

    def _fetch(self, name: str, leaf: Any) -> Any:
        """A parameter that is read outside every unit, through one of its own."""
        if name not in self._fetches:

            def fetched(params: Any) -> Any:
                return params

            fetched.__name__ = name  # one for each, as units have names
            self._fetches[name] = unit(fetched)
        return self._fetches[name]({name: leaf})[name]


def without_tensors(module: nn.Module, tensors: Tensors) -> nn.Module:
    """A copy of ``module`` in which each of its tensors is :class:`Absent`.

    Raises:
        TypeError: something in it cannot be copied, or holds what is.
    """
    check_closures(module)
    memo: dict[int, Any] = {
        id(x): Absent(name, tuple(x.shape), x.dtype) for name, x in tensors.all.items()
    }
    for name, x in computed(module):
        memo.setdefault(id(x), Absent(name, tuple(x.shape), x.dtype))
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"the structure of {type(module).__name__} cannot be copied, and each call "
            f"needs a copy: {error}"
        ) from error


def _copied(
    template: nn.Module, part: Knowledge, fills: bool
) -> tuple[nn.Module, list[Any]]:
    """A copy of a part, and what was copied with it: not what it shares."""
    memo: dict[int, Any] = {}
    with _torch.outside_modes():  # a fake tensor would stay
        module = copy.deepcopy(template, memo)
    originals = memo.pop(id(memo), [])
    for x in originals:  # copies of their dicts that nobody keeps
        if hasattr(x, "__dict__"):
            memo.pop(id(vars(x)), None)
    things = list(memo.values())
    if not fills:
        without_caches(things)
    if part.fetch is None and part.name:
        for hooks in _torch.hook_tables(module, before=False):
            hooks.clear()  # they run on the unit's output, outside it
    return module, things


class Copy:
    """One copy of a part of a module, for one call at a time.

    Args:
        template: the module of which it is a copy, without tensors.
        stubs: the units in it, by name within it: what to run in their place.
        part: what is known of it.
        fills: whether it may fill a cache.
    """

    def __init__(
        self,
        template: nn.Module,
        stubs: Mapping[str, Callable[..., Any]],
        part: Knowledge,
        fills: bool,
    ):
        self.module, things = _copied(template, part, fills)
        self.fills = fills
        #: What the call that has the copy is given, and what it writes of that.
        self.tables = Tables(part, self.module)
        for name, call in stubs.items():
            make_stub(self.module.get_submodule(name), call, self)
        self.attributes = Attributes(self.module, things, stubs.keys(), part.who)
        units = map(self.module.get_submodule, stubs)
        self.late_hooks = {id(m): LateHooks(m) for m in units}


class _Part:
    """The whole or one unit: its names, its copies, and the function that runs it.

    Args:
        fetch: reads a parameter that is outside every unit; None of a unit.
    """

    def __init__(self, structure: Structure, name: str, fetch: Any):
        self.structure, self.name = structure, name
        self.template = m = structure.template.get_submodule(name)
        who = "the module" if fetch else f"unit {name or type(m).__name__!r}"
        frozen, fixed = structure.frozen, structure.fixed
        self.known = Knowledge(name, who, frozen, fixed, fetch, structure.plan)
        self.free: dict[bool, list[Copy]] = {False: [], True: []}  # by: may fill caches
        # Absent ones, which bear the names that these tensors have in the whole.
        params: list[Any] = [
            x for y in m.modules() for x in _torch.tensor_tables(y)[0].values()
        ]
        buffers: list[Any] = [
            x for y in m.modules() for x in _torch.tensor_tables(y)[1].values()
        ]
        self.params = tuple(dict.fromkeys(x.name for x in params if x is not None))
        self.buffers = tuple(dict.fromkeys(x.name for x in buffers if x is not None))
        self.units: dict[Extras, Unit] = {}

    def called_within(self, outer: Copy, m: nn.Module, args: Any, keywords: Any) -> Any:
        """Calls the unit in place of ``m``, within a part that holds its tensors."""
        given = outer.tables.given
        outer.attributes.enter()
        hooks = outer.late_hooks[id(m)].found()
        params = {n: given.params[n] for n in self.params}
        buffers = given.current(self.buffers)
        asked = Extras(given.mutable, outer.fills, tuple(hooks))
        ran = self.called(params, buffers, args, keywords, asked)
        for name, x in ran.changed.items():
            given.write(name, x)
        for path, inputs, output in ran.seen:
            run_late(m.get_submodule(path), hooks[path], inputs, output)
        return ran.out

    def run(
        self, params: Any, buffers: Any, args: Any, keywords: Any, asked: Extras
    ) -> PartResult:
        """The output of the part, run here and now on a copy of its own."""
        if not self.known.fetch:
            self.structure.plan.check(params)
        free = self.free[asked.fills]
        if free:
            own = free.pop()
        else:
            units = self.structure.units_within(self.name)
            stubs = {path: part.called_within for path, part in units.items()}
            own = Copy(self.template, stubs, self.known, asked.fills)
        own.tables.call = CallTensors(own.tables, params, buffers, asked.mutable)
        try:
            seen = shown_by(own.module, asked.shows)
            out = own.module(*args, **keywords)
            changed = own.tables.given.changed()
            own.tables.given.flow.check_returned()
        finally:
            own.tables.call = None  # and with it a graph, and what was gathered for it
            left = own.attributes.restored(asked.mutable and not self.name)
            if not own.attributes.is_closed:
                free.append(own)
        if left is not None:
            raise RuntimeError(left)
        return PartResult(out, changed, seen)

    def called(
        self, params: Any, buffers: Any, args: Any, keywords: Any, asked: Extras
    ) -> PartResult:
        """Calls the unit, and nothing else."""
        who = f"unit {self.name!r}"
        if asked.mutable and self.name and not buffers:
            asked = replace(asked, mutable=False)
        if asked.fills:
            args, keywords = handed((args, keywords))
        others = opened((args, keywords), who)
        found = self.units.get(asked) or self._unit(asked)
        out = found(params, buffers, *args, **keywords)
        if others:
            opened((args, keywords), who)
        out, changed, seen = (out, {}, []) if asked.is_plain else out
        return PartResult(taken(out) if asked.fills else out, changed, seen)

    def _unit(self, asked: Extras) -> Unit:
        name = self.name or type(self.template).__name__

        def run(params: Any, buffers: Any, /, *args: Any, **keywords: Any) -> Any:
            if asked.fills:
                args, keywords = taken((args, keywords))
            before = tree.flatten((args, keywords), is_leaf=is_sharded)
            ran = self.run(params, buffers, args, keywords, asked)
            after = tree.flatten((args, keywords), is_leaf=is_sharded)
            if after[1] != before[1] or not all(map(is_, after[0], before[0])):
                raise RuntimeError(
                    f"unit {name!r} changes a list or dict that it is given: where the "
                    "unit runs again, or elsewhere, it is another; return what is new, "
                    "or make a unit of what is around both"
                )
            out = handed(ran.out) if asked.fills else ran.out
            opened(out, f"unit {name!r}")
            return out if asked.is_plain else (out, ran.changed, ran.seen)

        run.__name__ = name
        run.as_given = 1  # type: ignore[attr-defined]  # statistics stay exact
        run.compiled_by = partial(self._compiled, asked)  # type: ignore[attr-defined]
        self.units[asked] = unit(run)
        return self.units[asked]

    def _compiled(self, asked: Extras, compile: Compile) -> Callable[..., Any]:
        """The unit's function, ``(params, buffers, *args, **keywords)``, compiled.

        Raises:
            ValueError: it is no function of these alone, or writes buffers as it runs.
        """
        who, name = self.known.who, self.name
        split = self.structure.plan.words
        refused = "jit compiles no such unit; leave it out, jit(..., only=other names)"
        if self.structure.units_within(name):
            raise ValueError(f"{who} holds other units: {refused}")
        if any(x == name or x.startswith(f"{name}.") for x in split):
            raise ValueError(f"{who} has layers that a plan splits: {refused}")
        if asked.fills:  # without gradients, when it may be given a cache to fill
            return self.units[asked].fn
        if not asked.is_plain:
            raise ValueError(f"{who} is asked for more than its output: {refused}")
        for path, m in self.template.named_modules():
            if m.training and getattr(m, "track_running_stats", False):
                raise ValueError(
                    f"{who} holds {path or type(m).__name__!r}, which writes running "
                    f"statistics: {refused}, or call eval() of it before from_module"
                )
        module, things = _copied(self.template, self.known, False)
        names = _with_meta_tensors(module)
        attributes = Attributes(module, things, (), who)
        like = module.state_dict(keep_vars=True)
        kind = type(module), *((k, x.shape, x.dtype) for k, x in like.items())
        # No guard looks at hooks, and what they hold is not for a cache to keep.
        is_hooked = any(table for m in module.modules() for table in hook_tables(m))
        make = _caller_of.__wrapped__ if is_hooked else _caller_of
        run = compile(make(kind))

        def called(params: Any, buffers: Any, /, *args: Any, **keywords: Any) -> Any:
            given = {**params, **buffers}
            tensors = {here: given[there] for here, there in names.items()}
            try:
                return run(module, tensors, args, keywords)
            finally:
                if (left := attributes.restored(False)) is not None:
                    raise RuntimeError(left)

        return called


@functools.cache
def _caller_of(kind: tuple[Any, ...]) -> Callable[..., Any]:
    """A caller of modules of one class and shapes, with code of its own.

    The compiler keeps what it makes of a code, a few at most.
    """
    code = _called.__code__.replace(co_name=kind[0].__name__)
    return types.FunctionType(code, _called.__globals__)


def _called(module: nn.Module, tensors: Any, args: Any, keywords: Any) -> Any:
    return torch.func.functional_call(module, tensors, args, keywords)


def _with_meta_tensors(module: nn.Module) -> dict[str, str]:
    """The names in the whole of a module's tensors, by their names in it.

    Its placeholders become tensors without data, tied ones one.
    """
    made: dict[str, Tensor] = {}
    names = {}
    for path, m in module.named_modules():
        parameters, buffers = _torch.tensor_tables(m)
        for table in (parameters, buffers):
            for name, x in table.items():
                if not isinstance(x, Absent):
                    continue
                if x.name not in made:
                    empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
                    if table is parameters:
                        empty = nn.Parameter(empty, requires_grad=False)
                    made[x.name] = empty
                    names[f"{path}.{name}" if path else name] = x.name
                table[name] = made[x.name]
    return names
