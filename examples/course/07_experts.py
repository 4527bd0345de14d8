"""Lesson 7. Experts: tokens travel to the weights.

The plain program sends each token to the expert that a gate prefers for it:

    y_t = p_e(t) tanh(x_t W_e),     p(t) = softmax(G x_t),     e = argmax p(t)

Each rank has some tokens, some experts, and a queue of C places for every expert. One
all-to-all takes queues to experts, one brings results home; derivatives go back so too.

    python examples/course/07_experts.py
"""

import torch
from torch.testing import assert_close

import fsfunc as ff

TOKENS, DIM, EXPERTS, RANKS = 64, 8, 8, 4
torch.manual_seed(0)
params = {"gate": torch.randn(EXPERTS, DIM), "experts": torch.randn(EXPERTS, DIM, DIM)}
x, mesh = torch.randn(TOKENS, DIM) + torch.randn(DIM), ff.make_mesh({"data": RANKS})


def loss(params, x):  # 1. The plain program: a loop over tokens.
    p = torch.softmax(x @ params["gate"].T, dim=1)
    w = params["experts"]
    y = [p[t, e] * torch.tanh(x[t] @ w[e]) for t, e in enumerate(p.argmax(1))]
    return (torch.stack(y) - x).square().mean()


def own_loss(params, x, places):  # 2. By hand, on a rank's tokens and experts.
    p = torch.softmax(x @ params["gate"].T, dim=1)
    chosen = torch.eye(EXPERTS)[p.argmax(1)]  # [tokens, experts]
    place = chosen.cumsum(0) * chosen - 1  # in its expert's queue
    seat = (place[:, :, None] == torch.arange(places)).float()  # [tokens, experts, C]
    queues = torch.einsum("tec,td->ecd", seat, x)
    there = ff.all_to_all(queues, "data", split_dim=0, concat_dim=1)
    done = torch.tanh(there @ params["experts"])
    back = ff.all_to_all(done, "data", split_dim=1, concat_dim=0)
    y = torch.einsum("tec,te,ecd->td", seat, p, back)
    return (y - x).square().mean(), chosen.sum(0).int().tolist()


def by_hand():
    rows, experts = (ff.local_batch(t, mesh, "data") for t in (x, params["experts"]))
    own = {"gate": params["gate"], "experts": experts}
    (_, sent), g = ff.value_and_grad(own_loss, has_aux=True)(own, rows, len(rows))
    return sent, ff.pmean(g["gate"], "data"), g["experts"] / RANKS  # L is a mean


@ff.unit  # 3. By the library.
def layer(params, x, factor):
    gate, experts = params["gate"], params["experts"]
    routing = ff.nn.top_1_gating(x @ gate.T, capacity_factor=factor)
    y = ff.nn.expert_layer(x, routing, lambda w, x: torch.tanh(x @ w), experts)
    return (y - x).square().mean(), ff.Summed(routing.dropped)


def main(places):
    fn = ff.shard(ff.value_and_grad(layer, has_aux=True), mesh, "data")
    given = ff.local_batch(x, mesh, "data"), places * EXPERTS * RANKS / TOKENS
    parts = ff.place(fn, params, *given, layouts={"experts": ff.Split(0, "data")})
    return ff.unshard(fn(parts, *given))


value, plain = ff.value_and_grad(loss)(params, x)
with ff.ledger() as log:
    sent, gates, experts = ff.spmd(by_hand, mesh)().unzip()
print("tokens that ranks 0 to 3 send to experts 0 to 7", *sent, sep="\n")
assert_close({"gate": gates[0], "experts": torch.cat(experts)}, plain)
for_a_place = 3 * (RANKS - 1) / RANKS * 4 * EXPERTS * DIM  # one is of the backward pass
assert log.bytes("data", "all_to_all") == for_a_place * TOKENS / RANKS
for places in (1, 2, 4, 16):  # short queues send less, and have no place for some
    with ff.ledger() as log:
        ((mean, dropped), g), *_ = ff.spmd(main, mesh)(places)
    sent = log.bytes("data", "all_to_all")
    print(f"{places:2} places: loss {mean:.4f}, {dropped.tree:2} dropped, {sent} bytes")
    assert sent == for_a_place * places
print(f"y = 0, if dropped, has loss {x.square().mean():.4f}; random experts do worse")
assert_close((mean, g), (value, plain))  # 16 places are enough for all
