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

    def _near(self, name: str, word: str) -> list[str]:
        """The layers of that word, under the nearest module around ``name``."""
        unit = self.unit_of(name)
        others = [x for x, w in self.words.items() if w == word]
        others = [x for x in others if self.unit_of(x) == unit]
        for above in _above(name):
            if near := [x for x in others if _is_in(x, above)]:
                return near
        return []

    def column_beside(self, name: str) -> str:
        """A column layer whose features a "whole" module meets."""
        near = self._near(name, "column")
        if not near:
            raise ValueError(
                f'plan: {name!r} is "whole", as what meets split features, and its '
                f'unit {self.unit_of(name)!r} has no "column" layer: leave it out'
            )
        return near[0]

    def check(self, name: str) -> None:
        """Raises where it shows that features are not taken each by itself."""
        near = self._near(name, "row")
        if not near:
            raise ValueError(
                f'plan: {name!r} is "column", which leaves each rank its own features, '
                f'and no "row" layer in its unit {self.unit_of(name)!r} takes them: '
                "plan one, with units= that have both in one; or say "
                '"column_gathered"'
            )
        for above in _above(name):
            _check_heads(above, self.module.get_submodule(above))
            if any(_is_in(row, above) for row in near):
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


def _is_in(name: str, above: str) -> bool:
    return not above or name == above or name.startswith(f"{above}.")


def _above(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


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
