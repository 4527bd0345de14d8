"""Recipes for states of your own: two models, adapters on frozen weights, a dataset.

    python examples/recipes.py

Each runs on four simulated ranks and prints what it ends with; one device gives the
same numbers.
"""

import os
import tempfile
from pathlib import Path

import torch

import fsfunc as ff

mesh = ff.make_mesh({"data": 4})
adam = ff.sharded_adam(1e-3)
layer = ff.unit(lambda w, x: torch.tanh(x @ w))
adapted = ff.unit(lambda p, x: torch.tanh(x @ (p["w"] + p["a"] @ p["b"])))


# Two models. A state is any tree: a function of the laid out parameters makes it.


def critic_loss(d, g, x):
    return layer(d, layer(g, x).detach()).mean() - layer(d, x).mean()


def generator_loss(g, d, x):
    return -layer(d, layer(g, x)).mean()


def gan_step(state, x):
    g, d = state["g"], state["d"]
    _, grads = ff.value_and_grad(critic_loss)(d.params, g.params, x)
    d = d.apply_gradients(grads, adam)
    loss, grads = ff.value_and_grad(generator_loss)(g.params, d.params, x)
    return {"g": g.apply_gradients(grads, adam), "d": d}, loss


def gan(weights, x):
    """One step of a generator and a critic, ``weights`` of them whole."""
    step = ff.shard(gan_step, mesh, "data")

    def begin(parts):
        return {k: ff.TrainState(w, adam.init(w)) for k, w in parts.items()}

    state = ff.init_state(step, weights, begin, x)
    state, loss = step(state, ff.local_batch(x, mesh, "data"))
    return ff.unshard(state)


# Adapters (LoRA). What is carried beside the parameters lies in ``extra``: sharded as
# they are where units take it, whole elsewhere.


def lora_loss(adapters, frozen, x):  # gradients of the adapters alone
    return adapted({"w": frozen, **adapters}, x).square().mean()


def lora_step(state, x):
    frozen, seen = state.extra["w"], state.extra["seen"] + 1
    loss, grads = ff.value_and_grad(lora_loss)(state.params, frozen, x)
    return state.apply_gradients(grads, adam, extra={"w": frozen, "seen": seen}), loss


def lora(w, adapters, x):
    """One step of two low-rank factors beside a frozen weight ``w``."""
    step = ff.shard(lora_step, mesh, "data")
    extra = {"w": w, "seen": torch.zeros(())}
    state = ff.init_state(step, adapters, adam, x, extra=extra)
    state, loss = step(state, ff.local_batch(x, mesh, "data"))
    return ff.unshard(state)


# A dataset has a length and gives a row by its number; a rank asks for its own alone.


class Windows(torch.utils.data.Dataset):
    """Windows of a file of bytes, which stays on the disk."""

    def __init__(self, path, length):
        size = os.path.getsize(path)
        self.bytes = torch.from_file(path, size=size, dtype=torch.uint8)
        self.length = length

    def __len__(self):
        return len(self.bytes) // self.length

    def __getitem__(self, i):
        return self.bytes[i * self.length : (i + 1) * self.length].long()


def first_batch(path):
    return next(iter(ff.batches(Windows(path, 16), mesh, "data", 8, seed=0)))


def main():
    torch.manual_seed(0)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    models = {"g": torch.randn(8, 8), "d": torch.randn(8, 8)}
    trained = ff.spmd(gan, mesh)(models, x)[0]
    print("generator moved by", (trained["g"].params - models["g"]).norm().item())
    factors = {"a": torch.randn(8, 2), "b": torch.zeros(2, 8)}
    state = ff.spmd(lora, mesh)(w, factors, x)[0]
    print("frozen weight changed:", not torch.equal(state.extra["w"], w))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes(bytes(range(256)) * 8)
        print(
            "rows of each rank:",
            [len(b) for b in ff.spmd(first_batch, mesh)(str(path))],
        )


if __name__ == "__main__":
    main()
