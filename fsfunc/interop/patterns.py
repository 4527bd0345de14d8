"""Selection of a module's parts: units by class, name or size, and a plan's layers.

`from_module` calls this once. ``units=`` names modules (`select_units`), to which those
are added that must be units too (`complete_units`). ``plan=`` maps patterns of names to
words, such as "column", of which each layer gets one (`match_words`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias, cast

from torch import nn

from fsfunc import _torch
from fsfunc.interop.split_layers import (
    SPLIT_CLASSES,
    check_experts,
    scaled_class_of,
)
from fsfunc.tree.structure import matches, nearest


@dataclass(frozen=True, repr=False)
class BySize:
    """Units of about one size: see :func:`by_size`."""

    min_params: int
    whole: tuple[type[nn.Module], ...]
    through: tuple[type[nn.Module], ...]

    def __repr__(self) -> str:
        return f"by_size({self.min_params})"

    def names(self, module: nn.Module) -> list[str]:
        """Returns the names of the units within ``module``."""
        units: list[str] = []
        self._visit("", module, units)
        return units

    def _visit(self, name: str, module: nn.Module, units: list[str]) -> int:
        """Adds the units at and below ``module``; returns their parameters' number."""
        count = sum(p.numel() for p in module.parameters())
        if count < self.min_params or isinstance(module, self.whole):
            return 0
        in_units = sum(
            self._visit(f"{name}.{part}" if name else part, child, units)
            for part, child in module.named_children()
        )
        if count - in_units < self.min_params or isinstance(module, self.through):
            return in_units
        units.append(name)
        return count


# What names units: a class, a name or a pattern of names, a compiled regular
# expression, a size, or a predicate of (name, module); and any nesting of several.
Selector: TypeAlias = (
    type[nn.Module]
    | str
    | re.Pattern[str]
    | int
    | BySize
    | Callable[[str, nn.Module], bool]
)
Units: TypeAlias = "Selector | Sequence[Units] | Set[Units] | None"


def by_size(
    min_params: int = 100_000_000,
    *,
    whole: Sequence[type[nn.Module]] = (nn.MultiheadAttention,),
    through: Sequence[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict),
) -> BySize:
    """Units of at least ``min_params`` parameters each, counted from below.

    A module becomes a unit where the parameters that no unit within it has are that
    many.

    Args:
        min_params: how many elements.
        whole: classes that are not looked into: they stay with what is around them.
        through: classes that are looked into, and never units themselves.

    Source: FairScale's ``default_auto_wrap_policy``.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2), nn.Linear(9, 9))
    >>> by_size(20).names(model)
    ['0', '2']
    """
    return BySize(min_params, tuple(whole), tuple(through))


def has_forward(module: nn.Module) -> bool:
    """Returns whether a module has a forward: a ModuleList, for one, has none."""
    return type(module).forward is not nn.Module.forward


def select_units(module: nn.Module, units: Units) -> list[str]:
    """Returns the names of the modules that ``units`` means, each by its first name.

    Raises:
        ValueError: one of ``units`` matches nothing; the nearest are named.
        TypeError: one of them is nothing that could match.
    """
    selected: set[str] = set()
    first_names = {id(m): name for name, m in module.named_modules()}
    for selector in _each(units):
        names = _matching(module, selector)
        modules = {name: module.get_submodule(name) for name in names}
        # A unit replaces a forward, so what has none, such as a ModuleList, is passed
        # over.
        callable_names = [
            first_names[id(m)] for m in modules.values() if has_forward(m)
        ]
        if not callable_names:
            raise ValueError(_no_match_message(module, selector, modules))
        selected.update(callable_names)
    return [name for name in first_names.values() if name in selected]


def _each(units: Units) -> Iterator[Selector]:
    """Yields the selectors one by one, of any nesting."""
    if isinstance(units, list | tuple | set | frozenset):
        for inner in units:
            yield from _each(inner)
    elif units is not None:
        yield cast(Selector, units)


def _matching(module: nn.Module, selector: Selector) -> list[str]:
    if isinstance(selector, int) and not isinstance(selector, bool):
        selector = by_size(selector)
    if isinstance(selector, BySize):
        return selector.names(module)
    return [
        name
        for name, m in module.named_modules(remove_duplicate=False)
        if _predicate(selector)(name, m)
    ]


