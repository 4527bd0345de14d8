"""Values of an optimizer's functions: schedules by count, masks by leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.comparison import Lines
from fsfunc.comm.descriptions import Ask, stated
from fsfunc.optim.leaves import Tree
from fsfunc.sharded.leaf import is_sharded

__all__ = ["answers"]

_COUNTS = (0, 1, 2, 3, 10, 100, 1000, 10_000, 100_000)
_RATES = {"learning_rate", "lr"}
_BY_LEAF = {"mask", "trust_mask", "labels"}


def answers(params: Tree) -> Ask:
    """Asks schedules for their first rates, and masks about each leaf.

    By the names of arguments: a function of another name is known by its own alone.

    >>> import torch
    >>> from fsfunc.comm.descriptions import told
    >>> from fsfunc.optim import scale
    >>> halving = scale(1.0).known_as("sgd", {"learning_rate": lambda n: 0.5**n})
    >>> told("sgd", halving, answers(torch.ones(2)))[2:4]
    [('sgd/learning_rate at count 0', '1.0'), ('sgd/learning_rate at count 1', '0.5')]
    """
    paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
    named = zip(paths, leaves, strict=True)
    known = [(p, x) for p, x in named if is_sharded(x) or isinstance(x, Tensor)]

    def ask(name: str, fn: Callable[..., Any]) -> Lines:
        if name in _RATES:
            return [(f"at count {n}", _said(fn, n)) for n in _COUNTS]
        if name in _BY_LEAF:
            return [(f"of {path!r}", _said(fn, path, x)) for path, x in known]
        return ()

    return ask


def _said(fn: Callable[..., Any], *args: Any) -> str:
    try:
        return stated(fn(*args))
    except Exception as error:  # of a table of rates, beyond its end
        return f"raises {type(error).__name__}"
