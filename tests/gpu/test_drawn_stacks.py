"""200 drawn steps on a card: losses and parameters of the CPU's.

No random numbers: a card draws others. The same parameters and batch, made on the CPU.
"""

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc import tree
from tests import models
from tests.checks import simulated
from tests.gpu.programs import DEVICE, REHEARSED, on_host

pytestmark = pytest.mark.gpu

COUNT, GROUPS, STEPS = 200, 8, 2
LENGTH = 3
# How far losses may be, relative to theirs, and parameters, relative to how far two
# steps moved them; in bfloat16, or not. Last bits that differ in every unit make 3e-7
# and 6e-6 of them, and 3e-3 and 3e-2 in bfloat16, whose last bit is 8e-3.
NEAR = {False: (2e-5, 2e-4), True: (2e-2, 0.1)}

# With a small eps, or of signs alone, an update is as large however small a gradient
# is, so that its last bit decides.
OPTIMIZERS = {
    "sgd": lambda: ff.sgd(0.1),
    "nesterov": lambda: ff.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: ff.sharded_adam(0.01, eps=1e-2),
    "adam, bf16 moments": lambda: ff.sharded_adam(
        0.01, eps=1e-2, moment_dtype=torch.bfloat16
    ),
    "adam, some decay": lambda: ff.sharded_adam(
        0.01, eps=1e-2, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim > 1
    ),
    "lamb": lambda: ff.lamb(0.01, eps=1e-2),
    "torch's rmsprop": lambda: ff.from_torch(torch.optim.RMSprop, lr=0.01, eps=1e-1),
}
OFFLOADED = ["params", "moments", "activations"]


@dataclass(frozen=True)
class Stack:
    """A step that was drawn: its model, and what is around it, innermost first."""

    ranks: int
    grid: bool  # copies of shards, on two axes
    zero: int
    around: tuple[str, ...]
    microbatches: int
    offloaded: tuple[str, ...]
    bf16: bool
    donated: bool
    optimizer: str
    clipped: bool
    min_bytes: int
    width: int
    hidden: int
    depth: int
    tied: bool
    outside: bool
    weighted: bool
    rows: int


def drawn(number):
    draw = random.Random(number)
    ranks = draw.choice([1, 2, 2, 3, 4])
    maybe = lambda: draw.random() < 0.5  # noqa: E731
    offloaded = [k for k in OFFLOADED if maybe()] if maybe() else []
    bf16, microbatches = draw.random() < 0.3, draw.choice([1, 1, 2, 3])
    around = ["shard"]
    around += ["remat"] if maybe() else []
    around += ["accumulate"] if microbatches > 1 else []
    around += ["precision"] if bf16 else []
    around += ["offload"] if offloaded else []
    draw.shuffle(around)
    grid = ranks == 4 and maybe()
    return Stack(
        ranks=ranks,
        grid=grid,
        zero=3 if grid else draw.randrange(4),
        around=tuple(around),
        microbatches=microbatches,
        offloaded=tuple(offloaded),
        bf16=bf16,
        donated=maybe(),
        optimizer=draw.choice(sorted(OPTIMIZERS)),
        clipped=maybe(),
        min_bytes=draw.choice([0, 0, 256, 4096]),
        width=draw.choice([4, 7, 12]),
        hidden=draw.choice([5, 8, 16]),
        depth=draw.choice([1, 1, 2]),
        tied=maybe(),
        outside=maybe(),
        weighted=maybe(),
        rows=ranks * microbatches * draw.choice([1, 2]),
    )


VOCABULARY = 11
NUDGED = []  # whether a rehearsal stands for another device


def nudged(x):
    """``x``; where another device is rehearsed, with other last bits."""
    if not NUDGED:
        return x
    shape = torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape)
    return x * (1 + torch.finfo(x.dtype).eps * shape).to(x.dtype)


@ff.unit
def embed(p, tokens):
    return nudged(F.embedding(tokens, p["table"]))


@ff.unit
def block(p, x):
    """With a scalar, and sizes that no number of ranks divides."""
    h = F.gelu(x @ p["w"] + p["b"])
    mixed = torch.softmax(x @ x.transpose(-1, -2), -1) @ x
    return nudged(x + p["gain"] * torch.tanh(h @ p["v"]) + 0.5 * mixed)


