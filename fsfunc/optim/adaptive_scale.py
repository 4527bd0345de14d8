"""Learning rates that grow as the batch does, by what its gradients agree in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import averaged_axes
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.frames import frame
from fsfunc.core.reduction_hooks import UNSEEN
from fsfunc.optim.leaves import Tree
from fsfunc.optim.norms import global_norm
from fsfunc.optim.observing import observe_means
from fsfunc.optim.optimizer import Optimizer, Run, State, described
from fsfunc.optim.reductions import by_axes, tree_scale


class AdaScaleState(NamedTuple):
    """The averages, the last gain, and what the optimizer within keeps.

    All but ``inner`` are 0-dim tensors, in float32, or in float64 where a parameter is,
    the same on every rank: ``variance`` of a sample's gradient and ``square``, of the
    norm of what samples agree in, both exponential averages that start at 0; and
    ``iterations``, the sum of all gains: how many steps at a scale of 1 these were
    worth.
    """

    variance: Tensor
    square: Tensor
    gain: Tensor
    iterations: Tensor
    inner: State


@described
def adascale(
    optimizer: Optimizer, scale: float | None = None, *, smoothing: float | None = None
) -> Optimizer:
    """``optimizer``, whose updates are multiplied by AdaScale's gain, from 1 to S.

    Of a step's gradient, the mean of n samples (the ranks' and microbatches' own
    gradients g_i), v estimates the variance of one sample at the scale of 1, and s the
    square of what all agree in::

        v = (sum |g_i|^2 - n |mean|^2) S / (n (n - 1))      s = |mean|^2 - v / S
        V = average of max(v, 1e-6)      Q = average of max(s, 0)
        gain = (V + Q) / (V / S + Q)

    Where samples are alike a larger batch is worth nothing, and the gain is 1; where
    they are noise a step is worth S steps, and the gain is S.

    Args:
        optimizer: what makes the updates: the gain multiplies its learning rate.
        scale: S, how many times the batch is larger than that for which the learning
            rate was chosen; by default n, the samples of a step.
        smoothing: of the exponential average, in [0, 1); by default 1 - n/1000, and 0
            from 1000 samples on.

    Returns:
        the optimizer; its state is an `AdaScaleState`. It makes its train step itself,
        ``adascale(...)(grad_fn)``, since it must see gradients before they are reduced.

    Raises:
        ValueError: a step of one sample; an update by gradients that it has not seen; a
            scale below 1 or a smoothing outside [0, 1).
        LawError: gradients that have no samples: see `observe_gradients`.

    Cost: one pass over the gradients before they are reduced, one after, and a psum of
    one number for each; the updates are scaled, in a pass and memory of their own.

    Source: Johnson et al., AdaScale SGD: A User-Friendly Algorithm for Distributed
    Training, 2020, algorithm 1; the averages are FairScale's.

    >>> import torch, fsfunc as ff
    >>> optimizer = adascale(ff.sgd(1.0))
    >>> grad = ff.value_and_grad(lambda w, x: (w @ x.T).mean())
    >>> step = ff.accumulate(optimizer(grad), 2)
    >>> w = torch.zeros(2)
    >>> state = ff.TrainState(w, optimizer.init(w))
    >>> step(state, torch.eye(2))[0].opt_state.gain  # of two with nothing in common
    tensor(2.)
    """
    if scale is not None and not scale >= 1:
        raise ValueError(f"scale is {scale}: it must be 1 or more")
    if smoothing is not None and not 0 <= smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}: it must be at least 0 and below 1")
    return Optimizer.of(_AdaScale(optimizer, scale, smoothing))


@dataclass(frozen=True, eq=False)
class _AdaScale:
    """The functions of such an optimizer.

    Args:
        seen: what one step's samples gave: the sum of the squares of all, how many, and
            the square of their mean, before anything clips it or adds to it.
    """

    optimizer: Optimizer
    scale: float | None
    smoothing: float | None
    seen: tuple[Tensor, int, Tensor] | None = None

    def init(self, params: Tree) -> AdaScaleState:
        _, wide = by_axes(params)
        variance, square, iterations = (torch.zeros((), dtype=wide) for _ in range(3))
        gain = torch.ones((), dtype=wide)
        inner = self.optimizer.init(params)
        return AdaScaleState(variance, square, gain, iterations, inner)

    def take(self, run: Run, state: AdaScaleState) -> tuple[Any, Tree, Optimizer]:
        found: list[Any] = []
        means: list[Tensor] = []

        def mean(grads: Tree) -> None:
            means.append(global_norm(grads) ** 2)

        def observed() -> tuple[Any, Tree]:
            out, *found[:] = observe_means(run, _square, mean)()
            return out

        value, grads, inner = self.optimizer.gradients(observed, state.inner)
        squares, n = found
        if len(means) != 1:
            raise LawError(UNSEEN.format("a transform replaces the gradients"))
        if axes := averaged_axes():
            squares, n = psum(squares, axes), n * group(axes).size
        if frame().tracer is not None:
            n = max(n, 2)  # a step may be tried on one microbatch of several
        if n < 2:
            raise ValueError(
                "adascale compares the samples of a step, and this step has one: shard "
                "it over two ranks or more, or accumulate(step, 2)"
            )
        seen = squares, n, means[0]
        return value, grads, Optimizer.of(replace(self, optimizer=inner, seen=seen))

    def update(self, grads: Tree, state: AdaScaleState, params: Tree = None):
        if self.seen is None:
            raise ValueError(
                "adascale has not seen these gradients before they were reduced: make "
                "the step by adascale(...)(grad_fn)"
            )
        squares, n, mean = self.seen
        scale = n if self.scale is None else self.scale
        keep = max(1 - n / 1000, 0.0) if self.smoothing is None else self.smoothing
        variance = (squares - n * mean) * (scale / n / (n - 1))
        square = mean - variance / scale
        # Each is bounded by itself, as FairScale does it. That the averages start at 0
        # makes both too small by one factor, which the gain does not see.
        v = keep * state.variance + (1 - keep) * variance.clamp(min=1e-6)
        s = keep * state.square + (1 - keep) * square.clamp(min=0.0)
        gain = (v + s) / (v / scale + s)
        updates, inner = self.optimizer.update(grads, state.inner, params)
        after = AdaScaleState(v, s, gain, state.iterations + gain, inner)
        return tree_scale(updates, gain), after


def _square(gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return vector_norm(gradient, dtype=wide) ** 2
