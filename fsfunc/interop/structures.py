"""A module as a function: its parts, the copies that run them, and their unit calls.

A module's forward reads its parameters and buffers as attributes, and may set others.
Ranks, recomputes and recursive calls run at the same time, so each call borrows a copy
of the module for itself:

    Structure   the module without its tensors, cut into parts
    _Part       the whole, or one unit: its name, its free copies, its unit function
    ModuleCopy  one copy; a module in it that is a unit calls that unit (`UnitStub`)
    Tables      where the copy's modules look up their tensors: in the call's arguments

Attributes that a forward sets are put back after the call (`Attributes`).

torch's `functional_call` puts all tensors in their places before a module runs. Tables
are asked as it runs, for these reasons. A parameter that is read outside every unit is
gathered by that read, in its turn among the gathers of units; one that nobody reads is
never gathered. A buffer is copied when it is read. A read after the call is over, as by
a backward within it, is refused, since the copy may be another call's by then. An error
about what a forward sets is raised where it is set.

No compiler takes such tables. A unit that ``jit`` compiles is a copy with tensors on
"meta", which `functional_call` runs by names within the unit, so that equal layers
share what is compiled.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.core.units import unit
from fsfunc.interop.attributes import Attributes
from fsfunc.interop.call_tensors import CallTensors, PartFacts, Tables
from fsfunc.interop.layer_plans import LayerPlan
from fsfunc.interop.module_tensors import (
    ModuleTensors,
    check_closures,
    computed_tensors,
)
from fsfunc.interop.stubs import (
    AbsentTensor,
    LateHooks,
    ModuleCalls,
    all_hook_tables,
    check_no_hidden,
    make_stub,
    may_fill_caches,
    record_calls,
    run_late_hooks,
    turn_off_caches,
    unwrap_objects,
    wrap_objects,
)
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf, PyTree

Compile: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
_Arguments: TypeAlias = Sequence[Any]
_Keywords: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class ExtraResults:
    """What a call of a part is asked for beside its output.

    Args:
        mutable: whether to return the buffers that it wrote.
        fills_caches: whether it may fill caches, as no unit will run again.
        recorded: paths of modules within it whose inputs and outputs to return.
    """

    mutable: bool
    fills_caches: bool
    recorded: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether a unit returns its output, and no more."""
        return not (self.mutable or self.recorded)


class PartResult(NamedTuple):
    """The output of a part, the buffers that it wrote, and calls of modules in it."""

    output: Any
    written: dict[str, Tensor]
    calls: ModuleCalls


class Structure:
    """A module without its tensors, cut into units.

    Args:
        module: it is copied, and not kept.
        tensors: the module's.
        units: names of the modules that are units.
        plan: which of its layers are split.
    """

    template: nn.Module
    plan: LayerPlan
    frozen: frozenset[str]
    overlapping: frozenset[str]

    def __init__(
        self,
        module: nn.Module,
        tensors: ModuleTensors,
        units: Sequence[str],
        plan: LayerPlan,
    ):
        self.template, self.plan = without_tensors(module, tensors), plan
        plan.install(self.template)
        # A module that is there under several names goes by the first of them.
        first_name_of = {id(m): name for name, m in self.template.named_modules()}
        every = self.template.named_modules(remove_duplicate=False)
        self._first_names = {name: first_name_of[id(m)] for name, m in every}
        self.frozen, self.overlapping = frozenset(tensors.frozen), tensors.overlapping
        self._fetch_units: dict[str, Callable[..., Any]] = {}
        self.parts: dict[str, _Part] = {n: _Part(self, n, None) for n in units}
        self.whole: _Part = self.parts.get("") or _Part(self, "", self._fetch)

    def call(
        self,
        params: Mapping[str, Leaf],
        buffers: Mapping[str, Tensor],
        args: _Arguments,
        keywords: _Keywords,
        mutable: bool,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Returns the module's output, and the buffers that it wrote."""
        part, extras = self.whole, ExtraResults(mutable, may_fill_caches())
        if part is not self.parts.get(""):
            result = part.run(params, buffers, args, keywords, extras)
            return result.output, result.written
        params = {n: params[n] for n in part.params}
        buffers = {n: buffers[n] for n in part.buffers}
        result = part.call_unit(params, buffers, args, keywords, extras)
        return result.output, result.written

    def units_within(self, name: str) -> dict[str, _Part]:
        """Returns the units in a part, by their paths within it."""
        paths = [x for x, _ in self.template.get_submodule(name).named_modules() if x]
        names = {x: self._first_names[f"{name}.{x}" if name else x] for x in paths}
        return {x: self.parts[y] for x, y in names.items() if y in self.parts}

    def _fetch(self, name: str, leaf: Leaf) -> Leaf:
        """Returns a parameter that is read outside every unit.

        It goes through a small unit of its own, as units are what transforms gather.
        """
        if name not in self._fetch_units:

            def fetch(params: PyTree) -> PyTree:
                return params

            fetch.__name__ = name  # a unit for each parameter, as units have names
            self._fetch_units[name] = unit(fetch)
        return self._fetch_units[name]({name: leaf})[name]


def without_tensors(module: nn.Module, tensors: ModuleTensors) -> nn.Module:
    """Copies ``module`` with an :class:`AbsentTensor` in place of each of its tensors.

    Raises:
        TypeError: something in it cannot be copied, or holds what is.
    """
    check_closures(module)
    # deepcopy takes what the memo has for an object as its copy.
    memo: dict[int, Any] = {
        id(x): AbsentTensor(name, tuple(x.shape), x.dtype)
        for name, x in tensors.all.items()
    }
    for name, x in computed_tensors(module):
        memo.setdefault(id(x), AbsentTensor(name, tuple(x.shape), x.dtype))
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"the structure of {type(module).__name__} cannot be copied, and each call "
            f"needs a copy: {error}"
        ) from error


