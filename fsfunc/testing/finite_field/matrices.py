"""Rules of what is computed of whole matrices: solutions, and factors.

What arithmetic gives (inverses, determinants, solutions of linear systems) is computed
by it. Eigenvalues, singular values, and the factors of Cholesky and QR are irrational:
they are random functions of the whole matrix. So equal matrices have equal factors, in
whatever stack; that a product of the factors is the matrix again is not known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsfunc.testing.finite_field.field import (
    Field,
    matmul,
    modulo,
    product,
    salt,
    scrambled,
)
from fsfunc.testing.finite_field.rules import absolute, rule, value

# Solutions


def factored(f: Field, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns L and U of matrices in one, and the rows that were exchanged, from 1.

    A pivot is the first number of its column that is not 0.
    """
    lu, (m, n) = x.clone(), x.shape[-2:]
    pivots = torch.ones(*x.shape[:-2], min(m, n), dtype=torch.int32)
    for k in range(min(m, n)):
        row = k + (lu[..., k:, k] != 0).int().argmax(-1)
        pivots[..., k] = row + 1
        lu = lu.gather(-2, _exchange(row, k, m).unsqueeze(-1).expand_as(lu))
        pivot = f.inverse(lu[..., k, k])
        below = product(lu[..., k + 1 :, k], pivot.unsqueeze(-1))
        lu[..., k + 1 :, k] = below
        taken = product(below.unsqueeze(-1), lu[..., k, k + 1 :].unsqueeze(-2))
        lu[..., k + 1 :, k + 1 :] = modulo(lu[..., k + 1 :, k + 1 :] - taken)
    return lu, pivots


def _exchange(row: Tensor, k: int, n: int) -> Tensor:
    """Returns the order of ``n`` rows in which the rows ``row`` and k are exchanged."""
    order = torch.arange(n).expand(*row.shape, n).clone()
    order[..., k] = row
    return order.scatter(-1, row.unsqueeze(-1), k)


def _exchanged(b: Tensor, pivots: Tensor, back: bool = False) -> Tensor:
    """Returns rows that were exchanged one after the other, or put back."""
    n = pivots.shape[-1]
    for k in reversed(range(n)) if back else range(n):
        order = _exchange(pivots[..., k].long() - 1, k, b.shape[-2])
        b = b.gather(-2, order.unsqueeze(-1).expand_as(b))
    return b


def triangular_solution(
    f: Field, t: Tensor, b: Tensor, upper: bool, unit: bool = False
) -> Tensor:
    """Returns x of t x = b, of one triangle of t; with ``unit``, its diagonal is 1."""
    n = t.shape[-1]
    b = b.expand(*torch.broadcast_shapes(t.shape[:-2], b.shape[:-2]), *b.shape[-2:])
    x = torch.zeros_like(b)
    for i in reversed(range(n)) if upper else range(n):
        known = slice(i + 1, n) if upper else slice(0, i)
        sums = matmul(t[..., i : i + 1, known], x[..., known, :]).squeeze(-2)
        row = modulo(b[..., i, :] - sums)
        scale = 1.0 if unit else f.inverse(t[..., i, i]).unsqueeze(-1)
        x[..., i, :] = product(row, scale)
    return x


def solution(
    f: Field, lu: Tensor, pivots: Tensor, b: Tensor, adjoint: bool = False
) -> Tensor:
    """Returns x of a x = b, or of a's transpose, whose factors these are."""
    batch = torch.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    b = b.expand(*batch, *b.shape[-2:])
    pivots = pivots.expand(*batch, pivots.shape[-1])
    if not adjoint:
        y = triangular_solution(f, lu, _exchanged(b, pivots), upper=False, unit=True)
        return triangular_solution(f, lu, y, upper=True)
    y = triangular_solution(f, lu.mT, b, upper=False)
    y = triangular_solution(f, lu.mT, y, upper=True, unit=True)
    return _exchanged(y, pivots, back=True)


def _info(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[:-2], dtype=torch.int32)


