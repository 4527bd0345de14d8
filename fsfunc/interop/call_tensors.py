"""Parameters and buffers of one call of a part, and what the call did to them.

The modules of a copy look for their parameters and buffers in tables, which ask the
call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm as _batchnorm

from fsfunc import _torch
from fsfunc.core.frames import frame
from fsfunc.interop.layer_plans import LayerPlan
from fsfunc.interop.split_layers import SplitFlow
from fsfunc.sharded.leaf import is_sharded


@dataclass
class Knowledge:
    """Facts about one part that all its copies share.

    Args:
        name: that of the part; "" for the whole module.
        who: its name in messages.
        frozen: parameters that do not require grad.
        fixed: buffers that may not be written.
        fetch: reads a parameter outside every unit; None inside one.
        plan: the layers that are split.
        looked: whether a first call on data was seen not to change parameters.
        hidden: buffers whose values changed while their version counters did not.
    """

    name: str
    who: str
    frozen: frozenset[str]
    fixed: frozenset[str]
    fetch: Callable[[str, Any], Any] | None
    plan: LayerPlan
    looked: bool = False
    hidden: set[str] = field(default_factory=set)


class Tables:
    """The tables of tensors of a copy's modules, which ask the call that has the copy.

    Args:
        part: what is known of it.
        module: the copy, whose tables of tensors now ask here.
    """

    def __init__(self, part: Knowledge, module: nn.Module):
        self.part = part
        self.call: CallTensors | None = None
        hidden: set[str] = set()  # written by the modules, which no version shows
        trusted: set[str] = set()  # not written by them
        for m in module.modules():
            parameters, buffers = _torch.tensor_tables(m)
            like = None
            if getattr(m, "track_running_stats", False):
                own = (buffers.get(x) for x in ("running_mean", "running_var"))
                names = {x.name for x in own if x is not None}
                like = min(names, default=None)
                if m.training:
                    hidden |= names
                elif type(m).__module__ == _batchnorm.__name__:
                    trusted |= names
            table = ParameterTable(self, parameters, like)
            _torch.set_tensor_tables(m, table, BufferTable(self, buffers))
        self.hidden, self.trusted = frozenset(hidden), frozenset(trusted - hidden)

    @property
    def given(self) -> CallTensors:
        """The call that has the copy, where it asks itself.

        Raises:
            RuntimeError: none runs, or another: the read comes from a backward.
        """
        if self.call is None or _torch.current_node() is not self.call.node:
            raise RuntimeError(
                f"{self.part.who} is run again by a backward after its call is over, "
                "as torch.utils.checkpoint does within a forward: leave it out (of a "
                "Hugging Face model: gradient_checkpointing_disable()), and recompute "
                "units by ff.remat(step)"
            )
        return self.call


# A tensor that a forward reads: its version then, by torch's count of writes, and its
# values, which are to be compared; None where the count tells. Made for each tensor of
# each call, so that it is a plain tuple.
Read = tuple[Tensor, int, Tensor | None]


class CallTensors:
    """The parameters and buffers of one call of a part, and what it does to them.

    Args:
        tables: those of the copy that the call has.
        params: by name; they may be sharded.
        buffers: by name.
        mutable: whether the call may write them.
    """

    def __init__(
        self,
        tables: Tables,
        params: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
        mutable: bool,
    ):
        self.tables, self.part = tables, tables.part
        self.params, self.buffers, self.mutable = params, buffers, mutable
        self.node = _torch.current_node()
        plan = self.part.plan
        column = None if self.part.fetch else plan.columns.get(self.part.name)
        self.flow = SplitFlow(params, column, plan.meeting)
        self._first = not self.part.looked
        self._leaves: dict[str, Any] = {}
        self._fetched: dict[Any, Any] = {}
        self._read: dict[int, Read] = {}  # parameters, by id
        self._names: dict[int, str] = {}  # theirs
        self._held: dict[str, Read] = {}  # buffers, by name

    def leaf(self, name: str) -> Any:
        """A parameter as it was given: of a frozen one, in a first call, a copy."""
        if name not in self._leaves:
            x = self.params[name]
            if isinstance(x, Tensor) and not is_sharded(x):
                private = self._first and name in self.part.frozen
                x = self._watch(name, _own(x) if private else x)
            self._leaves[name] = x
        return self._leaves[name]

    def parameter(self, name: str) -> Any:
        """A parameter that the module's forward reads."""
        leaf = self.leaf(name)
        if self.part.fetch is None:
            return self.flow.read(name, leaf)
        key = name, torch.is_grad_enabled()
        if key not in self._fetched:
            x = self.part.fetch(name, leaf)
            self._fetched[key] = self._watch(name, x) if isinstance(x, Tensor) else x
        return self._fetched[key]

    def _watch(self, name: str, x: Tensor) -> Tensor:
        key = id(x)
        if key not in self._read and not x.is_inference():
            look = self._first and not _is_virtual((x,))
            before = x.detach().clone() if look else None
            self._read[key], self._names[key] = (x, x._version, before), name
        return x

    def buffer(self, name: str) -> Tensor:
        """A buffer that the module's forward reads, and may write."""
        if name not in self._held:
            before = self.buffers[name]
            x = _own(before)
            # Without values one that was seen to be written is taken to be it again.
            virtual, hidden = _is_virtual((x, before)), name in self.tables.hidden
            new = hidden or virtual and name in self.part.hidden
            told = virtual or name in self.tables.trusted
            version = _NEW if new else x._version
            self._held[name] = x, version, None if told else before
        return self._held[name][0]

    def write(self, name: str, x: Tensor) -> None:
        """Puts another tensor in a buffer's place."""
        self._held[name] = x, _NEW, None

    def current(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Buffers as they now are, to hand on."""
        found = {n: self.buffers[n] for n in names}
        return found | self._written(found.keys() & self._held.keys())

    def changed(self) -> dict[str, Tensor]:
        """The buffers that were written.

        Raises:
            RuntimeError: there are some, without ``mutable=True``; or a parameter was.
                What a first call wrote into one is put back.
        """
        if written := _written(self._read):
            for x, _, before in map(self._read.__getitem__, written):
                if before is not None:
                    x.data.copy_(before)
            name = next(self._names[key] for key in self._read if key in written)
            raise RuntimeError(
                f"{self.part.who} changes the parameter {name!r} in place: a "
                "parameter changes by the optimizer alone. Compute with another "
                "tensor; an average of weights is a function of the train step's "
                "state; what is no parameter, make a buffer"
            )
        if self._first and self._read:
            looked = all(before is not None for *_, before in self._read.values())
            self.part.looked |= looked
        found = self._written(self._held)
        if found and not self.mutable:
            names = ", ".join(map(repr, found))
            raise RuntimeError(
                f"{self.part.who} writes the buffer {names}: apply(params, buffers, "
                "..., mutable=True) returns (output, new buffers), and the module's "
                "eval() may write none"
            )
        for name in found:
            if name in self.part.fixed:
                raise RuntimeError(
                    f"{self.part.who} writes the buffer {name!r}, whose memory is "
                    "another buffer's too: clone one of them in the module"
                )
        return found

    def _written(self, names: Collection[str]) -> dict[str, Tensor]:
        """Those of the buffers held that were written."""
        written = _written({n: x for n, x in self._held.items() if n in names})
        found = {n: x for n, x in self._held.items() if n in written}
        self.part.hidden |= {n for n, (x, v, _) in found.items() if x._version == v}
        return {n: x for n, (x, *_) in found.items()}


_NEW = -1  # a version that no tensor has


def _written(reads: Mapping[Any, Read]) -> set[Any]:
    """The keys of tensors that were written since they were read.

    Some operators write what they say they read, and .data counts nothing: so values
    are asked for too. Any call may write for the first time.
    """
    written: set[Any] = set()
    doubtful: dict[Any, tuple[Tensor, Tensor]] = {}
    for key, (x, version, before) in reads.items():
        if x._version != version:
            written.add(key)
        elif before is not None:
            doubtful[key] = x, before
    return written | _unanswered(_unlike, doubtful) if doubtful else written


def _is_virtual(tensors: tuple[Tensor, ...]) -> bool:
    """True if one of the tensors has no values."""
    return _torch.fake_active() or any(
        x.is_meta or isinstance(_torch.unwrapped(x), _torch.FakeTensor) for x in tensors
    )


def _unanswered(ask: Callable[..., Any], *args: Any) -> Any:
    """``ask(*args)``, of the values themselves.

    What a step asks of a value is answered both ways where it is checked: this question
    is not the step's.
    """
    if frame().tracer is None:
        return ask(*args)
    with _torch.outside_function_modes(), _torch.beneath_modes(_REAL):
        return ask(*args)


_REAL = torch.empty(0)


def _equal(x: Tensor, before: Tensor) -> bool:
    """True if two tensors have the same values, NaN for NaN."""
    with _torch.beneath_functorch(), torch.no_grad():
        x, before = _torch.unwrapped(x), _torch.unwrapped(before)
        if x.shape != before.shape:
            return False
        if torch.equal(x, before):
            return True
        return bool(((x == before) | (x != x) & (before != before)).all())


def _unlike(pairs: Mapping[Any, tuple[Tensor, Tensor]]) -> set[Any]:
    """The keys of pairs of which the values differ; NaN equals NaN.

    Cost: of all pairs on a device one wait for it.
    """
    far: dict[torch.device, dict[Any, Tensor]] = {}
    found = set()
    for name, (x, before) in pairs.items():
        if x.shape != before.shape or x.device != before.device or _on_host(x):
            found |= set() if _equal(x, before) else {name}
            continue
        with _torch.beneath_functorch(), torch.no_grad():
            x, before = _torch.unwrapped(x), _torch.unwrapped(before)
            unlike = (x != before) & ((x == x) | (before == before))
            far.setdefault(x.device, {})[name] = unlike.any()
    with _torch.beneath_functorch():
        for some in far.values():
            answers = _answers(torch.stack(list(some.values())))
            found |= {name for name, yes in zip(some, answers, strict=True) if yes}
    return found


def _on_host(x: Tensor) -> bool:
    """True if nobody waits to know a value."""
    return x.is_cpu


def _answers(asked: Tensor) -> list[bool]:
    return asked.tolist()


def _own(x: Tensor) -> Tensor:
    """A copy whose writes are counted: inference mode would not."""
    if not torch.is_inference_mode_enabled():
        return x.clone()
    with torch.inference_mode(False):
        return x.clone()


class _Table(dict):
    """The tensors of one module of a copy, by attribute, as a call was given them."""

    def __init__(self, tables: Tables, table: Mapping[str, Any]):
        super().__init__({k: None if x is None else x.name for k, x in table.items()})
        self.tables = tables

    def get(self, attribute: str, default: Any = None) -> Any:
        return self[attribute] if attribute in self else default

    def items(self) -> Any:
        return [(k, self[k]) for k in self]

    def values(self) -> Any:
        return [x for _, x in self.items()]


class ParameterTable(_Table):
    """The parameters of one module of a copy, by attribute.

    Args:
        like: the buffer whose dtype they are read in: batch norms take no other.
    """

    def __init__(self, tables: Tables, table: Mapping[str, Any], like: str | None):
        super().__init__(tables, table)
        self.like = like

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        if name is None:
            return None
        given = self.tables.given
        x = given.parameter(name)
        return x if self.like is None else x.to(given.buffers[self.like].dtype)

    def items(self) -> Any:
        # Who lists them wants to know of dtypes and devices: nothing is gathered.
        given, names = self.tables.given, dict.items(self)
        return [(k, None if n is None else given.leaf(n)) for k, n in names]

    def __setitem__(self, attribute: str, _: Any) -> None:
        raise RuntimeError(
            f"the module's forward sets the parameter {attribute!r}: a parameter "
            "changes by the optimizer alone; compute with another tensor"
        )


class BufferTable(_Table):
    """The buffers of one module of a copy, by attribute."""

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        return None if name is None else self.tables.given.buffer(name)

    def __setitem__(self, attribute: str, value: Any) -> None:
        name = dict.get(self, attribute)
        if name is None or value is None:
            raise RuntimeError(
                f"the module's forward registers or removes the buffer {attribute!r}: "
                "register it, with its shape, where the module is made"
            )
        self.tables.given.write(name, value)
