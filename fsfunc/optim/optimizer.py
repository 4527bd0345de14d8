"""The optimizer interface: two functions, and what follows from them.

``init(params)`` makes a state and ``update(grads, state, params)`` turns gradients into
updates, which are **added** to the parameters (optax's contract; so the learning rate
enters with its sign). ``apply`` is `update` and the addition, in one pass over memory
where the optimizer has one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
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
from fsfunc.core.frames import Transformed, frame
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Tree
from fsfunc.optim.matching import Matched
from fsfunc.optim.schedules import check_ranges
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.plain_leaves import holds_own, laid_as, lay_as, lay_leaves

State = Any
Init = Callable[[Tree], State]
Update = Callable[..., tuple[Tree, State]]
Apply = Callable[[Tree, State, Tree], tuple[Tree, State]]
Commit = Callable[[], tuple[Tree, State]]
Prepare = Callable[[Tree, State, Tree], Commit]
Begin = Callable[..., Commit]  # (grads, state, params, adds)
Run = Callable[[], tuple[Any, Tree]]  # a gradient function called: (value, gradients)
Take = Callable[[Run, State], tuple[Any, Tree, "Optimizer"]]


class _Functions(NamedTuple):
    init: Init
    update: Update
    apply: Apply
    prepare: Prepare
    take: Take | None


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
            and addition. It may write into tensors of ``params`` and ``state`` of
            which ``frame().donated`` says so (`Donation.may_write`), and then tells it
            which leaves it took; never into ``grads``.
        prepare: ``prepare(grads, state, params) -> commit``: `apply` in two phases. All
            checks, norms and collectives belong to the first; ``commit()`` only writes,
            and returns what `apply` does. So several optimizers can share a step that,
            failing, leaves the state as it was.
        elementwise: your word that `update` treats each element by itself, so that a
            step of some leaves, or of parts of them, is that part of the step:
            `step_in_backward` asks for it.
        configuration: by name, what tells it from others of its kind. Ranks compare
            it, and its repr shows it; without it, the names of its functions alone.

    `apply` and `prepare` may be left out; one follows from the other, both from
    `update`.

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
    elementwise: bool
    begin: Begin
    _how: SimpleNamespace

    def __new__(
        cls,
        init: Init,
        update: Update,
        apply: Apply | None = None,
        prepare: Prepare | None = None,
        take: Take | None = None,
        *,
        elementwise: bool = False,
        configuration: Mapping[str, Any] | None = None,
    ) -> Optimizer:
        if prepare is None:
            prepare = added(update) if apply is None else _deferred(apply)
        relaying = _relaying(_at_once(prepare) if apply is None else apply)
        how = SimpleNamespace()  # not the optimizer, which would be a circle
        told, does = (claiming(f, _APPLIES, how) for f in (update, relaying))
        self = super().__new__(cls, _laying(init), told, does, prepare, take)
        self._how, self.elementwise = how, elementwise
        self.begin = _either(update, prepare)
        known = {"init": init, "update": update, **(configuration or {})}
        return self.known_as("Optimizer", known)

    def known_as(self, called: str, configuration: Mapping[str, Any]) -> Self:
        """Itself, that says it was made by this call: see `described`."""
        self.called, self.configuration = called, tuple(configuration.items())
        vars(self._how).update(called=called, configuration=self.configuration)
        return self

    def _replace(self, **changes: Any) -> Optimizer:
        other = Optimizer(**(self._asdict() | changes), elementwise=self.elementwise)
        return other.known_as(self.called, dict(self.configuration) | changes)

    def __repr__(self) -> str:
        return stated(self)

    def __call__(self, grad_fn: Callable[..., Any]) -> Callable[..., Any]:
        """A train step ``step(state, *batch) -> (state, metrics)``.

        Args:
            grad_fn: ``grad_fn(params, *batch) -> (value, grads)``, such as
                ``value_and_grad(loss)``; with auxiliary results, ``((value, aux),
                grads)``.

        Returns:
            a step over any state with ``.params`` and ``.apply_gradients(grads,
            optimizer)``, and ``.opt_state`` where the optimizer has a ``take``. Its
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
            value, grads, optimizer = self.taken(run, state)
            if isinstance(value, tuple):
                metrics = dict(zip(("loss", "aux"), value, strict=True))
            else:
                metrics = {"loss": value}
            return state.apply_gradients(grads, optimizer), metrics

        return Transformed(grad_fn, self.called, tuple, train_step, train_step)

    def taken(self, run: Run, state: Any) -> tuple[Any, Tree, Optimizer]:
        """(value, gradients, the optimizer that applies them), from a train state."""
        return self.gradients(run, getattr(state, "opt_state", None))

    def gradients(self, run: Run, opt_state: State) -> tuple[Any, Tree, Optimizer]:
        """The same from the optimizer's own state."""
        return (*run(), self) if self.take is None else self.take(run, opt_state)

    @staticmethod
    def of(functions: Any, *, elementwise: bool = False) -> Optimizer:
        """The optimizer of an object's functions, with ``update`` or ``begin``."""
        init, take = functions.init, getattr(functions, "take", None)
        if not hasattr(functions, "update"):
            return begun_by(init, functions.begin, take, elementwise)
        steps = functions.update, None, getattr(functions, "prepare", None)
        return Optimizer(init, *steps, take, elementwise=elementwise)


