"""The protocol of an optimizer: what to write for one, and all that follows from it.

An optimizer is two functions, and a third where a kernel does the step in one pass::

    init(params) -> state
    update(grads, state, params) -> (updates, state)
    apply(grads, state, params) -> (params, state)

``update`` is the equation of the paper: pure, made of operations that differentiate;
updates are **added** to the parameters (optax's contract; so the learning rate enters
with its sign). ``apply`` is `update` and the addition. Left out, it is made of them.

``apply`` has two phases, with a ``yield`` between them, and may write in place behind
it. All checks, norms and collectives stand before the ``yield``, so that of several
optimizers that share a step none writes before all are ready, and a step that fails
leaves the state as it was. An ``apply`` without a ``yield`` is all writing.

A kernel is given to `in_place.fused`, which calls it with lists of dense tensors of one
dtype on one device: the flat buffers of whatever this rank holds of the parameters, the
gradients and the moments. It writes into parameters and moments, and knows nothing of
layouts, donation or offload: under ``donate`` it is given the state's own memory, else
copies; what lies with the host is brought, and sent back; complex numbers are pairs.

>>> import torch
>>> from fsfunc.optim.in_place import fused
>>> from fsfunc.optim.leaves import zeros_like
>>> from fsfunc.optim.matching import Matched
>>> def heavy_ball(rate, beta):  # m = beta m + g, p = p - rate m
...     def step(p, g, m, decay):
...         m = beta * m + g
...         return -rate * m, m
...     def update(grads, m, params=None):
...         like = grads if params is None else params
...         return tuple(Matched.of(like, grads, m).composed(step))
...     def kernel(params, grads, momenta):
...         torch._foreach_mul_(momenta, beta)
...         torch._foreach_add_(momenta, grads)
...         torch._foreach_add_(params, momenta, alpha=-rate)
...     def apply(grads, m, params):
...         matched = Matched.of(params, grads, m)  # raises where they do not fit
...         yield
...         return tuple(fused(matched, kernel))
...     return Optimizer(zeros_like, update, apply, elementwise=True)
>>> optimizer, w = heavy_ball(0.5, 0.9), torch.ones(2)
>>> optimizer.apply(torch.ones(2), optimizer.init(w), w)
(tensor([0.5000, 0.5000]), tensor([1., 1.]))

Where each element is treated by itself, less is to be written: an equation, and perhaps
its kernel, make an `element_rules.ElementRule`, and the rest follows, with moments in a
dtype of their own or in 8 bits, and one compiled pass under ``jit`` (see `adam`).

An optimizer around another hands the phases on, in one function for update and apply:
see `from_phases`. One that has a say in how gradients are taken, as what scales a loss,
gives the interpretations to take them in: see `GradientScope`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, Self

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collective_ops import claim, claiming
from fsfunc.comm.descriptions import stated
from fsfunc.comm.mesh import HERE
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Interpretation, Transformed, frame, inside
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import Tree
from fsfunc.optim.matching import Matched
from fsfunc.optim.schedules import check_ranges
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.plain_leaves import holds_own, laid_as, lay_as, lay_leaves

State = Any
Init = Callable[[Tree], State]
Update = Callable[..., tuple[Tree, State]]
Phases = Generator[None, None, Any]  # ends with (params or updates, state)
Apply = Callable[[Tree, State, Tree], Any]  # -> Phases, or (params, state) at once


class GradientScope(NamedTuple):
    """How the gradients of one step are taken, and what applies them then.

    Args:
        handlers: the interpretations inside which they are taken, outermost first.
        optimizer: reads from these, when it makes the step, what they have seen.
    """

    handlers: tuple[Interpretation, ...]
    optimizer: Optimizer


class _Functions(NamedTuple):
    init: Init
    update: Update
    apply: Callable[[Tree, State, Tree], tuple[Tree, State]]


class Optimizer(_Functions):
    """The functions of an optimizer; called on a gradient function, a train step.

    Args:
        init: ``init(params) -> state``, a pytree of tensors and numbers. Of parameters
            that are laid out, its plain leaves are one value on all ranks.
        update: ``update(grads, state, params=None) -> (updates, state)``: pure, made of
            operations that differentiate; updates are added to the parameters, and None
            stands for none. So it does in ``grads``, for what is no floating tensor or
            was not reached: `ff.tree.map` hands it to your function.
        apply: ``apply(grads, state, params) -> (params, state)``: the same as update
            and addition, which may be left out. As a generator function it has two
            phases: all checks, norms and collectives come before its ``yield``, and
            behind it it only writes; so several optimizers can share a step that,
            failing, leaves the state as it was. It may write into tensors of ``params``
            and ``state`` of which ``frame().donated`` says so (`Donation.may_write`),
            and then tells it which leaves it took; never into ``grads``.
        interprets: ``interprets(state) -> Reading``: inside which interpretations a
            train step takes its gradients, where the optimizer has a say in that.
        elementwise: your word that `update` treats each element by itself, so that a
            step of some leaves, or of parts of them, is that part of the step:
            `step_in_backward` asks for it.
        configuration: by name, what tells it from others of its kind. Ranks compare
            it, and its repr shows it; without it, the names of its functions alone.

    >>> import torch
    >>> halve = Optimizer(
    ...     init=lambda params: (),
    ...     update=lambda grads, state, params=None: ({"w": -grads["w"] / 2}, state),
    ... )
    >>> halve.apply({"w": torch.ones(2)}, (), {"w": torch.ones(2)})
    ({'w': tensor([0.5000, 0.5000])}, ())
    """

    called: str
    configuration: tuple[tuple[str, Any], ...]
    interprets: Callable[[State], GradientScope] | None
    elementwise: bool
    _how: SimpleNamespace  # its names, for what claims it: itself would be a circle
    _update: Update
    _phases: Callable[..., Phases]

    def __new__(
        cls,
        init: Init,
        update: Update,
        apply: Apply | None = None,
        *,
        interprets: Callable[[State], GradientScope] | None = None,
        elementwise: bool = False,
        configuration: Mapping[str, Any] | None = None,
    ) -> Self:
        apply = apply_from_update(update) if apply is None else apply
        phases = apply if inspect.isgeneratorfunction(apply) else _phases_of_writer(apply)
        how, whole = SimpleNamespace(), _lay_out_results(phases)
        claimed = [claiming(f, _COMPARED_AS, how) for f in (update, whole)]
        self = super().__new__(cls, _lay_out_state(init), *claimed)
        self._how, self._update, self._phases = how, update, phases
        self.interprets, self.elementwise = interprets, elementwise
        known = {"init": init, "update": update, **(configuration or {})}
        return self.known_as("Optimizer", known)

    def known_as(self, called: str, configuration: Mapping[str, Any]) -> Self:
        """Itself, that says it was made by this call: see `optimizer_factory`."""
        self.called, self.configuration = called, tuple(configuration.items())
        vars(self._how).update(called=called, configuration=self.configuration)
        return self

    def _replace(self, **changes: Any) -> Optimizer:
        how = {
            "apply": self._phases,  # both of them: `apply` runs them at once
            "interprets": self.interprets,
            "elementwise": self.elementwise,
        }
        other = Optimizer(**(self._asdict() | how | changes))
        return other.known_as(self.called, dict(self.configuration) | changes)

    def __repr__(self) -> str:
        return stated(self)

    def phases(self, grads: Tree, state: State, params: Tree, adds: bool) -> Phases:
        """Makes the step, for an optimizer around to run it with ``yield from``.

        Args:
            adds: whether it ends as `apply` does, or as `update`.
        """
        if adds:
            return self._phases(grads, state, params)
        return _phases_of_update(self._update, grads, state, params)

    def reading(self, state: State, params: Tree = None) -> GradientScope:
        """Tells how the gradients of a step are taken that begins in this state.

        Args:
            params: those of the train step, where nothing is around this optimizer.
        """
        return GradientScope((), self) if self.interprets is None else self.interprets(state)

    def __call__(self, grad_fn: Callable[..., Any]) -> Callable[..., Any]:
        """A train step ``step(state, *batch) -> (state, metrics)``.

        Args:
            grad_fn: ``grad_fn(params, *batch) -> (value, grads)``, such as
                ``value_and_grad(loss)``; with auxiliary results, ``((value, aux),
                grads)``.

        Returns:
            a step over any state with ``.params`` and ``.apply_gradients(grads,
            optimizer)``, and ``.opt_state`` where the optimizer ``interprets``. Its
            metrics are ``{"loss": value}``, and ``"aux"`` if any.

        >>> import torch
        >>> from types import SimpleNamespace
        >>> class State(SimpleNamespace):
        ...     def apply_gradients(self, grads, optimizer):
        ...         params, _ = optimizer.apply(grads, (), self.params)
        ...         return State(params=params)
        >>> from fsfunc.optim.transformations import scale
        >>> step = scale(-0.5)(lambda w, x: ((w * x).sum(), x))
        >>> step(State(params=torch.ones(2)), torch.tensor([1.0, 2.0]))
        (State(params=tensor([0.5000, 0.0000])), {'loss': tensor(3.)})
        """
        check_function(grad_fn, "an optimizer")

        def train_step(state: Any, *batch: Any, **named: Any) -> tuple[Any, dict]:
            claim(self, "the optimizer that makes the step")
            run = partial(grad_fn, state.params, *batch, **named)
            handlers, optimizer = self.reading(
                getattr(state, "opt_state", None), state.params
            )
            if handlers:
                f = frame()
                with inside(f.replace(handlers=(*f.handlers, *handlers))):
                    value, grads = run()
            else:
                value, grads = run()
            if isinstance(value, tuple):
                metrics = dict(zip(("loss", "aux"), value, strict=True))
            else:
                metrics = {"loss": value}
            return state.apply_gradients(grads, optimizer), metrics

        return Transformed(grad_fn, self.called, tuple, train_step, train_step)


_P = ParamSpec("_P")


def optimizer_factory(make: Callable[_P, Optimizer]) -> Callable[_P, Optimizer]:
    """``make``, whose arguments are checked; its optimizers are known by them.

    Raises:
        TypeError, ValueError: an argument out of its range: see `check_ranges`.
    """
    signature = inspect.signature(make)

    @api_boundary
    @functools.wraps(make)
    def made(*args: _P.args, **keywords: _P.kwargs) -> Optimizer:
        given = signature.bind(*args, **keywords)
        known = signature.parameters
        new = {k: x for k, x in given.arguments.items() if x is not known[k].default}
        check_ranges(make.__name__, **new)
        given.apply_defaults()
        optimizer = make(*args, **keywords)
        return optimizer.known_as(make.__name__, given.arguments)

    return made


def from_phases(
    init: Init,
    phases: Callable[..., Phases],
    *,
    interprets: Callable[[State], GradientScope] | None = None,
    elementwise: bool = False,
) -> Optimizer:
    """Makes an optimizer of one function for update and apply, as around another one.

    Args:
        phases: ``phases(grads, state, params, adds)``, a generator function as `apply`
            is. Where it ``adds`` it ends with (params, state), otherwise with
            (updates, state). Of an optimizer within it runs ``yield from
            optimizer.phases(grads, state.inner, params, adds)``; of several, each up
            to its ``yield`` by `begin_step`, and then, behind its own, each to its end by
            `finish_step`. No ``with`` may be open at a ``yield``: what runs between the
            phases would be in it.
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        return finish_step(phases(grads, state, params, False))

    apply = partial(phases, adds=True)
    return Optimizer(
        init, update, apply, interprets=interprets, elementwise=elementwise
    )


