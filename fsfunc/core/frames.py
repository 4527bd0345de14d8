"""The context of unit calls and gradient calls, fixed when they are made.

A :class:`Frame` is immutable and lives in a context variable. A call binds the frame
in which it was made, so a recompute in a backward pass needs no context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from fsfunc import _torch
from fsfunc.comm.attribution import INTERNAL
from fsfunc.comm.mesh import HERE, Here, Mesh, here
from fsfunc.core.casts import Casts
from fsfunc.core.tracers import Tracer
from fsfunc.runtime.scopes import refuse_compiled
from fsfunc.sharded.inputs import check_function


class Interpretation:
    """A transform's handling of unit and gradient calls; the default leaves them as is.

    For a transform of your own derive from it, say what becomes of a call, and reach
    the calls inside a function by ``transformed(f, interpretation)``. Of a unit call
    :meth:`unit` decides, of a ``value_and_grad`` call :meth:`gradient`; each is given
    ``run``, what transforms further in make of the call, and returns what stands in its
    place. So the order of transforms is that in which they stand around ``f``: in
    ``shard(mine(f))`` yours sees gathered parameters, and no gradients of units, which
    are reduced as they appear; in ``mine(shard(f))`` parts, and means. Threads share
    one: what it learns of a call belongs into what it returns, not into itself.

    >>> import torch, fsfunc as ff
    >>> class Rounded(ff.Interpretation):  # units compute on weights of whole numbers
    ...     called = "rounded"
    ...     def unit(self, run, call):
    ...         whole = lambda w: w + (w.round() - w).detach()
    ...         return lambda params, *x: run(ff.tree.map(whole, params), *x)
    >>> layer = ff.unit(lambda w, x: w * x)
    >>> loss = ff.transformed(lambda w, x: layer(w, x).sum(), Rounded())
    >>> ff.value_and_grad(loss)(torch.tensor(1.4), torch.tensor(3.0))
    (tensor(3.), tensor(3.))

    What more it may say of itself, as attributes. ``called``: its public name;
    ``configuration``: what ranks compare. ``lays_out``: whether it decides how leaves
    lie on a mesh. ``decides``: whether it is a :class:`Stage`. ``compared``: the ranks
    hosted here that know that all run one program under it, by its record or a first
    call. ``same_batch``: the axes along which all ranks must be given one batch.
    ``scales``: whether backward passes in its reach start from a larger number than 1,
    so that float16 will do. ``observes``: whether it is shown each gradient that
    somebody takes, see :meth:`begins` and :meth:`ends`. ``reads_outputs``: whether its
    ``unit`` looks at the values that a unit returns, unless it says False: a recompute
    then computes them though the backward has no use for them.
    """

    lays_out = False
    decides = False
    compared: frozenset[int] = frozenset()
    called = ""
    same_batch: tuple[str, ...] = ()
    scales = observes = False
    reads_outputs = False

    def __init_subclass__(cls) -> None:
        if "unit" in vars(cls) and "reads_outputs" not in vars(cls):
            cls.reads_outputs = True

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        """(name, value): what tells it from others of its kind, beside a mesh."""
        return ()

    def learn(self, other: Any) -> None:
        """Takes over what ``other``, one like it, has seen of a recorded step."""

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Runs the function that the transform is around, in reach of it."""
        outer = frame()
        with inside(replace(outer, handlers=(*outer.handlers, self))):
            return f(*args, **keywords)

    def recorded(self, recorder: Any) -> Interpretation:
        """The interpretation in its place while a step is recorded (`Recorder`)."""
        return self

    def here(self, mesh: Mesh) -> Here:
        """The rank that runs under it, on ``mesh``, and if it is still to compare."""
        at = here(mesh)
        known = at.compared or at.rank in self.compared
        return at if known == at.compared else replace(at, compared=known)

    def ran(self, at: Here) -> None:
        """A call of it is over: what its ranks sent each other in it was compared."""
        if at.rank not in self.compared and getattr(at.link, "moves", False):
            self.compared |= {at.rank}

    def begin(self, state: Any) -> Any:
        """The first state under the transform, of the first state under it."""
        return state

    def unit(self, run: Callable[..., Any], call: Any) -> Callable[..., Any]:
        """A function that runs a unit call whose inner interpretations are ``run``.

        Args:
            call: of it ``call.name`` is the unit's (``block``, or ``block/norm`` of one
                within another), and ``call.number`` which call it is of the loss.

        Returns:
            what is given the call's parameters and inputs in the place of ``run``.
        """
        return run

    def reads_again(self, call: Any) -> bool:
        """True if a unit call's backward has its parameters again, read or not."""
        return False

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs a gradient call whose inner interpretations are ``run``.

        What is returned takes a ``GradientCall`` (of it ``fn``, ``args`` and
        ``argnums`` say what is differentiated; ``dataclasses.replace`` changes them),
        and gives an ``Outcome``, as ``run`` does: ``total`` and ``grads`` (one tree for
        each argument), summed over microbatches, and ``aux``. Outside of ``shard`` its
        ``mean()`` divides them, and ``with_mean(grads)`` puts others in their place.
        """
        return run

    def begins(self, call: Any) -> None:
        """Called before each microbatch's forward pass, with its ``GradientCall``."""

    def ends(self, outcome: Any) -> None:
        """Called after its backward pass, before its gradients are accumulated."""