def _predicate(selector: Selector) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda _, m: isinstance(m, selector)
    if isinstance(selector, str):
        return lambda name, _: _is_named(selector, name)
    if isinstance(selector, re.Pattern):
        return lambda name, _: selector.fullmatch(name) is not None
    if callable(selector) and not isinstance(selector, type):
        return lambda name, m: bool(selector(name, m))
    raise TypeError(
        f"units has {selector!r}: it takes classes of modules, names such as "
        '"model.layers.*", compiled regular expressions, sizes (ff.by_size(n) or n), '
        "predicates (name, module) -> bool, and lists of these"
    )


def _is_named(pattern: str, name: str) -> bool:
    """Returns whether a pattern names a module; with ``**`` at the end, one below.

    >>> [_is_named(p, "a") for p in ("*", "a.**", "**", "")], _is_named("*", "")
    ([True, False, True, False], False)
    """
    if not (name and pattern):
        return name == pattern
    # `matches` lets "**" stand for no component too: "a.**" would name "a" itself.
    if pattern.split(".")[-1] == "**":
        pattern = f"{pattern[:-2]}*.**"
    return matches(pattern, name, ".")


def _no_match_message(
    module: nn.Module, selector: Selector, modules: dict[str, nn.Module]
) -> str:
    shown = getattr(selector, "__name__", repr(getattr(selector, "pattern", selector)))
    if modules:
        name, m = next(iter(modules.items()))
        return (
            f"units: {shown} matches {name!r}, a {type(m).__name__}, which is "
            f'never called itself: "{name}.*" names its parts'
        )
    classes = {
        name: type(m).__name__ for name, m in module.named_modules() if has_forward(m)
    }
    nearest_names = nearest(
        shown, [*sorted({*classes.values()}), *filter(None, classes)]
    )
    count = sum(p.numel() for p in module.parameters())
    return (
        f"units: {shown} matches nothing; there are {nearest_names}, of {count} "
        "parameters"
    )


# Modules that draw random numbers.
_DRAWS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout, nn.RReLU,
)  # fmt: skip


def _draws(m: nn.Module) -> bool:
    return isinstance(m, _DRAWS) and m.training and getattr(m, "p", 1.0) > 0


