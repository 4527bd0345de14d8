"""A step gives its next call what it returns in its state: each rank's own, too."""

import pytest
import torch

import fsfunc as ff
from fsfunc.tracing.refusals import LawError
from tests import checks

N = 2
MESH = checks.simulated(N)
W, X = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.arange(8.0).reshape(4, 2)
unit = ff.unit(lambda w, x: x @ w)


def carrying(factor, then=lambda h, mine: h + mine):
    """A step with own numbers ``h`` in its state, which make a factor of gradients."""

    def step(s, x):
        loss = lambda w: (unit(w, x).mean(0) + s["h"]).sum()  # noqa: E731
        g = ff.value_and_grad(loss)(s["w"])[1]
        g = ff.tree.map(lambda g: g * factor(s), g)
        w = ff.tree.map(torch.sub, s["w"], g)
        return {"w": w, "h": then(s["h"], x.mean(0)), "late": s["h"].sum()}

    return step


def three(step, own=("h", "late")):
    def main():
        mine = ff.local_batch(X, MESH, "data")
        sharded = ff.shard(step, MESH, "data")
        first = {"w": W, "h": torch.zeros(2), "late": torch.tensor(0.0)}
        laid = dict.fromkeys(own, ff.Own("data"))
        state = ff.place(sharded, first, mine, layouts=laid)
        for _ in range(3):
            state = sharded(state, mine)
        return ff.unshard(state)

    return ff.spmd(main, MESH)()


@pytest.mark.parametrize("of", ["h", "late"])
def test_a_factor_of_what_is_carried_is_each_ranks_own(of):
    with pytest.raises(LawError, match=f"and '{of}', which differs from rank to rank"):
        three(carrying(lambda s: s[of].sum()))


@pytest.mark.parametrize("of", ["h", "late"])
def test_its_mean_over_the_ranks_is_one_value(of):
    found = three(carrying(lambda s: ff.pmean(s[of].sum(), "data")))
    mine = torch.stack([x.mean(0) for x in X.chunk(N)])
    h, late, w = torch.zeros(N, 2), torch.zeros(N), W
    for _ in range(3):
        factor = (h.sum(1) if of == "h" else late).mean()
        w = w - factor * mine.mean(0)[:, None]
        h, late = h + mine, h.sum(1)
    for rank, state in enumerate(found):
        assert torch.equal(state["w"], w), rank
        assert torch.equal(state["h"], h[rank])
        assert torch.equal(state["late"], late[rank])


def test_what_ranks_agree_on_may_be_a_factor():
    agreed = carrying(
        lambda s: s["h"].sum(), then=lambda h, mine: h + ff.pmean(mine, "data")
    )
    one, other = three(agreed, own=())
    assert torch.equal(one["w"], other["w"]) and torch.equal(one["h"], other["h"])
