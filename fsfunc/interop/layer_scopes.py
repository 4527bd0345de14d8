"""What lies between column and row layers, as far as it shows before anything runs.

There a rank has some of the features for all there are: right where each feature, or
each head, is taken by itself. What shows that they are not is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["Scopes", "head_dim"]


class Scopes:
    """Which row layers take what a column layer makes: the nearest in its unit.

    Args:
        units: the names of the module's units; every layer is in one.
        words: by a layer's name, how it is split.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[str], words: Mapping[str, str]
    ):
        self.module, self.units, self.words = module, units, words

    def unit_of(self, name: str) -> str:
        return max((u for u in self.units if _is_in(name, u)), key=len)

    def _near(self, name: str, word: str) -> tuple[str, list[str]]:
        """The nearest module around ``name`` that has layers of that word, and they."""
        unit = self.unit_of(name)
        others = [x for x, w in self.words.items() if w == word]
        others = [x for x in others if self.unit_of(x) == unit]
        for above in _above(name):
            if near := [x for x in others if _is_in(x, above)]:
                return above, near
        return unit, []

    def column_beside(self, name: str) -> str:
        """A column layer whose features a "whole" module meets."""
        _, near = self._near(name, "column")
        if not near:
            raise ValueError(
                f'plan: {name!r} is "whole", as what meets split features, and its '
                f'unit {self.unit_of(name)!r} has no "column" layer: leave it out'
            )
        return near[0]

    def around(self, name: str) -> str:
        """The module around a column layer that has the row layers, too.

        Raises:
            ValueError: it shows that features are not taken each by itself.
        """
        unit = self.unit_of(name)
        around, near = self._near(name, "row")
        if not near:
            raise ValueError(
                f'plan: {name!r} is "column", which leaves each rank its own features, '
                f'and no "row" layer in its unit {unit!r} takes them: '
                "plan one, with units= that have both in one; or say "
                '"column_gathered"'
            )
        for above in _above(name):
            _check_heads(above, self.module.get_submodule(above))
            if above == around:
                break
        layers: dict[str, Any] = {x: self.module.get_submodule(x) for x in near}
        n = self.module.get_submodule(name).out_features
        taken = [layer.in_features for layer in layers.values()]
        if all(m % n for m in taken):  # type: ignore[operator]
            raise ValueError(
                f'plan: {name!r} is "column" and gives {n} features, of which the '
                f'"row" layer {near[0]!r} takes {taken[0]}: one weight of several '
                "layers (keys beside queries, a gate beside values) would give a rank "
                "a block of one of them. Make a Linear of each, or leave both out"
            )
        if around == unit and self.words.get(unit) == "sequence":
            raise ValueError(
                f'plan: {name!r} and its "row" layer stand in {unit!r} itself, a '
                '"sequence", of which they take all positions: put both into a module '
                "of their own in it, which is given these, or leave the sequence out"
            )
        return around

    def within_sequence(self, unit: str) -> dict[str, str]:
        """As what modules of a "sequence" unit are planned: "whole", they meet parts.

        Raises:
            ValueError: it is no unit, or has others; what may not take each position by
                itself is not split.
        """
        inner = [u for u in self.units if u != unit and _is_in(u, unit)]
        if unit not in self.units or not unit or inner:
            but = f"has the unit {inner[0]!r} in it" if inner else "is none of them"
            raise ValueError(
                f'plan: {unit!r} is "sequence", as units are that are given hidden '
                f"states first and return them, and {but}: give units= so"
            )
        if not any(w == "column" and _is_in(x, unit) for x, w in self.words.items()):
            raise ValueError(
                f'plan: {unit!r} is "sequence", and has no "column" and "row" layers: '
                "plan those, or leave it out"
            )
        first = {id(m): name for name, m in self.module.named_modules()}
        parts = self.module.get_submodule(unit).named_modules(remove_duplicate=False)
        found: dict[str, str] = {}
        for path, m in parts:
            name, own = first[id(m)], [*m.parameters(recurse=False)]
            word = self.words.get(name)
            if isinstance(m, _OVER_POSITIONS):
                raise ValueError(
                    f'plan: {unit!r} is "sequence", and {name!r}, a {type(m).__name__},'
                    " is of all positions: leave the sequence out"
                )
            if own and self.unit_of(name) != unit:
                raise ValueError(
                    f'plan: {unit!r} is "sequence", and shares its {path!r} with '
                    "another: give each its own, or leave both out"
                )
            if word in ("column", "row", "whole") or not own:
                continue
            if word not in (None, "sequence") or any(x.ndim > 1 for x in own):
                raise ValueError(
                    f'plan: {name!r} is in {unit!r}, a "sequence", and would take a '
                    'rank\'s positions alone: split it as "column" or "row"; say '
                    '"whole" where it takes each position by itself; or leave the '
                    "sequence out"
                )
            found[name] = "whole"
        return found


def _is_in(name: str, above: str) -> bool:
    return not above or name == above or name.startswith(f"{above}.")


def _above(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


_OVER_POSITIONS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm1d,
    nn.InstanceNorm2d, nn.GroupNorm,
)  # fmt: skip
_COUNTS = re.compile(r"(n|num|number_of)_?(\w+_)?heads?|heads")


def _check_heads(name: str, m: nn.Module) -> None:
    """Raises where a forward reads how many heads there are: a rank has its own."""
    for cls in type(m).__mro__:
        if cls is nn.Module:
            return
        for key, function in vars(cls).items():
            if key.startswith("_init") or key in ("__init__", "extra_repr"):
                continue
            if not isinstance(function, FunctionType):
                continue
            read = [x for x in _reads(function.__code__) if _COUNTS.fullmatch(x)]
            if read:
                of = repr(name) if name else "the module"
                raise ValueError(
                    f"plan: {cls.__name__}.{key}, of {of}, reads {read[0]}, how many "
                    "heads there are, and a rank has its own alone: let it say -1 in "
                    "their place, x.view(*shape, -1, self.head_dim), or leave its "
                    "layers out of the plan"
                )


def _reads(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _reads(inner)


def head_dim(module: nn.Module, name: str) -> int:
    """How many features are one head, where the module around a layer says so."""
    around = module.get_submodule(name.rpartition(".")[0])
    sizes = (getattr(around, x, None) for x in ("head_dim", "attention_head_size"))
    return next((x for x in sizes if isinstance(x, int)), 0)
