"""``observe_gradients``, and ``adascale``, which is an optimizer made with it.

`observe_gradients` hands each sample's gradient to a function of the user's, before it
is reduced over ranks or added to that of other microbatches. ``adascale`` measures
their squares, and multiplies updates by a gain: how much a larger batch is worth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.collective_ops import ignoring_axes
from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import get_group
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
from fsfunc.tree.types import Leaf

_P = ParamSpec("_P")
_R = TypeVar("_R")


@api_boundary
def observe_gradients(
    grad_fn: Callable[_P, _R], measure: Callable[[Tensor], Tensor]
) -> Callable[_P, tuple[_R, Tensor, int]]:
    """Returns ``grad_fn`` that also measures each sample's gradient before any sum.

    A gradient call over n ranks in c microbatches, of ``accumulate`` or ``pipeline``,
    is a mean over n c gradients, each a sample of the same one. ``measure`` is called
    once with each piece of this rank's c samples (the flat buffer of a unit's
    parameters, or a whole leaf), when it is complete and before it is reduced. This
    takes no memory, but for parameters that several unit calls of one sample share.
    Gradient noise scales, AdaScale and statistics of gradients are written so.

    Args:
        grad_fn: ``value_and_grad(loss)``, or what calls it.
        measure: piece to tensor, of one shape whatever the piece, such as
            ``lambda g: g.float().square().sum()``. A piece may have zeros at its end
            that belong to no parameter (a pipeline asks for the shape by one zero); it
            must not be kept or written into.

    Returns:
        a function that returns ``(what grad_fn returns, total, samples)``. ``total`` is
        the sum of the measures over this rank's samples. It is summed over axes that
        split the work of one loss, also over stages; over axes of the data it is each
        rank's own, and ``psum`` gives that of all ranks. ``samples`` is the number of
        this rank's samples.

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
    def observed(*args: _P.args, **keywords: _P.kwargs) -> tuple[_R, Tensor, int]:
        observer, outer = _GradientMeasure(measure), frame()
        with inside(outer.replace(handlers=(*outer.handlers, observer))):
            gradients = grad_fn(*args, **keywords)
        return gradients, observer.total(), observer.samples

    return observed


class _GradientMeasure(GradientObserver):
    """Calls ``measure`` with the gradients of the gradient calls inside of it.

    Whoever completes a gradient calls `see` with it: the runtime of ``shard`` before it
    reduces a buffer, a pipeline for each stage, and `ends` for all other leaves.
    """

    called = "observe_gradients"

    sees_mean = False

    def __init__(self, measure: Callable[[Tensor], Tensor]):
        self.measure, self.samples, self.scale = measure, 0, 1.0
        # By the axes that a leaf's parts are split over: the sum of what was measured.
        self.sums: dict[tuple[str, ...], Tensor] = {}
        self.begun: set[tuple[tuple[int, int], ...]] = set()  # microbatches
        # In a pipeline: its axes, and a zero of the shape of a measure.
        self.pipeline: tuple[tuple[str, ...], Tensor] | None = None

    def gradient(
        self, run: Callable[[GradientCall], Outcome]
    ) -> Callable[[GradientCall], Outcome]:
        def observed(call: GradientCall) -> Outcome:
            # A derivative that the loss itself takes, or an evaluation of it.
            if frame().in_loss or not call.argnums:
                return run(call)
            if call.composable:
                raise LawError(UNSEEN.format("the gradients are differentiated"))
            outcome = run(call)
            return (
                outcome.replace(after_mean=self._show_mean)
                if self.sees_mean
                else outcome
            )

        return observed

    def _show_mean(self, grads: tuple[Tree, ...]) -> tuple[Tree, ...]:
        with internal(), ignoring_axes(), torch.no_grad():
            self.take_mean(grads)
        return grads

    def take_mean(self, grads: Tree) -> None:
        """Called with the mean of all samples, before anything clips or changes it."""

    def begins(self, call: GradientCall) -> None:
        micro = frame().micro
        # A sample of the sum of two gradient calls would be a sum that nobody sees.
        if micro in self.begun:
            raise LawError(UNSEEN.format("gradients are taken more than once"))
        self.begun.add(micro)
        self.scale = call.cotangent

    def lies_along(self, axes: tuple[str, ...], leaves: Sequence[Tensor]) -> None:
        """Called where each rank of some axes sees only some leaves, as in a pipeline.

        Args:
            leaves: like all of them, of which this rank may have none.
        """
        # All ranks must join the sum in `total`, with one shape and dtype: so the shape
        # is asked for by a zero, of each dtype that any rank has.
        with internal(), torch.no_grad():
            measured = {x.dtype: self.measure(x.detach().new_zeros(1)) for x in leaves}
        zeros = map(torch.zeros_like, measured.values())
        self.pipeline = axes, functools.reduce(torch.add, zeros, torch.zeros(()))

    def ends(self, outcome: Outcome) -> None:
        if outcome.weight is not None:
            raise LawError(UNSEEN.format("a Weighted loss is divided in the end"))
        self.samples += 1
        for x in tree.leaves(outcome.grads, is_leaf=is_sharded):
            self._see_leaf(x)

    def _see_leaf(self, x: Leaf) -> None:
        """Takes in a leaf's gradient, if no transform has shown it before."""
        if not isinstance(x, Sharded):
            if isinstance(x, Tensor):
                self.see(x, ())
        elif x._local is not None:  # a buffer's is still to be reduced, and was shown
            if x.layout.flat is not None:
                raise LawError(UNSEEN.format(f"{x.name!r} is read outside units"))
            self.see(x.local, x.layout.axes)

    def see(self, gradient: Tensor, axes: tuple[str, ...]) -> None:
        """Measures a piece: a part over ``axes``, which split the work of one loss."""
        with internal(), torch.no_grad():
            piece = gradient.detach()
            if self.scale != 1:  # under `loss_scale`
                wide = torch.promote_types(piece.dtype, torch.float32)
                piece = piece.to(wide) / self.scale
            measured = self.measure(piece)
            sum_before = self.sums.get(axes)
            self.sums[axes] = measured if sum_before is None else sum_before + measured

    def total(self) -> Tensor:
        """Returns the sum over all pieces, also over other ranks' parts of a leaf."""
        parts = [psum(x, axes) if axes else x for axes, x in sorted(self.sums.items())]
        if self.pipeline is None:
            return functools.reduce(torch.add, parts) if parts else torch.zeros(())
        axes, zero = self.pipeline
        local_total = functools.reduce(torch.add, parts, zero)
        return psum(local_total.to(zero.dtype), axes)


