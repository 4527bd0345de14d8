"""Interpretations, the interface of transforms, and the frame that holds them.

A :class:`Frame` is immutable and lives in a context variable. A unit call or gradient
call binds the frame in force, so a recompute in a backward pass needs no context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import CodeType, MethodType
from typing import Any

from fsfunc import _torch
from fsfunc.comm.attribution import INTERNAL
from fsfunc.comm.mesh import HERE, Here, Mesh, axis_names, here
from fsfunc.comm.tracebacks import api_boundary, leave_out
from fsfunc.core.casts import Casts
from fsfunc.core.tracers import Tracer
from fsfunc.runtime.scopes import in_one_thread, refuse_compiled
from fsfunc.sharded.inputs import check_function


class Interpretation:
    """The interface of a transform: how it runs unit calls and gradient calls.

    To write a transform, derive from this class, override :meth:`unit` (for unit calls)
    or :meth:`gradient` (for ``value_and_grad`` calls), and apply it to a function by
    ``transformed(f, interpretation)``. Each method is given ``run``, the function that
    runs the call under the transforms further in, and returns one to use in its place;
    by default ``run`` itself. In ``shard(mine(f))`` yours sees gathered parameters, and
    no gradients of units, which are reduced as they appear; in ``mine(shard(f))`` it
    sees sharded leaves, and mean gradients. Ranks that are threads share one object: do
    not store on it what depends on a call.

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

    Attributes:
        called: its public name.
        configuration: the arguments that ranks compare.
        lays_out: whether it decides the layouts of leaves.
        decides: whether it is a :class:`Stage`.
        compared: the ranks of this process that have compared their programs.
        same_batch: the axes along which all ranks must be given one batch.
        scales: whether it scales losses, so that gradients may be in float16.
        observes: whether :meth:`begins` and :meth:`ends` are called.
        ends_alike: whether it does in the last microbatch what it does in others, as
            a plan may then leave that one out.
    """

    lays_out = False
    decides = False
    compared: frozenset[int] = frozenset()
    called = ""
    same_batch: tuple[str, ...] = ()
    scales = observes = ends_alike = False

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        """(name, value) of its arguments but the mesh."""
        return ()

    @property
    def shown(self) -> Iterable[tuple[str, Any]]:
        """(name, value) of the arguments with which it prints; of an axis, its size."""
        for name, value in self.configuration:
            if name == "axis":
                sizes = self.mesh.axes  # type: ignore[attr-defined]
                yield from ((a, sizes[a]) for a in axis_names(value))
            elif value is not None:
                yield name, value

    def learn(self, other: Any) -> None:
        """Adopts what another rank's instance learned while a step was recorded."""

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Calls ``f``, the transformed function, with this interpretation in force."""
        outer = frame()
        with inside(outer.replace(handlers=(*outer.handlers, self))):
            return f(*args, **keywords)

    def recorded(self, recorder: Any) -> Interpretation:
        """The interpretation to use in its place while a step is recorded."""
        return self

    def here(self, mesh: Mesh) -> Here:
        """The rank that runs, on ``mesh``, and whether it has compared its program."""
        at = here(mesh)
        known = at.compared or at.rank in self.compared
        return at if known == at.compared else replace(at, compared=known)

    def ran(self, at: Here) -> None:
        """Called after a call: the ranks have compared the collectives in it."""
        if at.rank not in self.compared and getattr(at.link, "moves", False):
            self.compared |= {at.rank}

    def first_state(self, state: Any) -> Any:
        """The initial state of the transformed step, given that of the inner one."""
        return state

    def unit(self, run: Callable[..., Any], call: Any) -> Callable[..., Any]:
        """The function that runs a unit call in place of ``run``.

        Args:
            run: ``run(params, *inputs, **keywords)`` runs it under inner transforms.
            call: ``call.name`` is that of the unit (``block``, or ``block/norm`` inside
                another), and ``call.number`` counts the calls of the loss.

        Returns:
            a function of the same arguments.
        """
        return run

    def reads_again(self, call: Any) -> bool:
        """True if a unit call's backward has its parameters again, read or not."""
        return False

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function that runs a gradient call in place of ``run``.

        Args:
            run: takes a ``GradientCall`` (its ``fn``, ``args`` and ``argnums`` say what
                is differentiated; ``dataclasses.replace`` changes them) and returns an
                ``Outcome``: ``total``, ``grads`` (a tree for each argument) and
                ``aux``, as sums over microbatches. Of an evaluation, by ``ff.value``,
                ``argnums`` and ``grads`` are empty.

        Returns:
            a function of the same argument. Outside ``shard``, ``outcome.mean()`` has
            the means, and ``outcome.with_mean(grads)`` replaces the gradients.
        """
        return run

    def begins(self, call: Any) -> None:
        """Called before each microbatch's forward pass, with its ``GradientCall``."""

    def ends(self, outcome: Any) -> None:
        """Called after its backward pass, before its gradients are accumulated."""


