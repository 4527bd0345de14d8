"""``observe_gradients``: measures of each sample's gradient, before it is reduced.

``adascale``: rates that grow as the batch does, by what these gradients agree in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.collective_ops import ignoring_axes
from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import averaged_axes
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.frames import Transformed, frame, inside
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.reduction_hooks import UNSEEN, GradientObserver
from fsfunc.optim.leaves import Tree, check_follows_no_params
from fsfunc.optim.optimizer import GradientScope, Optimizer, State, optimizer_factory
from fsfunc.optim.places import computing_device
from fsfunc.optim.reductions import global_norm, tensors_by_axes, tree_scale
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import Sharded, is_sharded


@api_boundary
def observe_gradients(
    grad_fn: Callable[..., Any], measure: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    """``grad_fn``, and what its gradients measure before anybody sums them.

    A gradient call over n ranks in c microbatches, of ``accumulate`` or ``pipeline``,
    is a mean over n c gradients, each a sample of the same one. Of this rank's c
    samples, ``measure`` is given each piece (the flat buffer of a unit's parameters, or
    a whole leaf) once, when it is complete and before it is reduced; nothing more is
    held for that, but for parameters that several unit calls of one sample share. So
    gradient noise scales, AdaScale and statistics of gradients are written.

    Args:
        grad_fn: ``value_and_grad(loss)``, or what calls it.
        measure: piece to tensor, of one shape whatever the piece, such as
            ``lambda g: g.float().square().sum()``. A piece may have zeros at its end
            that belong to no parameter (a pipeline asks for the shape by one zero); it
            must not be kept or written into.

    Returns:
        a function that returns ``(what grad_fn does, total, samples)``: the sum of the
        measures over this rank's samples (over axes that split the work of one loss,
        that of stages too, it is summed; over data it is each rank's own: ``psum``
        gives that of all), and how many samples this rank had.

    Raises:
        LawError: where a rank's own gradient does not exist as such: under
            ``torch.func`` or of arguments that require grad, of ``Weighted`` losses, of
            parameters that a loss reads outside units under ``shard``, of leaves that
            ranks of the data own, or of more than one gradient call; in a pipeline, of
            leaves that stages on several ranks use, and of microbatches of unlike
            numbers of rows.

    Cost: what ``measure`` costs; a psum of its result over each set of axes that leaves
    are split over, and over a pipeline's. There, without ``shard``, the gradients of a
    stage's microbatch beside their sum.

    Source: the per-replica gradients of Johnson et al., AdaScale SGD, 2020, section 3.

    >>> import torch, fsfunc as ff
    >>> grad = ff.accumulate(ff.value_and_grad(lambda w, x: (w * x).mean()), 2)
    >>> observed = observe_gradients(grad, lambda g: g.square().sum())
    >>> (value, g), total, n = observed(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
    >>> g, total, n
    (tensor(2.), tensor(10.), 2)
    """
    check_function(grad_fn, "observe_gradients")

    @functools.partial(Transformed, grad_fn, "observe_gradients", tuple)
    def observed(*args: Any, **keywords: Any) -> tuple[Any, Tensor, int]:
        seen, f = _GradientMeasure(measure), frame()
        with inside(f.replace(handlers=(*f.handlers, seen))):
            out = grad_fn(*args, **keywords)
        return out, seen.total(), seen.samples

    return observed


class _GradientMeasure(GradientObserver):
    """Shows the gradients of the gradient calls in its reach to ``measure``."""

    called = "observe_gradients"

    sees_mean = False

    def __init__(self, measure: Callable[[Tensor], Tensor]):
        self.measure, self.samples, self.scale = measure, 0, 1.0
        self.found: dict[tuple[str, ...], Tensor] = {}
        self.begun: set[Any] = set()  # the microbatches
        # Where leaves are on ranks of a pipeline: its axes, and a zero of their sum.
        self.along: tuple[tuple[str, ...], Tensor] | None = None

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def seen(call: GradientCall) -> Outcome:
            f = frame()
            # A derivative that the loss itself takes, or an evaluation of it.
            if f.in_loss or not call.argnums:
                return run(call)
            if call.composable:
                raise LawError(UNSEEN.format("the gradients are differentiated"))
            outcome = run(call)
            return outcome.replace(shown=self._ended) if self.sees_mean else outcome

        return seen

    def _ended(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        with internal(), ignoring_axes(), torch.no_grad():
            self.take_mean(grads)
        return grads

    def take_mean(self, grads: Tree) -> None:
        """Hears the mean of all samples, before anything clips it or adds to it."""

    def begins(self, call: GradientCall) -> None:
        micro = frame().micro
        if micro in self.begun:  # the sum of two calls has samples that nobody sees
            raise LawError(UNSEEN.format("gradients are taken more than once"))
        self.begun.add(micro)
        self.scale = call.cotangent

    def lies_along(self, axes: tuple[str, ...], leaves: Sequence[Tensor]) -> None:
        """Hears that each rank of these axes sees some of the leaves.

        Args:
            leaves: like all of them, of which this rank may have none.
        """
        with internal(), torch.no_grad():
            each = {x.dtype: self.measure(x.detach().new_zeros(1)) for x in leaves}
        zeros = map(torch.zeros_like, each.values())
        self.along = axes, functools.reduce(torch.add, zeros, torch.zeros(()))

    def ends(self, outcome: Outcome) -> None:
        if outcome.weight is not None:
            raise LawError(UNSEEN.format("a Weighted loss is divided in the end"))
        self.samples += 1
        for x in tree.leaves(outcome.grads, is_leaf=is_sharded):
            self._whole(x)

    def _whole(self, x: Any) -> None:
        """A leaf that no transform answers for."""
        if not isinstance(x, Sharded):
            if isinstance(x, Tensor):
                self.see(x, ())
        elif x._local is not None:
            if x.layout.flat is not None:
                raise LawError(UNSEEN.format(f"{x.name!r} is read outside units"))
            self.see(x.local, x.layout.axes)

    def see(self, gradient: Tensor, axes: tuple[str, ...]) -> None:
        """Takes in a piece, a part over ``axes`` that split the work of one loss."""
        with internal(), torch.no_grad():
            piece = gradient.detach()
            if self.scale != 1:
                wide = torch.promote_types(piece.dtype, torch.float32)
                piece = piece.to(wide) / self.scale
            found = self.measure(piece)
            before = self.found.get(axes)
            self.found[axes] = found if before is None else before + found

    def total(self) -> Tensor:
        """The measures of all pieces, those of other blocks of split leaves too."""
        parts = [psum(x, a) if a else x for a, x in sorted(self.found.items())]
        if self.along is None:
            return functools.reduce(torch.add, parts) if parts else torch.zeros(())
        axes, zero = self.along
        found = functools.reduce(torch.add, parts, zero)
        return psum(found.to(zero.dtype), axes)


class _SampleSquares(NamedTuple):
    """The sum of all samples' squares, how many they are, the square of their mean."""

    squares: Tensor
    count: int
    mean: Tensor


class _SquareMeasure(_GradientMeasure):
    """Measures the squares of one step's samples, and that of their mean."""

    sees_mean = True

    def __init__(self):
        super().__init__(_square)
        self.means: list[Tensor] = []

    def take_mean(self, grads: Tree) -> None:
        self.means.append(global_norm(grads) ** 2)

    def all(self) -> _SampleSquares:
        """What the samples of all ranks gave.

        Raises:
            LawError: gradients that nobody saw.
            ValueError: one sample.
        """
        squares, n = self.total(), self.samples
        if len(self.means) != 1:
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
        return _SampleSquares(squares, n, self.means[0])


def _square(gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return vector_norm(gradient, dtype=wide) ** 2


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


@optimizer_factory
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
            scale below 1 or a smoothing outside [0, 1); an ``optimizer`` that keeps
            parameters or averages of them.
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
    return _AdaScale(optimizer, scale, smoothing).make_optimizer()


@dataclass(frozen=True, eq=False)
class _AdaScale:
    """The functions of such an optimizer.

    Args:
        seen: has seen one step's samples, and their mean.
    """

    optimizer: Optimizer
    scale: float | None
    smoothing: float | None
    seen: _SquareMeasure | None = None

    def make_optimizer(self) -> Optimizer:
        return Optimizer(self.init, self.update, interprets=self.interprets)

    def init(self, params: Tree) -> AdaScaleState:
        wide = tensors_by_axes(params)[1].to_real()
        # Where updates will leave them: what is loaded or compiled finds it so.
        tensors = (x for x in tree.leaves(params) if isinstance(x, Tensor))
        devices = map(computing_device, tensors)
        like = {"dtype": wide, "device": next(devices, torch.device("cpu"))}
        variance, square, iterations = (torch.zeros((), **like) for _ in range(3))
        gain = torch.ones((), **like)
        inner = self.optimizer.init(params)
        check_follows_no_params("adascale", inner)
        return AdaScaleState(variance, square, gain, iterations, inner)

    def interprets(self, state: AdaScaleState) -> GradientScope:
        handlers, inner = self.optimizer.gradient_scope(state.inner)
        seen = _SquareMeasure()
        after = replace(self, optimizer=inner, seen=seen).make_optimizer()
        return GradientScope((*handlers, seen), after)

    def update(self, grads: Tree, state: AdaScaleState, params: Tree = None):
        if self.seen is None:
            raise ValueError(
                "adascale has not seen these gradients before they were reduced: make "
                "the step by adascale(...)(grad_fn)"
            )
        squares, n, mean = self.seen.all()
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
