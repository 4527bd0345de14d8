"""NaN: the first value of a step that is not finite, and NaN in unwritten memory."""

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
from fsfunc.runtime.memory import BufferPool
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.testing.comparing import place_of
from fsfunc.testing.observed_runs import unseen


class NotFinite(FloatingPointError):
    """A value that is NaN or infinite."""


def finite(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, which raises at the first value that is NaN or infinite.

    It checks, in this order: the arguments of ``fn``, the arguments and outputs of each
    unit, the cotangents of units' outputs, the loss, the gradients, and the result of
    ``fn``. So the message names the unit, and whether it was forward or backward.
    Nothing is checked under ``torch.func`` and while a step is recorded.

    Raises:
        NotFinite: names the unit or leaf, the first such element, the rank and its
            coordinates.

    Cost: each of these tensors is read once, and waited for: for debugging. Of a job
    that :func:`ff.testing.recorded` keeps, one rank is looked at alone by
    :func:`ff.testing.replay`, and the job itself pays nothing for it.

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
    """Looks at what units and gradient calls are given, and give."""

    called = "finite"

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        name = getattr(f, "__name__", "the step")
        look(args, f"{name} is given", "argument ")
        out = super().call(f, args, keywords)
        look(out, f"{name} returns")
        return out

    def unit(self, run: Callable[..., Any], call: Any) -> Callable[..., Any]:
        said = f"unit {call.name!r}"
        of_cotangent = f"the cotangent of what {said} returns is"

        def looked(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
            look(params, f"{said} is given", "parameter ")
            look((inputs, keywords), f"{said} is given")
            out = run(params, *inputs, **keywords)
            look(out, f"{said} returns")
            for x in tree.leaves(out, is_leaf=is_sharded):
                if isinstance(x, Tensor) and x.requires_grad and not unseen():
                    x.register_hook(lambda g: look(g, of_cotangent))
            return out

        return looked

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def looked(call: GradientCall) -> Outcome:
            outcome = run(call)
            look(outcome.total, "the loss is")
            look(outcome.grads, "there is a gradient of")
            return outcome

        return looked


def look(value: Any, says: str, kind: str = "") -> None:
    """Raises where a tensor in a tree holds what is not finite."""
    if unseen():
        return
    paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
    for path, leaf in zip(paths, leaves, strict=True):
        x = leaf.local if is_sharded(leaf) else leaf
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            continue
        with torch.no_grad():
            good = x.detach().isfinite()
            if bool(good.all()):
                continue
            at = place_of(int((~good).reshape(-1).int().argmax()), x.shape)
            number = x.detach()[at].item()
        where = f" of {kind}{path!r}" if path else ""
        part = ", this rank's part," if is_sharded(leaf) else ""
        raise NotFinite(
            f"{says} {number!r} at {at}{where or ' of'} "
            f"{describe_tensor(x.shape, x.dtype)}{part}{_who()}"
        )


def _who() -> str:
    at = maybe_here()
    if at is None:
        return " on one device"
    return f" on rank {at.rank} {at.mesh.coordinates(at.rank)}"


@contextmanager
def poison() -> Iterator[None]:
    """Fills memory that means nothing yet, or no more, with NaN.

    Inside, the buffers of gathers and reductions are spoiled as they are handed out and
    as they are let go of, and so is what ``torch.empty`` and its like return (integers:
    their largest). A step that reads a stale buffer, or padding, then returns NaN,
    where it may have been right by chance.

    It holds for the whole process, on CPU and CUDA.

    >>> import torch
    >>> with poison():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    poisoned = BufferPool.poison
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic.*")
        try:
            # torch fills what is new only where it is asked to be deterministic.
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = True
            BufferPool.poison = True
            yield
        finally:
            BufferPool.poison = poisoned
            settings.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(was, warn_only=warned)
