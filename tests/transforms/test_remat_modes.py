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


@pytest.mark.parametrize("policy", ["except-last", 3, ["always"]])
def test_another_policy_is_refused(policy) -> None:
    with pytest.raises(TypeError, match="'always', 'except_last', 'never', or None"):
        ff.remat(lambda p: p, policy)
