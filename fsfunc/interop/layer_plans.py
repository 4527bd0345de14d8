"""Which layers of a module are split over an axis of the mesh, and how.

A plan is checked before anything runs, but for what needs the sizes of a mesh, which is
checked before a call sends anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from fsfunc import _torch
from fsfunc.interop.layer_scopes import Scopes, head_dim
from fsfunc.interop.module_tensors import Tensors
from fsfunc.interop.split_experts import check_experts, kind_of
from fsfunc.interop.split_layers import KINDS, gather_sequence
from fsfunc.sharded.layout import Split
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.structure import matches

__all__ = ["LayerPlan", "planned"]


class LayerPlan:
    """The layers of a module that are split.

    Args:
        words: by a layer's name, how it is split.
        layouts: by a parameter's name, how it lies: for ``layouts=`` of ``place``.
        heads: by a weight's name, how many of its rows are one head, which no rank may
            have a part of.
        meeting: whole parameters that meet split features, and the weight of a column
            layer that makes these.
        sequences: units whose sequence is split, and such a weight in each.
        around: the modules in them that take the whole sequence.
    """

    def __init__(
        self,
        words: Mapping[str, str],
        layouts: Mapping[str, Split],
        heads: Mapping[str, int],
        meeting: Mapping[str, str],
        sequences: Mapping[str, str],
        around: Iterable[str],
    ):
        self.words, self.layouts, self.heads = words, layouts, heads
        self.meeting, self.sequences, self.around = meeting, sequences, around

    def install(self, template: nn.Module) -> None:
        """Makes the layers of a copy of the module run split, in calls on parts."""
        for name, word in self.words.items():
            m = template.get_submodule(name)
            kind = kind_of(type(m)) if word == "expert" else type(m)
            m.__class__ = KINDS.get((word, type(m)), kind)
        for name in self.around:
            template.get_submodule(name).register_forward_pre_hook(
                gather_sequence, prepend=True, with_kwargs=True
            )

    def check(self, params: Mapping[str, Any]) -> None:
        """Looks at how the parameters of a unit lie.

        Raises:
            ValueError: one lies otherwise than planned, while others do not; a head
                that no rank has all of.
        """
        if not self.layouts:
            return
        leaves = {n: x for n, x in params.items() if is_sharded(x)}
        split = {n: x.layout.splits for n, x in leaves.items() if x.layout.splits}
        if not split:
            return
        for name in params:
            wanted, found = self.layouts.get(name), split.get(name, ())
            lies = [(s.dim, s.axis) for s in found]
            if lies != ([] if wanted is None else [(wanted.dim, wanted.axis)]):
                raise ValueError(
                    f"plan: {name!r} lies {_lies(found)}, and is to lie "
                    f"{_lies((wanted,) if wanted else ())}: place all parameters with "
                    "layouts=apply.layouts"
                )
        for name, size in self.heads.items():
            if name not in split:
                continue
            count, n = params[name].shape[0] // size, split[name][0].size
            if count % n:
                fits = ", ".join(str(k) for k in range(1, count + 1) if not count % k)
                raise ValueError(
                    f"plan: {name!r} has {count} heads of {size} features, which axis "
                    f'"{split[name][0].axis}" of size {n} does not divide: give it '
                    f"a size of {fits}; or leave these layers out of the plan"
                )


def planned(
    module: nn.Module,
    tensors: Tensors,
    units: Sequence[str],
    plan: Mapping[str, str | tuple[str, str]],
    axis: str,
) -> LayerPlan:
    """What a plan of words by pattern means for a module cut into units.

    Args:
        plan: a word, of layers split over ``axis``; or ("expert", another axis).

    Raises:
        TypeError: a layer that is no torch.nn.Linear or Embedding, or is one with
            options that no split one has; that is frozen, or computes its weight.
        ValueError: a word that is none; a pattern that matches no module, two that
            match one; a parameter that others have too and leave whole; a column layer
            that no row layer of its unit follows, or does not as each feature or head
            is taken by itself; a sequence unit that is none, or may mix positions.
    """
    plain = {k: x if isinstance(x, str) else x[0] for k, x in plan.items()}
    words, by = _words(module, plain)
    axes = {n: axis if plan[k] == plain[k] else plan[k][1] for n, k in by.items()}
    for name, over in axes.items():
        if over != axis and words[name] != "expert":
            raise ValueError(
                f"plan: {name!r} is split over {over!r} and other layers over {axis!r}:"
                ' features go over one axis from layer to layer; "expert" alone takes '
                "an axis of its own"
            )
    scopes = Scopes(module, units, words)
    split = [name for name, word in words.items() if word == "sequence"]
    for unit in split:
        words |= scopes.within_sequence(unit)
    names = {id(x): name for name, x in tensors.all.items()}
    layouts: dict[str, Split] = {}
    uses: dict[str, list[tuple[str, int | str | None]]] = {}
    for layer, m in module.named_modules():
        for attribute, x in m.named_parameters(recurse=False):
            use = _use(words.get(layer, ""), attribute)
            uses.setdefault(names[id(x)], []).append((layer, use))
            if isinstance(use, int):
                layouts[names[id(x)]] = Split(use, axes[layer])
    for name in layouts:
        if name in tensors.frozen:
            raise TypeError(
                f"plan: {name!r} does not require grad, and so is among the buffers, "
                "which no layout splits: let it require grad, and leave it out of the "
                "optimizer by ff.masked"
            )
    _check_ties(uses)
    scopes = Scopes(module, units, words)
    heads, meeting, sequences, around = {}, {}, {}, set()
    for layer, word in words.items():
        m = module.get_submodule(layer)
        if word == "column":
            above, unit = scopes.around(layer), scopes.unit_of(layer)
            if unit in split:
                sequences.setdefault(unit, names[id(m.weight)])
                around.add(above)
            if size := head_dim(module, layer):
                heads[names[id(m.weight)]] = size
        elif word == "whole":
            weight = module.get_submodule(scopes.column_beside(layer)).weight
            for x in m.parameters(recurse=False):
                meeting[names[id(x)]] = names[id(weight)]
    return LayerPlan(words, layouts, heads, meeting, sequences, around)


def _lies(splits: tuple[Split, ...]) -> str:
    if not splits:
        return "whole"
    return "split over " + ", ".join(f'"{s.axis}" along dim {s.dim}' for s in splits)


def _words(
    module: nn.Module, plan: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """By the name of each layer that a plan names, its word, and its pattern."""
    first = {id(m): name for name, m in module.named_modules()}
    every = [*module.named_modules(remove_duplicate=False)]
    by: dict[str, str] = {}
    for pattern, word in plan.items():
        names = [first[id(m)] for name, m in every if matches(pattern, name, ".")]
        if not names:
            layers = [n for n, m in every if isinstance(m, nn.Linear | nn.Embedding)]
            near = get_close_matches(pattern, layers, 3, 0.3) or layers[:3]
            raise ValueError(
                f"plan: no module matches {pattern!r}; there are "
                f"{', '.join(map(repr, near))} ({len(layers)} layers in all). '*' "
                "stands for one component of a name, '**' for any number"
            )
        for name in dict.fromkeys(names):
            if name in by:
                raise ValueError(
                    f"plan: {by[name]!r} and {pattern!r} both match {name!r}: let one "
                    "pattern name it"
                )
            _check_layer(name, module.get_submodule(name), word)
            by[name] = pattern
    return {name: plan[pattern] for name, pattern in by.items()}, by


def _check_layer(name: str, m: nn.Module, word: str) -> None:
    known = sorted({*(known for known, _ in KINDS), "expert", "sequence", "whole"})
    if word not in known:
        raise ValueError(
            f"plan: {name!r} is given {word!r}; a layer is {', '.join(known[:-1])} or "
            f"{known[-1]}"
        )
    if word == "sequence":
        return
    if word == "whole" and any(True for _ in m.parameters(recurse=False)):
        return
    if word == "expert":
        return check_experts(name, m)
    if word == "whole":
        raise ValueError(
            f'plan: {name!r} is "whole", and has no parameter of its own: name the '
            "modules in it that have"
        )
    if (word, type(m)) in KINDS:
        _check_options(name, m)
        return
    kinds = sorted({cls.__name__ for known, cls in KINDS if known == word})
    way = "" if type(m) in (nn.Linear, nn.Embedding) else (
        ". Where its forward calls ff.nn.column_linear, row_linear or vocab_embedding "
        "on self.weight, layouts= alone splits it"
    )  # fmt: skip
    raise TypeError(
        f"plan: {name!r} is a {type(m).__module__}.{type(m).__qualname__}, and "
        f"{word!r} splits torch.nn's own {' or '.join(kinds)}{way}"
    )


def _check_options(name: str, m: nn.Module) -> None:
    options = ("sparse", "scale_grad_by_freq")
    asked = [x for x in options if getattr(m, x, False)]
    if asked:
        raise TypeError(f"plan: {name!r} is an Embedding with {asked[0]}: leave it out")
    table, _ = _torch.tables(m)
    if table.get("weight") is None:
        raise TypeError(
            f"plan: the weight of {name!r} is computed by a hook, from what a rank has "
            "no part of: remove the hook, or leave the layer out of the plan"
        )


def _use(word: str, attribute: str) -> int | str | None:
    """How a layer has a parameter: split (its dim), whole, or meeting others."""
    if word == "row":
        return 1 if attribute == "weight" else None  # a bias is added once
    return word if word == "whole" else 0 if word else None


def _check_ties(uses: Mapping[str, list[tuple[str, int | str | None]]]) -> None:
    """Raises where two layers have one parameter, each in a way of its own."""
    for name, found in uses.items():
        (first, use), *others = found
        for layer, other in others:
            if other != use:
                raise ValueError(
                    f"plan: {name!r} is tied, and {first!r} and {layer!r} must be split"
                    ' alike: an embedding "vocab" and a head "column_gathered", or '
                    '"vocab" for ff.nn.vocab_cross_entropy; or neither'
                )