def _copy_part(
    template: nn.Module, part: PartFacts, fills_caches: bool
) -> tuple[nn.Module, list[Any]]:
    """Copies a part; returns the copy, and all objects that were copied with it."""
    memo: dict[int, Any] = {}
    with _torch.outside_modes():  # a fake tensor would stay
        module = copy.deepcopy(template, memo)
    # Under its own id the memo has the originals, which it keeps alive. An object's
    # __dict__ is copied too, but the copy of the object has another dict.
    originals = memo.pop(id(memo), [])
    for x in originals:
        if hasattr(x, "__dict__"):
            memo.pop(id(vars(x)), None)
    copied = list(memo.values())
    if not fills_caches:
        turn_off_caches(copied)
    if part.fetch is None and part.name:
        for hooks in _torch.hook_tables(module, before=False):
            hooks.clear()  # they run on the unit's output, outside it
    return module, copied


class ModuleCopy:
    """One copy of a part of a module, for one call at a time.

    Args:
        template: the module of which it is a copy, without tensors.
        stubs: by the path of each unit in it, what to run in place of its forward.
        part: the facts that all copies of the part share.
        fills_caches: whether it may fill a cache.
    """

    module: nn.Module

    def __init__(
        self,
        template: nn.Module,
        stubs: Mapping[str, Callable[..., Any]],
        part: PartFacts,
        fills_caches: bool,
    ):
        self.module, copied = _copy_part(template, part, fills_caches)
        self.fills_caches = fills_caches
        #: Where its modules look up their tensors: they ask the call that has the copy.
        self.tables: Tables = Tables(part, self.module)
        for name, call in stubs.items():
            make_stub(self.module.get_submodule(name), call, self)
        self.attributes: Attributes = Attributes(
            self.module, copied, stubs.keys(), part.title
        )
        units = map(self.module.get_submodule, stubs)
        self.late_hooks: dict[int, LateHooks] = {id(m): LateHooks(m) for m in units}


