"""The versions of torch that fsfunc is tested with, and what differs among them.

Nothing here asks for a version to decide what to do: a function that stands for two of
torch's is the one that this torch has, and what a private function does is tried once,
here or where it is first needed. `DIFFERENCES` says why such code is there, so that it
can go when the versions it is for are not supported any more.
"""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

OLDEST, NEWEST = "2.11", "2.14"
"""The first and the last minor version that the tests pass on; all between do too."""


class VersionDifference(NamedTuple):
    """Something that torch does in some of its versions.

    Attributes:
        versions: those that do it.
        behavior: what they do.
        met_by: the place in this library that makes it no difference, and how.
    """

    versions: str
    behavior: str
    met_by: str


DIFFERENCES: tuple[VersionDifference, ...] = (
    VersionDifference(
        "2.11, 2.12",
        "the node of an autograd.Function, held by ctx or grad_fn alone, loses what it "
        "saved when its result dies",
        "transforms/repeated_calls.py keeps the results of _Saver, not their nodes; "
        "pipelining/backward_split.py keeps a node above one that waits for its weight "
        "gradient, and with it what that one saved where the graph is retained",
    ),
    VersionDifference(
        "2.11, with CUDA built in and no card",
        "the process ends when a thread enters a mode of fake tensors, if the thread "
        "that was the first to do so has ended",
        "_torch/fake_tensors.py: ready_for_threads, before simulated ranks start",
    ),
    VersionDifference(
        "2.11, 2.12",
        "a torch.Generator takes no weak references",
        "generator_reference below, which counts references",
    ),
    VersionDifference(
        "2.11, 2.12",
        "all_gather_single and reduce_scatter_single have other names",
        "all_gather_single and reduce_scatter_single below",
    ),
    VersionDifference(
        "2.11, 2.12",
        "torch.utils.checkpoint leaves its hooks on when the function raises, until "
        "nobody holds the error: in another thread they cannot be taken off, it says",
        "tests/derivatives/test_refusals.py, which lets it be said: the call is "
        "torch's and the user's, and the error is refused either way",
    ),
    VersionDifference(
        "2.11, 2.12",
        "the compiler writes silu's backward with 1 + exp(-x) in place of a sigmoid, "
        "and shares it with silu that is computed again: kernels write and read it",
        "tests/planning/test_device_kernels.py, which counts it: plans are of what "
        "this torch compiles",
    ),
    VersionDifference(
        "2.14",
        "Function.apply is built in: it has no code object, and no frame of Python",
        "_torch/graph.py: function_runs asks whether operators take tangents",
    ),
)

# `getattr(x, name, default)` would warn of an old name that is there, but not used.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", None
) or (dist.reduce_scatter_tensor)


class _Same(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _nodes_keep_functions_alive() -> bool:
    # The result of ``apply`` dies at once, and the node is held.
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = _Same.apply(
            torch.zeros((), device="cpu", requires_grad=True)
        ).grad_fn
    try:
        return bool(node.next_functions)
    except RuntimeError:
        return False


# At import, where no mode of a caller's sees its operators.
NODES_KEEP_FUNCTIONS_ALIVE = _nodes_keep_functions_alive()
"""Whether a node of an ``autograd.Function`` lives as long as somebody holds it."""


def generator_reference(
    generator: torch.Generator,
) -> Callable[[], torch.Generator | None]:
    """Returns a function that gives the generator while others hold it, else None."""
    try:
        return weakref.ref(generator)
    except TypeError:
        return partial(_if_referenced, [generator])


def _if_referenced(holder: list[torch.Generator]) -> torch.Generator | None:
    return holder[0] if _reference_count(holder) > _ALONE else None


def _reference_count(holder: list[Any]) -> int:
    return sys.getrefcount(holder[0])


_ALONE = _reference_count([object()])  # where the list alone holds it


def is_tested(version: str) -> bool:
    """Returns whether fsfunc is tested with a version of torch.

    >>> is_tested("2.13.0+cpu"), is_tested("2.10.1"), is_tested("2.15.0a0+git1234")
    (True, False, False)
    """
    return _minor(OLDEST) <= _minor(version) <= _minor(NEWEST)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


if not is_tested(torch.__version__):  # once, as this is imported
    warnings.warn(
        f"fsfunc is tested with torch {OLDEST} to {NEWEST}, and this is "
        f"{torch.__version__}: private functions of torch may do something else there; "
        "`pytest tests/test_torch.py` of fsfunc's sources says which",
        stacklevel=2,
    )
