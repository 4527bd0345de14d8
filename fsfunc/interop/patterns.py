"""Selection of a module's parts: units by class, name, size; the words of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsfunc import _torch
from fsfunc.interop.split_layers import KINDS, check_experts
from fsfunc.tree.structure import matches, nearest

Units = Any  # a class, a name, a pattern, a size, a predicate; or several


@dataclass(frozen=True, repr=False)
class BySize:
    """Units of about one size: see :func:`by_size`."""

    min_params: int
    whole: tuple[type[nn.Module], ...]
    through: tuple[type[nn.Module], ...]

    def __repr__(self) -> str:
        return f"by_size({self.min_params})"

    def names(self, module: nn.Module) -> list[str]:
        """The names of the units within ``module``."""
        found: list[str] = []
        self._visit("", module, found)
        return found

    def _visit(self, name: str, module: nn.Module, found: list[str]) -> int:
        """The number of parameters of the units at and below ``module``."""
        count = sum(p.numel() for p in module.parameters())
        if count < self.min_params or isinstance(module, self.whole):
            return 0
        taken = sum(
            self._visit(f"{name}.{part}" if name else part, child, found)
            for part, child in module.named_children()
        )
        if count - taken < self.min_params or isinstance(module, self.through):
            return taken
        found.append(name)
        return count


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


def called(module: nn.Module) -> bool:
    """True if a module has a forward: a ModuleList, for one, has none."""
    return type(module).forward is not nn.Module.forward


def chosen(module: nn.Module, units: Units) -> list[str]:
    """The names of the modules that ``units`` means, each by its first name.

    Raises:
        ValueError: one of ``units`` matches nothing; the nearest are named.
        TypeError: one of them is nothing that could match.
    """
    found: set[str] = set()
    first = {id(m): name for name, m in module.named_modules()}
    for one in _each(units):
        names = _matching(module, one)
        parts = {name: module.get_submodule(name) for name in names}
        good = [first[id(m)] for m in parts.values() if called(m)]
        if not good:
            raise ValueError(_nothing(module, one, parts))
        found.update(good)
    return [name for name in first.values() if name in found]


def _each(units: Units) -> Iterator[Any]:
    if isinstance(units, list | tuple | set | frozenset):
        for one in units:
            yield from _each(one)
    elif units is not None:
        yield units


def _matching(module: nn.Module, one: Any) -> list[str]:
    if isinstance(one, int) and not isinstance(one, bool):
        one = by_size(one)
    if isinstance(one, BySize):
        return one.names(module)
    return [
        name
        for name, m in module.named_modules(remove_duplicate=False)
        if _test(one)(name, m)
    ]


def _test(one: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(one, type) and issubclass(one, nn.Module):
        return lambda _, m: isinstance(m, one)
    if isinstance(one, str):
        return lambda name, _: _is_named(one, name)
    if isinstance(one, re.Pattern):
        return lambda name, _: one.fullmatch(name) is not None
    if callable(one) and not isinstance(one, type):
        return lambda name, m: bool(one(name, m))
    raise TypeError(
        f"units has {one!r}: it takes classes of modules, names such as "
        '"model.layers.*", compiled regular expressions, sizes (ff.by_size(n) or n), '
        "predicates (name, module) -> bool, and lists of these"
    )


def _is_named(pattern: str, name: str) -> bool:
    """True if a pattern names a module; one that ends in ``**`` names those below.

    >>> [_is_named(p, "a") for p in ("*", "a.**", "**", "")], _is_named("*", "")
    ([True, False, True, False], False)
    """
    if not (name and pattern):
        return name == pattern
    if pattern.split(".")[-1] == "**":
        pattern = f"{pattern[:-2]}*.**"
    return matches(pattern, name, ".")


def _nothing(module: nn.Module, one: Any, parts: dict[str, nn.Module]) -> str:
    """The message about a pattern that gives no unit."""
    said = getattr(one, "__name__", repr(getattr(one, "pattern", one)))
    if parts:
        name, m = next(iter(parts.items()))
        return (
            f"units: {said} matches {name!r}, a {type(m).__name__}, which is "
            f'never called itself: "{name}.*" names its parts'
        )
    names = {name: type(m).__name__ for name, m in module.named_modules() if called(m)}
    near = nearest(said, [*sorted({*names.values()}), *filter(None, names)])
    count = sum(p.numel() for p in module.parameters())
    return f"units: {said} matches nothing; there are {near}, of {count} parameters"


_DRAWS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout, nn.RReLU,
)  # fmt: skip


def _draws(m: nn.Module) -> bool:
    return isinstance(m, _DRAWS) and m.training and getattr(m, "p", 1.0) > 0


def completed(module: nn.Module, names: Sequence[str]) -> list[str]:
    """``names``, and what must be a unit beside them.

    Modules that have parameters of their own become units, and those that draw random
    numbers, as only units draw the same on every mesh. A module around units does not:
    its own parameters are read through small units of their own.
    """
    units = set(names)
    above = {name[:i] for name in units for i, c in enumerate(name) if c == "."}
    if units - {""}:
        above.add("")

    def visit(name: str, m: nn.Module) -> None:
        if name in units:
            return
        params, _ = _torch.tensor_tables(m)
        owns = any(p is not None for p in params.values())
        below = [c for c in m.children() if any(True for _ in c.parameters())]
        alone = name not in above and (name or not below)
        if called(m) and (owns and alone or _draws(m)):
            units.add(name)
            return
        for part, child in m.named_children():
            visit(f"{name}.{part}" if name else part, child)

    visit("", module)
    first = [name for name, _ in module.named_modules()]
    return [name for name in first if name in units]


def own_plan(module: nn.Module) -> dict[str, str]:
    """The plan that a model of transformers has of itself, in the words used here.

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
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        if not any(matches(pattern, name, ".") for name in names):
            continue  # parameters of experts, and layers of other configurations
        if word not in _OTHER_WORDS:
            raise ValueError(
                f'plan="auto": the plan of {type(module).__name__} has {pattern!r} as '
                f"{word!r}, which has no counterpart: write a plan without it"
            )
        if _OTHER_WORDS[word]:
            found[pattern] = _OTHER_WORDS[word]
    return found


