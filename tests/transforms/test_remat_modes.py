"""`remat` by microbatch: always, all but the last, or never."""

import pytest
import torch

import fsfunc as ff
from tests.checks import same

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
P = [torch.eye(4) + i for i in range(2)]
MODES = ["always", "except_last", "never"]


class Counted:
    """A loss of units, and how often each unit's function ran."""

    def __init__(self) -> None:
        self.runs = 0

        @ff.unit
        def layer(w, x):
            self.runs += 1
            h = ff.checkpoint_name(torch.tanh(x @ w), "h")  # a mode keeps no names
            return torch.nn.functional.dropout(h, 0.25)

        def loss(ws, x):
            for w in ws:
                x = layer(w, x)
            return (x**2).mean()

        self.loss = loss
        self.grad = ff.value_and_grad(loss)

    def again(self, step, *args):
        """How many microbatches were recomputed, and what the step gave."""
        torch.manual_seed(3)
        self.runs = 0
        out = step(*args)
        return self.runs / len(P), out


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_how_many_microbatches_are_recomputed(n, mode) -> None:
    one = Counted()
    plain, expected = one.again(ff.accumulate(one.grad, n), P, X)
    again = {"always": n, "except_last": n - 1, "never": 0}[mode]
    for step in (
        ff.accumulate(ff.remat(one.grad, mode), n),
        ff.remat(ff.accumulate(one.grad, n), mode),
        ff.accumulate(ff.value_and_grad(ff.remat(one.loss, mode)), n),
    ):
        runs, found = one.again(step, P, X)
        assert runs - plain == again
        same(found, expected)


@pytest.mark.parametrize(
    ("mode", "again"), [("always", 1), ("except_last", 0), ("never", 0)]
)
def test_outside_a_loop_there_is_one_microbatch_the_last(mode, again) -> None:
    one = Counted()
    expected = one.again(one.grad, P, X)[1]
    runs, found = one.again(ff.remat(one.grad, mode), P, X)
    assert runs == 1 + again
    same(found, expected)
    with torch.no_grad():
        assert one.again(ff.remat(one.loss, mode), P, X)[0] == 1  # evaluation


@pytest.mark.parametrize(
    ("mode", "order", "zero"),
    [
        ("always", "sra", 0), ("except_last", "ras", 3), ("never", "rsa", 3),
        ("except_last", "rsa", 2), ("never", "sra", 2),
    ],
)  # fmt: skip
def test_with_shard_the_numbers_stay(mode, order, zero):
    mesh = ff.make_mesh({"data": 2}, "simulated")
    one = Counted()
    wraps = {
        "a": lambda f: ff.accumulate(f, 3),
        "r": lambda f: ff.remat(f, mode),
        "s": lambda f: ff.shard(f, mesh, "data", zero=zero),
    }

    def main(order):
        step = one.grad
        for key in order:
            step = wraps[key](step)
        mine = ff.local_batch(X, mesh, "data")
        params = ff.place(step, P, mine)
        torch.manual_seed(3)
        values = [step(params, mine) for _ in range(2)]  # the second by its prefetches
        return [(value, ff.unshard(grads)) for value, grads in values]

    def run(order):
        torch.manual_seed(3)
        return list(ff.spmd(lambda: main(order), mesh)())

    same(run(order), run(order.replace("r", "")))


@pytest.mark.parametrize("policy", ["except-last", 3, ["always"]])
def test_another_policy_is_refused(policy) -> None:
    with pytest.raises(TypeError, match="'always', 'except_last', 'never', or None"):
        ff.remat(lambda p: p, policy)
