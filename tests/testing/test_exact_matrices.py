"""Whole matrices in exact runs: equations hold, and factors are functions of them."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import assert_equals_one_device, exact, residues
from fsfunc.testing.finite_field import values
from fsfunc.testing.finite_field.field import constant
from tests.checks import simulated

equal = torch.equal


@pytest.fixture(params=range(3))
def matrices(request):
    with exact(request.param):
        a, b = residues((torch.zeros(2, 4, 4), torch.zeros(2, 4, 3)))
        yield a.requires_grad_(), b


def gradient(y, x):
    return torch.autograd.grad(y.sum(), x, retain_graph=True)[0]


def test_linear_systems_are_solved(matrices):
    a, b = matrices
    x, inverse = torch.linalg.solve(a, b), torch.linalg.inv(a)
    assert equal(a @ x, b) and equal(inverse @ b, x)
    assert equal(gradient(x, a), gradient(inverse @ b, a))
    assert equal(torch.linalg.solve(a, b.mT, left=False) @ a, b.mT)
    vector = b[0, :, 0]
    assert equal(a[0] @ torch.linalg.solve(a[0], vector), vector)
    swaps = torch.eye(4, dtype=torch.float64)[[1, 0, 3, 2]]  # a pivot that is 0
    assert equal(torch.linalg.inv(swaps) @ swaps, torch.eye(4, dtype=torch.float64))


def test_triangles_are_solved(matrices):
    a, b = matrices[0].detach(), matrices[1]
    for t, upper in ((a.triu(), True), (a.tril(), False)):
        assert equal(t @ torch.linalg.solve_triangular(t, b, upper=upper), b)
        right = torch.linalg.solve_triangular(t, b.mT, upper=upper, left=False)
        assert equal(right @ t, b.mT)
        square = t.mT @ t if upper else t @ t.mT
        assert equal(square @ torch.cholesky_solve(b, t, upper=upper), b)
        assert equal(torch.cholesky_inverse(t, upper=upper) @ square @ b, b)


@pytest.mark.parametrize("contiguous", [True, False])
def test_determinants_multiply(matrices, contiguous):
    a = matrices[0] if contiguous else matrices[0].mT
    d, inverse = torch.linalg.det(a), torch.linalg.inv(a)
    assert equal(torch.linalg.det(a @ a), d * d)
    assert equal(gradient(d, a), d[:, None, None] * inverse.mT)
    assert equal(gradient(torch.linalg.slogdet(a)[1], a), inverse.mT)


def test_factors_are_functions_of_a_matrix(matrices):
    a, b = matrices
    square = a @ a.mT
    # Only one triangle is read.
    read = square.tril() + a.triu(1)
    for factors in (torch.linalg.eigh, torch.linalg.cholesky):
        ours, theirs = tree.leaves(factors(square)), tree.leaves(factors(read))
        assert ours and all(map(equal, ours, theirs))
        other = square + torch.eye(4, dtype=torch.float64) * 1e-12
        assert not any(map(equal, ours, tree.leaves(factors(other))))
    assert [x.shape[1:] for x in torch.linalg.svd(b)] == [(4, 4), (3,), (3, 3)]
    assert [x.shape[1:] for x in torch.linalg.qr(b)] == [(4, 3), (3, 3)]
    # One matrix of a batch is what it is alone.
    assert equal(torch.linalg.eigh(square)[1][1], torch.linalg.eigh(square[1])[1])


def test_distances_are_roots_of_sums_of_squares(matrices):
    a, b = matrices
    x, y = a[0], b.mT[0]
    apart = x[:, None] - y
    far, squares = torch.cdist(x, y), apart.square().sum(-1)
    assert equal(far.square(), squares)
    assert equal(gradient(far.square(), a), gradient(squares, a))
    near, sizes = torch.cdist(x, y, p=1.0), apart.abs().sum(-1)
    assert equal(near, sizes)
    assert equal(gradient(near.square(), a), gradient(sizes.square(), a))


RESAMPLED = {
    "adaptive means": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "means, cut at the edge": lambda x: F.avg_pool2d(
        x, 2, padding=1, ceil_mode=True, count_include_pad=False
    ),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "linear": lambda x: F.interpolate(x, (6, 9), mode="bilinear"),
    "cubic": lambda x: F.interpolate(x, (6, 9), mode="bicubic", align_corners=True),
    "smoothed": lambda x: F.interpolate(x, (2, 3), mode="bilinear", antialias=True),
}


@pytest.mark.parametrize("name", RESAMPLED)
def test_resampled_pictures_have_the_weights_of_torch(name):
    resample = RESAMPLED[name]
    with exact():
        x = residues(torch.zeros(2, 3, 4, 5)).requires_grad_()
        y = resample(x * 1)
        # The backward is the transpose, and means of ones are ones.
        other = residues(torch.zeros(y.shape), 1)
        (back,) = torch.autograd.grad(y, x, other)
        assert equal((back * x).sum(), (other * y).sum())
        ones = resample(torch.ones_like(x))
        assert equal(ones, torch.ones_like(ones))
        # Of one number, the weights are fractions of what torch says.
        single = torch.zeros(1, 1, 4, 5)
        single[0, 0, 1, 2] = 1
        ours = values(resample(single)).flatten().tolist()
    theirs = resample(single.double()).flatten().tolist()
    for a, b in zip(ours, theirs, strict=True):
        assert a == constant(float(Fraction(b).limit_denominator(10**5)))


def test_matrix_optimizers_are_the_same_functions_of_parts():
    layer = ff.unit(lambda w, x: torch.tanh(x @ w["a"]) @ w["b"])
    mesh, x = simulated(data=2), torch.zeros(4, 3)
    params = {"a": torch.zeros(3, 4), "b": torch.zeros(4, 1)}
    optimizer = ff.shampoo(1e-2)
    gradient = ff.value_and_grad(lambda w, x: layer(w, x).square().mean())

    def step(w, x):
        state = optimizer.init(w)
        updates, state = optimizer.update(gradient(w, x)[1], state, w)
        return ff.optim.apply_updates(w, updates)

    sharded = ff.shard(step, mesh, "data")
    assert_equals_one_device(step, sharded, mesh, params, x, calls=1, exact=True)
