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

Room = dict[Any, tuple[Tensor, Tensor, Tensor]]


def newton_schulz(
    matrix: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    room: Room | None = None,
) -> Tensor:
    """``U f(S) V'`` for a matrix ``U S V'``, with f near 1: all directions alike.

    X = X / max(norm, eps), and then ``steps`` times, of a wide X::

        A = X X'        X = a X + (b A + c A^2) X

    Args:
        matrix: [m, n], in the dtype in which all of it is computed.
        coefficients: (a, b, c), by which the small singular values grow.
        steps: how often.
        eps: the least norm by which it is divided.
        room: memory for reuse between matrices, where nothing is differentiated.

    Cost: see `newton_schulz_flops`; in memory, besides the result, a matrix of its size
    and two of [m, m], m the shorter dim: once for each shape with ``room``.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks.

    >>> x = newton_schulz(torch.diag(torch.tensor([2.0, 0.5])), (2.0, -1.5, 0.5), 9, 0)
    >>> torch.allclose(x, torch.eye(2), atol=1e-3)
    True
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    if room is None:
        for _ in range(steps):
            gram = x @ x.T
            update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, update, x, beta=a)
        return x.T if tall else x
    key = *x.shape, x.dtype, x.device
    if key not in room:
        m = x.shape[0]
        room[key] = x.new_empty(m, m), x.new_empty(m, m), x.new_empty(x.shape)
    gram, update, spare = room[key]
    # Rows in a row, as they are without room: other strides would give other bits.
    result = x.new_empty(x.shape)
    for left in reversed(range(steps)):
        out = spare if left % 2 else result
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
        x = torch.addmm(x, update, x, beta=a, out=out)
    return x.T if tall else x


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """Multiplications and additions of one step for a matrix of this shape.

    >>> newton_schulz_flops((2, 3)) == 2 * (2 * 2 * 3) + 2 * 2**3 + 2 * (2 * 2 * 3)
    True
    """
    short, long = sorted(shape)
    return 4.0 * short * short * long + 2.0 * short**3


def inverse_root(matrix: Tensor, eps: float, power: float = -0.25) -> Tensor:
    """A positive definite matrix to a power, its eigenvalues at least ``eps``.

    In float64; not a number all over, where an element is not finite.

    >>> inverse_root(torch.diag(torch.tensor([16.0, 0.0])), eps=1e-4)
    tensor([[ 0.5000,  0.0000],
            [ 0.0000, 10.0000]])
    """
    finite = matrix.isfinite().all()
    wide = torch.where(finite, matrix.double(), 1.0)
    values, vectors = torch.linalg.eigh(wide)
    root = (vectors * values.clamp(min=eps) ** power) @ vectors.T
    return torch.where(finite, root, torch.nan).to(matrix.dtype)


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