def begin_step(phases: Phases) -> Phases:
    """Runs the first phase of a step; what is left of it is for `finish_step`."""
    try:
        next(phases)
    except StopIteration as end:  # it had nothing to write
        return _ended_phases(end.value)
    return phases


def _ended_phases(result: Any) -> Phases:
    return result
    yield


def finish_step(phases: Phases) -> tuple[Any, State]:
    """Runs the phases of a step that are left, and returns what it ends with."""
    while True:
        try:
            next(phases)
        except StopIteration as end:
            return end.value


def apply_from_update(update: Update) -> Apply:
    """Makes the ``apply`` of an ``update``, which differentiates as that does."""

    def apply(grads: Tree, state: State, params: Tree) -> Phases:
        updates, state = update(grads, state, params)
        matched = Matched.of(params, updates)
        yield
        return _sum_matched(matched), state

    return apply


def update_from_apply(
    apply: Apply, grads: Tree, state: State, params: Tree
) -> tuple[Tree, State]:
    """Makes an update of an ``apply``: the differences that it makes to parameters."""
    with inside(frame().replace(donated=None)):
        new, after = finish_step(apply(grads, state, params))
    matched = Matched.of(params, grads, new)
    return matched.composed(lambda p, g, q, _: (q - p, q))[0], after