@ff.unit
def head(p, x, targets):
    x = F.layer_norm(x, x.shape[-1:])
    logits = nudged(x @ p["table"].T).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def loss_of(stack):
    def loss(params, batch):
        tokens, targets = batch
        x = embed(params["embed"], tokens)
        for p in params["blocks"]:
            x = block(p, x)
        total = head(params["embed" if stack.tied else "head"], x, targets)
        if stack.weighted:
            return ff.Weighted(total, targets.numel())
        return total / targets.numel()

    return loss


def params_of(stack):
    d, h = stack.width, stack.hidden
    normal = lambda *shape, seed: models.floats(*shape, seed=seed) * 0.5  # noqa: E731
    blocks = [
        {
            "w": normal(d, h, seed=4 * k),
            "b": normal(h, seed=4 * k + 1),
            "v": normal(h, d, seed=4 * k + 2),
            "gain": torch.tensor(0.7 + 0.1 * k),
        }
        for k in range(stack.depth)
    ]
    params = {"embed": {"table": normal(VOCABULARY, d, seed=90)}, "blocks": blocks}
    if not stack.tied:
        params["head"] = {"table": normal(VOCABULARY, d, seed=91)}
    if stack.outside:  # nobody reads it
        params["spare"] = normal(3, seed=92)
    return params


def batch_of(stack):
    draw = torch.Generator().manual_seed(stack.rows)
    shape = (stack.rows, LENGTH)
    return tuple(torch.randint(VOCABULARY, shape, generator=draw) for _ in range(2))


def step_of(stack, mesh, optimizer):
    copies = {"replicate": "node"} if stack.grid else {}
    wraps = {
        "shard": lambda f: ff.shard(
            f, mesh, "data", zero=stack.zero, min_bytes=stack.min_bytes, **copies
        ),
        "remat": ff.remat,
        "accumulate": lambda f: ff.accumulate(f, stack.microbatches),
        "precision": lambda f: ff.precision(f, torch.bfloat16, torch.float32),
        "offload": lambda f: ff.offload(f, **dict.fromkeys(stack.offloaded, "host")),
    }
    step = models.train_step(loss_of(stack), optimizer)
    for name in stack.around:
        step = wraps[name](step)
    return ff.donate(step) if stack.donated else step


def trained(stack, device):
    """The losses of two steps, and the whole parameters, of each rank."""
    axes = {"node": 2, "data": 2} if stack.grid else {"data": stack.ranks}
    mesh, optimizer = simulated(**axes), OPTIMIZERS[stack.optimizer]()
    if stack.clipped:
        optimizer = ff.chain(ff.clip_by_global_norm(0.5), optimizer)
    step = step_of(stack, mesh, optimizer)

    def main():
        params, batch = tree.map(
            lambda x: x.to(device), (params_of(stack), batch_of(stack))
        )
        mine = ff.local_batch(batch, mesh, tuple(axes))
        state = ff.init_state(step, params, optimizer, mine)
        losses = []
        for _ in range(STEPS):
            state, loss = step(state, mine)
            losses.append(loss.detach())
        return torch.stack(losses), ff.unshard(state.params)

    return on_host(ff.spmd(main, mesh)())


def on_the_card(stack):
    if not REHEARSED:
        return trained(stack, DEVICE)
    NUDGED.append(True)
    try:
        return trained(stack, DEVICE)
    finally:
        NUDGED.clear()


def distances(found, expected, start):
    """Of the losses and parameters of any rank; of these the unit is their way."""
    losses, params = [], []
    for (mine, trained), (theirs, right) in zip(found, expected, strict=True):
        losses.append(((mine - theirs) / theirs).abs().max())
        params.append((flat(trained) - flat(right)).norm())
    way = (flat(expected[0][1]) - flat(start)).norm()
    return torch.stack(losses).max().item(), (torch.stack(params).max() / way).item()


def flat(params):
    return torch.cat([x.flatten() for x in tree.leaves(params)])


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=pytest.mark.xdist_group(str(n % GROUPS)))
        for n in range(COUNT)
    ],
)
def test_a_card_trains_as_the_cpu(number):
    stack = drawn(number)
    try:
        found, expected = on_the_card(stack), trained(stack, "cpu")
        losses, params = distances(found, expected, params_of(stack))
        assert losses <= NEAR[stack.bf16][0]
        assert params <= NEAR[stack.bf16][1]
    except Exception as error:
        error.add_note(f"number {number}: {stack}")
        raise
