"""Backward passes in a second thread, as on CUDA: ``FSFUNC_THREADED=1 pytest``.

Autograd runs the nodes of a CUDA tensor in a thread of the device. It gives that thread
the state that is torch's own (grad mode, autocast, stacks of modes, hooks of saved
tensors, levels of ``torch.func``: its ``ThreadLocalState``), but Python's context
variables are empty there. A task that ``torch.jit.fork`` starts gets the very same
state, in a real second thread: so here a whole backward pass is such a task.

Wherever autograd's threads are off (``torch.autograd.set_multithreading_enabled``) a
backward pass stays where it is, as on CUDA. So does one that begins in another's.
"""

import itertools
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

ASKED = "FSFUNC_THREADED" in os.environ

_tasks: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()
_here = threading.local()


@torch.jit.ignore
def _task(n: int) -> int:
    _tasks.pop(n)()
    return n


with warnings.catch_warnings(action="ignore"):  # torch.jit's days are numbered

    @torch.jit.script
    def _other(n: int) -> int:
        return _task(n)

    @torch.jit.script
    def _in_other(n: int) -> int:
        return torch.jit.wait(torch.jit.fork(_other, n))


def in_another_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or raises, in a thread with an empty context."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def task() -> None:
        _here.is_second = True
        try:
            result.append(call())
        except BaseException as error:  # torch.jit would make another of it
            errors.append(error)
        finally:
            _here.is_second = False

    _tasks[n := next(_numbers)] = task
    _in_other(n)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # it holds this frame
    return result.pop()


def begin() -> Callable[[], None]:
    """From now on backward passes run as on CUDA; returns what ends that."""
    engine = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **keywords: Any) -> Any:
        threads = torch._C._is_multithreading_enabled()
        if not threads or getattr(_here, "is_second", False):
            return engine(*args, **keywords)
        return in_another_thread(lambda: engine(*args, **keywords))

    # Where torch.autograd.grad, .backward and the pullbacks of torch.func look it up.
    def put(how: Callable[..., Any]) -> None:
        for module in (torch.autograd, torch.autograd.graph):
            module._engine_run_backward = how

    put(run_backward)
    return lambda: put(engine)
