"""A convnet learns to tell shapes apart: ordinary.py beside it, moved over.

    python examples/convert/sharded.py                          2 simulated ranks
    torchrun --nproc-per-node 2 examples/convert/sharded.py     2 processes

Ten lines are new; the losses are the same, on one rank to the bit. `shuffle=False`
keeps the order of rows, since the two would shuffle them each in its own way.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

import fsfunc as ff

STEPS, WARMUP, RATE = 60, 6, 3e-3


class Shapes(data.Dataset):
    """Pictures [1, 16, 16] of a bar, a column, a cross or a box, in noise."""

    def __len__(self) -> int:
        return STEPS * 32

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(i)
        picture = 0.5 * torch.randn(1, 16, 16, generator=generator)
        x, y = torch.randint(2, 9, (2,), generator=generator).tolist()
        kind = i % 4
        if kind in (0, 2):
            picture[0, y + 2, x : x + 5] += 2
        if kind in (1, 2):
            picture[0, y : y + 5, x + 2] += 2
        if kind == 3:
            picture[0, y : y + 5, x : x + 5] += 2
            picture[0, y + 1 : y + 4, x + 1 : x + 4] -= 2
        return picture, kind


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.up = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.down = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """The mean cross entropy of the kinds of some pictures."""

    def __init__(self, width: int = 16, blocks: int = 3):
        super().__init__()
        self.first = nn.Conv2d(1, width, 4, stride=2, padding=1)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.last = nn.Linear(width, 4)

    def forward(self, pictures: Tensor, kinds: Tensor) -> Tensor:
        x = self.blocks(self.first(pictures))
        return F.cross_entropy(self.last(x.mean((-2, -1))), kinds)


def rate(step: int) -> float:
    """The learning rate: a warm-up, then half a cosine."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def main() -> list[float]:
    torch.manual_seed(0)
    rows, losses = Shapes(), []
    model, params, buffers = ff.from_module(Net(), units=Block)
    loader = ff.batches(rows, mesh, "data", 32, shuffle=False, epochs=1)
    optimizer = ff.from_torch(torch.optim.AdamW, lr=rate, weight_decay=0.01)
    grad = ff.value_and_grad(lambda params, batch: model(params, buffers, *batch))
    step = ff.shard(optimizer(grad), mesh, "data")
    state = ff.init_state(step, params, optimizer, data.default_collate([rows[0]]))
    for batch in loader:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses


if __name__ == "__main__":
    losses = ff.spmd(main, mesh := ff.make_mesh({"data": 2}))()[0]
    for step, loss in enumerate(losses):
        print(f"step {step:2}  loss {loss:.4f}")
