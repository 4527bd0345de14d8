"""A module as a function: its parts, the copies that run them, and their unit calls.

A module's forward reads its parameters and buffers as attributes, and may set others.
So each call borrows a copy of its own, for ranks, recomputes and recursive calls that
run at the same time. A copy's tables of parameters and buffers look up the arguments of
the call; attributes that a forward sets are dropped after the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any

from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.core.units import Unit, unit
from fsfunc.interop.attributes import Attributes
from fsfunc.interop.call_tensors import CallTensors, Knowledge
from fsfunc.interop.compiled_units import Compile, compiled_unit, refuse_compiled_unit
from fsfunc.interop.layer_plans import LayerPlan
from fsfunc.interop.module_tensors import Tensors, check_closures, computed
from fsfunc.interop.stubs import (
    Absent,
    LateHooks,
    Seen,
    are_filled,
    handed,
    make_stub,
    opened,
    run_late,
    shown_by,
    taken,
    without_caches,
)
from fsfunc.sharded.leaf import is_sharded


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
            return part.run(params, buffers, args, keywords, asked)[:2]
        params = {n: params[n] for n in part.params}
        buffers = {n: buffers[n] for n in part.buffers}
        return part.called(params, buffers, args, keywords, asked)[:2]

    def units_within(self, name: str) -> dict[str, _Part]:
        """The units in a part, by their paths within it."""
        paths = [x for x, _ in self.template.get_submodule(name).named_modules() if x]
        full = {x: self._first[f"{name}.{x}" if name else x] for x in paths}
        return {x: self.parts[y] for x, y in full.items() if y in self.parts}

    def _fetch(self, name: str, leaf: Any) -> Any:
        """A parameter that is read outside every unit, through one of its own."""
        if name not in self._fetches:
            fetched = _given()
            fetched.__name__ = name
            self._fetches[name] = unit(fetched)
        return self._fetches[name]({name: leaf})[name]


def _given() -> Callable[..., Any]:
    return lambda params: params


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


def copied(module: nn.Module) -> tuple[nn.Module, list[Any]]:
    """A copy of ``module``, and what was copied with it: not what it shares."""
    memo: dict[int, Any] = {}
    with _torch.outside_modes():  # a fake tensor would stay
        found = copy.deepcopy(module, memo)
    originals = memo.pop(id(memo), [])
    for x in originals:  # copies of their dicts that nobody keeps
        if hasattr(x, "__dict__"):
            memo.pop(id(vars(x)), None)
    return found, list(memo.values())


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
        self.module, things = copied(template)
        self.fills = fills
        if not fills:
            without_caches(things)
        #: What the call that has the copy is given, and what it writes of that.
        self.tensors = CallTensors(part, self.module)
        for name, call in stubs.items():
            make_stub(self.module.get_submodule(name), call, self)
        if part.fetch is None and part.name:
            for hooks in _torch.hook_tables(self.module, before=False):
                hooks.clear()  # they run on the unit's output, outside it
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
        tables = [(dict(x.named_parameters(recurse=False)), x) for x in m.modules()]
        self.params = _names(x for table, _ in tables for x in table.values())
        self.buffers = _names(
            x for _, one in tables for _, x in one.named_buffers(recurse=False)
        )
        self.units: dict[Extras, Unit] = {}

    def called_within(self, outer: Copy, m: nn.Module, args: Any, keywords: Any) -> Any:
        """Calls the unit in place of ``m``, within a part that holds its tensors."""
        given = outer.tensors.given
        outer.attributes.enter()
        hooks = outer.late_hooks[id(m)].found()
        params = {n: given.params[n] for n in self.params}
        buffers = given.current(self.buffers)
        asked = Extras(given.mutable, outer.fills, tuple(hooks))
        out, changed, seen = self.called(params, buffers, args, keywords, asked)
        for name, x in changed.items():
            given.write(name, x)
        for path, inputs, output in seen:
            run_late(m.get_submodule(path), hooks[path], inputs, output)
        return out

    def run(
        self, params: Any, buffers: Any, args: Any, keywords: Any, asked: Extras
    ) -> tuple[Any, dict[str, Tensor], Seen]:
        """The output of the part, run here and now on a copy of its own."""
        if not self.known.fetch:
            self.structure.plan.check(params)
        free = self.free[asked.fills]
        own = free.pop() if free else self._copy(asked.fills)
        own.tensors.begin(params, buffers, asked.mutable)
        try:
            seen = shown_by(own.module, asked.shows)
            out = own.module(*args, **keywords)
            changed = own.tensors.changed()
            own.tensors.flow.check_returned()
        finally:
            own.tensors.end()
            left = own.attributes.restored(asked.mutable and not self.name)
            if not own.attributes.is_closed:
                free.append(own)
        if left is not None:
            raise RuntimeError(left)
        return out, changed, seen

    def _copy(self, fills: bool) -> Copy:
        units = self.structure.units_within(self.name)
        stubs = {path: part.called_within for path, part in units.items()}
        return Copy(self.template, stubs, self.known, fills)

    def called(
        self, params: Any, buffers: Any, args: Any, keywords: Any, asked: Extras
    ) -> tuple[Any, dict[str, Tensor], Seen]:
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
        return taken(out) if asked.fills else out, changed, seen

    def _unit(self, asked: Extras) -> Unit:
        name = self.name or type(self.template).__name__

        def run(params: Any, buffers: Any, /, *args: Any, **keywords: Any) -> Any:
            if asked.fills:
                args, keywords = taken((args, keywords))
            before = tree.flatten((args, keywords), is_leaf=is_sharded)
            out, changed, seen = self.run(params, buffers, args, keywords, asked)
            after = tree.flatten((args, keywords), is_leaf=is_sharded)
            if after[1] != before[1] or not all(map(is_, after[0], before[0])):
                raise RuntimeError(
                    f"unit {name!r} changes a list or dict that it is given: where the "
                    "unit runs again, or elsewhere, it is another; return what is new, "
                    "or make a unit of what is around both"
                )
            if asked.fills:
                out = handed(out)
            opened(out, f"unit {name!r}")
            return out if asked.is_plain else (out, changed, seen)

        run.__name__ = name
        run.as_given = 1  # type: ignore[attr-defined]  # statistics stay exact
        run.compiled_by = partial(self._compiled, asked)  # type: ignore[attr-defined]
        self.units[asked] = unit(run)
        return self.units[asked]

    def _compiled(self, asked: Extras, compile: Compile) -> Callable[..., Any]:
        """The unit's function as ``jit`` compiles it."""
        structure, who = self.structure, self.known.who
        if structure.units_within(self.name):
            refuse_compiled_unit(who, "holds other units")
        if any(
            x == self.name or x.startswith(f"{self.name}.")
            for x in structure.plan.words
        ):
            refuse_compiled_unit(who, "has layers that a plan splits")
        if asked.fills:  # without gradients, when it may be given a cache to fill
            return self.units[asked].fn
        if not asked.is_plain:
            refuse_compiled_unit(who, "is asked for more than its output")
        return compiled_unit(*copied(self.template), who, compile)


def _names(absent: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(x.name for x in absent))
