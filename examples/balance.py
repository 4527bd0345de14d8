"""Even the loads of experts without a loss for it, by a bias (DeepSeek's way).

    python examples/balance.py

The k experts of a token are those of the largest p_e + b_e, where p are the gate's
probabilities; they are weighted by p alone. No gradient moves b. After each step an
expert that had fewer tokens than the mean gets more:

    b_e += u sign(mean load - load_e)

A layer returns its loads as ``ff.Summed``, which adds them up over microbatches and
ranks. So one step, written for one device, has the same biases on any mesh, to the bit.
"""

import torch

import fsfunc as ff

TOKENS, DIM, EXPERTS, K, LAYERS, STEPS = 128, 8, 8, 2, 2, 31
optimizer = ff.sharded_adam(3e-3)


@ff.unit
def mixture(params, x, bias):
    routing = ff.nn.top_k_gating(x @ params["gate"], K, bias=bias)
    y = ff.nn.expert_layer(x, routing, lambda w, x: torch.tanh(x @ w), params["maps"])
    return x + y, ff.Summed(routing.counts)


def train_step(state, x):
    train, biases = state

    def loss_fn(params, x):
        y, loads = x, []
        for layer, bias in zip(params, biases, strict=True):
            y, load = mixture(layer, y, bias)
            loads.append(load)
        return (y - 2 * x.sin()).square().mean(), loads

    value_and_grad = ff.value_and_grad(loss_fn, has_aux=True)
    (loss, loads), grads = value_and_grad(train.params, x)
    biases = ff.nn.balance_bias(biases, loads, rate=0.005)
    return (train.apply_gradients(grads, optimizer), biases), (loss, loads)


def train(mesh, transform):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64) / 2  # noqa: E731
    layer = lambda: {"gate": draw(DIM, EXPERTS), "maps": draw(EXPERTS, DIM, DIM)}  # noqa: E731
    params = [layer() for _ in range(LAYERS)]
    x = draw(TOKENS, DIM) + draw(DIM)  # alike, so that few experts are chosen
    x = ff.local_batch(x, mesh, "data") if "data" in mesh.axes else x
    step = transform(train_step, mesh)
    biases = [torch.zeros(EXPERTS, dtype=torch.float64) for _ in range(LAYERS)]
    whole = ff.TrainState(params, optimizer.init(params)), biases
    state, seen = ff.place(step, whole, x), []
    for _ in range(STEPS):
        state, (loss, loads) = step(state, x)
        seen.append((loss.item(), [load.tree.tolist() for load in loads]))
    return seen


shard = lambda f, mesh: ff.shard(f, mesh, "data")  # noqa: E731
STACKS = {
    "one device": ({"data": 1}, shard),
    "four ranks": ({"data": 4}, shard),
    "two microbatches": ({"data": 2}, lambda f, mesh: shard(ff.accumulate(f, 2), mesh)),
    "two stages": (
        {"pipe": 2}, lambda f, mesh: ff.pipeline(f, mesh, "pipe", n_microbatches=2)
    ),
}  # fmt: skip

if __name__ == "__main__":
    even = TOKENS * K // EXPERTS
    for name, (axes, transform) in STACKS.items():
        mesh = ff.make_mesh(axes, "simulated")
        seen = ff.spmd(train, mesh)(mesh, transform)[0]
        busiest = [[max(load) / even for load in loads] for _, loads in seen]
        rows = [" ".join(f"{x:.2f}" for x in row) for row in busiest[::10]]
        print(f"{name:17} busiest / even load by layer: {' | '.join(rows)}")