_OTHER_WORDS = {
    "colwise": "column", "colwise_gather_output": "column_gathered", "rowwise": "row",
    "rowwise_split_input": "", "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "whole", "moe_tp_experts": "expert",
    "ep_dispatch_experts": "expert",
}  # fmt: skip


def words_of(
    module: nn.Module, plan: Mapping[str, str | tuple[str, str]], axis: str
) -> tuple[dict[str, str], dict[str, str]]:
    """By the name of each layer that a plan names, its word and its axis.

    Raises:
        TypeError, ValueError: those of a plan's words in `planned`.
    """
    first = {id(m): name for name, m in module.named_modules()}
    every = [*module.named_modules(remove_duplicate=False)]
    words: dict[str, str] = {}
    axes: dict[str, str] = {}
    by: dict[str, str] = {}
    for pattern, said in plan.items():
        names = [first[id(m)] for name, m in every if matches(pattern, name, ".")]
        if not names:
            layers = [n for n, m in every if isinstance(m, nn.Linear | nn.Embedding)]
            raise ValueError(
                f"plan: no module matches {pattern!r}; there are "
                f"{nearest(pattern, layers)}. '*' stands for one component of a name, "
                "'**' for any number"
            )
        word, over = (said, axis) if isinstance(said, str) else said
        for name in dict.fromkeys(names):
            if name in by:
                raise ValueError(
                    f"plan: {by[name]!r} and {pattern!r} both match {name!r}: let one "
                    "pattern name it"
                )
            _check_layer(name, module.get_submodule(name), word)
            if over != axis and word != "expert":
                raise ValueError(
                    f"plan: {name!r} is split over {over!r} and other layers over "
                    f"{axis!r}: features go over one axis from layer to layer; "
                    '"expert" alone takes an axis of its own'
                )
            by[name], words[name], axes[name] = pattern, word, over
    return words, axes


def _check_layer(name: str, m: nn.Module, word: str) -> None:
    known = sorted({*(known for known, _ in KINDS), "expert", "whole"})
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
        _check_kind(name, m, word)


def _check_kind(name: str, m: nn.Module, word: str) -> None:
    if (word, type(m)) not in KINDS:
        kinds = sorted({cls.__name__ for known, cls in KINDS if known == word})
        way = "" if type(m) in (nn.Linear, nn.Embedding) else (
            ". Where its forward calls ff.nn.column_linear, row_linear or "
            "vocab_embedding on self.weight, layouts= alone splits it"
        )  # fmt: skip
        raise TypeError(
            f"plan: {name!r} is a {type(m).__module__}.{type(m).__qualname__}, and "
            f"{word!r} splits torch.nn's own {' or '.join(kinds)}{way}"
        )
    for option in ("sparse", "scale_grad_by_freq"):
        if getattr(m, option, False):
            raise TypeError(f"plan: {name!r} is an Embedding with {option}")
    if _torch.tensor_tables(m)[0].get("weight") is None:
        raise TypeError(
            f"plan: the weight of {name!r} is computed by a hook, from what a rank has "
            "no part of: remove the hook, or leave the layer out of the plan"
        )
