"""Plans: which layers of a module are split over an axis of the mesh, and how.

`from_module` makes one of ``plan=`` (`make_plan`). A `Structure` installs it in copies
of the module, so that layers run split, and checks the layouts of parameters in each
call. A plan is checked before anything runs. Only what depends on the sizes of a mesh
or of activations is checked in a call, before the call sends anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from fsfunc.comm.folding import expand_here
from fsfunc.interop.module_tensors import ModuleTensors
from fsfunc.interop.patterns import match_words
from fsfunc.interop.split_layers import (
    SPLIT_CLASSES,
    SplitModule,
    scaled_class_of,
    split_class_of,
)
from fsfunc.sharded.layout import Split
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf


class LayerPlan:
    """The layers of a module that are split.

    Args:
        words: by a layer's name, how it is split.
        layouts: by a parameter's name, its layout: for ``layouts=`` of ``place``.
        around: the modules in which features are split: each has column layers, and row
            layers that take their outputs.
        columns: by a unit's name, the weight of a column layer in it.
        meets_split: the whole parameters that are combined with split values.
    """

    words: Mapping[str, str]
    layouts: Mapping[str, Split]
    around: Sequence[str]
    columns: Mapping[str, str]
    meets_split: frozenset[str]

    def __init__(
        self,
        words: Mapping[str, str],
        layouts: Mapping[str, Split],
        around: Sequence[str],
        columns: Mapping[str, str],
        meets_split: frozenset[str],
    ):
        self.words, self.layouts, self.around = words, layouts, around
        self.columns, self.meets_split = columns, meets_split

    def install(self, template: nn.Module) -> None:
        """Makes the layers of a template run split, where their weights are.

        A layer's class is replaced: another forward, over the same attributes.
        """
        for name, word in self.words.items():
            m = template.get_submodule(name)
            split_class = split_class_of(type(m)) if word == "expert" else type(m)
            if word == "vocab":
                split_class = scaled_class_of(type(m)) or split_class
            m.__class__ = SPLIT_CLASSES.get((word, type(m)), split_class)
        # Copied before hooks are registered: each runs its module once without data.
        split_modules = {x: SplitModule(template, x, self.words) for x in self.around}
        for name, split_module in split_modules.items():
            m = template.get_submodule(name)
            m.register_forward_pre_hook(
                split_module.enter, prepend=True, with_kwargs=True
            )
            m.register_forward_hook(split_module.leave)

    def check(self, params: Mapping[str, Leaf]) -> None:
        """Checks the layouts of a unit's parameters.

        Parameters that are all whole are right too: then layers run as on one device.

        Raises:
            ValueError: one is not split as planned, while others are.
        """
        if not self.layouts:
            return
        leaves = {n: x for n, x in params.items() if is_sharded(x)}
        split = {n: x.layout.splits for n, x in leaves.items() if x.layout.splits}
        for name in params if split else ():
            planned, splits = self.layouts.get(name), split.get(name, ())
            actual = [(s.dim, s.axis) for s in splits]
            expected = [] if planned is None else [(planned.dim, planned.axis)]
            if actual != expected and planned is not None:
                # The plan may name an axis of another view of the mesh.
                expected = [(planned.dim, a) for a in expand_here(planned.axis)]
            if actual != expected:
                raise ValueError(
                    f"plan: {name!r} is {_describe_splits(splits)}, and must be "
                    f"{_describe_splits((planned,) if planned else ())}: place all "
                    "parameters with layouts=apply.layouts"
                )


def make_plan(
    module: nn.Module,
    tensors: ModuleTensors,
    units: Sequence[str],
    plan: Mapping[str, str | tuple[str, str]],
    axis: str,
) -> LayerPlan:
    """Makes the plan of a module that is cut into units, of words by pattern.

    Args:
        plan: by pattern of names, how these layers are split over ``axis``; or
            ("expert", another axis).

    Raises:
        TypeError: a layer that is no torch.nn.Linear or Embedding, or is one with
            options that no split one has; that is frozen, or computes its weight.
        ValueError: a word that is none; a pattern that matches no module, two that
            match one; a parameter that others have too and leave whole; a column layer
            without a row layer in its unit.
    """
    words, axes = match_words(module, plan, axis)
    names = _LayerNames(module, units, words)
    layouts = _layouts(module, tensors, words, axes)
    tensor_names = {id(x): name for name, x in tensors.all.items()}
    around: dict[str, None] = {}  # an ordered set
    columns: dict[str, str] = {}
    meets_split: set[str] = set()
    for layer, word in words.items():
        m = module.get_submodule(layer)
        if word == "column":
            around[names.around(layer)] = None
            columns.setdefault(names.unit_of(layer), tensor_names[id(m.weight)])
        elif word == "whole":
            params = m.parameters(recurse=False)
            meets_split.update(tensor_names[id(x)] for x in params)
    for layer, word in words.items():
        if word == "whole" and not any(_is_in(layer, x) for x in around):
            raise ValueError(
                f'plan: {layer!r} is "whole", which is for modules that see split '
                'features, and no module around it has a "column" layer: leave it out'
            )
    return LayerPlan(words, layouts, list(around), columns, frozenset(meets_split))


def _layouts(
    module: nn.Module,
    tensors: ModuleTensors,
    words: Mapping[str, str],
    axes: Mapping[str, str],
) -> dict[str, Split]:
    """Returns the layouts of split parameters, by name.

    Raises:
        ValueError: layers that share a parameter split it in different ways.
        TypeError: a split parameter is frozen.
    """
    names = {id(x): name for name, x in tensors.all.items()}
    layouts: dict[str, Split] = {}
    uses: dict[str, tuple[str, int | str | None]] = {}
    for layer, m in module.named_modules():
        for attribute, x in m.named_parameters(recurse=False):
            name, word = names[id(x)], words.get(layer, "")
            # The dim that is split; "whole", or None of a layer outside the plan.
            use: int | str | None = word if word == "whole" else 0 if word else None
            if word == "row":
                use = 1 if attribute == "weight" else None  # a bias is added once
            first_layer, first_use = uses.setdefault(name, (layer, use))
            if first_use != use:
                raise ValueError(
                    f"plan: {name!r} is tied, and {first_layer!r} and {layer!r} must be"
                    ' split alike: an embedding "vocab" and a head "column_gathered"; '
                    "or neither"
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


def _describe_splits(splits: tuple[Split, ...]) -> str:
    if not splits:
        return "whole"
    return "split over " + ", ".join(f'"{s.axis}" along dim {s.dim}' for s in splits)


class _LayerNames:
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
        """Returns the innermost unit that a layer is in."""
        return max((u for u in self.units if _is_in(name, u)), key=len)

    def around(self, column: str) -> str:
        """Returns the innermost module with this column layer and row layers.

        Raises:
            ValueError: there is none.
        """
        unit = self.unit_of(column)
        rows = [x for x, word in self.words.items() if word == "row"]
        rows = [x for x in rows if self.unit_of(x) == unit]
        for module_name in _above(column):
            if any(_is_in(x, module_name) for x in rows):
                return module_name
        raise ValueError(
            f'plan: {column!r} is "column", which leaves each rank its own features, '
            f'and no "row" layer in its unit {unit!r} takes them: plan one, with '
            'units= that have both in one; or say "column_gathered"'
        )


def _is_in(name: str, above: str) -> bool:
    return not above or name == above or name.startswith(f"{above}.")


def _above(name: str) -> Iterator[str]:
    """Yields the names of the modules around one, from the inside to the whole."""
    while name:
        name = name.rpartition(".")[0]
        yield name
