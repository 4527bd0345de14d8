"""What each unit call of a loss costs, by the clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.frames import Frame, Stage, frame, inside
from fsfunc.generators import generators_kept
from fsfunc.sharded import Sharded, is_sharded

__all__ = ["profile"]


def profile(
    loss_fn: Callable[..., Any], *args: Any, repeat: int = 3, **keywords: Any
) -> list[float]:
    """Seconds of the forward and backward pass of each unit call of ``loss_fn``.

    Each unit call runs once to warm up and then ``repeat`` times, on the inputs that
    the loss gives it; the median counts. What lies between the calls is not timed.

    Args:
        loss_fn: a loss that calls units.
        args: its arguments, with data and whole; the first holds its parameters.
        repeat: how many runs to take the median of.

    Returns:
        one time for each unit call, in order: what ``balance`` takes.

    Raises:
        ValueError: ``repeat`` below 1, or a sharded parameter.

    Cost: ``repeat + 1`` steps, without an optimizer.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda p, x: torch.tanh(x @ p))
    >>> def loss(params, x):
    ...     return layer(params[1], layer(params[0], x)).sum()
    >>> times = profile(loss, [torch.ones(3, 3)] * 2, torch.ones(2, 3))
    >>> len(times), ff.balance(times, 2)
    (2, [1, 1])
    """
    if repeat < 1:
        raise ValueError(f"repeat={repeat}: at least one run is timed")
    if not args:
        raise TypeError(
            "profile(loss_fn, params, ...): the first argument of the loss is missing"
        )
    for leaf in tree.leaves((args, keywords), is_leaf=is_sharded):
        if isinstance(leaf, Sharded):
            raise ValueError(
                f"{leaf.layout} is sharded, and the clock needs whole parameters: "
                "pass ff.unshard(params)"
            )
    clock = _Clock(repeat)
    f = Frame(at=frame().at, compute=frame().compute, handlers=(clock,), in_loss=True)
    params = tree.map(_differentiated, args[0])
    with generators_kept(), inside(f):
        with torch.inference_mode(False):  # and gradients on
            loss_fn(params, *args[1:], **keywords)
    return clock.times


class _Clock(Stage):
    """Times the unit calls of a loss."""

    def __init__(self, repeat: int):
        self.repeat = repeat
        self.times: list[float] = []

    def decide(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """A unit call of the loss: timed, its outputs cut off from its graph."""
        given = tree.map(_cut_off, (params, inputs, keywords))
        timed: list[float] = []
        self._run(call, *given)
        for _ in range(self.repeat):
            out, seconds = self._run(call, *given)
            timed.append(seconds)
        self.times.append(sorted(timed)[len(timed) // 2])
        return tree.map(_cut_off, out)

    def _run(
        self, call: Any, params: Any, inputs: Any, keywords: Any
    ) -> tuple[Any, float]:
        start = _now((params, inputs, keywords))
        out = call.body(params, *inputs, **keywords)
        roots = [x for x in _tensors(out) if x.requires_grad]
        leaves = [x for x in _tensors((params, inputs, keywords)) if x.requires_grad]
        if roots and leaves:
            ones = [torch.ones_like(x) for x in roots]
            torch.autograd.grad(roots, leaves, ones, allow_unused=True)
        return out, _now(out) - start


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree.leaves(values) if isinstance(x, Tensor)]


def _now(values: Any) -> float:
    """The time once everything asked of the tensors' devices is done."""
    for device in {x.device for x in _tensors(values) if x.is_cuda}:
        torch.cuda.synchronize(device)
    return perf_counter()


def _differentiated(x: Any) -> Any:
    real = isinstance(x, Tensor) and x.dtype.is_floating_point
    return x.detach().requires_grad_() if real else x


def _cut_off(x: Any) -> Any:
    """A leaf of its own: it has no history, and asks for a gradient if ``x`` did."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