class Stage(Interpretation):
    """An interpretation that decides which unit calls of a loss run on this rank.

    It is the outermost of a frame, so that nothing is gathered for other calls.
    """

    decides = True

    def unit(self, run: Callable[..., Any], call: Any) -> Callable[..., Any]:
        if call.frame.path:  # a nested unit runs where the outer one does
            return run

        def decided(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
            return self.decide(call, params, inputs, keywords)

        return decided

    def decide(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """The value that a unit call of the loss returns."""
        raise NotImplementedError


class Counter:
    """Numbers unit calls from 0."""

    count = 0

    def next(self) -> int:
        self.count += 1
        return self.count - 1


class Replaced:
    """A frozen dataclass that has ``replace``, faster than that of ``dataclasses``."""

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **changes)
        return new


@dataclass(frozen=True)
class Frame(Replaced):
    """The transforms in force, and the position in the step.

    Args:
        handlers: the interpretations, outermost first.
        at: the rank that runs, if a transform or ``spmd`` gave a mesh.
        runtimes: (interpretation, its state during this call or gradient call); that of
            ``shard`` is a ``ShardRuntime``.
        micro: (index, count) in each enclosing loop over microbatches, outermost first;
            ``rows``: the same in the order in which rows are cut, if that is another.
        varies: (index, count) along each enclosing axis of ``shard``.
        seed: the random number of the enclosing gradient call, if any; ``seeded``: how
            many units are around that call.
        drawing: the names of units that draw random numbers outside gradient calls, as
            far as the step's recordings know.
        path: the names of the enclosing units; ``numbers``: their call numbers.
        counter: numbers the unit calls made here.
        casts: the dtypes of ``precision``, if any.
        compiler: under ``jit``, ``compiler.of(call)`` is the compiled function to run.
        donated: the `Donation` of the state that may be written in place, if any.
        tracer: the `Tracer` that records, checks or plans the step, if any.
        in_loss: the number of enclosing gradient calls.
        whole: whether an enclosing unit gathered all of its parameters (see ``unit``).
        level: the functorch level at which the outermost enclosing unit was called.
        create_graph: whether the gradients of the enclosing gradient call are
            differentiable.
        around: calls the outermost of transformed functions and gradient calls, if
            that is not None, as ``around(run, args, keywords)``.
    """

    handlers: tuple[Interpretation, ...] = ()
    at: Here | None = None
    runtimes: tuple[tuple[Interpretation, Any], ...] = ()
    micro: tuple[tuple[int, int], ...] = ()
    rows: tuple[tuple[int, int], ...] = ()
    varies: tuple[tuple[int, int], ...] = ()
    seed: int | None = None
    seeded: int = 0
    drawing: frozenset[str] = frozenset()
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
    around: Callable[..., Any] | None = None

    def runtime_of(self, handler: Interpretation) -> Any:
        """The state of ``handler`` in the innermost enclosing call, or None."""
        for owner, runtime in reversed(self.runtimes):
            if owner is handler:
                return runtime
        return None

    @property
    def composable(self) -> bool:
        """True where only operations with second derivatives may be used.

        That is under ``torch.func``, under forward mode, and in a gradient call whose
        gradients are differentiated.
        """
        return self.create_graph or _torch.transforms_active()

    @property
    def staged(self) -> bool:
        """True in a loss of which only some unit calls run on this rank."""
        return bool(self.handlers) and self.handlers[0].decides


_FRAME: ContextVar[Frame | None] = ContextVar("fsfunc_frame", default=None)
_OUTSIDE = Frame()


def frame() -> Frame:
    """The frame in force."""
    return _FRAME.get() or _OUTSIDE


def composable() -> bool:
    """`Frame.composable` of the frame in force."""
    return frame().composable


def recording() -> bool:
    """True while a step is run only to be recorded, checked or planned.

    A step is run a few times before its first real call, mostly on tensors without
    data, by ``place``, ``init_state`` and ``plan``, and again before some later calls:
    ``help(ff.shard)`` says which.
    Each run prints, and changes Python's own state, as a real one does.

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
    """``with inside(value)`` makes ``value`` the frame in force.

    With ``users``, what runs inside counts as the user's code, not the library's.
    Inside, backward passes find the frame: see `in_one_thread`.
    """

    __slots__ = ("value", "users", "tokens", "threads")

    def __init__(self, value: Frame, users: bool = False):
        self.value, self.users = value, users

    def __enter__(self) -> Frame:
        value = self.value
        token = _FRAME.set(value)
        # In the outermost one; and within `inference_mode(False)`, which turns them on,
        # or in another thread, which `asyncio.to_thread` gives the context of this one.
        self.threads = in_one_thread() if _torch.uses_device_threads() else None
        self.tokens: list[tuple[Any, Any]] = [(_FRAME, token)]
        if value.at is not None:
            self.tokens.append((HERE, HERE.set(value.at)))
        if self.users:
            self.tokens.append((INTERNAL, INTERNAL.set(False)))
        return value

    def __exit__(self, *_: Any) -> None:
        for var, token in self.tokens:
            var.reset(token)
        if self.threads is not None:
            self.threads.__exit__(None, None, None)


class Transformed:
    """A function with something around it, such as a transform.

    It stands for the function within, as what ``functools.wraps`` makes does. It prints
    as the stack of what is around, and an error leaves it with a short traceback.

    Args:
        f: the function within.
        called: the name of what is around; ``shown()`` returns (name, value) of its
            arguments.
        run: the function to call.
        stands_for: the function whose name, signature and attributes it has; ``f``.

    >>> import fsfunc as ff
    >>> def loss_fn(params, x): ...
    >>> ff.accumulate(ff.remat(ff.value_and_grad(loss_fn)), 4)
    accumulate(remat(value_and_grad(loss_fn)), n=4)
    """

    __qualname__: str  # and what else `f` has
    interpretations: tuple[Interpretation, ...]
    # A function may have attributes of any name, and users may set them.
    __slots__ = ("_f", "_called", "_shown", "_run", "__dict__", "__weakref__")

    def __init__(
        self,
        f: Callable[..., Any],
        called: str,
        shown: Callable[[], Iterable[tuple[str, Any]]],
        run: Callable[..., Any],
        stands_for: Callable[..., Any] | None = None,
    ):
        self.__name__, self.__qualname__ = run.__name__, run.__qualname__
        functools.update_wrapper(self, stands_for or f)
        self._f, self._called, self._shown, self._run = f, called, shown, run

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        try:
            return self._run(*args, **keywords)
        except BaseException as error:
            leave_out(error)
            raise

    @property
    def __code__(self) -> CodeType:  # one object where the function is made anew
        return self._run.__code__

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        arguments = [f"{name}={_value(x)}" for name, x in self._shown()]
        return f"{self._called}({', '.join([title(self._f), *arguments])})"

    def __reduce__(self) -> str:  # copied and pickled by name, as functions are
        return self.__qualname__


def title(f: Any) -> str:
    """The name of a function, with the transforms around it and their arguments."""
    # Not what a partial or a module holds, such as parameters.
    name = getattr(f, "__name__", type(f).__name__)
    return repr(f) if isinstance(f, Transformed) else name


def _value(x: Any) -> str:
    """An argument as text: names of axes and functions without quotes."""
    if isinstance(x, tuple) and len(x) == 1 and isinstance(x[0], str):
        return x[0]
    return x if isinstance(x, str) else getattr(x, "__name__", repr(x))


@api_boundary
def transformed(
    f: Callable[..., Any],
    handler: Interpretation,
) -> Callable[..., Any]:
    """``f`` with an interpretation of the unit and gradient calls inside.

    All transforms are made with it; use it to apply one of your own.

    Args:
        f: a unit, a loss, or a train step.
        handler: the ``Interpretation``.

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

    called = handler.called or type(handler).__name__.lower()

    @functools.partial(Transformed, f, called, lambda: handler.shown)
    def run(*args: Any, **keywords: Any) -> Any:
        refuse_compiled("a transformed function")
        outer = frame()
        if outer.around is not None:
            # Not `run`: what holds itself lives until the garbage is collected.
            return outer.around(transformed(f, handler), args, keywords)
        if outer.compiler is not None and outer.compiler.whole:
            outer.compiler.check_takes(handler)
        meant = handler if outer.tracer is None else outer.tracer.standing_for(handler)
        return meant.call(f, args, keywords)

    # Found from outside, as wrapping a transformed function keeps its attributes.
    run.interpretations = (*getattr(f, "interpretations", ()), handler)
    return run
