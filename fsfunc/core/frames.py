"""Interpretations, the interface of transforms, and the frame that holds them.

A transform is a function from functions to functions. `transformed` makes one of an
:class:`Interpretation`: while the transformed function runs, the interpretation is in
force, that is, among the ``handlers`` of the :class:`Frame`. A unit call, or gradient
call, asks each handler in turn for the function to run instead::

    a(b(step))   handlers = (a, b)    a unit runs as   a.unit(b.unit(call.body))

A frame is immutable and lives in a context variable. A unit call or gradient call binds
the frame in force, so a recompute in a backward pass needs no context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar

from fsfunc import _torch
from fsfunc.comm.attribution import INTERNAL
from fsfunc.comm.mesh import HERE, Here, Mesh, axis_names, here
from fsfunc.comm.tracebacks import api_boundary, leave_out
from fsfunc.core.casts import Casts
from fsfunc.core.tracers import Tracer, UnitCall
from fsfunc.runtime.scopes import in_one_thread, refuse_compiled
from fsfunc.sharded.inputs import check_function
from fsfunc.tree.types import Args, Keywords, PyTree

if TYPE_CHECKING:
    from fsfunc.core.outcomes import GradientCall, Outcome
    from fsfunc.core.units import Call

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
        repeats_calls: whether it does in each unit call what it does in others of the
            same unit with arguments of the same shapes, and keeps nothing from one for
            another: then a plan need not run all of them. One that has no part in unit
            calls need not say so.
    """

    lays_out = repeats_calls = False
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

    def learn(self, other: Self) -> None:
        """Adopts what another rank's instance learned while a step was recorded."""

    def call(self, f: Callable[..., PyTree], args: Args, keywords: Keywords) -> PyTree:
        """Calls ``f``, the transformed function, with this interpretation in force."""
        outer = frame()
        with inside(outer.replace(handlers=(*outer.handlers, self))):
            return f(*args, **keywords)

    def recorded(self, recorder: Tracer) -> Interpretation:
        """Returns what to use in its place while a step is recorded."""
        return self

    def here(self, mesh: Mesh) -> Here:
        """Returns the rank that runs, and whether it has compared its program."""
        this_rank = here(mesh)
        compared = this_rank.compared or this_rank.rank in self.compared
        same = compared == this_rank.compared
        return this_rank if same else replace(this_rank, compared=compared)

    def ran(self, at: Here) -> None:
        """Called after a call: the ranks have compared the collectives in it."""
        # A link without real data (a plan's) has compared nothing.
        if at.rank not in self.compared and getattr(at.link, "moves_data", False):
            self.compared |= {at.rank}

    def first_state(self, state: PyTree) -> PyTree:
        """Returns the initial state of the transformed step, given the inner one's."""
        return state

    def unit(self, run: Callable[..., PyTree], call: Call) -> Callable[..., PyTree]:
        """Returns the function that runs a unit call in place of ``run``.

        Args:
            run: ``run(params, *inputs, **keywords)`` runs it under inner transforms.
            call: ``call.name`` is that of the unit (``block``, or ``block/norm`` inside
                another), and ``call.number`` counts the calls of the loss.

        Returns:
            a function of the same arguments.
        """
        return run

    def reads_again(self, call: Call) -> bool:
        """Returns whether a unit call's backward gathers its parameters again."""
        return False

    def gradient(
        self, run: Callable[[GradientCall], Outcome]
    ) -> Callable[[GradientCall], Outcome]:
        """Returns the function that runs a gradient call in place of ``run``.

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

    def begins(self, call: GradientCall) -> None:
        """Called before each microbatch's forward pass, with its ``GradientCall``."""

    def ends(self, outcome: Outcome) -> None:
        """Called after its backward pass, before its gradients are accumulated."""


