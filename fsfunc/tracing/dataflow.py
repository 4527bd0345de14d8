"""Data dependencies of a loss, recorded below autograd on fake tensors.

`tracer` runs the loss in a :class:`Dataflow`, a mode that sees each operator.
Dependencies follow storages, not tensors: a view, an operation in place and an
assignment to a slice reach the storage that they share. Of what a unit does inside only
FLOPs, random draws and saved memory are noted; the operations between units (glue) are
noted one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import FakeTensorMode
from fsfunc.comm.attribution import source_line
from fsfunc.core.units import Call
from fsfunc.runtime.memory import StorageTable
from fsfunc.tracing.operators import FLOPS, OperatorMode, draws
from fsfunc.tracing.programs import NOWHERE, Draw, Glue, Names, Origins, Value
from fsfunc.tracing.runs import with_data
from fsfunc.tree import PyTree


class Argument(NamedTuple):
    """A leaf of the loss's arguments.

    Args:
        name: its path, for a parameter within the first argument.
        parameter: whether it is of the first argument, and has a gradient.
    """

    name: str
    parameter: bool


@dataclass
class RunningUnit:
    """Operators, origins and saved memory of one unit call while it runs.

    Args:
        name: the unit's.
        has_data: whether it runs on tensors with data.
        flops, operators: those counted so far; a view is no operator.
        draws: whether it has drawn random numbers.
        origins: the origins of all that it has used.
        saved: the tensors saved for its backward pass, one of each storage, by its key.
    """

    name: str
    has_data: bool = False
    flops: int = 0
    operators: int = 0
    draws: bool = False
    origins: Origins = NOWHERE
    saved: dict[int, Tensor] = field(default_factory=dict)

    def note_saved(self, x: Tensor) -> None:
        """Notes a tensor that is saved for the backward pass."""
        self.saved[_torch.storage_key(x)] = x

    def note_saved_by_graph(self, arguments: PyTree, out: PyTree) -> None:
        """Notes what autograd saved between the arguments and the outputs.

        It is read from the graph afterwards, as hooks on saved tensors would forbid
        ``torch.func`` in a unit.
        """
        input_nodes = {x.grad_fn for x in tensors_in(arguments)}
        roots = [x.grad_fn for x in tensors_in(out) if x.grad_fn not in input_nodes]
        for x in _torch.saved_tensors(_torch.graph_nodes(roots, input_nodes)):
            self.note_saved(x)


class Dataflow(OperatorMode):
    """A dispatch mode that records where the values of a run come from.

    Args:
        names: what tensors are called in the listing.

    Attributes:
        call_count: the number of unit calls so far.
        running_unit: the unit call that runs now, if any.
        glue: the operations between unit calls.
        draws: those of them that draw random numbers.
        mutated: the unit outputs that were written in place.
        owner: by storage, the argument or the unit output that lies there.
        shared: by storage, the unit of which an output lies there with another tensor.
    """

    owner: StorageTable[Argument | Value]
    shared: StorageTable[str]

    def __init__(self, names: Names):
        super().__init__()
        self.names = names
        self.call_count: int = 0
        self.running_unit: RunningUnit | None = None
        self.glue: list[Glue] = []
        self.draws: list[Draw] = []
        self.mutated: set[Value] = set()
        self.owner = StorageTable[Argument | Value]()
        self.shared = StorageTable[str]()
        self._origins = StorageTable[Origins]()

    def record_origins(
        self, x: Tensor, origins: Origins, owner: Argument | Value | None
    ) -> None:
        """Records the origins of what is in the storage of ``x``, and whose it is."""
        self._origins[x] = origins
        if owner is not None:
            self.owner[x] = owner

    def note_shared(self, sharing: Iterable[Tensor], unit: str) -> None:
        """Notes tensors of one storage, of which one is an output of a unit."""
        for x in sharing:
            self.shared[x] = unit

    def has_origins(self, x: Tensor) -> bool:
        """Returns whether the storage of ``x`` is a leaf's, a unit output's or glue's.

        Else it is that of a tensor that the loss has captured.
        """
        return self._origins.get(x) is not None

    def add_argument(self, x: Tensor, leaf: Argument) -> Tensor:
        """Records ``x`` as a leaf of the loss's arguments; returns it."""
        names = frozenset((leaf.name,))
        origins = Origins(reads=names) if leaf.parameter else Origins(batch=names)
        self.record_origins(x, origins, leaf)
        self.names.give(x, self.names.argument_name(leaf))
        return x

    def origins_of(self, values: PyTree) -> Origins:
        """Returns the joint origins of the tensors in a tree."""
        origins = NOWHERE
        for x in tensors_in(values):
            origins = origins | (self._origins.get(x) or NOWHERE)
        return origins

    def operator(
        self, func: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
    ) -> Any:
        if func.namespace == "prim":  # asks for a device
            return func(*args, **kwargs)
        written = _torch.tensors_written(func, args, kwargs)
        if self.running_unit is not None:
            return self._run_in_unit(self.running_unit, func, args, kwargs, written)
        return self._run_glue(func, args, kwargs, written)

    def _run_in_unit(
        self,
        body: RunningUnit,
        func: _torch.OpOverload,
        args: _torch.Args,
        kwargs: _torch.Kwargs,
        written: Sequence[Tensor],
    ) -> Any:
        """Runs an operation of a unit, and counts it."""
        body.origins = body.origins | self.origins_of((args, kwargs))
        if not body.has_data:
            self._refuse_captured(written, f"unit {body.name!r}")
        out = func(*args, **kwargs)
        body.draws = body.draws or draws(func, args, kwargs)
        body.operators += not _torch.gives_views(func)
        formula = FLOPS.get(func.overloadpacket)
        if formula is not None:
            body.flops += formula(*args, **kwargs, out_val=out)
        return out

    def _run_glue(
        self,
        func: _torch.OpOverload,
        args: _torch.Args,
        kwargs: _torch.Kwargs,
        written: Sequence[Tensor],
    ) -> Any:
        """Runs an operation between unit calls, and notes it as glue."""
        self._refuse_captured(written, "the loss")
        for x in written:
            self._check_write(x)
        name, line = func.overloadpacket.__name__, source_line()
        text = self.names.text_of_call(args, kwargs)
        origins = self.origins_of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins = origins | Origins(draws=frozenset((len(self.draws),)))
            self.draws.append(Draw(name, line))
        out = func(*args, **kwargs)
        results = tensors_in(out) or written
        for x in (*results, *written):
            self.record_origins(x, origins, None)
        outputs = tuple(self.names.give(x) for x in results)
        grad_enabled = torch.is_grad_enabled()
        self.glue.append(Glue(name, text, outputs, self.call_count, grad_enabled, line))
        return out

    def _refuse_captured(self, written: Iterable[Tensor], writer: str) -> None:
        """Raises where a tensor is written that is no fake, and so no argument."""
        for x in written:
            if not isinstance(x, _torch.FakeTensor):
                raise RuntimeError(
                    f"{writer} writes in place into a captured tensor of shape "
                    f"{tuple(x.shape)}, at {source_line()}: every stage of a pipeline "
                    "would do so, for every microbatch. Write into a clone, or return "
                    "the new value with the loss"
                )

    def _check_write(self, x: Tensor) -> None:
        """Notes a write between unit calls; raises where a stage cannot repeat it."""
        owner = self.owner.get(x)
        if isinstance(owner, Argument):
            raise RuntimeError(
                f"the loss writes in place into {self.names.argument_name(owner)!r}, "
                f"at {source_line()}: every stage of a pipeline would do so, for every "
                "microbatch. Write into a clone"
            )
        if (unit := self.shared.get(x)) is not None:
            raise RuntimeError(
                f"the loss writes in place, at {source_line()}, into memory that an "
                f"output of unit {unit!r} shares with one of its inputs or "
                "another output, and not on another stage. Write into a clone"
            )
        if owner is not None:
            self.mutated.add(owner)


