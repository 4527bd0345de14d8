"""What depends on what, seen below autograd while a loss runs on fake tensors.

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
from torch.utils.flop_counter import flop_registry

from fsfunc import _torch, tree
from fsfunc.comm.attribution import source_line
from fsfunc.tracing.names import Names
from fsfunc.tracing.programs import NOWHERE, Draw, Glue, Origins, Value

__all__ = ["Body", "Flow", "Leaf", "tensors"]


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """q k^T and then (that) v, for each batch entry and head."""
    rows = q.shape[:-1].numel()
    return 2 * rows * k.shape[-2] * (k.shape[-1] + v.shape[-1])


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Each row, or each column, times those of its own group alone."""
    pairs = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * pairs * a.shape[-2] * a.shape[-1] * b.shape[-1]


# torch counts nothing for the first two.
FLOPS = {
    _torch.CPU_ATTENTION: _attention,
    _torch.GROUPED_PRODUCT: _grouped,
    **flop_registry,
}


class Leaf(NamedTuple):
    """A leaf of the loss's arguments: a parameter, by its path, or another."""

    name: str
    parameter: bool


@dataclass
class Body:
    """What the function of one unit call does while it runs.

    Args:
        name: the unit's.
        real: it runs on tensors with data.
        flops: counted so far.
        origins: of all that it has used.
        kept: storages that its backward pass keeps.
    """

    name: str
    real: bool = False
    flops: int = 0
    origins: Origins = NOWHERE
    kept: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def keep(self, x: Tensor) -> None:
        """Notes a tensor that its backward pass keeps."""
        self.kept[_torch.storage_key(x)] = x.untyped_storage()

    def keep_saved(self, given: Any, out: Any) -> None:
        """Notes what autograd saved between the arguments and the outputs.

        Seen after the fact: hooks meanwhile would forbid ``torch.func`` in a unit.
        """
        stop = {x.grad_fn for x in tensors(given)}
        roots = [x.grad_fn for x in tensors(out) if x.grad_fn not in stop]
        for x in _torch.saved_tensors(_torch.graph_nodes(roots, stop)):
            self.keep(x)


class Flow(_torch.TorchDispatchMode):
    """Notes where the values of a run come from, while it is on.

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
        self.owner: dict[int, Leaf | Value] = {}
        self.shared: dict[int, str] = {}
        self._origins: dict[int, Origins] = {}
        self._alive: list[Tensor] = []  # or a key would come to mean another storage

    def know(self, x: Tensor, origins: Origins, owner: Leaf | Value | None) -> None:
        """Says where what is in the storage of ``x`` comes from, and whose it is."""
        key = _torch.storage_key(x)
        if key not in self._origins:
            self._alive.append(x)
        self._origins[key] = origins
        if owner is not None:
            self.owner[key] = owner

    def share(self, sharing: Iterable[Tensor], unit: str) -> None:
        """Notes tensors that a unit returned, and that lie in one storage for it."""
        for x in sharing:
            self._alive.append(x)
            self.shared[_torch.storage_key(x)] = unit

    def knows(self, x: Tensor) -> bool:
        """Whether the storage of ``x`` is a leaf's, a unit's output's or glue's."""
        return _torch.storage_key(x) in self._origins

    def argument(self, x: Tensor, leaf: Leaf) -> Tensor:
        """``x``, known as a leaf of the loss's arguments."""
        some = frozenset((leaf.name,))
        origins = Origins(reads=some) if leaf.parameter else Origins(batch=some)
        self.know(x, origins, leaf)
        self.names.give(x, self.names.path(leaf))
        return x

    def of(self, values: Any) -> Origins:
        """Where the tensors in a tree come from."""
        found = NOWHERE
        for x in tensors(values):
            found = found | self._origins.get(_torch.storage_key(x), NOWHERE)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a device
            return func(*args, **kwargs)
        written = tensors(_torch.written(func, args, kwargs))
        if self.body is not None:
            return self._within(self.body, func, args, kwargs, written)
        return self._between(func, args, kwargs, written)

    def _within(self, body: Body, func: Any, args: Any, kwargs: Any, written: Any):
        """An operation of a unit's."""
        body.origins = body.origins | self.of((args, kwargs))
        if not body.real:
            self._refuse_captured(written, f"unit {body.name!r}")
        out = func(*args, **kwargs)
        formula = FLOPS.get(func.overloadpacket)
        if formula is not None:
            body.flops += formula(*args, **kwargs, out_val=out)
        return out

    def _between(self, func: Any, args: Any, kwargs: Any, written: Any):
        """An operation of the loss's own."""
        self._refuse_captured(written, "the loss")
        for x in written:
            self._note_write(_torch.storage_key(x))
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
                    "the new value beside the loss"
                )

    def _note_write(self, key: int) -> None:
        owner = self.owner.get(key)
        if isinstance(owner, Leaf):
            raise RuntimeError(
                f"the loss writes in place into {self.names.path(owner)!r}, at "
                f"{source_line()}: every stage of a pipeline would do so, for every "
                "microbatch. Write into a clone"
            )
        if key in self.shared:
            raise RuntimeError(
                f"the loss writes in place, at {source_line()}, into memory that an "
                f"output of unit {self.shared[key]!r} shares with one of its inputs or "
                "another output: on another stage they lie apart. Write into a clone"
            )
        if owner is not None:
            self.mutated.add(owner)


def tensors(values: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [x for x in tree.leaves(values) if isinstance(x, Tensor)]
