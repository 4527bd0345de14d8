"""The calls that a machine is measured with, and the stopwatch that times them.

`calibration` times them: one call of each operator that a transformer's step has, on
tensors of the shapes of its activations, logits and parameters. Which operator a call
runs, and what it reads and writes, `calibration` sees when it runs.
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
Call = Callable[[], Any]  # what is timed; what it returns is dropped


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors that a device is measured with.

    Args:
        tokens, width, vocabulary: those of the activations and logits; a hidden layer
            is four times as wide.
        heads, length: those of the attention.
        products: the sides m = k = n of products, ascending.
        other: one of ``products``, at which further dtypes are measured.
        memory: the elements of a tensor that no cache holds.
        touched: the elements of one that is allocated anew for each call, as
            activations are.
        messages: the bytes of the buffers that are sent, ascending.
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
        """Returns sizes that take a core, or a GPU, milliseconds."""
        if device.type == "cpu":
            products = (32, 64, 128, 256, 512, 1024)
            messages = (2**14, 2**17, 2**20, 2**22, 2**23)
            return Sizes(1024, 256, 4096, 8, 256, products, 256, 2**23, 2**20, messages)
        products = (128, 256, 512, 1024, 2048, 4096, 8192)
        messages = (2**14, 2**18, 2**22, 2**25, 2**28)
        return Sizes(
            8192, 2048, 32768, 16, 2048, products, 4096, 2**27, 2**24, messages
        )


def specimens(sizes: Sizes, device: torch.device) -> list[Call]:
    """Returns calls of one operator each; a device may compose some of several."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    tokens, width, vocabulary = sizes.tokens, sizes.width, sizes.vocabulary
    x, y = normal(tokens, 4 * width), normal(tokens, 4 * width)
    activations, weights = normal(tokens, width), normal(width)
    return [
        *_pointwise(x, y),
        *_copies(x, y, sizes),
        *_norms(activations, normal(tokens, width), weights),
        *_words(
            normal(vocabulary, width),
            normal(tokens, vocabulary),
            activations,
            generator,
        ),
        *_optimizer(normal(vocabulary, 4 * width)),
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
    calls: list[Call] = [
        lambda: F.rms_norm(x, shape, w, 1e-5),
        lambda: aten.native_layer_norm(x, shape, w, w, 1e-5),
        lambda: aten.native_layer_norm_backward(
            g, x, shape, mean, rstd, w, w, [True, True, True]
        ),
    ]
    if x.device.type == "cuda":
        calls.append(
            lambda: aten._fused_rms_norm_backward(g, x, shape, rstd, w, [True, True])
        )
    return calls


def _words(
    table: Tensor, logits: Tensor, g: Tensor, generator: torch.Generator
) -> list[Call]:
    vocabulary = table.shape[0]
    row_numbers = torch.randint(
        vocabulary, g.shape[:1], generator=generator, device=g.device
    )
    log_probs = torch.log_softmax(logits, -1)
    cotangent = logits.new_ones(())
    _, count = aten.nll_loss_forward(log_probs, row_numbers, None, 1, -100)
    return [
        lambda: aten.embedding(table, row_numbers),
        lambda: aten.embedding_dense_backward(g, row_numbers, vocabulary, -1, False),
        lambda: aten._log_softmax(logits, -1, False),
        lambda: aten._log_softmax_backward_data(logits, log_probs, -1, logits.dtype),
        lambda: aten.nll_loss_forward(log_probs, row_numbers, None, 1, -100),
        lambda: aten.nll_loss_backward(
            cotangent, log_probs, row_numbers, None, 1, -100, count
        ),
    ]


def _optimizer(p: Tensor) -> list[Call]:
    m, v, g = torch.zeros_like(p), torch.ones_like(p), torch.ones_like(p)
    step = torch.ones((), device=p.device)
    # With lr=0 the same parameters can be updated again and again.
    options = dict(lr=0.0, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8)
    options.update(amsgrad=False, maximize=False)
    return [lambda: aten._fused_adamw_([p], [g], [m], [v], [], [step], **options)]


def attention(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Call:
    """Returns a call: causal attention of one sequence, forward and backward."""
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
    """Returns a call: ``length`` tiny operators forward, and as many backward."""
    x = torch.ones(4, device=device, requires_grad=True)

    def call() -> Any:
        with torch.enable_grad():
            y = x
            for _ in range(length):
                y = torch.tanh(y)
            return torch.autograd.grad(y, x, x)

    return call


def layer(n: int, n_sets: int, device: torch.device, dtype: torch.dtype) -> Call:
    """Returns a call: a layer's product and its two gradients, of [n, n] each.

    ``n_sets`` sets of tensors take turns, so that no cache has them: each product of a
    step reads other tensors.
    """
    x, y, out = (torch.randn(n_sets, n, n, device=device).to(dtype) for _ in range(3))
    set_numbers = cycle(range(n_sets))

    def call() -> None:
        i = next(set_numbers)
        torch.mm(x[i], y[i].t(), out=out[i])
        torch.mm(x[i], y[i], out=out[i])
        torch.mm(x[i].t(), y[i], out=out[i])

    return call


# Timing

FEWEST = 3  # at least so many times make a median


class Stopwatch:
    """Times calls on all ranks at once; every rank reads the same.

    Args:
        device: where the calls compute.
        place: this rank and its mesh; None: a process alone.
        seconds: the time for all measurements together.
    """

    device: torch.device
    seconds: float

    def __init__(self, device: torch.device, place: Here | None, seconds: float):
        self.device, self.seconds = device, seconds
        self.rank_group: RankGroup | None = None
        if place is not None and place.mesh.size > 1:
            self.rank_group = get_group(tuple(place.mesh.axes), place)

    def __call__(self, call: Callable[[], Any], share: float, batch: int = 1) -> float:
        """Returns the seconds of a call: the lower quartile of many, over the ranks.

        Ranks start together and go on for a ``share`` of all the time, so that each is
        measured beside the others. Slow calls are those that other programs disturbed:
        so a quartile, and no mean.

        Args:
            batch: calls between two readings of the clock.
        """
        # On a GPU a call is launched ahead: many between two readings of the clock, so
        # that the wait for the device at the end weighs little.
        batch *= 10 if self.device.type == "cuda" else 1
        self._seconds_of(call, batch)  # warms up: kernels, caches, memory
        self.mean(0.0)  # all ranks begin together
        times, end = [], time.perf_counter() + share * self.seconds
        while len(times) < FEWEST or time.perf_counter() < end:
            times.append(self._seconds_of(call, batch))
        return self.mean(sorted(times)[len(times) // 4])

    def time_transfer(self, call: Callable[[], Any], share: float) -> float:
        """Returns the seconds of a call that sends: the median of many.

        All ranks make the same number of calls. The median and no quartile, as waiting
        for a late rank is a part of what sending costs.
        """
        self._seconds_of(call, 1)
        first_seconds = max(self.largest(self._seconds_of(call, 1)), 1e-9)
        count = max(FEWEST, int(share * self.seconds / first_seconds))
        return self.mean(median(self._seconds_of(call, 1) for _ in range(count)))

    def mean(self, value: float) -> float:
        """Returns the mean over all ranks, which so wait for each other."""
        return self._over_ranks(pmean, value)

    def largest(self, value: float) -> float:
        """Returns the largest value of all ranks."""
        return self._over_ranks(pmax, value)

    def _over_ranks(self, collective: Callable[..., Any], value: float) -> float:
        if self.rank_group is None:
            return value
        x = torch.tensor([value], dtype=torch.float64, device=self.device)
        with silence():
            return float(collective(x, self.rank_group.axis).item())

    def _seconds_of(self, call: Callable[[], Any], batch: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        self._wait()
        return (time.perf_counter() - start) / batch

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
