"""What an operator was given, as the rules of types look at it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc.tracing.knowledge import Seen
from fsfunc.tracing.types import Operand

__all__ = ["OF_LISTS", "flat", "names_dims", "number", "operand", "rows", "shown"]


def operand(x: Tensor, seen: Seen) -> Operand:
    """A tensor of which something is known."""
    steps = zip(x.shape, x.stride(), strict=True) if x.layout == torch.strided else ()
    number = x.numel() == 1 or all(n == 1 or step == 0 for n, step in steps)
    return Operand(seen.kind, number or seen.uniform, tuple(x.shape))


OF_LISTS = ("aten::_foreach_", "aten::_fused_")


def rows(args: Any, kwargs: Any, made: list[Tensor]) -> list[tuple[list[Any], Any]]:
    """What an operator over lists does at each place: what it is given, and made."""
    every = [*args, *kwargs.values()]
    n = len(args[0])
    lists = [x for x in every if isinstance(x, (list, tuple)) and len(x) == n]
    others = [x for x in every if not isinstance(x, (list, tuple))]
    results = [made[i::n] for i in range(n)] if len(made) % n == 0 else [made] * n
    return [([*(x[i] for x in lists), *others], results[i]) for i in range(n)]


def names_dims(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator works along dims that it is given."""
    said = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)}
    said |= kwargs
    return any(said.get(name) not in (None, [], ()) for name in ("dim", "dims"))


def number(x: Any) -> Any:
    """What of an argument that is no tensor tells it from others."""
    if isinstance(x, torch.Generator):
        return "generator", x.initial_seed()
    simple = isinstance(x, (bool, int, float, complex, str, type(None)))
    return x if simple else type(x).__name__


def shown(x: Tensor) -> Any:
    """Which elements of its memory a tensor shows, where it is not all of them."""
    if x.layout != torch.strided or x.nbytes == x.untyped_storage().nbytes():
        return None
    return x.storage_offset(), tuple(x.shape), x.stride()


def flat(values: Any) -> list[Any]:
    """What lists of lists hold."""
    if isinstance(values, (tuple, list)):
        return [y for x in values for y in flat(x)]
    if isinstance(values, dict):
        return [y for x in values.values() for y in flat(x)]
    return [values]
