"""What a rank's thread takes along: settings of the caller's, and a state of its own.

A new thread inherits nothing of what was set around ``spmd``: it is carried in, or
refused. And what torch has once for all threads is swapped as the ranks take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch

__all__ = ["Own", "carry", "own", "resume"]

Own = tuple[Tensor, Tensor | None, tuple[int, int], Any]


def own() -> Own:
    """What torch has once for all threads, and each rank for itself.

    The default generators' states (the CPU's, and that of a CUDA device in use), the
    level of forward-mode differentiation, and how compiled functions run.
    """
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    level, stance = _torch.forward_ad_state(), _torch.compiler_stance()
    return torch.get_rng_state(), cuda, level, stance


def resume(own: Own) -> None:
    """Puts a rank's own state in place, as it gets the baton back."""
    cpu, cuda, level, stance = own
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    _torch.set_forward_ad_state(level)
    _torch.set_compiler_stance(stance)


def carry() -> Callable[[], ExitStack]:
    """How a new thread enters the caller's settings.

    Raises:
        RuntimeError: a setting that acts in one thread only.
    """
    if modes := _torch.active_modes():
        raise RuntimeError(
            f"spmd cannot carry {', '.join(modes)} into simulated ranks: a mode acts "
            "in one thread; enter it inside the function given to spmd"
        )
    if _torch.functorch_active():
        raise RuntimeError(
            "spmd on simulated ranks inside a torch.func transform: differentiate or "
            "map inside the function given to spmd"
        )
    if _torch.saved_tensors_hooked():
        raise RuntimeError(
            "spmd cannot carry saved_tensors_hooks into simulated ranks: they act in "
            "one thread; enter them inside the function given to spmd"
        )
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    casts = [(k, torch.get_autocast_dtype(k)) for k in kinds]
    device, threads = torch.get_default_device(), torch.get_num_threads()
    plain = device == torch.device("cpu")
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter() -> ExitStack:
        stack = ExitStack()
        torch.set_num_threads(threads)
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        # Backward stays in the rank's own thread, which can pass the baton. (After
        # inference_mode, which turns multithreading on.)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype))
        if not plain:
            stack.enter_context(device)
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter
