"""torch's tensor parallelism, and the module that it splits.

`Gpt` of models.py has one product for queries, keys and values, whose rows cannot be
cut in two; here there are three, of the same numbers. Modules are split as torch's
tutorial and torchtitan do it: `PrepareModuleInput` lets an input enter its products
once, so that its gradient is summed once and not once for each of them.

Every rank has the batch of all ranks: they share its work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from compared.models import Size, cross_entropy, init_params
from compared.peers import FLOAT, Competitor, Setting, adamw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def split_params(size: Size, *, device: str = "cpu") -> dict:
    """`init_params`, with the rows of queries, keys and values as three leaves."""
    params = init_params(size, device=device)
    for block in params["blocks"]:
        q, k, v = block.pop("qkv").chunk(3)
        block |= {"q": q.clone(), "k": k.clone(), "v": v.clone()}
    return params


def mixed(q: Tensor, k: Tensor, v: Tensor, features: int) -> Tensor:
    """Causal attention of heads of `features`, as many as there are: like `q`."""
    q, k, v = (y.unflatten(-1, (-1, features)).transpose(1, 2) for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.features = width // size.heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(mixed(self.q(x), self.k(x), self.v(x), self.features))


class FeedForward(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention, self.feed_forward = Attention(size), FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class SplitGpt(nn.Module):
    def __init__(self, setting: Setting):
        super().__init__()
        size = setting.size
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.to(setting.device)
        params = split_params(size, device=setting.device)
        self.embed.weight.data.copy_(params["embed"]["w"])
        self.head.weight.data.copy_(params["head"]["w"])
        for block, source in zip(self.blocks, params["blocks"], strict=True):
            for module in (block, block.attention, block.feed_forward):
                for name, child in module.named_children():
                    if name in source:
                        child.weight.data.copy_(source[name])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), targets)


def split(setting: Setting, *, sequence: bool) -> Competitor:
    """The model under `parallelize_module`; activations split too with `sequence`."""
    mesh = init_device_mesh(setting.device.split(":")[0], (setting.ranks,))
    model, between = SplitGpt(setting), Shard(1) if sequence else Replicate()
    enter = functools.partial(
        PrepareModuleInput,
        input_layouts=(between,),
        desired_input_layouts=(Replicate(),),
    )
    block_plan = {
        "attention": enter(),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=between),
        "feed_forward": enter(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        block_plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        # Logits stay split, as `loss_parallel` takes them.
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, plan)
    return stepping(model, setting)


def stepping(model: SplitGpt, setting: Setting) -> Competitor:
    # The fused update takes tensors of one kind at a time; whole weights are plain.
    parameters = list(model.parameters())
    kinds = [isinstance(p, DTensor) for p in parameters]
    groups = [
        {"params": [p for p, kind in zip(parameters, kinds, strict=True) if kind == of]}
        for of in set(kinds)
    ]
    optimizer, batch = adamw(groups), setting.whole_batch()

    def step() -> Tensor:
        with loss_parallel():
            loss = model(batch["tokens"], batch["targets"])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().full_tensor()

    return Competitor(step, sent=sent_bytes(setting), state=(model, optimizer))


def sent_bytes(setting: Setting) -> float:
    """Four sums of an activation a layer, and one at either end.

    Gathers and reduce-scatters of split sequences are each half of a sum. (Left out:
    the norms' gradients, width numbers each, and the loss, some numbers a token.)
    """
    size = setting.size
    tokens = setting.ranks * size.tokens
    sums = (4 * size.layers + 2) * 2 * tokens * size.width
    return setting.alpha * sums * FLOAT


BUILDERS: dict[str, Callable[[Setting], Competitor]] = {
    "torch_tensor_parallel": functools.partial(split, sequence=False),
    "torch_sequence_parallel": functools.partial(split, sequence=True),
}
