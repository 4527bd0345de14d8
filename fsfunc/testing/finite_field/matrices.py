"""Rules of operators on whole matrices: solutions, and factors.

Inverses, determinants and solutions of linear systems are computed by arithmetic of the
field. Eigenvalues, singular values, and the factors of Cholesky and QR are irrational:
they are random functions of the whole matrix. So equal matrices have equal factors, in
whatever batch they are. But that the product of the factors is the matrix is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsfunc.testing.finite_field.field import (
    Field,
    matmul,
    modulo,
    product,
    salt,
    scramble,
)
from fsfunc.testing.finite_field.rules import absolute, residue_of, rule

# Solutions


def factor_lu(f: Field, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns L and U of matrices in one, and the rows that were exchanged, from 1.

    A pivot is the first number of its column that is not 0.
    """
    lu, (m, n) = x.clone(), x.shape[-2:]
    pivots = torch.ones(*x.shape[:-2], min(m, n), dtype=torch.int32)
    for k in range(min(m, n)):
        row = k + (lu[..., k:, k] != 0).int().argmax(-1)
        pivots[..., k] = row + 1
        lu = lu.gather(-2, _swap_order(row, k, m).unsqueeze(-1).expand_as(lu))
        pivot = f.inverse(lu[..., k, k])
        multipliers = product(lu[..., k + 1 :, k], pivot.unsqueeze(-1))
        lu[..., k + 1 :, k] = multipliers
        subtracted = product(
            multipliers.unsqueeze(-1), lu[..., k, k + 1 :].unsqueeze(-2)
        )
        lu[..., k + 1 :, k + 1 :] = modulo(lu[..., k + 1 :, k + 1 :] - subtracted)
    return lu, pivots


def _swap_order(row: Tensor, k: int, n: int) -> Tensor:
    """Returns the order of ``n`` rows in which the rows ``row`` and k are exchanged."""
    order = torch.arange(n).expand(*row.shape, n).clone()
    order[..., k] = row
    return order.scatter(-1, row.unsqueeze(-1), k)


def _apply_swaps(b: Tensor, pivots: Tensor, back: bool = False) -> Tensor:
    """Exchanges rows as pivots say, one after the other; or puts them back."""
    n = pivots.shape[-1]
    for k in reversed(range(n)) if back else range(n):
        order = _swap_order(pivots[..., k].long() - 1, k, b.shape[-2])
        b = b.gather(-2, order.unsqueeze(-1).expand_as(b))
    return b


def solve_triangle(
    f: Field, t: Tensor, b: Tensor, upper: bool, unit: bool = False
) -> Tensor:
    """Returns x of t x = b, of one triangle of t; with ``unit``, its diagonal is 1."""
    n = t.shape[-1]
    b = b.expand(*torch.broadcast_shapes(t.shape[:-2], b.shape[:-2]), *b.shape[-2:])
    x = torch.zeros_like(b)
    for i in reversed(range(n)) if upper else range(n):
        solved = slice(i + 1, n) if upper else slice(0, i)
        solved_terms = matmul(t[..., i : i + 1, solved], x[..., solved, :]).squeeze(-2)
        row = modulo(b[..., i, :] - solved_terms)
        scale = 1.0 if unit else f.inverse(t[..., i, i]).unsqueeze(-1)
        x[..., i, :] = product(row, scale)
    return x


def solve_from_factors(
    f: Field, lu: Tensor, pivots: Tensor, b: Tensor, adjoint: bool = False
) -> Tensor:
    """Returns x of a x = b, or of a's transpose, whose factors these are."""
    batch = torch.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    b = b.expand(*batch, *b.shape[-2:])
    pivots = pivots.expand(*batch, pivots.shape[-1])
    if not adjoint:
        y = solve_triangle(f, lu, _apply_swaps(b, pivots), upper=False, unit=True)
        return solve_triangle(f, lu, y, upper=True)
    y = solve_triangle(f, lu.mT, b, upper=False)
    y = solve_triangle(f, lu.mT, y, upper=True, unit=True)
    return _apply_swaps(y, pivots, back=True)


