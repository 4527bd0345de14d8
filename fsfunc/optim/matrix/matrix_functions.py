"""Functions of matrices: the nearest orthogonal one, about, and roots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
