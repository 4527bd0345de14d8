"""A module as a function, and the unit calls that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from fsfunc import tree
from fsfunc.interop.absence import Absent
from fsfunc.interop.caching import are_filled, handed, taken
from fsfunc.interop.containers import opened
from fsfunc.interop.copies import Copy, without_tensors
from fsfunc.interop.given import Knowledge
from fsfunc.interop.tensors import Tensors
from fsfunc.interop.watching import Attribute
from fsfunc.sharded import is_sharded
from fsfunc.units import Unit, unit

__all__ = ["Structure"]


class Structure:
    """A module without its tensors, cut into units.

    Args:
        module: it is copied, and not kept.
        tensors: the module's.
        units: names of the modules that are units.
    """

    def __init__(self, module: nn.Module, tensors: Tensors, units: Sequence[str]):
        self.template = without_tensors(module, tensors)
        first = {id(m): name for name, m in self.template.named_modules()}
        every = self.template.named_modules(remove_duplicate=False)
        self._first = {name: first[id(m)] for name, m in every}
        self.parts = {name: _Part(self, name) for name in units}
        self._fetches: dict[str, Unit] = {}
        frozen = frozenset(tensors.frozen)
        self._knowledge = {
            name: Knowledge(frozen, tensors.overlapping) for name in ("", *units)
        }
        self._free: dict[tuple[str, bool], list[Copy]] = {
            (name, fills): [] for name in ("", *units) for fills in (False, True)
        }

    def call(
        self,
        params: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        mutable: bool,
    ) -> tuple[Any, dict[str, Tensor]]:
        """The module's output, and the buffers that it wrote."""
        fills = are_filled()
        if "" in self.parts:
            part = self.parts[""]
            return part.call(params, buffers, args, keywords, mutable, fills)
        return self.run("", params, buffers, args, keywords, mutable, fills)

    def run(
        self,
        name: str,
        params: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        mutable: bool,
        fills: bool,
    ) -> tuple[Any, dict[str, Tensor]]:
        """The output of one part, run here and now on a copy of its own."""
        free = self._free[name, fills]
        borrowed = free.pop() if free else self._copy(name, fills)
        borrowed.begin(params, buffers, mutable)
        try:
            out = borrowed.module(*args, **keywords)
            changed = borrowed.changed()
        finally:
            found, filled = borrowed.end()
            if not borrowed.spoiled:
                free.append(borrowed)
        borrowed.check(found)
        if found and name in self.parts:
            self.parts[name].sets |= found.keys()
            self.parts[name].fills |= filled
        return out, changed

    def _copy(self, name: str, fills: bool) -> Copy:
        template = self.template.get_submodule(name)
        below = {
            path: self._first[f"{name}.{path}" if name else path]
            for path, _ in template.named_modules()
            if path
        }
        ports = {
            path: self.parts[full].port
            for path, full in below.items()
            if full in self.parts
        }
        fetch = None if name in self.parts else self._fetch
        return Copy(template, ports, fetch, name, self._knowledge[name], fills)

    def _fetch(self, name: str, leaf: Any) -> Any:
        """A parameter that is read outside every unit, through one of its own."""
        if name not in self._fetches:
            fetched = _given()
            fetched.__name__ = name
            self._fetches[name] = unit(fetched)
        return self._fetches[name]({name: leaf})[name]


def _given() -> Callable[..., Any]:
    return lambda params: params


class _Part:
    """One unit: its names, and the function that runs it."""

    def __init__(self, structure: Structure, name: str):
        self.structure, self.name = structure, name
        m = structure.template.get_submodule(name)
        # Absent ones, which bear the names that these tensors have in the whole.
        tables = [(dict(x.named_parameters(recurse=False)), x) for x in m.modules()]
        self.params = _names(x for table, _ in tables for x in table.values())
        self.buffers = _names(
            x for _, one in tables for _, x in one.named_buffers(recurse=False)
        )
        self.units: dict[bool, Unit] = {}
        self.sets: set[Attribute] = set()
        self.fills: set[Attribute] = set()

    def port(self, outer: Copy, m: nn.Module, args: Any, keywords: Any) -> Any:
        """Calls the unit in place of ``m``, within a part that holds its tensors."""
        given = outer.given
        outer.enter()
        params = {n: given.params[n] for n in self.params}
        buffers = {n: given.current(n) for n in self.buffers}
        out, changed = self._called(
            params, buffers, args, keywords, outer.mutable, outer.fills
        )
        for name, x in changed.items():
            given.write(name, x)
        for path, name in self.sets:  # on a copy that is not this one
            where = ".".join(filter(None, (self.name, path, name)))
            attributes = vars(m.get_submodule(path))
            if (path, name) in self.fills:
                outer.left(self.name, where, attributes.get(name))
            attributes[name] = Absent(where, None, None)
        return out

    def call(
        self,
        params: Any,
        buffers: Any,
        args: Any,
        keywords: Any,
        mutable: bool,
        fills: bool,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Calls the unit that is the whole module."""
        params = {n: params[n] for n in self.params}
        buffers = {n: buffers[n] for n in self.buffers}
        return self._called(params, buffers, args, keywords, mutable, fills)

    def _called(
        self,
        params: Any,
        buffers: Any,
        args: Any,
        keywords: Any,
        mutable: bool,
        fills: bool,
    ) -> tuple[Any, dict[str, Tensor]]:
        who = f"unit {self.name!r}"
        if fills:
            args, keywords = handed((args, {**keywords, _FILLS: True}))
        others = opened((args, keywords), who)
        mutable = mutable and bool(buffers)
        if "params" in keywords:  # what a unit's first argument is called
            keywords = {_PARAMS if k == "params" else k: x for k, x in keywords.items()}
        found = self.units.get(mutable) or self._unit(mutable)
        out = found(params, buffers, *args, **keywords)
        if others:
            opened((args, keywords), who)
        out = taken(out) if fills else out
        return out if mutable else (out, {})

    def _unit(self, mutable: bool) -> Unit:
        name = self.name or type(self.structure.template).__name__

        def run(params: Any, buffers: Any, /, *args: Any, **keywords: Any) -> Any:
            if _PARAMS in keywords:
                keywords["params"] = keywords.pop(_PARAMS)
            fills = keywords.pop(_FILLS, False)
            if fills:
                args, keywords = taken((args, keywords))
            before = tree.flatten((args, keywords), is_leaf=is_sharded)
            out, changed = self.structure.run(
                self.name, params, buffers, args, keywords, mutable, fills
            )
            after = tree.flatten((args, keywords), is_leaf=is_sharded)
            if after[1] != before[1] or not all(map(is_, after[0], before[0])):
                raise RuntimeError(
                    f"unit {name!r} changes a list or dict that it is given: where the "
                    "unit runs again, or elsewhere, it is another; return what is new, "
                    "or make a unit of what is around both"
                )
            if fills:
                out = handed(out)
            opened(out, f"unit {name!r}")
            return (out, changed) if mutable else out

        run.__name__ = name
        run.as_given = 1  # type: ignore[attr-defined]  # statistics stay exact
        self.units[mutable] = unit(run)
        return self.units[mutable]


# Keywords that no module has.
_PARAMS, _FILLS = "params of the module's", "whether caches are filled"


def _names(absent: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(x.name for x in absent))