class _Part:
    """The whole module or one unit: its names, its copies, and its unit function.

    Args:
        fetch: reads a parameter that is outside every unit; None for a unit.
    """

    structure: Structure
    name: str
    template: nn.Module
    params: tuple[str, ...]
    buffers: tuple[str, ...]

    def __init__(
        self,
        structure: Structure,
        name: str,
        fetch: Callable[[str, Leaf], Leaf] | None,
    ):
        self.structure, self.name = structure, name
        self.template = m = structure.template.get_submodule(name)
        title = "the module" if fetch else f"unit {name or type(m).__name__!r}"
        frozen, overlapping = structure.frozen, structure.overlapping
        self.facts: PartFacts = PartFacts(
            name, title, frozen, overlapping, fetch, structure.plan
        )
        # Copies that no call has, by whether they may fill caches.
        self.free_copies: dict[bool, list[ModuleCopy]] = {False: [], True: []}
        # Placeholders, which bear the names that these tensors have in the whole.
        params: list[Any] = [
            x for y in m.modules() for x in _torch.tensor_tables(y)[0].values()
        ]
        buffers: list[Any] = [
            x for y in m.modules() for x in _torch.tensor_tables(y)[1].values()
        ]
        self.params = tuple(dict.fromkeys(x.name for x in params if x is not None))
        self.buffers = tuple(dict.fromkeys(x.name for x in buffers if x is not None))
        # By what else they return, the calls of the part as a unit (`_make_unit`).
        self.unit_calls: dict[ExtraResults, Callable[..., Any]] = {}

    def call_from_outer(
        self, outer: ModuleCopy, m: nn.Module, args: _Arguments, keywords: _Keywords
    ) -> Any:
        """Calls the unit in place of ``m``, in a copy of the part around it."""
        call = outer.tables.current_call
        outer.attributes.enter()
        hooks = outer.late_hooks[id(m)].find_added()
        params = {n: call.params[n] for n in self.params}
        buffers = call.current_buffers(self.buffers)
        extras = ExtraResults(call.mutable, outer.fills_caches, tuple(hooks))
        result = self.call_unit(params, buffers, args, keywords, extras)
        for name, x in result.written.items():
            call.write(name, x)
        for path, inputs, output in result.calls:
            run_late_hooks(m.get_submodule(path), hooks[path], inputs, output)
        return result.output

    def run(
        self,
        params: Mapping[str, Leaf],
        buffers: Mapping[str, Tensor],
        args: _Arguments,
        keywords: _Keywords,
        extras: ExtraResults,
    ) -> PartResult:
        """Runs the part on a free copy, and returns its results."""
        if not self.facts.fetch:
            self.structure.plan.check(params)
        free_copies = self.free_copies[extras.fills_caches]
        if free_copies:
            borrowed = free_copies.pop()
        else:
            units = self.structure.units_within(self.name)
            stubs = {path: part.call_from_outer for path, part in units.items()}
            borrowed = ModuleCopy(self.template, stubs, self.facts, extras.fills_caches)
        tables = borrowed.tables
        tables.call = CallTensors(tables, params, buffers, extras.mutable)
        try:
            calls = record_calls(borrowed.module, extras.recorded)
            output = borrowed.module(*args, **keywords)
            written = tables.current_call.written_buffers()
            tables.current_call.flow.check_returned()
        finally:
            # Lets go of the call's graph, and of what was gathered for it.
            tables.call = None
            fault = borrowed.attributes.restore(extras.mutable and not self.name)
            if not borrowed.attributes.is_closed:
                free_copies.append(borrowed)
        if fault is not None:
            raise RuntimeError(fault)
        return PartResult(output, written, calls)

    def call_unit(
        self,
        params: Mapping[str, Leaf],
        buffers: Mapping[str, Tensor],
        args: _Arguments,
        keywords: _Keywords,
        extras: ExtraResults,
    ) -> PartResult:
        """Calls the unit, and nothing else."""
        title = f"unit {self.name!r}"
        # Without buffers it can write none: it shares the plain unit.
        if extras.mutable and self.name and not buffers:
            extras = replace(extras, mutable=False)
        if extras.fills_caches:
            args, keywords = wrap_objects((args, keywords))
        may_hide = check_no_hidden((args, keywords), title)
        called = self.unit_calls.get(extras) or self._make_unit(extras)
        out = called(params, buffers, *args, **keywords)
        # An object that held no tensors before may have been given some by the call.
        if may_hide:
            check_no_hidden((args, keywords), title)
        output, written, calls = (out, {}, []) if extras.is_plain else out
        if extras.fills_caches:
            output = unwrap_objects(output)
        return PartResult(output, written, calls)

    def _make_unit(self, extras: ExtraResults) -> Callable[..., Any]:
        name = self.name or type(self.template).__name__

        # Parameters are the first argument of a unit. It and buffers are positional
        # only, so that a module may have keywords of these names.
        def run(
            params: PyTree, buffers: PyTree, /, *args: Any, **keywords: Any
        ) -> PyTree:
            if extras.fills_caches:
                args, keywords = unwrap_objects((args, keywords))
            before = tree.flatten((args, keywords), is_leaf=is_sharded)
            result = self.run(params, buffers, args, keywords, extras)
            after = tree.flatten((args, keywords), is_leaf=is_sharded)
            if after[1] != before[1] or not all(map(is_, after[0], before[0])):
                raise RuntimeError(
                    f"unit {name!r} changes a list or dict that it is given: where the "
                    "unit runs again, or elsewhere, it is another; return what is new, "
                    "or make a unit of what is around both"
                )
            out = wrap_objects(result.output) if extras.fills_caches else result.output
            check_no_hidden(out, f"unit {name!r}")
            return out if extras.is_plain else (out, result.written, result.calls)

        run.__name__ = name
        # `Unit` and `jit` look for these two. Buffers, the argument behind parameters,
        # are not cast under `precision`: statistics stay exact.
        run.uncast_inputs = 1  # type: ignore[attr-defined]
        run.compiled_by = partial(self._compile, extras)  # type: ignore[attr-defined]
        self.unit_calls[extras] = unit(run)
        return self.unit_calls[extras]

    def _compile(self, extras: ExtraResults, compile: Compile) -> Callable[..., Any]:
        """Compiles the unit's function, ``(params, buffers, *args, **keywords)``.

        Raises:
            ValueError: it is no function of these alone, or writes buffers as it runs.
        """
        title, name = self.facts.title, self.name
        split = self.structure.plan.words
        advice = "jit compiles no such unit; leave it out, jit(..., only=other names)"
        if self.structure.units_within(name):
            raise ValueError(f"{title} holds other units: {advice}")
        if any(x == name or x.startswith(f"{name}.") for x in split):
            raise ValueError(f"{title} has layers that a plan splits: {advice}")
        if extras.fills_caches:  # without gradients: it may be given a cache to fill
            return self.unit_calls[extras].fn
        if not extras.is_plain:
            raise ValueError(f"{title} is asked for more than its output: {advice}")
        for path, m in self.template.named_modules():
            if m.training and getattr(m, "track_running_stats", False):
                raise ValueError(
                    f"{title} holds {path or type(m).__name__!r}, which writes running "
                    f"statistics: {advice}, or call eval() of it before from_module"
                )
        module, copied = _copy_part(self.template, self.facts, False)
        names = _fill_with_meta_tensors(module)
        attributes = Attributes(module, copied, (), title)
        state = module.state_dict(keep_vars=True)
        kind = type(module), *((k, x.shape, x.dtype) for k, x in state.items())
        # Units with hooks share no graph: the compiler's guards do not look at hooks.
        # Nor is a cache to keep alive what hooks hold.
        is_hooked = any(table for m in module.modules() for table in all_hook_tables(m))
        make = _make_caller.__wrapped__ if is_hooked else _make_caller
        run = compile(make(kind))

        def call_compiled(
            params: PyTree, buffers: PyTree, /, *args: Any, **keywords: Any
        ) -> PyTree:
            arguments = {**params, **buffers}
            tensors = {path: arguments[name] for path, name in names.items()}
            try:
                return run(module, tensors, args, keywords)
            finally:
                if (fault := attributes.restore(False)) is not None:
                    raise RuntimeError(fault)

        return call_compiled


