"""A step gives its next call what it returns in its state: each rank's own, too.

That what it carries is no factor of a gradient, but as a mean, `tests/derivatives` has.
"""

import pytest
import torch

import fsfunc as ff
from tests.checks import same, simulated

N = 2
MESH = simulated(N)
W, X = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.arange(8.0).reshape(4, 2)
unit = ff.unit(lambda w, x: x @ w)


@pytest.mark.parametrize("of", ["h", "late"])
def test_a_mean_of_own_numbers_that_a_step_carries_is_one_value(of):
    def step(s, x):
        loss = lambda w: (unit(w, x).mean(0) + s["h"]).sum()  # noqa: E731
        g, factor = ff.value_and_grad(loss)(s["w"])[1], ff.pmean(s[of].sum(), "data")
        w = ff.tree.map(lambda w, g: w - g * factor, s["w"], g)
        return {"w": w, "h": s["h"] + x.mean(0), "late": s["h"].sum()}

    def main():
        mine = ff.local_batch(X, MESH, "data")
        sharded = ff.shard(step, MESH, "data")
        first = {"w": W, "h": torch.zeros(2), "late": torch.tensor(0.0)}
        own = dict.fromkeys(("h", "late"), ff.Own("data"))
        state = ff.place(sharded, first, mine, layouts=own)
        for _ in range(3):
            state = sharded(state, mine)
        return ff.unshard(state)

    mine = torch.stack([x.mean(0) for x in X.chunk(N)])
    h, late, w = torch.zeros(N, 2), torch.zeros(N), W
    for _ in range(3):
        factor = (h.sum(1) if of == "h" else late).mean()
        w = w - factor * mine.mean(0)[:, None]
        h, late = h + mine, h.sum(1)
    for rank, state in enumerate(ff.spmd(main, MESH)()):
        same(state, {"w": w, "h": h[rank], "late": late[rank]})
