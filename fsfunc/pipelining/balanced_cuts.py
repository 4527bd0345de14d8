"""Balanced cuts of a chain of calls, by what they cost or by what a clock says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf, isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import Frame, Stage, frame, inside
from fsfunc.core.units import Call
from fsfunc.runtime.generators import generators_kept
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.dataflow import tensors

Number = int | float


def balance(
    costs: Sequence[Number],
    n: int,
    *,
    memory: Sequence[Number] | None = None,
    bound: Number | None = None,
) -> list[int]:
    """Numbers of consecutive calls for ``n`` stages, the largest stage's cost least.

    Among the cuts whose most costly stage costs least, the most even one: least sum of
    squares of the stages' costs, then of their counts.

    ==========================  =================================================
    FairScale                   here
    ==========================  =================================================
    ``balance_by_time``         ``balance(profile(loss_fn, params, batch), n)``
    ``balance_by_size``         ``balance([c.activations + 2 * c.weights
                                for c in program(...).calls], n)``
    ``auto_shard``              ``balance([c.weights for c in ....calls], n)``
    time, within memory         ``balance(times, n, memory=sizes, bound=most)``
    ``pipeline``'s default      ``balance([c.flops for c in ....calls], n)``
    ==========================  =================================================

    Args:
        costs: of each call, in any unit; not negative.
        n: the number of stages; each gets at least one call.
        memory: of each call, in any unit, such as bytes.
        bound: the most memory that a stage may have.

    Raises:
        ValueError: fewer calls than stages, a negative or infinite cost, memory of
            another length than costs or without a bound, or a bound that no cut keeps.

    Cost: O(n k^2) for k calls at most: stages that cost too much are not looked into.

    Source: Bárány and Grinberg, Block partitions of sequences (2015), the problem.

    >>> balance([1, 2, 3, 4, 5, 6], 3)
    [3, 2, 1]
    >>> balance([1, 1, 1, 1, 1, 1], 2, memory=[4, 4, 1, 1, 1, 1], bound=8)
    [2, 4]
    """
    if (
        not 1 <= n <= len(costs)
        or (memory is None) != (bound is None)
        or memory is not None
        and len(memory) != len(costs)
        or not all(isfinite(x) and x >= 0 for x in (*costs, *(memory or ())))
    ):
        raise ValueError(
            f"balance({costs}, {n}, memory={memory}, bound={bound}): it takes finite "
            "costs, not below 0, of each call, as many memories with a bound, and at "
            "least one call for each of at least one stage"
        )
    size = [*accumulate(memory or [0] * len(costs), initial=0)]
    spent = [*accumulate(costs, initial=0)]
    (limit, _), _ = _best(spent, size, n, inf, bound, _largest)
    if limit == inf:
        raise ValueError(
            f"no cut into {n} stages keeps each within memory {bound}: the calls "
            f"need {list(memory or ())}"
        )
    return _best(spent, size, n, limit, bound, _evenness)[1]


Value = tuple[Number, int]  # of a cut: what is to be least


def _largest(before: Value, cost: Number, count: int) -> Value:
    """The cost of the largest stage, with one more of this cost and count."""
    return max(before[0], cost), 0


def _evenness(before: Value, cost: Number, count: int) -> Value:
    """(sum of squared costs, sum of squared counts), with one more stage."""
    return before[0] + cost**2, before[1] + count**2


def _best(
    spent: list[Number],
    size: list[Number],
    n: int,
    limit: Number,
    bound: Number | None,
    value: Callable[[Value, Number, int], Value],
) -> tuple[Value, list[int]]:
    """The least value of a cut whose stages keep to the limits, and that cut.

    ``best[i]`` is that of the first i calls in so many stages. The cost of the last
    stage grows as it begins earlier: no further than it alone outweighs the best.
    """
    k, nothing = len(spent) - 1, (0, 0)
    best: list[Value] = [nothing, *([(inf, 0)] * k)]
    begins: list[list[int]] = []
    for stage in range(1, n + 1):
        longer: list[Value] = [(inf, 0)] * (k + 1)
        begin = [0] * (k + 1)
        for i in range(stage, k + 1):
            for j in range(i - 1, stage - 2, -1):
                cost = spent[i] - spent[j]
                if cost > limit or bound is not None and size[i] - size[j] > bound:
                    break
                if value(nothing, cost, 0) >= longer[i]:
                    break
                found = value(best[j], cost, i - j)
                if found < longer[i]:
                    longer[i], begin[i] = found, j
        best = longer
        begins.append(begin)
    counts, end = [], k
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return best[k], counts[::-1]


def profile(
    loss_fn: Callable[..., Any], *args: Any, repeat: int = 3, **keywords: Any
) -> list[float]:
    """Seconds of the forward and backward pass of each unit call of ``loss_fn``.

    Each unit call runs once to warm up and then ``repeat`` times, on the inputs that
    the loss gives it; the median counts. Operations between the calls are not timed.

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
    clock = _CallTimer(repeat)
    f = Frame(at=frame().at, casts=frame().casts, handlers=(clock,), in_loss=1)
    params = tree.map(_differentiated, args[0])
    with generators_kept(), inside(f):
        with torch.inference_mode(False):  # and gradients on
            loss_fn(params, *args[1:], **keywords)
    return clock.times


class _CallTimer(Stage):
    """Times the unit calls of a loss."""

    def __init__(self, repeat: int):
        self.repeat = repeat
        self.times: list[float] = []

    def decide(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
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
        self, call: Call, params: Any, inputs: Any, keywords: Any
    ) -> tuple[Any, float]:
        start = _now((params, inputs, keywords))
        out = call.body(params, *inputs, **keywords)
        roots = [x for x in tensors(out) if x.requires_grad]
        leaves = [x for x in tensors((params, inputs, keywords)) if x.requires_grad]
        if roots and leaves:
            ones = [torch.ones_like(x) for x in roots]
            torch.autograd.grad(roots, leaves, ones, allow_unused=True)
        return out, _now(out) - start


def _now(values: Any) -> float:
    """The time once everything asked of the tensors' devices is done."""
    for device in {x.device for x in tensors(values) if x.is_cuda}:
        torch.cuda.synchronize(device)
    return perf_counter()


def _differentiated(x: Any) -> Any:
    real = isinstance(x, Tensor) and x.dtype.is_floating_point
    return x.detach().requires_grad_() if real else x


def _cut_off(x: Any) -> Any:
    """A leaf of its own: it has no history, and asks for a gradient if ``x`` did."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