def tensors_in(values: PyTree) -> list[Tensor]:
    """Returns the tensors among the leaves of a tree."""
    return [x for x in tree.leaves(values) if isinstance(x, Tensor)]


def run_on_data(
    flow: Dataflow,
    fake: FakeTensorMode | None,
    call: Call,
    params: PyTree,
    inputs: tuple[PyTree, ...],
    keywords: dict[str, PyTree],
) -> PyTree:
    """Returns a unit's outputs as fake tensors, from one run on tensors with data.

    Those hold ones, and zeros if of integers (`runs.with_data`). Of the outputs only
    shapes and dtypes are used.

    Args:
        flow: the mode that is on, and counts for the unit that runs.
        fake: the mode around it that makes fake tensors; None if it is not ours.
        call: the unit call, with ``params``, ``inputs`` and ``keywords``.

    Raises:
        RuntimeError: there are other modes on, so that these cannot be taken off.
    """
    body, our_modes = flow.running_unit, [type(mode).__name__ for mode in (fake, flow)]
    if fake is None or body is None or _torch.active_modes()[-2:] != our_modes:
        raise RuntimeError("other modes are on, under which nothing has data")
    body.has_data, body.flops, body.operators = True, 0, 0
    body.saved.clear()
    leaves, treedef = tree.flatten((params, inputs, keywords))
    # The modes are taken off, innermost first, for tensors with data to be made.
    flow.__exit__(None, None, None)
    fake.__exit__(None, None, None)
    try:
        real = [with_data(x) if isinstance(x, Tensor) else x for x in leaves]
        params, inputs, keywords = tree.unflatten(treedef, real)
        with flow:
            out = call.body(params, *inputs, **keywords)
        body.note_saved_by_graph((params, inputs, keywords), out)
    finally:
        fake.__enter__()
        flow.__enter__()
    for x in tensors_in((real, out)):
        body.saved.pop(_torch.storage_key(x), None)
    # An input that the unit returns as it is stays that input.
    leaf_of = {id(x_real): x for x_real, x in zip(real, leaves, strict=True)}
    return tree.map(
        lambda x: leaf_of.get(id(x), _fake_like(x)) if isinstance(x, Tensor) else x, out
    )


def _fake_like(x: Tensor) -> Tensor:
    fake = torch.empty_strided(
        tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device
    )
    return fake.requires_grad_(x.requires_grad)