class Stage(Interpretation):
    """An interpretation that decides which unit calls of a loss run on this rank.

    It is the outermost of a frame, so that nothing is gathered for other calls.
    """

    decides = True

    def unit(self, run: Callable[..., PyTree], call: Call) -> Callable[..., PyTree]:
        if call.frame.path:  # a nested unit runs where the outer one does
            return run

        def decided(params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
            return self.decide(call, params, inputs, keywords)

        return decided

    def decide(
        self,
        call: UnitCall,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        """Returns the value of a unit call of the loss."""
        raise NotImplementedError


class Counter:
    """Numbers unit calls from 0."""

    count: int = 0

    def next(self) -> int:
        self.count += 1
        return self.count - 1


class Replaced:
    """A base of frozen dataclasses, with a faster ``replace`` than ``dataclasses``'.

    Frames and outcomes are replaced several times in each unit call.
    """

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **changes)
        return new


class Compiler(Protocol):
    """What ``jit`` puts into a frame: it compiles unit calls, or a whole step.

    ``of`` returns the function to run for a unit call; ``compiles`` says whether it is
    compiled, and ``partitions_call`` whether the compiler also decides what its
    backward is given. ``update`` returns an optimizer's update, compiled once for
    tensors of any size.

    Attributes:
        whole: whether the step is compiled with all that it calls. Then it also has
            ``check_takes`` and ``compares`` (`transforms.step_traces`), else
            ``replays`` (`transforms.compilation`).
    """

    whole: bool

    def of(self, call: UnitCall) -> Callable[..., Any]: ...
    def compiles(self, call: UnitCall) -> bool: ...
    def partitions_call(self, call: UnitCall) -> bool: ...
    def update(self, rule: Any, make: Callable[[], Any], name: str) -> Any: ...


@dataclass(frozen=True)
class Frame(Replaced):
    """The transforms in force, and the position in the step.

    Args:
        handlers: the interpretations, outermost first.
        here: the rank that runs, if a transform or ``spmd`` gave a mesh.
        runtimes: (interpretation, its state during this call or gradient call); that of
            ``shard`` is a ``ShardRuntime``.
        micro: (index, count) in each enclosing loop over microbatches, outermost first.
        rows: as ``micro``, in the order in which rows of the batch are cut, where that
            is another.
        batch_places: (index, count) along each axis of the enclosing ``shard`` and
            local-update transforms: which part of the global batch this rank has.
        seed: the random number of the enclosing gradient call, if any.
        seed_depth: the number of units around the gradient call that drew ``seed``.
        drawing_units: the names of units that draw random numbers outside gradient
            calls, as far as the step's recordings know.
        path: the names of the enclosing units.
        numbers: the call numbers of the enclosing units.
        counter: numbers the unit calls made here.
        casts: the dtypes of ``precision``, if any.
        compiler: that of ``jit``, if any.
        donated: the `Donation` of the state that may be written in place, if any.
        tracer: the `Tracer` that records, checks or plans the step, if any.
        in_loss: the number of enclosing gradient calls.
        whole: whether an enclosing unit gathered all of its parameters (see ``unit``).
        functorch_level: the functorch level at which the outermost enclosing unit was
            called.
        create_graph: whether the gradients of the enclosing gradient call are
            differentiable.
        run_outermost: runs the outermost transformed function or gradient call, as
            ``run_outermost(run, args, keywords)``; None: it is called.
    """

    handlers: tuple[Interpretation, ...] = ()
    here: Here | None = None
    runtimes: tuple[tuple[Interpretation, Any], ...] = ()
    micro: tuple[tuple[int, int], ...] = ()
    rows: tuple[tuple[int, int], ...] = ()
    batch_places: tuple[tuple[int, int], ...] = ()
    seed: int | None = None
    seed_depth: int = 0
    drawing_units: frozenset[str] = frozenset()
    path: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    counter: Counter = field(default_factory=Counter)
    casts: Casts | None = None
    compiler: Compiler | None = None
    donated: Any = None
    tracer: Tracer | None = None
    in_loss: int = 0
    whole: bool = False
    functorch_level: int = 0
    create_graph: bool = False
    run_outermost: Callable[..., Any] | None = None

    def runtime_of(self, handler: Interpretation) -> Any:
        """Returns the state of ``handler`` in the innermost enclosing call, or None."""
        for owner, runtime in reversed(self.runtimes):
            if owner is handler:
                return runtime
        return None

    @property
    def composable(self) -> bool:
        """Whether only operations with second derivatives may be used.

        That is so under ``torch.func``, under forward mode, and in a gradient call
        whose gradients are differentiated.
        """
        return self.create_graph or _torch.transforms_active()

    @property
    def staged(self) -> bool:
        """Whether this is a loss of which only some unit calls run on this rank."""
        return bool(self.handlers) and self.handlers[0].decides


_FRAME: ContextVar[Frame | None] = ContextVar("fsfunc_frame", default=None)
_OUTSIDE = Frame()


def frame() -> Frame:
    """Returns the frame in force."""
    return _FRAME.get() or _OUTSIDE


def composable() -> bool:
    """Returns `Frame.composable` of the frame in force."""
    return frame().composable


def recording() -> bool:
    """Returns whether a step is run only to be recorded, checked or planned.

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
    """A context manager: within ``inside(frame)``, ``frame`` is the one in force.

    Backward passes that run inside find the frame too: see `in_one_thread`.

    Args:
        frame: is in force inside, and so is its rank.
        is_user_code: whether what runs inside counts as the user's code, not the
            library's, for tracebacks and source lines.
    """

    __slots__ = ("frame", "is_user_code", "resets", "one_thread")

    frame: Frame
    is_user_code: bool
    one_thread: AbstractContextManager[None] | None

    def __init__(self, frame: Frame, is_user_code: bool = False):
        self.frame = frame
        self.is_user_code = is_user_code

    def __enter__(self) -> Frame:
        frame = self.frame
        token = _FRAME.set(frame)
        # Autograd's device threads have an empty context. They are on in the outermost
        # frame; within `inference_mode(False)`, which turns them on again; and in
        # another thread, which `asyncio.to_thread` gives the context of this one.
        self.one_thread = in_one_thread() if _torch.uses_device_threads() else None
        self.resets: list[tuple[ContextVar[Any], Token[Any]]] = [(_FRAME, token)]
        # Else the rank is that which `spmd` has set, or none.
        if frame.here is not None:
            self.resets.append((HERE, HERE.set(frame.here)))
        if self.is_user_code:
            self.resets.append((INTERNAL, INTERNAL.set(False)))
        return frame

    def __exit__(self, *_: object) -> None:
        for var, token in self.resets:
            var.reset(token)
        if self.one_thread is not None:
            self.one_thread.__exit__(None, None, None)


class Transformed:
    """A function with something around it, such as a transform.

    It has the name, signature and attributes of the function within, as a function of
    ``functools.wraps`` does. It prints as the stack of transforms, and errors leave it
    with a short traceback.

    Args:
        f: the function within.
        called: the name of the transform, or of what else is around.
        shown: returns the (name, value) of each of its arguments that is printed.
        run: the function to call.
        stands_for: the function whose name, signature and attributes it has; by
            default ``f``.

    >>> import fsfunc as ff
    >>> def loss_fn(params, x): ...
    >>> ff.accumulate(ff.remat(ff.value_and_grad(loss_fn)), 4)
    accumulate(remat(value_and_grad(loss_fn)), n=4)
    """

    __name__: str
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
        # Users call it: where it is the outermost function of the library, errors leave
        # here without the library's frames. So does `api_boundary`, for functions.
        try:
            return self._run(*args, **keywords)
        except BaseException as error:
            leave_out(error)
            raise

    @property
    def __code__(self) -> CodeType:  # one object where the function is made anew
        return self._run.__code__

    # A class has none of a function's binding: as a method it must bind by itself.
    def __get__(
        self, instance: object | None, owner: type | None
    ) -> Transformed | MethodType:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        arguments = [f"{name}={_value(x)}" for name, x in self._shown()]
        return f"{self._called}({', '.join([title(self._f), *arguments])})"

    def __reduce__(self) -> str:  # copied and pickled by name, as functions are
        return self.__qualname__


def title(f: Callable[..., Any]) -> str:
    """Returns a function's name, with the transforms around it and their arguments."""
    # Not what a partial or a module holds, such as parameters.
    name = getattr(f, "__name__", type(f).__name__)
    return repr(f) if isinstance(f, Transformed) else name


def _value(x: object) -> str:
    """Returns an argument as text: names of axes and functions without quotes."""
    if isinstance(x, tuple) and len(x) == 1 and isinstance(x[0], str):
        return x[0]
    return x if isinstance(x, str) else getattr(x, "__name__", repr(x))


@api_boundary
def transformed(f: Callable[_P, _R], handler: Interpretation) -> Callable[_P, _R]:
    """Returns ``f`` with an interpretation of the unit and gradient calls inside.

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
        if outer.run_outermost is not None:
            # Not `run`, which would then hold a reference to itself: what it closes
            # over, such as parameters, would live until a garbage collection.
            return outer.run_outermost(transformed(f, handler), args, keywords)
        # A graph of a whole step can have some transforms alone, and refuses others.
        if outer.compiler is not None and outer.compiler.whole:
            outer.compiler.check_takes(handler)  # type: ignore[attr-defined]
        # A recording runs an interpretation of its own, which notes what this one does.
        tracer = outer.tracer
        in_force = handler if tracer is None else tracer.replacement_for(handler)
        return in_force.call(f, args, keywords)

    # `place`, `init_state` and `plan` read from outside which transforms a step has; a
    # function of `functools.wraps` around it keeps the attribute.
    run.interpretations = (*getattr(f, "interpretations", ()), handler)
    return run
