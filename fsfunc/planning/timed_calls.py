"""The calls that a machine is measured with, and the watch that times them.

The operators of a step, one call of each: shapes are those of a transformer's
activations, its logits and its parameters. Which operator a call is, and what it reads
and writes, is seen when it runs, not said here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.comm.collectives import pmax, pmean
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Here

aten: Any = torch.ops.aten
Call = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors that a device is measured with.

    Args:
        tokens, width, vocabulary: of the activations; a hidden layer is four times as
            wide.
        heads, length: of the attention.
        products: m = k = n, ascending; ``other``: one of them, for further dtypes.
        memory: elements of a tensor that no cache holds.
        touched: of one that is taken anew for each call, as activations are.
        messages: bytes of the buffers that are sent, ascending.
    """

    tokens: int
    width: int
    vocabulary: int
    heads: int
    length: int
    products: tuple[int, ...]
    other: int
    memory: int
    touched: int
    messages: tuple[int, ...]

    @staticmethod
    def of(device: torch.device) -> Sizes:
        """Sizes that a core, or a GPU, gets through in milliseconds."""
        if device.type == "cpu":
            sides = (32, 64, 128, 256, 512, 1024)
            sent = (2**14, 2**17, 2**20, 2**22, 2**23)
            return Sizes(1024, 256, 4096, 8, 256, sides, 256, 2**23, 2**20, sent)
        sides = (128, 256, 512, 1024, 2048, 4096, 8192)
        sent = (2**14, 2**18, 2**22, 2**25, 2**28)
        return Sizes(8192, 2048, 32768, 16, 2048, sides, 4096, 2**27, 2**24, sent)


