"""The protocol of an optimizer: what to write for one, and all that follows from it.

`TrainState.apply_gradients` calls ``apply`` once a step, with the gradients that
``value_and_grad`` returned; `init_state` calls ``init`` once, with parameters that are
laid out already. An optimizer is two functions, and a third where a kernel does the
step in one pass::

    init(params) -> state
    update(grads, state, params) -> (updates, state)
    apply(grads, state, params) -> (params, state)

``update`` is the equation of the paper: pure, made of operations that differentiate;
updates are **added** to the parameters (optax's contract; so the learning rate enters
with its sign). ``apply`` is `update` and the addition. Left out, it is made of them.

``apply`` has two phases, with a ``yield`` between them, and may write in place after
it. All checks, norms and collectives stand before the ``yield``. So when several
optimizers share a step, none writes before all are ready, and a step that fails leaves
the state as it was. An ``apply`` without a ``yield`` only writes.

`in_place.run_kernel` runs a kernel: it calls it with lists of dense tensors of one
dtype on one device, which are the flat buffers of whatever this rank holds of the
parameters, the gradients and the moments. The kernel writes into parameters and
moments, and knows nothing of layouts, donation or offload. Under ``donate`` it gets the
state's own memory, otherwise copies. Tensors in host memory are fetched before it and
written back after it. Complex numbers are pairs of real ones.

>>> import torch
>>> from fsfunc.optim.in_place import run_kernel
>>> from fsfunc.optim.leaves import zeros_like
>>> from fsfunc.optim.matching import Matched
>>> def heavy_ball(rate, beta):  # m = beta m + g, p = p - rate m
...     def step(p, g, m, decay):
...         m = beta * m + g
...         return -rate * m, m
...     def update(grads, m, params=None):
...         like = grads if params is None else params
...         return tuple(Matched.of(like, grads, m).map_rule(step))
...     def kernel(params, grads, momenta):
...         torch._foreach_mul_(momenta, beta)
...         torch._foreach_add_(momenta, grads)
...         torch._foreach_add_(params, momenta, alpha=-rate)
...     def apply(grads, m, params):
...         matched = Matched.of(params, grads, m)  # raises where they do not fit
...         yield
...         return tuple(run_kernel(matched, kernel))
...     return Optimizer(zeros_like, update, apply, elementwise=True)
>>> optimizer, w = heavy_ball(0.5, 0.9), torch.ones(2)
>>> optimizer.apply(torch.ones(2), optimizer.init(w), w)
(tensor([0.5000, 0.5000]), tensor([1., 1.]))

An optimizer that treats each element by itself needs less: its equation, and perhaps a
kernel, make an `element_rules.ElementRule`. The rest follows from that, also moments in
a dtype of their own or in 8 bits, and one compiled pass under ``jit`` (see `adam`).

An optimizer around another one passes the phases on, in one function for update and
apply: see `from_phases`. An optimizer that changes how gradients are computed, such as
`loss_scale`, names the interpretations to compute them in: see `GradientScope`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import (
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    overload,
)

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collective_ops import claim_equal, claiming_equal
from fsfunc.comm.descriptions import describe_value
from fsfunc.comm.mesh import HERE
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Interpretation, Transformed, frame, inside
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import Tree
from fsfunc.optim.matching import Matched
from fsfunc.optim.schedules import check_ranges
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.plain_leaves import (
    copy_placements,
    find_rank_local,
    lay_leaves,
    placement_of,
)
from fsfunc.tree.types import PyTree

State: TypeAlias = PyTree  # an optimizer's: tensors and plain numbers
Init = Callable[[Tree], State]
Update = Callable[..., tuple[Tree, State]]
Step = tuple[Tree, State]  # (params or updates, the next state)
Phases = Generator[None, None, Step]  # one ``yield`` between checks and writes
Apply = Callable[[Tree, State, Tree], Any]  # -> Phases, or a Step at once


_P = ParamSpec("_P")
_Params = TypeVar("_Params", bound=Any)


class Trainable(Protocol):
    """A state that a train step takes: `TrainState`, or one of your own."""

    @property
    def params(self) -> Any:
        """The tree that gradients are taken by."""
        ...

    def apply_gradients(self, grads: Any, optimizer: Any) -> Any:
        """Returns the state after one step of ``optimizer``."""
        ...


_Trained = TypeVar("_Trained", bound=Trainable)


class GradientScope(NamedTuple):
    """The interpretations that one step's gradients are computed in, and what follows.

    Args:
        handlers: the interpretations, outermost first.
        optimizer: the optimizer that applies these gradients. It reads from the
            handlers what they have seen.
    """

    handlers: tuple[Interpretation, ...]
    optimizer: Optimizer


class _Functions(NamedTuple):
    init: Init
    update: Update
    apply: Callable[[Tree, State, Tree], tuple[Tree, State]]


class Optimizer(_Functions):
    """An optimizer: its functions. Called on a gradient function it makes a train step.

    Args:
        init: ``init(params) -> state``, a pytree of tensors and numbers. If parameters
            have layouts, its plain leaves are one value on all ranks.
        update: ``update(grads, state, params=None) -> (updates, state)``: pure, made of
            operations that differentiate. Updates are added to the parameters; None is
            no update. A gradient is None for a leaf that is no floating tensor, or that
            the loss does not use: `ff.tree.map` passes it to your function.
        apply: ``apply(grads, state, params) -> (params, state)``: the same as update
            and addition. It may be left out. As a generator function it has two phases:
            all checks, norms and collectives come before its ``yield``, and after it it
            only writes. So several optimizers can share a step, and a step that fails
            leaves the state as it was. It may write into tensors of ``params`` and
            ``state`` if ``frame().donated`` allows it (`Donation.may_write`), and then
            tells that which leaves it took (`Donation.mark_written`); never into
            ``grads``.
        interprets: ``interprets(state) -> GradientScope``: the interpretations that a
            train step computes its gradients in, if the optimizer needs some.
        elementwise: whether `update` treats each element by itself, so that a step of
            some leaves, or of parts of them, is that part of the whole step.
            `step_in_backward` requires it, and takes your word for it.
        configuration: by name, what tells it from others of its kind. Ranks compare
            it, and its repr shows it. By default the names of its functions.

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
    # What ranks compare of it. Its functions hold this object and not the optimizer:
    # a circle would keep its tensors until the next garbage collection.
    _description: SimpleNamespace
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
        phases = (
            apply if inspect.isgeneratorfunction(apply) else _phases_of_writer(apply)
        )
        description, whole = SimpleNamespace(), _lay_out_results(phases)
        # Also called by hand, outside of `apply_gradients`, they tell which optimizer
        # runs: with a rate that differs between ranks each part would train by its own.
        claimed = [
            claiming_equal(f, _COMPARED_AS, description) for f in (update, whole)
        ]
        self = super().__new__(cls, _lay_out_state(init), *claimed)
        self._description, self._update, self._phases = description, update, phases
        self.interprets, self.elementwise = interprets, elementwise
        arguments = {"init": init, "update": update, **(configuration or {})}
        return self.described_as("Optimizer", arguments)

    def described_as(self, called: str, configuration: Mapping[str, Any]) -> Self:
        """Sets the call that made it, which its repr shows and ranks compare.

        Returns itself. See `optimizer_factory`.
        """
        self.called, self.configuration = called, tuple(configuration.items())
        vars(self._description).update(called=called, configuration=self.configuration)
        return self

    def _replace(self, **changes: Any) -> Optimizer:
        options = {
            "apply": self._phases,  # with both phases: the field runs them at once
            "interprets": self.interprets,
            "elementwise": self.elementwise,
        }
        other = Optimizer(**(self._asdict() | options | changes))
        return other.described_as(self.called, dict(self.configuration) | changes)

    def __repr__(self) -> str:
        return describe_value(self)

    def phases(
        self, grads: Tree, state: State, params: Tree, returns_params: bool
    ) -> Phases:
        """Makes the step; an optimizer around this one runs it with ``yield from``.

        Args:
            returns_params: whether it ends with (params, state), as `apply` does, or
                with (updates, state), as `update` does.
        """
        if returns_params:
            return self._phases(grads, state, params)
        return _phases_of_update(self._update, grads, state, params)

    def gradient_scope(self, state: State, params: Tree = None) -> GradientScope:
        """Returns how to compute the gradients of a step that begins in this state.

        Args:
            params: the parameters of the train step; None where another optimizer is
                around this one.
        """
        return (
            GradientScope((), self)
            if self.interprets is None
            else self.interprets(state)
        )

    @overload
    def __call__(
        self, grad_fn: Callable[Concatenate[_Params, _P], tuple[Tensor, _Params]]
    ) -> Callable[Concatenate[_Trained, _P], tuple[_Trained, dict[str, Tensor]]]: ...
    @overload
    def __call__(
        self, grad_fn: Callable[Concatenate[_Params, _P], tuple[Any, _Params]]
    ) -> Callable[Concatenate[_Trained, _P], tuple[_Trained, dict[str, Any]]]: ...
    def __call__(self, grad_fn: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        """Makes a train step ``step(state, *batch) -> (state, metrics)``.

        Args:
            grad_fn: ``grad_fn(params, *batch) -> (value, grads)``, such as
                ``value_and_grad(loss)``; with auxiliary results, ``((value, aux),
                grads)``.

        Returns:
            a step over any state with ``.params`` and ``.apply_gradients(grads,
            optimizer)``, and ``.opt_state`` if the optimizer ``interprets``. Its
            metrics are ``{"loss": value}``, and ``"aux"`` if there is any.

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

        def train_step(state: Any, *batch: Any, **keywords: Any) -> tuple[Any, dict]:
            claim_equal(self, "the optimizer that makes the step")
            run = partial(grad_fn, state.params, *batch, **keywords)
            handlers, optimizer = self.gradient_scope(
                getattr(state, "opt_state", None), state.params
            )
            if handlers:
                outer = frame()
                with inside(outer.replace(handlers=(*outer.handlers, *handlers))):
                    value, grads = run()
            else:
                value, grads = run()
            if isinstance(value, tuple):  # (loss, aux): `value_and_grad(has_aux=True)`
                metrics = dict(zip(("loss", "aux"), value, strict=True))
            else:
                metrics = {"loss": value}
            return state.apply_gradients(grads, optimizer), metrics

        return Transformed(grad_fn, self.called, tuple, train_step, train_step)


def optimizer_factory(make: Callable[_P, Optimizer]) -> Callable[_P, Optimizer]:
    """Wraps a public function that makes an optimizer, such as `sgd`.

    The wrapper checks the arguments, and records them in the optimizer: its repr shows
    them, and ranks compare them.

    Raises:
        TypeError, ValueError: an argument out of its range: see `check_ranges`.
    """
    signature = inspect.signature(make)

    @api_boundary
    @functools.wraps(make)
    def checked(*args: _P.args, **keywords: _P.kwargs) -> Optimizer:
        bound, parameters = signature.bind(*args, **keywords), signature.parameters
        # Defaults are not checked: some are None where a given value must be a number.
        changed = {
            name: x
            for name, x in bound.arguments.items()
            if x is not parameters[name].default
        }
        check_ranges(make.__name__, **changed)
        bound.apply_defaults()
        optimizer = make(*args, **keywords)
        return optimizer.described_as(make.__name__, bound.arguments)

    return checked


def from_phases(
    init: Init,
    phases: Callable[..., Phases],
    *,
    interprets: Callable[[State], GradientScope] | None = None,
    elementwise: bool = False,
) -> Optimizer:
    """Makes an optimizer from one function that is both its update and its apply.

    Optimizers around other optimizers are written so.

    Args:
        phases: ``phases(grads, state, params, returns_params)``, a generator function
            as ``apply`` may be. It ends with (params, state) if ``returns_params``, and
            with (updates, state) otherwise. One optimizer within it runs by ``yield
            from optimizer.phases(grads, state.inner, params, returns_params)``. Several
            run each up to its ``yield`` by `begin_step`, and after its own ``yield``
            each to its end by `finish_step`. No ``with`` may be open at a ``yield``:
            whatever runs between the phases would be inside of it.
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        return finish_step(phases(grads, state, params, False))

    apply = partial(phases, returns_params=True)
    return Optimizer(
        init, update, apply, interprets=interprets, elementwise=elementwise
    )


def begin_step(phases: Phases) -> Phases:
    """Runs the first phase of a step; `finish_step` runs what is left."""
    try:
        next(phases)
    except StopIteration as end:  # it had nothing to write
        return _ended_phases(end.value)
    return phases


def _ended_phases(step: Step) -> Phases:
    """Makes a generator that ends at once with ``step``."""
    return step
    yield  # which makes this function a generator


def finish_step(phases: Phases) -> Step:
    """Runs what is left of a step; returns (params or updates, state)."""
    while True:
        try:
            next(phases)
        except StopIteration as end:
            return end.value


def apply_from_update(update: Update) -> Apply:
    """Makes an ``apply`` from an ``update``; it differentiates as the update does."""

    def apply(grads: Tree, state: State, params: Tree) -> Phases:
        updates, state = update(grads, state, params)
        matched = Matched.of(params, updates)
        yield
        return _sum_matched(matched), state

    return apply


def update_from_apply(
    apply: Apply, grads: Tree, state: State, params: Tree
) -> tuple[Tree, State]:
    """Computes updates by an ``apply``: the differences that it makes to parameters."""
    # Without donation it writes into copies, so the old parameters can be subtracted.
    with inside(frame().replace(donated=None)):
        new_params, new_state = finish_step(apply(grads, state, params))
    matched = Matched.of(params, grads, new_params)
    return matched.map_rule(lambda p, g, q, _: (q - p, q))[0], new_state


def _phases_of_update(update: Update, *args: Any) -> Phases:
    """Runs an update, which writes nothing, in the first phase."""
    step = update(*args)
    yield
    return step


def _phases_of_writer(apply: Apply) -> Apply:
    """Defers an ``apply`` without a ``yield``, which only writes, to phase two."""

    def phases(grads: Tree, state: State, params: Tree) -> Phases:
        yield
        step = apply(grads, state, params)
        # A plain function may return the generator of another one.
        return finish_step(step) if isinstance(step, Generator) else step

    return phases


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Returns ``params + updates``, in the dtypes of ``params``.

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
    """Returns the result of `apply_updates`, always in new memory."""
    return Matched.of(params, updates).map_params(_sum_in_param_dtype)


def _sum_matched(matched: Matched) -> Tree:
    """Adds two trees; in place where donation allows it and autograd is not used."""
    if matched.differentiated:
        return matched.map_params(_sum_in_param_dtype)
    return run_kernel(matched, torch._foreach_add_)[0]


def _sum_in_param_dtype(p: Tensor, u: Tensor) -> Tensor:
    return p + u.to(p.dtype)


def check_takes_plain_gradients(name: str, optimizer: Optimizer) -> None:
    """Raises ValueError where ``optimizer`` changes how gradients are computed.

    Args:
        name: the optimizer around it, which cannot pass that on.
    """
    if optimizer.interprets is not None:
        raise ValueError(
            f"{name} is given an optimizer that takes gradients in a way of its own, "
            f"as loss_scale does: put that around, as in loss_scale({name}(...))"
        )


def _lay_out_results(apply: Callable[..., Phases]) -> Apply:
    """Runs both phases at once; plain leaves keep the layouts that they had."""

    @functools.wraps(apply)
    def laid_out(grads: Tree, state: State, params: Tree) -> Step:
        step = finish_step(apply(grads, state, params))
        # Only where an optimizer is applied by hand on a rank of a mesh. A transform
        # that runs the step (``runtimes``) lays its results out itself, and a recorder
        # takes them as they are.
        if HERE.get() is not None and not (frame().runtimes or frame().tracer):
            copy_placements(step, (params, state))
        return step

    return laid_out


def _lay_out_state(init: Init) -> Init:
    """Wraps ``init``: for parameters with layouts the state's plain leaves get one."""

    @functools.wraps(init)
    def laid_out(params: Tree) -> State:
        if (path := find_rank_local(params)) is not None:
            raise ValueError(_RANK_LOCAL.format(path))
        state = init(params)
        leaves = tree.leaves(params, is_sharded)
        have_layouts = any(is_sharded(x) or placement_of(x) is not None for x in leaves)
        return lay_leaves(state) if have_layouts else state

    return laid_out


_COMPARED_AS = "the optimizer that applies gradients"
_RANK_LOCAL = (
    "an optimizer is given {!r}, which is each rank's own: norms and moments over it "
    "and leaves that are one value have no meaning. Give it those alone, and keep the "
    "rank's own elsewhere, as in the extra of a TrainState"
)
