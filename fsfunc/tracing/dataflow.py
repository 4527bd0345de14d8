"""Data dependencies of a loss, recorded below autograd on fake tensors.

Dependencies follow storages, not tensors: a view, an operation in place and an
assignment to a slice reach the storage that they share. What a unit does inside stays
its own; the operations between units are noted one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import source_line
from fsfunc.core.units import Call
from fsfunc.runtime.memory import StorageTable
from fsfunc.tracing.operators import FLOPS, OperatorMode, draws
from fsfunc.tracing.programs import NOWHERE, Draw, Glue, Names, Origins, Value
from fsfunc.tracing.runs import with_data


class Argument(NamedTuple):
    """A leaf of the loss's arguments: a parameter, by its path, or another."""

    name: str
    parameter: bool


@dataclass
class Body:
    """FLOPs, origins and kept memory of one unit call while it runs.

    Args:
        name: the unit's.
        real: it runs on tensors with data.
        flops: counted so far; ``draws``: whether it draws random numbers.
        origins: of all that it has used.
        kept: tensors that its backward pass keeps, one of each storage.
    """

    name: str
    real: bool = False
    flops: int = 0
    draws: bool = False
    origins: Origins = NOWHERE
    kept: dict[int, Tensor] = field(default_factory=dict)

    def keep(self, x: Tensor) -> None:
        """Notes a tensor that its backward pass keeps."""
        self.kept[_torch.storage_key(x)] = x

    def keep_saved(self, given: Any, out: Any) -> None:
        """Notes what autograd saved between the arguments and the outputs.

        Read from the graph afterwards, as hooks would forbid ``torch.func`` in a unit.
        """
        stop = {x.grad_fn for x in tensors(given)}
        roots = [x.grad_fn for x in tensors(out) if x.grad_fn not in stop]
        for x in _torch.saved_tensors(_torch.graph_nodes(roots, stop)):
            self.keep(x)