def specimens(sizes: Sizes, device: torch.device) -> list[Call]:
    """Calls of one operator each, but for those that a device makes of several."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    tokens, width, words = sizes.tokens, sizes.width, sizes.vocabulary
    x, y = normal(tokens, 4 * width), normal(tokens, 4 * width)
    inside, row = normal(tokens, width), normal(width)
    return [
        *_pointwise(x, y),
        *_copies(x, y, sizes),
        *_norms(inside, normal(tokens, width), row),
        *_words(normal(words, width), normal(tokens, words), inside, draw),
        *_optimizer(normal(words, 4 * width)),
    ]


def _pointwise(x: Tensor, g: Tensor) -> list[Call]:
    half = torch.rand_like(x) + 0.5
    return [
        lambda: aten.gelu(x),
        lambda: aten.gelu_backward(g, x),
        lambda: aten.silu(x),
        lambda: aten.silu_backward(g, x),
        lambda: aten.relu(x),
        lambda: aten.threshold_backward(g, x, 0),
        lambda: aten.tanh(x),
        lambda: aten.tanh_backward(g, half),
        lambda: aten.sigmoid(x),
        lambda: aten.exp(x),
        lambda: aten.pow(x, 2),
        lambda: aten.rsqrt(half),
        lambda: aten.add(x, g),
        lambda: aten.mul(x, g),
        lambda: aten.div(x, half),
        lambda: aten.add_(x, g, alpha=0.0),
        lambda: aten.mul_(x, 1.0),
        lambda: aten.native_dropout(x, 0.1, True),
        lambda: aten.mean(x, [-1], True),
        lambda: aten.sum(x, [0], True),
        lambda: aten._softmax(x, -1, False),
        lambda: aten._softmax_backward_data(g, half, -1, x.dtype),
    ]


def _copies(x: Tensor, y: Tensor, sizes: Sizes) -> list[Call]:
    split = x.view(-1, sizes.heads, x.shape[1] // sizes.heads)
    return [
        lambda: aten.clone(
            split.transpose(0, 1), memory_format=torch.contiguous_format
        ),
        lambda: aten.copy_(y, x),
        lambda: aten._foreach_copy_([y], [x]),
        lambda: aten.cat([x, y]),
        lambda: aten.fill_(y, 1.0),
        lambda: aten._to_copy(x, dtype=torch.bfloat16),
    ]


def _norms(x: Tensor, g: Tensor, w: Tensor) -> list[Call]:
    shape = [x.shape[-1]]
    _, mean, rstd = aten.native_layer_norm(x, shape, w, w, 1e-5)
    found: list[Call] = [
        lambda: F.rms_norm(x, shape, w, 1e-5),
        lambda: aten.native_layer_norm(x, shape, w, w, 1e-5),
        lambda: aten.native_layer_norm_backward(
            g, x, shape, mean, rstd, w, w, [True, True, True]
        ),
    ]
    if x.device.type == "cuda":
        found.append(
            lambda: aten._fused_rms_norm_backward(g, x, shape, rstd, w, [True, True])
        )
    return found


def _words(table: Tensor, logits: Tensor, g: Tensor, draw: Any) -> list[Call]:
    words = table.shape[0]
    at = torch.randint(words, g.shape[:1], generator=draw, device=g.device)
    likely = torch.log_softmax(logits, -1)
    one = logits.new_ones(())
    _, count = aten.nll_loss_forward(likely, at, None, 1, -100)
    return [
        lambda: aten.embedding(table, at),
        lambda: aten.embedding_dense_backward(g, at, words, -1, False),
        lambda: aten._log_softmax(logits, -1, False),
        lambda: aten._log_softmax_backward_data(logits, likely, -1, logits.dtype),
        lambda: aten.nll_loss_forward(likely, at, None, 1, -100),
        lambda: aten.nll_loss_backward(one, likely, at, None, 1, -100, count),
    ]


def _optimizer(p: Tensor) -> list[Call]:
    m, v, g = torch.zeros_like(p), torch.ones_like(p), torch.ones_like(p)
    step = torch.ones((), device=p.device)
    how = dict(lr=0.0, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8)
    how.update(amsgrad=False, maximize=False)
    return [lambda: aten._fused_adamw_([p], [g], [m], [v], [], [step], **how)]


def attention(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Call:
    """Causal attention of one sequence, forward and backward."""
    shape = (1, sizes.heads, sizes.length, 64)
    q, k, v, g = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def call() -> Any:
        with torch.enable_grad():
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(y, (q, k, v), g)

    return call


def chain(device: torch.device, length: int) -> Call:
    """``length`` operators without work forward, and as many backward."""
    x = torch.ones(4, device=device, requires_grad=True)

    def call() -> Any:
        with torch.enable_grad():
            y = x
            for _ in range(length):
                y = torch.tanh(y)
            return torch.autograd.grad(y, x, x)

    return call


def layer(n: int, turns: int, device: torch.device, dtype: torch.dtype) -> Call:
    """Three products of [n, n]: a layer's forward and its two gradients.

    ``turns`` sets of tensors take turns, as a step's products read what no other did.
    """
    x, y, out = (torch.randn(turns, n, n, device=device).to(dtype) for _ in range(3))
    turn = cycle(range(turns))

    def call() -> None:
        i = next(turn)
        torch.mm(x[i], y[i].t(), out=out[i])
        torch.mm(x[i], y[i], out=out[i])
        torch.mm(x[i].t(), y[i], out=out[i])

    return call


# Timing

FEWEST = 3


class Stopwatch:
    """Times calls on all ranks at once; every rank reads the same.

    Args:
        device: where the calls compute.
        at: which rank of which mesh this is; None: a process alone.
        seconds: for all that is timed together.
    """

    def __init__(self, device: torch.device, at: Here | None, seconds: float):
        self.device, self.seconds = device, seconds
        self.where: RankGroup | None = None
        if at is not None and at.mesh.size > 1:
            self.where = get_group(tuple(at.mesh.axes), at)

    def __call__(self, call: Callable[[], Any], share: float, batch: int = 1) -> float:
        """Seconds of a call: the lower quartile of many, averaged over the ranks.

        Ranks start together and go on for a ``share`` of all the time, so that each is
        measured beside the others. Calls above the median show other programs.

        Args:
            batch: calls between two looks at the clock.
        """
        batch *= 10 if self.device.type == "cuda" else 1
        self._once(call, batch)
        self.mean(0.0)
        times, end = [], time.perf_counter() + share * self.seconds
        while len(times) < FEWEST or time.perf_counter() < end:
            times.append(self._once(call, batch))
        return self.mean(sorted(times)[len(times) // 4])

    def together(self, call: Callable[[], Any], share: float) -> float:
        """Seconds of a call that sends: the median of many, as all ranks make it.

        Not a quartile: that one rank comes late is what sending costs.
        """
        self._once(call, 1)
        first = max(self.most(self._once(call, 1)), 1e-9)
        count = max(FEWEST, int(share * self.seconds / first))
        return self.mean(median(self._once(call, 1) for _ in range(count)))

    def mean(self, value: float) -> float:
        """The mean over all ranks; also where they wait for each other."""
        return self._over_ranks(pmean, value)

    def most(self, value: float) -> float:
        """The largest of all ranks."""
        return self._over_ranks(pmax, value)

    def _over_ranks(self, collective: Callable[..., Any], value: float) -> float:
        if self.where is None:
            return value
        x = torch.tensor([value], dtype=torch.float64, device=self.device)
        with silence():
            return float(collective(x, self.where.axis).item())

    def _once(self, call: Callable[[], Any], batch: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        self._wait()
        return (time.perf_counter() - start) / batch

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