_P = ParamSpec("_P")


def described(make: Callable[_P, Optimizer]) -> Callable[_P, Optimizer]:
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


def begun_by(
    init: Init, begin: Begin, take: Take | None = None, elementwise: bool = False
) -> Optimizer:
    """The optimizer whose steps are made by one function.

    Args:
        begin: ``begin(grads, state, params, adds) -> commit``: as `Optimizer.prepare`
            where it ``adds`` the updates to the parameters, as `Optimizer.update` with
            its result for ``commit`` to return where it does not.
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        return begin(grads, state, params, False)()

    adds: Any = partial(begin, adds=True)
    made = Optimizer(init, update, prepare=adds, take=take, elementwise=elementwise)
    made.begin = begin
    return made


def then(commit: Commit, after: Callable[[State], State]) -> Commit:
    """``commit``, with ``after(state)`` in place of the state that it returns."""

    def finish() -> tuple[Tree, State]:
        result, state = commit()
        return result, after(state)

    return finish


def _either(update: Update, prepare: Prepare) -> Begin:
    def begin(grads: Tree, state: State, params: Tree, adds: bool) -> Commit:
        if adds:
            return prepare(grads, state, params)
        done = update(grads, state, params)
        return lambda: done

    return begin


def _deferred(apply: Apply) -> Prepare:
    return lambda grads, state, params: lambda: apply(grads, state, params)


def _at_once(prepare: Prepare) -> Apply:
    return lambda grads, state, params: prepare(grads, state, params)()


def added(update: Update) -> Prepare:
    """The ``prepare`` of an ``update``, which differentiates as that does."""

    def prepare(grads: Tree, state: State, params: Tree):
        updates, state = update(grads, state, params)
        add = prepare_updates(params, updates)
        return lambda: (add(), state)

    return prepare


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
    return prepare_updates(params, updates)()


def prepare_updates(params: Tree, updates: Tree) -> Callable[[], Tree]:
    """A function that does the work of `apply_updates`; the trees are checked now."""
    matched = Matched.of(params, updates)
    if matched.differentiated:
        return lambda: matched.summed(_sum)
    commit = fused(matched, torch._foreach_add_)
    return lambda: commit()[0]


def summed(params: Tree, updates: Tree) -> Tree:
    """The result of `apply_updates`, in memory of its own."""
    return Matched.of(params, updates).summed(_sum)


def _sum(p: Tensor, u: Tensor) -> Tensor:
    return p + u.to(p.dtype)


def check_takes_plainly(what: str, optimizer: Optimizer) -> None:
    """Raise ValueError where ``optimizer`` has a say in how gradients are taken."""
    if optimizer.take is not None:
        raise ValueError(
            f"{what} is given an optimizer that takes gradients in a way of its own, "
            f"as loss_scale does: put that around, as in loss_scale({what}(...))"
        )


def _relaying(apply: Apply) -> Apply:
    """``apply``, whose plain leaves outside of steps are laid out as those before."""

    @functools.wraps(apply)
    def laid(grads: Any, state: Any, params: Any) -> Any:
        new = apply(grads, state, params)
        if HERE.get() is not None and not (frame().runtimes or frame().tracer):
            lay_as(new, (params, state))
        return new

    return laid


def _laying(init: Init) -> Init:
    """``init``, of which the plain leaves are laid out as the parameters are."""

    @functools.wraps(init)
    def laid(params: Any) -> Any:
        if (path := holds_own(params)) is not None:
            raise ValueError(_OWN.format(path))
        state = init(params)
        leaves = tree.leaves(params, is_sharded)
        some = any(is_sharded(x) or laid_as(x) is not None for x in leaves)
        return lay_leaves(state) if some else state

    return laid


_APPLIES = "the optimizer that applies gradients"
_OWN = (
    "an optimizer is given {!r}, which is each rank's own: norms and moments over it "
    "and leaves that are one value have no meaning. Give it those alone, and keep the "
    "rank's own elsewhere, as in the extra of a TrainState"
)
