"""Words of a plan: which layers its patterns name, and whether they can be split so."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn

from fsfunc import _torch
from fsfunc.interop.split_layers import KINDS
from fsfunc.interop.split_values import check_experts
from fsfunc.tree.structure import matches


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
            near = get_close_matches(pattern, layers, 3, 0.3) or layers[:3]
            raise ValueError(
                f"plan: no module matches {pattern!r}; there are "
                f"{', '.join(map(repr, near))} ({len(layers)} layers in all). '*' "
                "stands for one component of a name, '**' for any number"
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
    known = sorted({*(known for known, _ in KINDS), "expert", "sequence", "whole"})
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
    elif word not in ("sequence", "whole"):
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
    if _torch.tables(m)[0].get("weight") is None:
        raise TypeError(
            f"plan: the weight of {name!r} is computed by a hook, from what a rank has "
            "no part of: remove the hook, or leave the layer out of the plan"
        )
