"""Lesson 2. What a gradient is on many ranks: transposes, and types.

A collective is a linear map of all ranks' values at once: y = A x, where row r is what
rank r receives. Its derivative sends cotangents through A^T, and A^T is a collective as
well. So a program with collectives in it is differentiated like any other.

What is left is a value's type. Over an axis it is V, varying: every rank has its own,
and derivatives pair them by a sum over ranks; or I, invariant: one value on all ranks,
paired once. The plain program is a mean of n losses with one parameter, which is I:

    L(w) = 1/n sum_r c_r w^2,      dL/dw = 2 w mean(c)

    python examples/course/02_gradients.py
"""

import torch
from torch.func import grad, vjp

import fsfunc as ff

RANKS = 4
mesh = ff.make_mesh({"data": RANKS})


# 1. Collectives as matrices: each is asked what it makes of every unit vector.
def forward_and_backward(collective):
    unit = torch.eye(RANKS)[ff.axis_index("data")]  # this rank's number in each of them
    y, pull, *_ = vjp(collective, unit)
    return y, *pull(unit)


ring = [(r, (r + 1) % RANKS) for r in range(RANKS)]
for name, collective in {
    "psum": lambda x: ff.psum(x, "data", to="V"),
    "ppermute": lambda x: ff.ppermute(x, "data", ring),
    "pbroadcast": lambda x: ff.pbroadcast(x, "data", source=2),
}.items():
    ranks = ff.spmd(forward_and_backward, mesh)(collective)
    a, transposed = (torch.stack(rows) for rows in zip(*ranks, strict=True))
    print(f"{name} as a matrix (row r: what rank r receives), and its derivative")
    for rows in zip(a.tolist(), transposed.tolist(), strict=True):
        print("   ", "     ".join(" ".join(".1"[int(v)] for v in row) for row in rows))
    assert torch.equal(transposed, a.T)

# 2. One parameter in many losses, written in four ways. Which one is dL/dw?
w, c = torch.tensor(3.0), torch.tensor([1.0, 2.0, 3.0, 6.0])
plain = grad(lambda w: (c * w**2).mean())(w).item()


def own(w):
    return c[ff.axis_index("data")] * w**2


def cast(w):
    # One value enters varying work. Forwards nothing happens; the transpose of "each
    # rank takes a copy" is "add up what is owed to the copies": a psum.
    return own(ff.pcast(w, "data", to="V"))


ways = {
    # Without the cast the gradient stays what this rank's term says of it.
    "pmean(own(w))": grad(lambda w: ff.pmean(own(w), "data")),
    "pmean(cast(w))": grad(lambda w: ff.pmean(cast(w), "data")),
    # n own values that agree are n losses, not one: their sum is differentiated.
    'pmean(cast(w), to="V")': grad(lambda w: ff.pmean(cast(w), "data", to="V")),
    # Under shard one writes a rank's own loss, and L is the mean, by definition.
    "shard(own(w))": ff.shard(lambda w: ff.value_and_grad(own)(w)[1], mesh, "data"),
}
print(f"dL/dw is {plain:g} on one device. What four ranks find, and what each sends")
begun = ff.spmd(lambda: ff.place(ways["shard(own(w))"], w), mesh)()  # one value
for name, gradient in ways.items():
    with ff.ledger() as log:
        found = [g.item() for g in ff.spmd(gradient, mesh)(begun)]
    verdict = "right" if found == [plain] * RANKS else "wrong"
    print(f"  {name:23} {found!s:25} {log.bytes('data'):3} bytes   {verdict}")

# 3. The formula: an all-reduce sends 2 (n-1)/n b, here 6 bytes a number. The right way
#    by hand has a value and a derivative; of shard the value is two, a sum and a count.