def _zero_info(x: Tensor) -> Tensor:
    """Returns LAPACK's info for each matrix: 0, no error."""
    return torch.zeros(x.shape[:-2], dtype=torch.int32)


@rule("linalg_lu_factor_ex")
def lu_factors(
    f: Field, a: Tensor, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns L and U in one, the exchanged rows, and that all went well."""
    return *factor_lu(f, residue_of(a)), _zero_info(a)


@rule("linalg_lu_solve")
def solve_by_factors(
    f: Field, lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True,
    adjoint: bool = False,
) -> Tensor:  # fmt: skip
    """Returns x of a x = b, or of x a = b, given the factors of a."""
    lu, b = residue_of(lu), residue_of(b)
    if left:
        return solve_from_factors(f, lu, pivots, b, adjoint)
    return solve_from_factors(f, lu, pivots, b.mT, not adjoint).mT


@rule("_linalg_solve_ex")
def solve(
    f: Field, a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solves a x = b, or x a = b."""
    # As torch has it: b of shape [batch, n] has a vector for each matrix.
    a, b = residue_of(a), residue_of(b)
    vectors = b.dim() == 1 or a.dim() - 1 == b.dim() and a.shape[:-1] == b.shape
    lu, pivots = factor_lu(f, a)
    b = b.unsqueeze(-1) if vectors else b
    x = solve_by_factors(f, lu, pivots, b, left=left)
    return x.squeeze(-1) if vectors else x, lu, pivots, _zero_info(a)


@rule("linalg_inv_ex")
def invert(f: Field, a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """Returns inverses: solutions of a x = 1."""
    one = torch.eye(a.shape[-1], dtype=torch.float64)
    return solve_from_factors(f, *factor_lu(f, residue_of(a)), one), _zero_info(a)


@rule("_linalg_det")
def determinant(f: Field, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns determinants, with the factors that torch's backward reads."""
    # For a contiguous matrix it expects the factors of the transpose.
    lu, pivots = factor_lu(f, residue_of(a).mT if a.is_contiguous() else residue_of(a))
    not_exchanged = pivots == torch.arange(1, pivots.shape[-1] + 1)
    det = 1.0 - 2.0 * ((~not_exchanged).sum(-1) % 2).double()
    for pivot in lu.diagonal(0, -2, -1).unbind(-1):
        det = product(det, pivot)
    return modulo(det), lu, pivots


@rule("_linalg_slogdet")
def log_determinant(f: Field, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns a determinant's sign, and the logarithm of its size."""
    det, lu, pivots = determinant(f, a)
    sign = f.order_keys(det).sign()
    return modulo(sign), f.log(modulo(det * sign)), lu, pivots


@rule("linalg_solve_triangular")
def solve_triangular(
    f: Field, a: Tensor, b: Tensor, *, upper: bool, left: bool = True,
    unitriangular: bool = False,
) -> Tensor:  # fmt: skip
    """Returns x of a x = b, or of x a = b, for one triangle of a."""
    a, b = residue_of(a), residue_of(b)
    if left:
        return solve_triangle(f, a, b, upper, unitriangular)
    return solve_triangle(f, a.mT, b.mT, not upper, unitriangular).mT


@rule("cholesky_solve")
def solve_by_cholesky(
    f: Field, b: Tensor, factor: Tensor, upper: bool = False
) -> Tensor:
    """Returns x of l l^T x = b, for any triangle l."""
    lower = residue_of(factor).mT if upper else residue_of(factor)
    y = solve_triangle(f, lower, residue_of(b), upper=False)
    return solve_triangle(f, lower.mT, y, upper=True)


@rule("cholesky_inverse")
def invert_by_cholesky(f: Field, factor: Tensor, upper: bool = False) -> Tensor:
    """Returns the inverse of l l^T, for any triangle l."""
    one = torch.eye(factor.shape[-1], dtype=torch.float64)
    return solve_by_cholesky(f, one, factor, upper)


# Factors


def random_matrix_function(f: Field, name: str, x: Tensor, *sizes: int) -> Tensor:
    """Returns a random function of each whole matrix, with results of these sizes."""
    count = x.shape[-2] * x.shape[-1]
    positions = torch.arange(count)
    weights = scramble(positions, salt(name, "weights", f.seed)).unsqueeze(-1)
    keys = matmul(x.reshape(*x.shape[:-2], 1, count), weights)[..., 0]
    images = f.random_function(name, keys).to(torch.int64)
    positions = torch.arange(torch.Size(sizes).numel())
    results = scramble(images * (1 << 30) + positions, salt(name, "places", f.seed))
    return results.reshape(*x.shape[:-2], *sizes)


@rule("_linalg_eigh")
def eigenvalues(
    f: Field, a: Tensor, UPLO: str = "L", compute_v: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns random eigenvalues and eigenvectors of one triangle of each matrix."""
    x, n = residue_of(a), a.shape[-1]
    x = x.tril() if UPLO.upper() == "L" else x.mT.tril()
    vectors = (
        random_matrix_function(f, "eigenvectors", x, n, n)
        if compute_v
        else x.new_empty(0)
    )
    return random_matrix_function(f, "eigenvalues", x, n), vectors


@rule("cholesky")
def cholesky(f: Field, a: Tensor, upper: bool = False) -> Tensor:
    """Returns a random triangle for each matrix."""
    return cholesky_ex(f, a, upper=upper)[0]


@rule("linalg_cholesky_ex")
def cholesky_ex(
    f: Field, a: Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns a random triangle for each matrix, and that all went well."""
    x, n = residue_of(a), a.shape[-1]
    factor = random_matrix_function(
        f, "cholesky", (x.mT if upper else x).tril(), n, n
    ).tril()
    return factor.mT if upper else factor, _zero_info(x)


@rule("_linalg_svd")
def singular_values(
    f: Field, a: Tensor, full_matrices: bool = False, compute_uv: bool = True, *,
    driver: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns random factors and values for each matrix."""
    x, (m, n) = residue_of(a), a.shape[-2:]
    k = min(m, n)
    s = random_matrix_function(f, "singular values", x, k)
    if not compute_uv:
        return x.new_empty(0), s, x.new_empty(0)
    columns = (m, n) if full_matrices else (k, k)
    u = random_matrix_function(f, "left singular vectors", x, m, columns[0])
    return u, s, random_matrix_function(f, "right singular vectors", x, columns[1], n)


@rule("linalg_qr")
def qr(f: Field, a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Returns random factors for each matrix, the second one a triangle."""
    x, (m, n) = residue_of(a), a.shape[-2:]
    k = m if mode == "complete" else min(m, n)
    r = random_matrix_function(f, "qr, upper", x, k, n).triu()
    if mode == "r":
        return x.new_empty(0), r
    return random_matrix_function(f, "qr, orthogonal", x, m, k), r


# Distances


def _pairwise_differences(x: Tensor, y: Tensor) -> Tensor:
    return modulo(residue_of(x).unsqueeze(-2) - residue_of(y).unsqueeze(-3))


@rule("_cdist_forward")
def distances(
    f: Field, x: Tensor, y: Tensor, p: float, compute_mode: int | None = None
) -> Tensor:
    """Returns the distance of each row of x from each row of y."""
    differences = _pairwise_differences(x, y)
    if p == 2:
        return f.root(modulo(product(differences, differences).sum(-1)))
    if p == 1:
        return modulo(residue_of(absolute(f, differences)).sum(-1))
    raise NotImplementedError(f"distances of p={p} have no exact rule; 1 and 2 have")


@rule("_cdist_backward")
def distances_backward(
    f: Field, g: Tensor, x: Tensor, y: Tensor, p: float, distance: Tensor
) -> Tensor:
    """Returns the gradient by x."""
    differences = _pairwise_differences(x, y)
    if p == 2:
        g = product(residue_of(g), f.inverse(residue_of(distance)))
    else:
        differences = modulo(f.order_keys(differences).sign())
    return modulo(product(residue_of(g).unsqueeze(-1), differences).sum(-2))