@rule("linalg_lu_factor_ex")
def lu_factors(
    f: Field, a: Any, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns L and U in one, the exchanged rows, and that all went well."""
    return *factored(f, value(a)), _info(a)


@rule("linalg_lu_solve")
def solve_by_factors(
    f: Field, lu: Any, pivots: Tensor, b: Any, *, left: bool = True,
    adjoint: bool = False,
) -> Tensor:  # fmt: skip
    """Returns x of a x = b, or of x a = b, given the factors of a."""
    lu, b = value(lu), value(b)
    if left:
        return solution(f, lu, pivots, b, adjoint)
    return solution(f, lu, pivots, b.mT, not adjoint).mT


@rule("_linalg_solve_ex")
def solve(
    f: Field, a: Any, b: Any, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A right side of as many rows as there are matrices is a vector for each."""
    a, b = value(a), value(b)
    vectors = b.dim() == 1 or a.dim() - 1 == b.dim() and a.shape[:-1] == b.shape
    lu, pivots = factored(f, a)
    b = b.unsqueeze(-1) if vectors else b
    x = solve_by_factors(f, lu, pivots, b, left=left)
    return x.squeeze(-1) if vectors else x, lu, pivots, _info(a)


@rule("linalg_inv_ex")
def invert(f: Field, a: Any, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """Returns inverses: solutions of a x = 1."""
    one = torch.eye(a.shape[-1], dtype=torch.float64)
    return solution(f, *factored(f, value(a)), one), _info(a)


@rule("_linalg_det")
def determinant(f: Field, a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of a contiguous matrix torch's backward takes the factors of the transpose."""
    lu, pivots = factored(f, value(a).mT if a.is_contiguous() else value(a))
    stayed = pivots == torch.arange(1, pivots.shape[-1] + 1)
    result = 1.0 - 2.0 * ((~stayed).sum(-1) % 2).double()
    for pivot in lu.diagonal(0, -2, -1).unbind(-1):
        result = product(result, pivot)
    return modulo(result), lu, pivots


@rule("_linalg_slogdet")
def log_determinant(f: Field, a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns a determinant's sign, and the logarithm of its size."""
    result, lu, pivots = determinant(f, a)
    sign = f.order(result).sign()
    return modulo(sign), f.log(modulo(result * sign)), lu, pivots


@rule("linalg_solve_triangular")
def solve_triangular(
    f: Field, a: Any, b: Any, *, upper: bool, left: bool = True,
    unitriangular: bool = False,
) -> Tensor:  # fmt: skip
    """Returns x of a x = b, or of x a = b, for one triangle of a."""
    a, b = value(a), value(b)
    if left:
        return triangular_solution(f, a, b, upper, unitriangular)
    return triangular_solution(f, a.mT, b.mT, not upper, unitriangular).mT


@rule("cholesky_solve")
def solve_by_cholesky(f: Field, b: Any, factor: Any, upper: bool = False) -> Tensor:
    """Returns x of l l^T x = b, for any triangle l."""
    lower = value(factor).mT if upper else value(factor)
    y = triangular_solution(f, lower, value(b), upper=False)
    return triangular_solution(f, lower.mT, y, upper=True)


@rule("cholesky_inverse")
def invert_by_cholesky(f: Field, factor: Any, upper: bool = False) -> Tensor:
    """Returns the inverse of l l^T, for any triangle l."""
    one = torch.eye(factor.shape[-1], dtype=torch.float64)
    return solve_by_cholesky(f, one, factor, upper)


# Factors


def of_matrices(f: Field, name: str, x: Tensor, *sizes: int) -> Tensor:
    """Returns a random function of each whole matrix, with results of these sizes."""
    count = x.shape[-2] * x.shape[-1]
    places = torch.arange(count)
    weights = scrambled(places, salt(name, "weights", f.seed)).unsqueeze(-1)
    keys = matmul(x.reshape(*x.shape[:-2], 1, count), weights)[..., 0]
    images = f.function(name, keys).to(torch.int64)
    places = torch.arange(torch.Size(sizes).numel())
    results = scrambled(images * (1 << 30) + places, salt(name, "places", f.seed))
    return results.reshape(*x.shape[:-2], *sizes)


@rule("_linalg_eigh")
def eigenvalues(
    f: Field, a: Any, UPLO: str = "L", compute_v: bool = True
) -> tuple[Tensor, Tensor]:
    """They are read off one triangle."""
    x, n = value(a), a.shape[-1]
    x = x.tril() if UPLO.upper() == "L" else x.mT.tril()
    vectors = of_matrices(f, "eigenvectors", x, n, n) if compute_v else x.new_empty(0)
    return of_matrices(f, "eigenvalues", x, n), vectors


@rule("cholesky")
def cholesky(f: Field, a: Any, upper: bool = False) -> Tensor:
    """Returns a random triangle for each matrix."""
    return cholesky_ex(f, a, upper=upper)[0]


@rule("linalg_cholesky_ex")
def cholesky_ex(
    f: Field, a: Any, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns a random triangle for each matrix, and that all went well."""
    x, n = value(a), a.shape[-1]
    factor = of_matrices(f, "cholesky", (x.mT if upper else x).tril(), n, n).tril()
    return factor.mT if upper else factor, _info(x)


@rule("_linalg_svd")
def singular_values(
    f: Field, a: Any, full_matrices: bool = False, compute_uv: bool = True, *,
    driver: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns random factors and values for each matrix."""
    x, (m, n) = value(a), a.shape[-2:]
    k = min(m, n)
    s = of_matrices(f, "singular values", x, k)
    if not compute_uv:
        return x.new_empty(0), s, x.new_empty(0)
    wide = (m, n) if full_matrices else (k, k)
    u = of_matrices(f, "left singular vectors", x, m, wide[0])
    return u, s, of_matrices(f, "right singular vectors", x, wide[1], n)


@rule("linalg_qr")
def qr(f: Field, a: Any, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Returns random factors for each matrix, the second one a triangle."""
    x, (m, n) = value(a), a.shape[-2:]
    k = m if mode == "complete" else min(m, n)
    r = of_matrices(f, "qr, upper", x, k, n).triu()
    if mode == "r":
        return x.new_empty(0), r
    return of_matrices(f, "qr, orthogonal", x, m, k), r


# Distances


def _differences(x: Any, y: Any) -> Tensor:
    return modulo(value(x).unsqueeze(-2) - value(y).unsqueeze(-3))


@rule("_cdist_forward")
def distances(f: Field, x: Any, y: Any, p: float, compute_mode: Any = None) -> Tensor:
    """Returns the distance of each row of x from each row of y."""
    apart = _differences(x, y)
    if p == 2:
        return f.root(modulo(product(apart, apart).sum(-1)))
    if p == 1:
        return modulo(value(absolute(f, apart)).sum(-1))
    raise NotImplementedError(f"distances of p={p} have no exact rule; 1 and 2 have")


@rule("_cdist_backward")
def distances_backward(
    f: Field, g: Any, x: Any, y: Any, p: float, distance: Any
) -> Tensor:
    """Returns the gradient by x."""
    apart = _differences(x, y)
    if p == 2:
        g = product(value(g), f.inverse(value(distance)))
    else:
        apart = modulo(f.order(apart).sign())
    return modulo(product(value(g).unsqueeze(-1), apart).sum(-2))