@functools.cache
def _make_caller(kind: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns a caller for modules of one class and shapes, with code of its own.

    The compiler keeps its graphs by code object, and a few for each at most. So equal
    layers share one, and unequal ones do not use up each other's.
    """
    code = _call_functional.__code__.replace(co_name=kind[0].__name__)
    return types.FunctionType(code, _call_functional.__globals__)


def _call_functional(
    module: nn.Module,
    tensors: dict[str, Tensor],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    return torch.func.functional_call(module, tensors, args, keywords)


def _fill_with_meta_tensors(module: nn.Module) -> dict[str, str]:
    """Puts tensors without data in place of a module's placeholders.

    Returns, by a tensor's name in the module, its name in the whole. A tied tensor has
    one name.
    """
    meta_tensors: dict[str, Tensor] = {}  # by the name in the whole
    names: dict[str, str] = {}
    for path, m in module.named_modules():
        parameters, buffers = _torch.tensor_tables(m)
        for table in (parameters, buffers):
            for name, x in table.items():
                if not isinstance(x, AbsentTensor):
                    continue
                if x.name not in meta_tensors:
                    shape = cast(torch.Size, x.shape)
                    empty = torch.empty(shape, dtype=x.dtype, device="meta")
                    if table is parameters:
                        empty = nn.Parameter(empty, requires_grad=False)
                    meta_tensors[x.name] = empty
                    names[f"{path}.{name}" if path else name] = x.name
                table[name] = meta_tensors[x.name]
    return names