class Stage(Interpretation):
    """Decides what becomes of a loss's unit calls: whether one runs here at all.

    It stands before all other interpretations of a frame, so that nothing is gathered
    for what does not run.
    """

    decides = True

    def unit(self, run: Callable[..., Any], call: Any) -> Callable[..., Any]:
        if call.frame.path:  # of a unit inside a unit the outer one decides
            return run

        def decided(params: Any, *inputs: Any, **keywords: Any) -> Any:
            return self.decide(call, params, inputs, keywords)

        return decided

    def decide(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """The value that a unit call of the loss returns."""
        raise NotImplementedError


class Counter:
    """Numbers the unit calls made in one body."""

    count = 0

    def next(self) -> int:
        self.count += 1
        return self.count - 1


@dataclass(frozen=True)
class Frame:
    """The active transforms, and the current position in the step.

    Args:
        handlers: interpretations, outermost first.
        at: the rank that runs, once a transform or ``spmd`` named a mesh.
        runtimes: what an interpretation keeps during one call of its function, and
            anew during each gradient call: of ``shard`` a ``ShardRuntime``.
        micro: (index, count) of each microbatch loop around us, outermost first.
        varies: (index, count) of each data axis around us.
        seed: the number drawn for this gradient call, if any.
        path: names of the units around us; ``numbers``: which call each one was.
        casts: the dtypes that ``precision`` asked for, if any.
        compiler: says by ``of(call)`` which function runs for a unit's, under ``jit``.
        donated: the `Donation` of the state that may be written in place, if any.
        tracer: looks on while a step is recorded, checked, or planned.
        in_loss: how many gradient calls are around us.
        whole: whether a unit around us gathered all of its parameters (see ``unit``).
        level: the functorch level at which the outermost unit around us was called.
        create_graph: whether the gradient call around us gives gradients that are
            themselves differentiable.
    """

    handlers: tuple[Interpretation, ...] = ()
    at: Here | None = None
    runtimes: tuple[tuple[Interpretation, Any], ...] = ()
    micro: tuple[tuple[int, int], ...] = ()
    varies: tuple[tuple[int, int], ...] = ()
    seed: int | None = None
    path: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    counter: Counter = field(default_factory=Counter)
    casts: Casts | None = None
    compiler: Any = None
    donated: Any = None
    tracer: Tracer | None = None
    in_loss: int = 0
    whole: bool = False
    level: int = 0
    create_graph: bool = False

    def runtime_of(self, handler: Interpretation) -> Any:
        """The runtime of ``handler`` in the innermost call around us, or None."""
        for owner, runtime in reversed(self.runtimes):
            if owner is handler:
                return runtime
        return None

    @property
    def composable(self) -> bool:
        """True where what runs must be made of operations with second derivatives.

        So it is under ``torch.func`` and forward mode, and in a gradient call of which
        the gradients are differentiated.
        """
        return self.create_graph or _torch.transforms_active()

    @property
    def staged(self) -> bool:
        """True if this is in a loss of which only some unit calls run here."""
        return bool(self.handlers) and self.handlers[0].decides

    def but(self, **changes: Any) -> Frame:
        """The frame with some fields changed: ``replace``, without its checks."""
        frame = object.__new__(Frame)
        frame.__dict__.update(self.__dict__, **changes)
        return frame


_FRAME: ContextVar[Frame | None] = ContextVar("fsfunc_frame", default=None)
_OUTSIDE = Frame()


def frame() -> Frame:
    """The frame in force."""
    return _FRAME.get() or _OUTSIDE


def composable() -> bool:
    """`Frame.composable` of the frame that is in force."""
    return frame().composable


def recording() -> bool:
    """True if what runs now only runs to be recorded, checked or planned.

    A step is run a few times before its first real call, most often on tensors without
    data, by ``place``, ``init_state``, ``plan`` and the first call of new shapes. What
    it does to Python's own state, or prints, it does each time.

    >>> import torch, fsfunc as ff
    >>> calls = []
    >>> @ff.unit
    ... def layer(w, x):
    ...     calls.append(ff.recording())
    ...     return w * x
    >>> mesh = ff.make_mesh({"data": 1}, "simulated")
    >>> def main():
    ...     step = ff.shard(lambda w, x: layer(w, x), mesh, "data")
    ...     step(ff.place(step, torch.ones(2), torch.ones(2)), torch.ones(2))
    >>> _ = ff.spmd(main, mesh)()
    >>> calls[0], calls[-1]
    (True, False)
    """
    return frame().tracer is not None or _torch.fake_active()


class inside:
    """``with inside(value)`` makes ``value`` the frame of the calls within.

    With ``users``, what runs there is the user's own doing.
    """

    __slots__ = ("value", "users", "tokens")

    def __init__(self, value: Frame, users: bool = False):
        self.value, self.users = value, users

    def __enter__(self) -> Frame:
        value = self.value
        self.tokens: list[tuple[Any, Any]] = [(_FRAME, _FRAME.set(value))]
        if value.at is not None:
            self.tokens.append((HERE, HERE.set(value.at)))
        if self.users:
            self.tokens.append((INTERNAL, INTERNAL.set(False)))
        return value

    def __exit__(self, *_: Any) -> None:
        for var, token in self.tokens:
            var.reset(token)


def transformed(
    f: Callable[..., Any],
    handler: Interpretation,
) -> Callable[..., Any]:
    """``f`` with an interpretation in reach of every unit and gradient call inside.

    What all transforms come down to, and how one of your own is applied.

    Args:
        f: a unit, a loss, or a train step.
        handler: an ``Interpretation``: what is to become of these calls.

    >>> import torch, fsfunc as ff
    >>> class Named(ff.Interpretation):
    ...     def unit(self, run, call):
    ...         print("calls", call.name)
    ...         return run
    >>> layer = ff.unit(lambda w, x: w * x)
    >>> transformed(lambda w: layer(w, 2.0), Named())(torch.tensor(3.0))
    calls <lambda>
    tensor(6.)
    """

    check_function(f, handler.called or "transformed")

    @functools.wraps(f)
    def run(*args: Any, **keywords: Any) -> Any:
        refuse_compiled("a transformed function")
        tracer = frame().tracer
        meant = handler if tracer is None else tracer.standing_for(handler)
        return meant.call(f, args, keywords)

    # Known from outside: wrapping a transformed function keeps its attributes.
    inner = getattr(f, "interpretations", ())
    run.interpretations = (*inner, handler)  # type: ignore[attr-defined]
    return run
