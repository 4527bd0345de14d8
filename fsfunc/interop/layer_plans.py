"""Plans: which layers of a module are split over an axis of the mesh, and how.

A plan is checked before anything runs, but for what needs the sizes of a mesh or of
activations, which is checked before a call sends anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fsfunc.interop.module_tensors import Tensors
from fsfunc.interop.patterns import words_of
from fsfunc.interop.split_layers import KINDS, SplitModule, kind_of
from fsfunc.sharded.layout import Split
from fsfunc.sharded.leaf import is_sharded


class LayerPlan:
    """The layers of a module that are split.

    Args:
        words: by a layer's name, how it is split.
        layouts: by a parameter's name, its layout: for ``layouts=`` of ``place``.
        around: the modules in which features are split: each has column layers, and row
            layers that take their outputs.
        columns: by a unit's name, the weight of a column layer in it.
        meeting: the whole parameters that are combined with split values.
    """

    def __init__(
        self,
        words: Mapping[str, str],
        layouts: Mapping[str, Split],
        around: Sequence[str],
        columns: Mapping[str, str],
        meeting: frozenset[str],
    ):
        self.words, self.layouts, self.around = words, layouts, around
        self.columns, self.meeting = columns, meeting

    def install(self, template: nn.Module) -> None:
        """Makes the layers of a copy of the module run split, in calls on parts."""
        for name, word in self.words.items():
            m = template.get_submodule(name)
            kind = kind_of(type(m)) if word == "expert" else type(m)
            m.__class__ = KINDS.get((word, type(m)), kind)
        found = {x: SplitModule(template, x, self.words) for x in self.around}
        for name, split in found.items():
            m = template.get_submodule(name)
            m.register_forward_pre_hook(split.enter, prepend=True, with_kwargs=True)
            m.register_forward_hook(split.leave)

    def check(self, params: Mapping[str, Any]) -> None:
        """Looks at the layouts of a unit's parameters.

        Raises:
            ValueError: one is not split as planned, while others are.
        """
        if not self.layouts:
            return
        leaves = {n: x for n, x in params.items() if is_sharded(x)}
        split = {n: x.layout.splits for n, x in leaves.items() if x.layout.splits}
        for name in params if split else ():
            wanted, found = self.layouts.get(name), split.get(name, ())
            lies = [(s.dim, s.axis) for s in found]
            if lies != ([] if wanted is None else [(wanted.dim, wanted.axis)]):
                raise ValueError(
                    f"plan: {name!r} is {_lies(found)}, and must be "
                    f"{_lies((wanted,) if wanted else ())}: place all parameters with "
                    "layouts=apply.layouts"
                )


def planned(
    module: nn.Module,
    tensors: Tensors,
    units: Sequence[str],
    plan: Mapping[str, str | tuple[str, str]],
    axis: str,
) -> LayerPlan:
    """The split layers of a module cut into units, by a plan of words by pattern.

    Args:
        plan: a word, of layers split over ``axis``; or ("expert", another axis).

    Raises:
        TypeError: a layer that is no torch.nn.Linear or Embedding, or is one with
            options that no split one has; that is frozen, or computes its weight.
        ValueError: a word that is none; a pattern that matches no module, two that
            match one; a parameter that others have too and leave whole; a column layer
            without a row layer in its unit.
    """
    words, axes = words_of(module, plan, axis)
    names = _Names(module, units, words)
    layouts = _layouts(module, tensors, words, axes)
    own = {id(x): name for name, x in tensors.all.items()}
    around: dict[str, None] = {}
    columns: dict[str, str] = {}
    meeting: set[str] = set()
    for layer, word in words.items():
        m = module.get_submodule(layer)
        if word == "column":
            around[names.around(layer)] = None
            columns.setdefault(names.unit_of(layer), own[id(m.weight)])
        elif word == "whole":
            meeting.update(own[id(x)] for x in m.parameters(recurse=False))
    for layer, word in words.items():
        if word == "whole" and not any(_is_in(layer, x) for x in around):
            raise ValueError(
                f'plan: {layer!r} is "whole", which is for modules that see split '
                'features, and no module around it has a "column" layer: leave it out'
            )
    return LayerPlan(words, layouts, list(around), columns, frozenset(meeting))


def _layouts(
    module: nn.Module,
    tensors: Tensors,
    words: Mapping[str, str],
    axes: Mapping[str, str],
) -> dict[str, Split]:
    """The layouts of split parameters, which all that have one of them must share."""
    names = {id(x): name for name, x in tensors.all.items()}
    layouts: dict[str, Split] = {}
    uses: dict[str, tuple[str, int | str | None]] = {}
    for layer, m in module.named_modules():
        for attribute, x in m.named_parameters(recurse=False):
            name, word = names[id(x)], words.get(layer, "")
            use: int | str | None = word if word == "whole" else 0 if word else None
            if word == "row":
                use = 1 if attribute == "weight" else None  # a bias is added once
            first, other = uses.setdefault(name, (layer, use))
            if other != use:
                raise ValueError(
                    f"plan: {name!r} is tied, and {first!r} and {layer!r} must be split"
                    ' alike: an embedding "vocab" and a head "column_gathered"; or '
                    "neither"
                )
            if isinstance(use, int):
                layouts[name] = Split(use, axes[layer])
            if isinstance(use, int) and name in tensors.frozen:
                raise TypeError(
                    f"plan: {name!r} does not require grad, and so is among the "
                    "buffers, which no layout splits: let it require grad, and leave "
                    "it out of the optimizer by ff.masked"
                )
    return layouts


def _lies(splits: tuple[Split, ...]) -> str:
    if not splits:
        return "whole"
    return "split over " + ", ".join(f'"{s.axis}" along dim {s.dim}' for s in splits)


class _Names:
    """Names of a module's layers, by the units and the split modules they are in.

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

    def around(self, column: str) -> str:
        """The innermost module of a unit that has a column layer and row layers.

        Raises:
            ValueError: there is none.
        """
        unit = self.unit_of(column)
        rows = [x for x, word in self.words.items() if word == "row"]
        rows = [x for x in rows if self.unit_of(x) == unit]
        for above in _above(column):
            if any(_is_in(x, above) for x in rows):
                return above
        raise ValueError(
            f'plan: {column!r} is "column", which leaves each rank its own features, '
            f'and no "row" layer in its unit {unit!r} takes them: plan one, with '
            'units= that have both in one; or say "column_gathered"'
        )


def _is_in(name: str, above: str) -> bool:
    return not above or name == above or name.startswith(f"{above}.")


def _above(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name
