"""Units that ``jit`` compiles, as a plan runs them: parted as the compiler parts them.

The compiler traces a unit's function once, and parts the joint graph into a forward and
a backward. It chooses what the forward saves: the least from which the backward can
cheaply compute the rest again. A plan of the plain function would save what autograd
does, which is more. So an `observer.Observer` runs a `_Parted` unit, which the same
partitioner made, on fake tensors.

Source: ``min_cut_rematerialization_partition`` of functorch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
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
from fsfunc.comm.mesh import Mesh, maybe_here, set_here
from fsfunc.core.execution_context import running
from fsfunc.core.units import Call
from fsfunc.planning.device_kernels import Kernels
from fsfunc.sharded.leaf import is_sharded
from fsfunc.transforms.rematerialization import saved_share
from fsfunc.tree.structure import TreeDef
from fsfunc.tree.types import Leaf, PyTree


class PartedUnits:
    """The functions of compiled units in one plan, each traced once for its shapes.

    Args:
        kernels: makes contexts with the device's kernels, see ``device_kernels``.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # By unit, share, structure and shapes of the arguments; None: cannot be parted.
        self._parted: dict[Hashable, _Parted | None] = {}
        self._plain_functions: dict[Hashable, Callable[..., PyTree]] = {}

    def function_for(
        self,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> Callable[..., PyTree]:
        """Returns the function to run for a call on these arguments.

        It is the unit's own if the compiler does not part it, or a recompute runs it
        twice.
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
        # Arguments that are the same tensor are one input of the compiled graph.
        first_index: dict[int, int] = {}
        kinds = [
            (
                *(x.shape, x.dtype, x.stride(), _torch.device_of(x)),
                *(x.requires_grad, first_index.setdefault(id(x), i)),
            )
            if isinstance(x, Tensor)
            else x
            for i, x in enumerate(leaves)
        ]
        share = saved_share(call)
        key = call.unit, share, treedef, repr(kinds)
        if key not in self._parted:
            self._parted[key] = self._trace_parted(call, share, leaves, treedef)
        return self._parted[key] or fn

    @reraising_interrupts()
    def _trace_parted(
        self, call: Call, share: float | None, leaves: list[Leaf], treedef: TreeDef
    ) -> _Parted | None:
        """Returns the parted function; warns, and returns None, if torch cannot."""
        key, compiled_by = (
            (call.unit, share),
            getattr(call.unit.fn, "compiled_by", None),
        )
        try:
            # A unit of a module says itself which function of it is compiled.
            if key not in self._plain_functions:
                compiles_whole = compiled_by is None
                plain = call.unit.fn if compiles_whole else compiled_by(lambda fn: fn)
                self._plain_functions[key] = plain
            parted = _Parted(self._plain_functions[key], share, leaves, treedef)
            with (
                _torch.outside_modes(),
                _torch.outside_function_modes(),
                torch.enable_grad(),
                self._kernels(),
                _ComposedNorms(),
                _alone(),
            ):
                parted.trace(leaves)
            return parted
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            warn(_WHOLE.format(call.name, first_line))
            return None


def _is_parted(call: Call) -> bool:
    """Returns whether a unit runs once, and its backward is the compiler's."""
    runs_plainly = call.frame.composable or _torch.functorch_active()
    return (
        torch.is_grad_enabled() and not runs_plainly and running().run_unit_fn is None
    )


def _alone() -> AbstractContextManager[Any]:
    """Returns a context in which a collective raises: no compiler takes one."""
    place = maybe_here()
    if place is None:
        return nullcontext()
    return set_here(replace(place, link=_NoLink()))


class _NoLink:
    """A link of no use: a unit that needs it is not parted."""

    def for_mesh(self, mesh: Mesh) -> _NoLink:
        return self

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("it calls a collective")


class _ComposedNorms(TorchFunctionMode):
    """Runs norms as operators: so the compiler writes them, whatever the device has."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.rms_norm, F.rms_norm):
            with _torch.outside_function_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Parted:
    """A unit's function as two graphs, for arguments of given shapes.

    Args:
        fn: the plain function.
        share: how much the partitioner may save, see ``share_kept``; None: its choice.
        leaves, treedef: arguments of such shapes, flattened.

    Attributes:
        run: the graphs, as a function of the tensors among the leaves.
        output_structure: the structure of what ``fn`` returns, and in it what is no
            tensor.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        share: float | None,
        leaves: Sequence[Leaf],
        treedef: TreeDef,
    ):
        from fsfunc._torch.partitions import partitioned  # slow to import

        self.tensor_indices = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.run = partitioned(partial(self._flat, fn, list(leaves), treedef), share)
        # Set by the first run: (structure, None for a tensor or (leaf,) for another).
        self.output_structure: tuple[TreeDef, list[tuple[Leaf] | None]]

    def trace(self, leaves: Sequence[Leaf]) -> None:
        """Runs it once, forward and backward, on tensors of its own.

        The partitioner works when a graph first runs; it is to do so outside the plan.
        """
        copies: dict[int, Tensor] = {}
        for i in self.tensor_indices:
            x = leaves[i]
            if id(x) not in copies:
                copies[id(x)] = torch.empty_like(x).requires_grad_(x.requires_grad)
        outputs = self.run(*(copies[id(leaves[i])] for i in self.tensor_indices))
        inputs = [x for x in copies.values() if x.requires_grad]
        outputs = [y for y in outputs if y.requires_grad]
        if outputs and inputs:
            ones = [torch.ones_like(y) for y in outputs]
            torch.autograd.grad(outputs, inputs, ones, allow_unused=True)

    def _flat(
        self,
        fn: Callable[..., Any],
        leaves: list[Leaf],
        treedef: TreeDef,
        *tensors: Tensor,
    ) -> list[Tensor]:
        leaves = list(leaves)
        for i, x in zip(self.tensor_indices, tensors, strict=True):
            leaves[i] = x
        params, inputs, keywords = tree.unflatten(treedef, leaves)
        values, outdef = tree.flatten(fn(params, *inputs, **keywords))
        output_tensors = [x for x in values if isinstance(x, Tensor)]
        non_tensors = [None if isinstance(x, Tensor) else (x,) for x in values]
        self.output_structure = outdef, non_tensors
        return output_tensors

    def __call__(self, params: PyTree, *inputs: PyTree, **keywords: PyTree) -> PyTree:
        leaves = tree.leaves((params, inputs, keywords))
        output_tensors = iter(self.run(*(leaves[i] for i in self.tensor_indices)))
        outdef, others = self.output_structure
        values = [next(output_tensors) if x is None else x[0] for x in others]
        return tree.unflatten(outdef, values)


_WHOLE = (
    "unit {!r} is planned as if its compiled backward were given all that the plain "
    "function saves, as torch could not part it without data: {}"
)
