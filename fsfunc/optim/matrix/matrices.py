"""The steps that optimizers of whole matrices have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.optim.element_rules import Codec, ElementRule
from fsfunc.optim.leaves import Mask, Tree, local, paths_of, said, trainable
from fsfunc.optim.matching import Matched, decays
from fsfunc.optim.matrix.matrix_exchange import MatrixExchange
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.sharded.leaf import is_sharded

PLAIN = Codec()


def check_matrices(params: Tree, name: str) -> None:
    """Raises where a leaf to train is no matrix, by its global shape.

    Raises:
        ValueError: names the leaf and the way out.
    """
    leaves, treedef = tree.flatten(params, is_sharded)
    for i, leaf in enumerate(leaves):
        if trainable(leaf) and leaf.ndim != 2:
            raise ValueError(
                f"{name} takes matrices, and {paths_of(treedef)[i]!r} is {said(leaf)}: "
                f'write ff.partition({{"matrix": ff.{name}(...), "other": '
                'ff.sharded_adam(...)}, lambda path, leaf: "matrix" if leaf.ndim == 2 '
                'else "other"), and name embeddings and heads as other too'
            )


def matched_matrices(name: str, params: Tree, grads: Tree, *moments: Tree) -> Matched:
    """The trees matched; raises where an active leaf is no matrix."""
    matched = Matched.of(params, grads, *moments)
    check_matrices(matched.restore(matched.columns[0], matched.nothing), name)
    return matched


def descent_rule(
    name: str,
    learning_rate: float | Schedule,
    weight_decay: float,
    mask: Mask | None,
    momentum: float = 0.0,
) -> ElementRule:
    """The step along directions u: ``v = momentum v + u`` and ``p - l (v + decay p)``.

    Its state is a pair of the count and v, None without momentum.
    """

    def equation(count: Any):
        rate = rate_at(learning_rate, count)

        def step(p: Tensor, u: Tensor, *rest: Any):
            *moments, decay = rest
            new = [momentum * v + u for v in moments]

            def update() -> Tensor:
                way = -rate * (new[0] if new else u)
                return way - rate * decay * p if decays(decay) else way

            return update, *new

        return step

    return ElementRule(
        f"{name} with weight_decay",
        lambda *state: state,
        1 if momentum else 0,
        equation,
        None,
        weight_decay,
        mask,
    )


def directions(
    matched: Matched,
    exchange: MatrixExchange,
    parts: Sequence[Tensor],
    fn: Callable[[dict[int, Tensor]], dict[int, Tensor]],
    factors: Sequence[float] | None = None,
) -> Tree:
    """The tree of what ``fn`` makes of the matrices, times factors.

    It lies as the parameters do, in their dtypes; leaves of one buffer in a buffer.

    Args:
        parts: of each active leaf what this rank holds, of one dtype.
        fn: as of `MatrixExchange.map`.
    """
    made = exchange.map(parts, fn)
    params = matched.buffers[0]
    leaves = matched.columns[0]
    factors = [1.0] * len(made) if factors is None else factors
    rows = list(zip(leaves, made, factors, strict=True))
    if matched.differentiated:
        out = [x.to(leaf.dtype) * factor for leaf, x, factor in rows]
        out = [
            leaf.with_local(x) if is_sharded(leaf) else x
            for leaf, x in zip(leaves, out, strict=True)
        ]
        return matched.restore(out, matched.nothing)
    flats = [torch.empty_like(x) for x in params.tensors]
    for flat, (_, packed) in zip(flats, params.groups, strict=True):
        end = 0  # of what the leaves before take; what is between them stays zero
        for start, stop in () if packed is None else [*packed.ranges, _end(flat)]:
            flat[end:start].zero_()
            end = max(end, stop)
    out = params.rebuild(flats)
    for leaf, (_, x, factor) in zip(out, rows, strict=True):
        local(leaf).copy_(x)
        if factor != 1:
            local(leaf).mul_(factor)
    return matched.restore(out, matched.nothing)


def _end(flat: Tensor) -> tuple[int, int]:
    return flat.numel(), flat.numel()
