"""A convnet learns to tell shapes apart: an ordinary torch script.

sharded.py beside it is the same script, moved over.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

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
    model = Net()
    loader = data.DataLoader(rows, batch_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for batch in loader:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    for step, loss in enumerate(losses):
        print(f"step {step:2}  loss {loss:.4f}")
