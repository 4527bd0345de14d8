"""Blocks: a context variable, one thread, no garbage collector, no compiled functions.

A unit's function may be compiled. What is around units may not: which unit is called
when is for Python to say, and for transforms to see.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch


class Scoped:
    """``with Scoped(var, value)``: a class, since each unit call opens several.

    >>> var = ContextVar("var", default=0)
    >>> with Scoped(var, 1):
    ...     var.get()
    1
    >>> var.get()
    0
    """

    __slots__ = ("var", "value", "token")

    def __init__(self, var: ContextVar[Any], value: Any):
        self.var, self.value = var, value

    def __enter__(self) -> Any:
        self.token = self.var.set(self.value)
        return self.value

    def __exit__(self, *_: Any) -> None:
        self.var.reset(self.token)


def in_one_thread() -> AbstractContextManager[None]:
    """Inside, backward passes run in the calling thread, with its context variables.

    Autograd runs the nodes of a CUDA tensor in a thread of the device, where every
    context variable is empty: no frame, no rank, no ledger. So whatever gives the
    user's code a context is entered with this: the outermost frame (of a transform, a
    gradient call or a unit), ``spmd``, a ledger, a run without data. It then holds for
    every backward pass inside, of ``value_and_grad``, stock ``torch.autograd.grad`` and
    ``loss.backward()``; and one outside of them all has nothing to lose.

    It takes about 1 µs. One thread then serves all devices: where a process has a model
    on several, it launches their kernels in turn (which still run at once).

    >>> var = ContextVar("var", default=0)
    >>> x = torch.ones(2, requires_grad=True)  # or on "cuda"
    >>> with in_one_thread(), Scoped(var, 1):
    ...     y = x * 2
    ...     _ = y.register_hook(lambda g: print(var.get()))
    ...     y.sum().backward()
    1
    """
    return torch.autograd.set_multithreading_enabled(False)


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector waits: of thousands of new values it would find none to free.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextmanager
def standing(stance: Any) -> Iterator[None]:
    """Inside, compiled functions run as where ``compiler_stance()`` was asked."""
    before = _torch.compiler_stance()
    _torch.set_compiler_stance(stance)
    try:
        yield
    finally:
        _torch.set_compiler_stance(before)


def plainly() -> AbstractContextManager[None]:
    """Inside, a compiled function runs as the plain one that it was made of.

    For tensors without values: a kernel would read their memory, and there is none.
    """
    return standing("force_eager")


class BeforeRuns:
    """The Python that each run of a graph does before, as its step did while traced.

    Attributes:
        drawn: how many numbers it draws and does not use.
        asked: (function, its arguments, tensor for the number that it returns).
    """

    def __init__(self) -> None:
        self.drawn = 0
        self.asked: dict[Any, tuple[Callable[..., Any], tuple[Any, ...], Tensor]] = {}


_IN_GRAPH: ContextVar[BeforeRuns | None] = ContextVar("fsfunc_in_graph", default=None)


def in_graph() -> Scoped:
    """Inside, a step is traced to be run as a graph, with other values."""
    return Scoped(_IN_GRAPH, BeforeRuns())


def draws_in_graph(number: int) -> int:
    """``number``, in place of one that each run of the graph draws and does not use."""
    if (before := _IN_GRAPH.get()) is not None:
        before.drawn += 1
    return number


def asked_in_graph(fn: Callable[..., Any], *args: Any) -> Tensor:
    """A float64 tensor of no dims, in which each run of the graph has ``fn(*args)``.

    Of ``args`` those that are leaves of the step's arguments are then what is given.
    """
    before = _IN_GRAPH.get()
    assert before is not None, "no graph is traced"
    key = fn, *map(id, args)
    if key not in before.asked:
        with _torch.beneath_all_modes():
            before.asked[key] = fn, args, torch.zeros((), dtype=torch.float64)
    return before.asked[key][2]


def is_in_graph() -> bool:
    """True while a step is traced to be run as a graph."""
    return _IN_GRAPH.get() is not None


def refuse_in_graph(what: str) -> None:
    """Raises in the trace of a graph, where ``what`` depends on values.

    A plan may assume them; a graph would have the assumption in it.

    Raises:
        RuntimeError: names the way out.
    """
    if is_in_graph():
        raise RuntimeError(
            f"{what}: that depends on values, and a step that is compiled whole is "
            "traced without them. Compile the step's units, jit(step)"
        )


def refuse_compiled(what: object) -> None:
    """Raises where a compiled function calls ``what``.

    Raises:
        RuntimeError: one does, as it is compiled or between its graphs.
    """
    # While this is compiled the first is true, and nobody compiles the second.
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling or _torch.compiler_at_work() not in (None, False):
        raise RuntimeError(
            f"{what} is called inside a function that torch.compile made: units "
            "compile, steps do not. Compile the unit's function, "
            "ff.unit(torch.compile(fn)), and leave steps, losses and units as they are"
        )
