"""Lesson 13. A proof: the same programs, computed where no sum is rounded.

Lesson 11 compared floats, whose sums differ in their last bits with their order: it had
a tolerance, below which no fault is seen. Modulo a prime p nothing is rounded, and sums
have no order. There

    two polynomials of degree d, unlike:  equal at a random point with chance <= d / p

(Schwartz and Zippel). What is no polynomial, a tanh, is a random function of its own.
So a program that runs twice, from numbers drawn modulo p = 33554393, is the other one,
or is told apart.

The plain program has a regularizer of weight 1e-8: the variance of what it predicts.

    python examples/course/13_proof.py
"""

import torch

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device

mesh = ff.make_mesh({"data": 4}, "simulated")
params = {"w": torch.randn(3, 2), "b": torch.zeros(2)}
x = torch.randn(8, 3)


# 1. The plain program.
def loss(params, x):
    y = torch.tanh(x @ params["w"]) + params["b"]
    return y.square().mean() + 1e-8 * (y - y.mean(0)).square().mean()


grad_fn = ff.value_and_grad(loss)


# 2. By hand: the mean of the ranks' gradients. Its fault: `y.mean(0)` is of own rows.
def by_hand(params, x):
    value, grads = grad_fn(params, x)
    return ff.pmean(value, "data"), ff.pmean(grads, "data")


assert_equals_one_device(grad_fn, by_hand, mesh, params, x, tolerance=1e-6)
print("floats: by_hand equals the plain program to 1e-6, and the fault is not seen")
try:
    ff.prove(grad_fn, by_hand, mesh, params, x)
except AssertionError as error:
    print("modulo p it is seen:", *str(error).splitlines()[:4], sep="\n    ")


# 3. Mended: the mean over all ranks' rows, each rank's own as it meets its rows (lesson
#    2): without to="V" its gradient is this rank's share, and the proof says that too.
def loss_on_ranks(params, x):
    y = torch.tanh(x @ params["w"]) + params["b"]
    center = ff.pmean(y.mean(0), "data", to="V")
    return y.square().mean() + 1e-8 * (y - center).square().mean()


def mended(params, x):
    value, grads = ff.value_and_grad(loss_on_ranks)(params, x)
    return ff.pmean(value, "data"), ff.pmean(grads, "data")


print(ff.prove(grad_fn, mended, mesh, params, x))


# 4. What is not proven: functions are random ones here, and know no identity. Two ways
#    to write one function, sinh(2 w) = 2 sinh(w) cosh(w), are told apart.
def doubled(params, x):
    return torch.sinh(2 * params["w"])


def by_parts(params, x):
    return 2 * torch.sinh(params["w"]) * torch.cosh(params["w"])


try:
    ff.prove(doubled, by_parts, mesh, params, x)
except AssertionError as error:
    print("two ways to write it:", str(error).splitlines()[1])
