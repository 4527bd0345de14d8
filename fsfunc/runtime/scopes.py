"""Context managers: a context variable, one thread, no collector, no compilation.

`Scoped` is under every transform and unit call. The rest of the file is for what may
not be compiled, or is traced to be run as a graph. A unit's function may be compiled by
``torch.compile``; the code around units may not, as Python decides which unit is called
when, and transforms must see the calls.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch


class Scoped:
    """``with Scoped(var, value)``: inside, the context variable has this value.

    A class, not a generator: each unit call opens several, and so it is faster.

    >>> var = ContextVar("var", default=0)
    >>> with Scoped(var, 1):
    ...     var.get()
    1
    >>> var.get()
    0
    """

    __slots__ = ("var", "value", "token")

    var: ContextVar[Any]
    value: Any
    token: Token[Any]

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
def gc_paused() -> Iterator[None]:
    """Inside, Python's garbage collector does not run.

    For code that makes thousands of values, of which it would find none to free.

    >>> with gc_paused():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def under_stance(stance: Any) -> Iterator[None]:
    """Inside, compiled functions run as ``stance``, of ``compiler_stance()``, says."""
    before = _torch.compiler_stance()
    _torch.set_compiler_stance(stance)
    try:
        yield
    finally:
        _torch.set_compiler_stance(before)


def running_eagerly() -> AbstractContextManager[None]:
    """Inside, a compiled function runs as the function that it was made of.

    For tensors without values: a compiled kernel would read memory that is not there.
    """
    return under_stance("force_eager")


class RunPrologue:
    """What each run of a graph does in Python first, as its step did while traced.

    Attributes:
        unused_draws: how many numbers the step draws and does not use.
        values: by function and arguments: these, and a tensor for the function's value.
    """

    def __init__(self) -> None:
        self.unused_draws = 0
        self.values: dict[Any, tuple[Callable[..., Any], tuple[Any, ...], Tensor]] = {}


_IN_GRAPH: ContextVar[RunPrologue | None] = ContextVar("fsfunc_in_graph", default=None)


def in_graph() -> Scoped:
    """Inside, a step is traced to be run as a graph, with other values."""
    return Scoped(_IN_GRAPH, RunPrologue())


def replace_draw(number: int) -> int:
    """Returns ``number`` for one that each run of the graph draws and does not use."""
    if (prologue := _IN_GRAPH.get()) is not None:
        prologue.unused_draws += 1
    return number


def value_in_graph(fn: Callable[..., Any], *args: Any) -> Tensor:
    """Returns a scalar float64 tensor, in each run of the graph ``fn(*args)``.

    Arguments that are leaves of the step's arguments have the values of that run.
    """
    prologue = _IN_GRAPH.get()
    assert prologue is not None, "no graph is traced"
    key = fn, *map(id, args)
    if key not in prologue.values:
        with _torch.beneath_all_modes():
            prologue.values[key] = fn, args, torch.zeros((), dtype=torch.float64)
    return prologue.values[key][2]


def is_in_graph() -> bool:
    """Returns whether a step is being traced to be run as a graph."""
    return _IN_GRAPH.get() is not None


def refuse_in_graph(action: str) -> None:
    """Raises in the trace of a graph, where ``action`` depends on values.

    A plan may assume them; a graph would have the assumption in it.

    Raises:
        RuntimeError: names the way out.
    """
    if is_in_graph():
        raise RuntimeError(
            f"{action}: that depends on values, and a step that is compiled whole is "
            "traced without them. Compile the step's units, jit(step)"
        )


def refuse_compiled(callee: object) -> None:
    """Raises if a compiled function calls ``callee``, which is printed.

    Raises:
        RuntimeError: one does, as it is compiled or between its graphs.
    """
    # While Dynamo traces this function the first is True, and `or` skips the second,
    # which Dynamo could not trace.
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling or _torch.compiler_at_work() not in (None, False):
        raise RuntimeError(
            f"{callee} is called inside a function that torch.compile made: units "
            "compile, steps do not. Compile the unit's function, "
            "ff.unit(torch.compile(fn)), and leave steps, losses and units as they are"
        )
