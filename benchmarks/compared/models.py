"""One byte-level GPT, written twice over the same numbers.

`Gpt` is the `nn.Module` that the peers wrap; `functional_loss` is the same arithmetic
as pure functions of a dict tree, cut into units. `init_params` makes the numbers and
`load` copies them into a module, so that both start from the same state and their
losses can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[..., Any]


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT and of one rank's batch."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int
    sequences: int

    @property
    def block_parameters(self) -> int:
        return 12 * self.width**2 + 2 * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + 2 * self.vocabulary * self.width

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def flops(self) -> float:
        """FLOPs of one step's forward and backward, recomputation not counted.

        6 a token and parameter that a matrix product reads (the embedding is looked up,
        not multiplied), and 6·T·D a token and layer for causal attention: two products
        of 2·D FLOPs with T/2 keys on average, three times (forward and two gradients).
        """
        products = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        attention = self.layers * self.length * self.width
        return 6.0 * self.tokens * (products + attention)


FULL = Size(4096, 256, layers=8, heads=8, length=256, sequences=4)
QUICK = Size(256, 64, layers=3, heads=4, length=32, sequences=2)
TINY = replace(QUICK, width=32, length=16)
SHAPES = {  # beside FULL, for what it might hide
    "small units": Size(512, 64, layers=32, heads=4, length=64, sequences=4),
    "large units": Size(4096, 768, layers=2, heads=12, length=128, sequences=2),
    "wider layers": Size(2048, 320, layers=6, heads=8, length=192, sequences=4),
    "odd widths": Size(1009, 330, layers=5, heads=5, length=131, sequences=3),
    "long sequences": Size(1024, 128, layers=4, heads=4, length=1024, sequences=1),
    "short sequences": Size(1024, 256, layers=6, heads=8, length=16, sequences=16),
}


def init_params(size: Size, *, seed: int = 0, device: str = "cpu") -> dict:
    """The parameters as a tree: embed, a list of blocks, head."""
    draw = torch.Generator(device).manual_seed(seed)
    width = size.width

    def normal(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, generator=draw, device=device)

    def block() -> dict[str, Tensor]:
        return {
            "norm1": torch.ones(width, device=device),
            "qkv": normal(3 * width, width),
            "out": normal(width, width),
            "norm2": torch.ones(width, device=device),
            "up": normal(4 * width, width),
            "down": normal(width, 4 * width),
        }

    return {
        "embed": {"w": normal(size.vocabulary, width)},
        "blocks": [block() for _ in range(size.layers)],
        "head": {"w": normal(size.vocabulary, width)},
    }


def make_batch(size: Size, rank: int, *, device: str = "cpu") -> dict[str, Tensor]:
    """This rank's tokens and targets, each int64[sequences, length]."""
    draw = torch.Generator(device).manual_seed(100 + rank)
    shape = (size.sequences, size.length)

    def tokens() -> Tensor:
        return torch.randint(size.vocabulary, shape, generator=draw, device=device)

    return {"tokens": tokens(), "targets": tokens()}


def whole_batch(size: Size, ranks: int, *, device: str = "cpu") -> dict[str, Tensor]:
    """The batches of all ranks as one: int64[ranks·sequences, length] each."""
    parts = [make_batch(size, rank, device=device) for rank in range(ranks)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def cut(size: Size, n_stages: int) -> list[int]:
    """How many of the 2 + layers units each stage of a pipeline has.

    The blocks are dealt evenly, the first stages taking one more where they do not come
    out even; the embedding is with the first stage and the head with the last.
    """
    each, more = divmod(size.layers, n_stages)
    counts = [each + (stage < more) for stage in range(n_stages)]
    counts[0] += 1
    counts[-1] += 1
    return counts


# ---------------------------------------------------------------- as pure functions


def functional_loss(size: Size, unit: Function, around_block: Function) -> Function:
    """`loss_fn(params, batch)`, of 2 + layers unit calls.

    Args:
        size: the model's sizes.
        unit: makes a unit of a function (`ff.unit`).
        around_block: what is done to the block alone (`ff.remat`, or nothing), as the
            peers checkpoint their blocks and neither the embedding nor the head.
    """
    width, heads = size.width, size.heads

    def embed(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return F.embedding(tokens, p["w"])

    def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.rms_norm(x, (width,), p["norm1"])
        x = x + F.linear(attend(F.linear(h, p["qkv"]), heads), p["out"])
        h = F.rms_norm(x, (width,), p["norm2"])
        return x + F.linear(F.gelu(F.linear(h, p["up"])), p["down"])

    def head(p: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(F.linear(x, p["w"]), targets)

    embed, block, head = unit(embed), around_block(unit(block)), unit(head)

    return concatenate_flat(embed, block, head)


def concatenate_flat(embed: Function, block: Function, head: Function) -> Function:
    """`loss_fn(params, batch)`: tokens through an embedding, blocks and a head."""

    def loss_fn(params: dict, batch: dict[str, Tensor]) -> Tensor:
        x = embed(params["embed"], batch["tokens"])
        for p in params["blocks"]:
            x = block(p, x)
        return head(params["head"], x, batch["targets"])

    return loss_fn


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Causal attention of [b, t, 3·d] projections: [b, t, d]."""
    b, t, triple = qkv.shape
    q, k, v = qkv.view(b, t, 3, heads, triple // 3 // heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(b, t, triple // 3)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# ----------------------------------------------------------------------- as a module


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.heads))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """The same model; its forward returns the loss, as DDP wants one call a step."""

    def __init__(self, size: Size):
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), targets)


def layers(model: Gpt) -> list[nn.Module]:
    """What its forward calls in turn, one for each unit of `functional_loss`."""
    return [model.embed, *model.blocks, model.head]


def load(size: Size, params: dict, *, device: str = "cpu") -> Gpt:
    """A `Gpt` holding copies of `params`."""
    with torch.device(device):
        model = Gpt(size)
    with torch.no_grad():
        model.embed.weight.copy_(params["embed"]["w"])
        model.head.weight.copy_(params["head"]["w"])
        for block, source in zip(model.blocks, params["blocks"], strict=True):
            for name, value in source.items():
                getattr(block, name).weight.copy_(value)
    return model