class Flow(OperatorMode):
    """A dispatch mode that records where the values of a run come from.

    Args:
        names: what tensors are called in the listing.
        counted: the number of unit calls so far.
        body: the unit call that runs now, if any.
        shared: storages that a unit's output has in common with something else.
    """

    def __init__(self, names: Names):
        super().__init__()
        self.names = names
        self.counted = 0
        self.body: Body | None = None
        self.glue: list[Glue] = []
        self.draws: list[Draw] = []
        self.mutated: set[Value] = set()
        self.owner = StorageTable[Argument | Value]()
        self.shared = StorageTable[str]()
        self._origins = StorageTable[Origins]()

    def know(self, x: Tensor, origins: Origins, owner: Argument | Value | None) -> None:
        """Records the origins of what is in the storage of ``x``, and its owner."""
        self._origins[x] = origins
        if owner is not None:
            self.owner[x] = owner

    def share(self, sharing: Iterable[Tensor], unit: str) -> None:
        """Notes the tensors that a unit returned, by storage."""
        for x in sharing:
            self.shared[x] = unit

    def knows(self, x: Tensor) -> bool:
        """True if the storage of ``x`` is a leaf's, a unit's output's or glue's."""
        return self._origins.get(x) is not None

    def argument(self, x: Tensor, leaf: Argument) -> Tensor:
        """``x``, known as a leaf of the loss's arguments."""
        some = frozenset((leaf.name,))
        origins = Origins(reads=some) if leaf.parameter else Origins(batch=some)
        self.know(x, origins, leaf)
        self.names.give(x, self.names.path(leaf))
        return x

    def of(self, values: Any) -> Origins:
        """The joint origins of the tensors in a tree."""
        found = NOWHERE
        for x in tensors(values):
            found = found | (self._origins.get(x) or NOWHERE)
        return found

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "prim":  # asks for a device
            return func(*args, **kwargs)
        written = _torch.written(func, args, kwargs)
        if self.body is not None:
            return self._within(self.body, func, args, kwargs, written)
        return self._between(func, args, kwargs, written)

    def _within(self, body: Body, func: Any, args: Any, kwargs: Any, written: Any):
        """An operation of a unit's."""
        body.origins = body.origins | self.of((args, kwargs))
        if not body.real:
            self._refuse_captured(written, f"unit {body.name!r}")
        out = func(*args, **kwargs)
        body.draws = body.draws or draws(func, args, kwargs)
        formula = FLOPS.get(func.overloadpacket)
        if formula is not None:
            body.flops += formula(*args, **kwargs, out_val=out)
        return out

    def _between(self, func: Any, args: Any, kwargs: Any, written: Any):
        """An operation of the loss's own."""
        self._refuse_captured(written, "the loss")
        for x in written:
            self._note_write(x)
        name, line = func.overloadpacket.__name__, source_line()
        text = self.names.call(args, kwargs)
        origins = self.of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins = origins | Origins(draws=frozenset((len(self.draws),)))
            self.draws.append(Draw(name, line))
        out = func(*args, **kwargs)
        made = tensors(out) or written
        for x in (*made, *written):
            self.know(x, origins, None)
        outputs = tuple(self.names.give(x) for x in made)
        grad = torch.is_grad_enabled()
        self.glue.append(Glue(name, text, outputs, self.counted, grad, line))
        return out

    def _refuse_captured(self, written: Iterable[Tensor], who: str) -> None:
        for x in written:
            if not isinstance(x, _torch.FakeTensor):
                raise RuntimeError(
                    f"{who} writes in place into a captured tensor of shape "
                    f"{tuple(x.shape)}, at {source_line()}: every stage of a pipeline "
                    "would do so, for every microbatch. Write into a clone, or return "
                    "the new value with the loss"
                )

    def _note_write(self, x: Tensor) -> None:
        owner = self.owner.get(x)
        if isinstance(owner, Argument):
            raise RuntimeError(
                f"the loss writes in place into {self.names.path(owner)!r}, at "
                f"{source_line()}: every stage of a pipeline would do so, for every "
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


def tensors(values: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [x for x in tree.leaves(values) if isinstance(x, Tensor)]


def run_on_data(
    flow: Flow, fake: Any, call: Call, params: Any, inputs: Any, keywords: Any
) -> Any:
    """A unit's outputs as fake tensors, from one run on tensors with data.

    Floating and boolean ones hold ones, integers zeros: what an index, a divisor and a
    mask can be. Only shapes and dtypes are kept of it.

    Args:
        flow: the mode that is on, counting for the body that runs.
        fake: the mode around it that makes fake tensors; None if it is not ours.

    Raises:
        RuntimeError: there are other modes on, so that these cannot be taken off.
    """
    body, ours = flow.body, [type(mode).__name__ for mode in (fake, flow)]
    if fake is None or body is None or _torch.active_modes()[-2:] != ours:
        raise RuntimeError("other modes are on, under which nothing has data")
    body.real, body.flops = True, 0
    body.kept.clear()
    leaves, treedef = tree.flatten((params, inputs, keywords))
    flow.__exit__(None, None, None)
    fake.__exit__(None, None, None)
    try:
        real = [with_data(x) if isinstance(x, Tensor) else x for x in leaves]
        params, inputs, keywords = tree.unflatten(treedef, real)
        with flow:
            out = call.body(params, *inputs, **keywords)
        body.keep_saved((params, inputs, keywords), out)
    finally:
        fake.__enter__()
        flow.__enter__()
    for x in tensors((real, out)):
        body.kept.pop(_torch.storage_key(x), None)
    given = {id(r): x for r, x in zip(real, leaves, strict=True)}
    return tree.map(
        lambda x: given.get(id(x), _fake(x)) if isinstance(x, Tensor) else x, out
    )


def _fake(x: Tensor) -> Tensor:
    fake = torch.empty_strided(
        tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device
    )
    return fake.requires_grad_(x.requires_grad)
