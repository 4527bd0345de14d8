"""Units that ``jit`` compiles, as a plan runs them: parted as the compiler parts them.

The compiler makes a forward and a backward of a unit's function at once, and chooses
what the one keeps for the other: the least, of which the rest is cheap to compute
again. On tensors without data the same partition gives the same two graphs.

Source: ``min_cut_rematerialization_partition`` of functorch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch, tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.backends.interrupts import reraising_interrupts
from fsfunc.comm.mesh import maybe_here, set_here
from fsfunc.core.execution_context import running
from fsfunc.core.units import Call
from fsfunc.planning.device_kernels import Kernels
from fsfunc.sharded.leaf import is_sharded
from fsfunc.transforms.rematerialization import saved_share


class PartedUnits:
    """The functions of compiled units in one plan, each traced once for its shapes.

    Args:
        kernels: of the device, see ``device_kernels``.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._made: dict[Any, _Parted | None] = {}
        self._plain: dict[Any, Callable[..., Any]] = {}

    def of(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        """The function to run for a call on these arguments.

        Where the compiler does not part it, or a recompute runs it twice, its own.
        """
        fn, compiler = call.unit.fn, call.frame.compiler
        if (
            compiler is None
            or not compiler.partitions_call(call)
            or not _is_parted(call)
        ):
            return fn
        leaves, treedef = tree.flatten((params, inputs, keywords), is_sharded)
        if any(map(is_sharded, leaves)):
            return fn
        first: dict[int, int] = {}
        kinds = [
            (
                *(x.shape, x.dtype, x.stride(), _torch.device_of(x)),
                *(x.requires_grad, first.setdefault(id(x), i)),
            )
            if isinstance(x, Tensor)
            else x
            for i, x in enumerate(leaves)
        ]
        share = saved_share(call)
        key = call.unit, share, treedef, repr(kinds)
        if key not in self._made:
            self._made[key] = self._traced(call, share, leaves, treedef)
        return self._made[key] or fn

    @reraising_interrupts()
    def _traced(
        self, call: Call, share: float | None, leaves: list[Any], treedef: Any
    ) -> _Parted | None:
        kind, by = (call.unit, share), getattr(call.unit.fn, "compiled_by", None)
        try:
            if kind not in self._plain:  # a unit of a module says what is compiled
                plain = call.unit.fn if by is None else by(lambda fn: fn)
                self._plain[kind] = plain
            found = _Parted(self._plain[kind], share, leaves, treedef)
            with (
                _torch.outside_modes(),
                _torch.outside_function_modes(),
                torch.enable_grad(),
                self._kernels(),
                _ComposedNorms(),
                _alone(),
            ):
                found.trace(leaves)
            return found
        except Exception as error:
            first = str(error).partition("\n")[0]
            warn(_WHOLE.format(call.name, first))
            return None


def _is_parted(call: Call) -> bool:
    """True where a unit runs once, and its backward is the compiler's."""
    plain = call.frame.composable or _torch.functorch_active()
    return torch.is_grad_enabled() and not plain and running().run_unit_fn is None


def _alone() -> AbstractContextManager[Any]:
    """Inside, nothing is sent: no compiler takes a collective."""
    at = maybe_here()
    return nullcontext() if at is None else set_here(replace(at, link=_NoLink()))


class _NoLink:
    def for_mesh(self, mesh: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("it calls a collective")


class _ComposedNorms(TorchFunctionMode):
    """The compiler writes a norm as operators, whatever kernel a device has of it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.rms_norm, F.rms_norm):
            with _torch.outside_function_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Parted:
    """A unit's function, of arguments that look like these, as two graphs."""

    def __init__(
        self,
        fn: Callable[..., Any],
        share: float | None,
        leaves: Sequence[Any],
        treedef: Any,
    ):
        from fsfunc._torch.partitions import partitioned  # slow to import

        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.run = partitioned(partial(self._flat, fn, list(leaves), treedef), share)
        self.out: Any = None  # the structure of what it returns, and what is no tensor

    def trace(self, leaves: Sequence[Any]) -> None:
        """Runs it once, forward and backward, on tensors of its own."""
        made: dict[int, Tensor] = {}
        for i in self.places:
            x = leaves[i]
            if id(x) not in made:
                made[id(x)] = torch.empty_like(x).requires_grad_(x.requires_grad)
        out = self.run(*(made[id(leaves[i])] for i in self.places))
        by = [x for x in made.values() if x.requires_grad]
        out = [y for y in out if y.requires_grad]
        if out and by:
            ones = [torch.ones_like(y) for y in out]
            torch.autograd.grad(out, by, ones, allow_unused=True)

    def _flat(
        self, fn: Callable[..., Any], leaves: list[Any], treedef: Any, *given: Tensor
    ) -> list[Tensor]:
        leaves = list(leaves)
        for i, x in zip(self.places, given, strict=True):
            leaves[i] = x
        params, inputs, keywords = tree.unflatten(treedef, leaves)
        values, outdef = tree.flatten(fn(params, *inputs, **keywords))
        tensors = [x for x in values if isinstance(x, Tensor)]
        others = [None if isinstance(x, Tensor) else (x,) for x in values]
        self.out = outdef, others
        return tensors

    def __call__(self, params: Any, *inputs: Any, **keywords: Any) -> Any:
        leaves = tree.leaves((params, inputs, keywords))
        made = iter(self.run(*(leaves[i] for i in self.places)))
        outdef, others = self.out
        values = [next(made) if x is None else x[0] for x in others]
        return tree.unflatten(outdef, values)


_WHOLE = (
    "unit {!r} is planned as if its compiled backward were given all that the plain "
    "function saves, as torch could not part it without data: {}"
)
