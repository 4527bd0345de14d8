"""NaN: ``finite`` finds the first one; ``poison`` fills unwritten memory with it.

``finite`` is a transform that checks the values of all units and gradient calls.
Under ``poison`` a step that reads memory before it is written returns NaN.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import Interpretation, transformed
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.units import Call
from fsfunc.runtime.memory import BufferPool
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.testing.comparing import index_of_element
from fsfunc.testing.observed_runs import without_values
from fsfunc.tree.types import PyTree


class NotFinite(FloatingPointError):
    """A value that is NaN or infinite."""


def finite(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Transforms ``fn`` to raise at the first value that is NaN or infinite.

    It checks, in this order: the arguments of ``fn``, the arguments and outputs of each
    unit, the cotangents of units' outputs, the loss, the gradients, and the result of
    ``fn``. So the message names the unit, and whether it was forward or backward.
    Nothing is checked under ``torch.func`` and while a step is recorded.

    Raises:
        NotFinite: names the unit or leaf, the first such element, the rank and its
            coordinates.

    Cost: each of these tensors is read once, and waited for: use it to debug. To spare
    a large job that, record it by :func:`ff.testing.recorded`, and check one rank alone
    by :func:`ff.testing.replay`.

    >>> import torch, fsfunc as ff
    >>> root = ff.unit(lambda w, x: (x * w).sqrt())
    >>> step = ff.value_and_grad(lambda w, x: root(w, x).mean())
    >>> x = torch.tensor([1.0, -1.0])
    >>> finite(step)(torch.ones(2), x)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    fsfunc.testing.nan_checks.NotFinite: unit '<lambda>' returns nan at (1,) of ...
    """
    return transformed(fn, _Finite())


class _Finite(Interpretation):
    """Checks the arguments and results of units and gradient calls."""

    called = "finite"

    def call(
        self, f: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        step_name = getattr(f, "__name__", "the step")
        check_finite(args, f"{step_name} is given", "argument ")
        out = super().call(f, args, keywords)
        check_finite(out, f"{step_name} returns")
        return out

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        unit_name = f"unit {call.name!r}"
        cotangent_text = f"the cotangent of what {unit_name} returns is"

        def checked(params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
            check_finite(params, f"{unit_name} is given", "parameter ")
            check_finite((inputs, keywords), f"{unit_name} is given")
            out = run(params, *inputs, **keywords)
            check_finite(out, f"{unit_name} returns")
            for x in tree.leaves(out, is_leaf=is_sharded):
                if isinstance(x, Tensor) and x.requires_grad and not without_values():
                    x.register_hook(lambda g: check_finite(g, cotangent_text))
            return out

        return checked

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def checked(call: GradientCall) -> Outcome:
            outcome = run(call)
            check_finite(outcome.total, "the loss is")
            check_finite(outcome.grads, "there is a gradient of")
            return outcome

        return checked


def check_finite(value: PyTree, prefix: str, kind: str = "") -> None:
    """Raises NotFinite if a tensor in a tree has an element that is not finite.

    Args:
        prefix: begins the message: "unit 'block' returns".
        kind: what the leaves are: "argument ".
    """
    if without_values():
        return
    paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
    for path, leaf in zip(paths, leaves, strict=True):
        x = leaf.local if is_sharded(leaf) else leaf
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            continue
        with torch.no_grad():
            is_finite = x.detach().isfinite()
            if bool(is_finite.all()):
                continue
            index = index_of_element(
                int((~is_finite).reshape(-1).int().argmax()), x.shape
            )
            number = x.detach()[index].item()
        leaf_text = f" of {kind}{path!r}" if path else ""
        part = ", this rank's part," if is_sharded(leaf) else ""
        raise NotFinite(
            f"{prefix} {number!r} at {index}{leaf_text or ' of'} "
            f"{describe_tensor(x.shape, x.dtype)}{part}{_describe_rank()}"
        )


def _describe_rank() -> str:
    here = maybe_here()
    if here is None:
        return " on one device"
    return f" on rank {here.rank} {here.mesh.coordinates(here.rank)}"


@contextmanager
def poison() -> Iterator[None]:
    """Fills memory that is not yet written, or no longer in use, with NaN.

    Inside, the buffers of gathers and reductions are filled as they are handed out and
    as they are released, and so is what ``torch.empty`` and the like return (integers:
    their largest). A step that reads a stale buffer, or padding, then returns NaN,
    where it may have been right by chance.

    It holds for the whole process, on CPU and CUDA.

    >>> import torch
    >>> with poison():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    was_filling = settings.fill_uninitialized_memory
    was_poisoned = BufferPool.poison
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic.*")
        try:
            # torch fills what is new only where it is asked to be deterministic.
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = True
            BufferPool.poison = True
            yield
        finally:
            BufferPool.poison = was_poisoned
            settings.fill_uninitialized_memory = was_filling
            torch.use_deterministic_algorithms(
                was_deterministic, warn_only=was_warn_only
            )