class _SampleSquares(NamedTuple):
    """What AdaScale's equation takes of a step's samples.

    ``sum_of_squares`` is sum |g_i|^2, ``square_of_mean`` |mean|^2.
    """

    sum_of_squares: Tensor
    count: int
    square_of_mean: Tensor


class _SquareMeasure(_GradientMeasure):
    """Measures the squares of one step's samples, and the square of their mean."""

    sees_mean = True

    def __init__(self) -> None:
        super().__init__(_square)
        self.squares_of_means: list[Tensor] = []  # one, or the step is refused

    def take_mean(self, grads: Tree) -> None:
        self.squares_of_means.append(global_norm(grads) ** 2)

    def of_all_ranks(self) -> _SampleSquares:
        """Returns the squares of all ranks' samples.

        Raises:
            LawError: gradients that this did not see.
            ValueError: one sample.
        """
        squares, n = self.total(), self.samples
        if len(self.squares_of_means) != 1:
            raise LawError(UNSEEN.format("a transform replaces the gradients"))
        if axes := averaged_axes():
            squares, n = psum(squares, axes), n * get_group(axes).size
        if frame().tracer is not None:
            n = max(n, 2)  # a step may be tried on one microbatch of several
        if n < 2:
            raise ValueError(
                "adascale compares the samples of a step, and this step has one: shard "
                "it over two ranks or more, or accumulate(step, 2)"
            )
        return _SampleSquares(squares, n, self.squares_of_means[0])


def _square(gradient: Tensor) -> Tensor:
    """Returns the sum of squares of a gradient's elements, in float32 or wider."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return vector_norm(gradient, dtype=wide) ** 2


class AdaScaleState(NamedTuple):
    """The averages, the last gain, and the state of the optimizer within.

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
    """Multiplies the updates of ``optimizer`` by AdaScale's gain, from 1 to S.

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
    """The functions of an `adascale`.

    Args:
        observer: has seen one step's samples, and their mean; None before the step.
    """

    optimizer: Optimizer
    scale: float | None
    smoothing: float | None
    observer: _SquareMeasure | None = None

    def make_optimizer(self) -> Optimizer:
        return Optimizer(self.init, self.update, interprets=self.interprets)

    def init(self, params: Tree) -> AdaScaleState:
        wide = tensors_by_axes(params)[1].to_real()
        # On the device where updates will leave them: a load or a compiled step finds
        # the first state like later ones.
        tensors = (x for x in tree.leaves(params) if isinstance(x, Tensor))
        devices = map(computing_device, tensors)
        options = {"dtype": wide, "device": next(devices, torch.device("cpu"))}
        variance, square, iterations = (torch.zeros((), **options) for _ in range(3))
        gain = torch.ones((), **options)
        inner = self.optimizer.init(params)
        check_follows_no_params("adascale", inner)
        return AdaScaleState(variance, square, gain, iterations, inner)

    def interprets(self, state: AdaScaleState) -> GradientScope:
        handlers, inner = self.optimizer.gradient_scope(state.inner)
        observer = _SquareMeasure()
        functions = replace(self, optimizer=inner, observer=observer)
        return GradientScope((*handlers, observer), functions.make_optimizer())

    def update(
        self, grads: Tree, state: AdaScaleState, params: Tree = None
    ) -> tuple[Tree, AdaScaleState]:
        if self.observer is None:
            raise ValueError(
                "adascale has not seen these gradients before they were reduced: make "
                "the step by adascale(...)(grad_fn)"
            )
        squares, n, square_of_mean = self.observer.of_all_ranks()
        scale = n if self.scale is None else self.scale
        decay = max(1 - n / 1000, 0.0) if self.smoothing is None else self.smoothing
        variance = (squares - n * square_of_mean) * (scale / n / (n - 1))
        square = square_of_mean - variance / scale
        # Each is bounded by itself, as FairScale does it. That the averages start at 0
        # makes both too small by one factor, which cancels in the gain.
        v = decay * state.variance + (1 - decay) * variance.clamp(min=1e-6)
        s = decay * state.square + (1 - decay) * square.clamp(min=0.0)
        gain = (v + s) / (v / scale + s)
        updates, inner = self.optimizer.update(grads, state.inner, params)
        new_state = AdaScaleState(v, s, gain, state.iterations + gain, inner)
        return tree_scale(updates, gain), new_state