def _phases_of_update(update: Update, *args: Any) -> Phases:
    """Computes an update, which writes nothing, in the first phase."""
    done = update(*args)
    yield
    return done


def _phases_of_writer(apply: Apply) -> Apply:
    """Has an ``apply`` that writes from its beginning wait for the second phase."""

    def phases(grads: Tree, state: State, params: Tree) -> Phases:
        yield
        done = apply(grads, state, params)
        return finish_step(done) if isinstance(done, Generator) else done

    return phases


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, in the dtypes of ``params``.

    Args:
        params: any tree; what is no floating tensor stays as it is.
        updates: a tree like it; None leaves a parameter as it is.

    Raises:
        TreeMismatch: the trees do not fit; the message names the path.

    Cost: no communication; in place under `donate`.

    >>> import torch
    >>> apply_updates({"w": torch.ones(2), "n": 3}, {"w": torch.ones(2), "n": None})
    {'w': tensor([2., 2.]), 'n': 3}
    """
    return _sum_matched(Matched.of(params, updates))


def sum_out_of_place(params: Tree, updates: Tree) -> Tree:
    """The result of `apply_updates`, in memory of its own."""
    return Matched.of(params, updates).summed(_sum_in_param_dtype)


def _sum_matched(matched: Matched) -> Tree:
    """Adds two trees, in place where that may be and nobody asks for a graph."""
    if matched.differentiated:
        return matched.summed(_sum_in_param_dtype)
    return run_kernel(matched, torch._foreach_add_)[0]


def _sum_in_param_dtype(p: Tensor, u: Tensor) -> Tensor:
    return p + u.to(p.dtype)


def check_takes_plain_gradients(what: str, optimizer: Optimizer) -> None:
    """Raise ValueError where ``optimizer`` has a say in how gradients are taken."""
    if optimizer.interprets is not None:
        raise ValueError(
            f"{what} is given an optimizer that takes gradients in a way of its own, "
            f"as loss_scale does: put that around, as in loss_scale({what}(...))"
        )


def _lay_out_results(apply: Callable[..., Phases]) -> Apply:
    """``apply`` at once; plain leaves outside of steps are laid out as those before."""

    @functools.wraps(apply)
    def laid(grads: Any, state: Any, params: Any) -> Any:
        new = finish_step(apply(grads, state, params))
        if HERE.get() is not None and not (frame().runtimes or frame().tracer):
            lay_as(new, (params, state))
        return new

    return laid


def _lay_out_state(init: Init) -> Init:
    """``init``, of which the plain leaves are laid out as the parameters are."""

    @functools.wraps(init)
    def laid(params: Any) -> Any:
        if (path := holds_own(params)) is not None:
            raise ValueError(_RANK_LOCAL.format(path))
        state = init(params)
        leaves = tree.leaves(params, is_sharded)
        some = any(is_sharded(x) or laid_as(x) is not None for x in leaves)
        return lay_leaves(state) if some else state

    return laid


_COMPARED_AS = "the optimizer that applies gradients"
_RANK_LOCAL = (
    "an optimizer is given {!r}, which is each rank's own: norms and moments over it "
    "and leaves that are one value have no meaning. Give it those alone, and keep the "
    "rank's own elsewhere, as in the extra of a TrainState"
)