def complete_units(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns ``names`` and what must be a unit beside them, in the module's order.

    Modules with parameters of their own become units, and those that draw random
    numbers, as only units draw the same on every mesh. A module around units does not:
    its own parameters are read through small units of their own.
    """
    units = set(names)
    around_units = {name[:i] for name in units for i, c in enumerate(name) if c == "."}
    if units - {""}:
        around_units.add("")

    def visit(name: str, m: nn.Module) -> None:
        if name in units:
            return
        params, _ = _torch.tensor_tables(m)
        has_params = any(p is not None for p in params.values())
        children = [c for c in m.children() if any(True for _ in c.parameters())]
        may_be_unit = name not in around_units and (name or not children)
        if has_forward(m) and (has_params and may_be_unit or _draws(m)):
            units.add(name)
            return
        for part, child in m.named_children():
            visit(f"{name}.{part}" if name else part, child)

    visit("", module)
    all_names = [name for name, _ in module.named_modules()]
    return [name for name in all_names if name in units]


def plan_of_model(module: nn.Module) -> dict[str, str]:
    """Returns the plan that a model of transformers has, in the words used here.

    Raises:
        ValueError: it has none, or one with other words.
    """
    plan = getattr(module, "_tp_plan", None)
    if not plan:
        raise ValueError(
            f'plan="auto": {type(module).__name__} has no plan of its own, as some '
            'models of transformers have: write one, {"**.q_proj": "column", ...}'
        )
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    words: dict[str, str] = {}
    for pattern, word in plan.items():
        if not any(matches(pattern, name, ".") for name in names):
            continue  # parameters of experts, and layers of other configurations
        if word not in _WORDS_OF_TRANSFORMERS:
            raise ValueError(
                f'plan="auto": the plan of {type(module).__name__} has {pattern!r} as '
                f"{word!r}, which has no counterpart: write a plan without it"
            )
        if _WORDS_OF_TRANSFORMERS[word]:
            words[pattern] = _WORDS_OF_TRANSFORMERS[word]
    return words


# By transformers' word the word used here; "" where there is nothing to do.
_WORDS_OF_TRANSFORMERS = {
    "colwise": "column", "colwise_gather_output": "column_gathered", "rowwise": "row",
    "rowwise_split_input": "", "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "whole", "moe_tp_experts": "expert",
    "ep_dispatch_experts": "expert",
}  # fmt: skip


def match_words(
    module: nn.Module, plan: Mapping[str, str | tuple[str, str]], axis: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns, by the name of each layer that a plan names, its word and its axis.

    Raises:
        TypeError, ValueError: those of a plan's words in `make_plan`.
    """
    first_names = {id(m): name for name, m in module.named_modules()}
    every = [*module.named_modules(remove_duplicate=False)]
    words: dict[str, str] = {}
    axes: dict[str, str] = {}
    patterns: dict[str, str] = {}  # by layer, the pattern that named it
    for pattern, entry in plan.items():
        names = [first_names[id(m)] for name, m in every if matches(pattern, name, ".")]
        if not names:
            layers = [n for n, m in every if isinstance(m, nn.Linear | nn.Embedding)]
            raise ValueError(
                f"plan: no module matches {pattern!r}; there are "
                f"{nearest(pattern, layers)}. '*' stands for one component of a name, "
                "'**' for any number"
            )
        word, layer_axis = (entry, axis) if isinstance(entry, str) else entry
        for name in dict.fromkeys(names):
            if name in patterns:
                raise ValueError(
                    f"plan: {patterns[name]!r} and {pattern!r} both match {name!r}: "
                    "let one pattern name it"
                )
            _check_layer(name, module.get_submodule(name), word)
            if layer_axis != axis and word != "expert":
                raise ValueError(
                    f"plan: {name!r} is split over {layer_axis!r} and other layers "
                    f"over {axis!r}: features go over one axis from layer to layer; "
                    '"expert" alone takes an axis of its own'
                )
            patterns[name], words[name], axes[name] = pattern, word, layer_axis
    return words, axes


def _check_layer(name: str, m: nn.Module, word: str) -> None:
    """Raises if a module is none that a word of a plan is for."""
    known = sorted({*(known for known, _ in SPLIT_CLASSES), "expert", "whole"})
    if word not in known:
        raise ValueError(
            f"plan: {name!r} is given {word!r}; a layer is {', '.join(known[:-1])} or "
            f"{known[-1]}"
        )
    if word == "expert":
        check_experts(name, m)
    elif word == "whole" and not any(True for _ in m.parameters(recurse=False)):
        raise ValueError(
            f'plan: {name!r} is "whole", and has no parameter of its own: name the '
            "modules in it that have"
        )
    elif word != "whole":
        _check_class(name, m, word)


def _check_class(name: str, m: nn.Module, word: str) -> None:
    # Exactly torch's classes: a subclass may compute something else in its forward. One
    # that scales an Embedding's rows leaves their lookup to the class above.
    is_scaled = word == "vocab" and scaled_class_of(type(m)) is not None
    if (word, type(m)) not in SPLIT_CLASSES and not is_scaled:
        classes = sorted({cls.__name__ for w, cls in SPLIT_CLASSES if w == word})
        advice = "" if type(m) in (nn.Linear, nn.Embedding) else (
            ". Where its forward calls ff.nn.column_linear, row_linear or "
            "vocab_embedding on self.weight, layouts= alone splits it"
        )  # fmt: skip
        raise TypeError(
            f"plan: {name!r} is a {type(m).__module__}.{type(m).__qualname__}, and "
            f"{word!r} splits torch.nn's own {' or '.join(classes)}{advice}"
        )
    for option in ("sparse", "scale_grad_by_freq"):
        if getattr(m, option, False):
            raise TypeError(f"plan: {name!r} is an Embedding with {option}")
    if _torch.tensor_tables(m)[0].get("weight") is None:
        raise TypeError(
            f"plan: the weight of {name!r} is computed by a hook, from what a rank has "
            "no part of: remove the hook, or leave the layer out of the plan"
        )
