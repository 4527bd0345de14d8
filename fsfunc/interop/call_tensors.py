"""Parameters and buffers of one call of a part, and what the call did to them.

A module looks up ``self.weight`` in its dict of parameters. In a copy that dict is a
table of ours, which asks the call that has the copy:

    m.weight -> ParameterTable["weight"] -> Tables.current_call.parameter("0.weight")

A buffer is a copy in each call, whose writes are returned. Whether a forward wrote a
tensor is told by torch's version counter, and in doubt by comparing its values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm as _batchnorm

from fsfunc import _torch
from fsfunc.core.frames import frame
from fsfunc.interop.layer_plans import LayerPlan
from fsfunc.interop.split_layers import SplitFlow
from fsfunc.interop.stubs import AbsentTensor
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf

_T = TypeVar("_T")
_Result = TypeVar("_Result")


@dataclass
class PartFacts:
    """Facts about one part that all its copies share.

    Args:
        name: the part's; "" for the whole module.
        title: its name in messages.
        frozen: parameters that do not require grad.
        overlapping: buffers in whose memory others lie, so that none may be written.
        fetch: reads a parameter outside every unit; None inside one.
        plan: the layers that are split.
        is_checked: whether a first call on data was seen not to change parameters.
        silently_written: buffers whose values changed while their versions did not.
    """

    name: str
    title: str
    frozen: frozenset[str]
    overlapping: frozenset[str]
    fetch: Callable[[str, Leaf], Leaf] | None
    plan: LayerPlan
    is_checked: bool = False
    silently_written: set[str] = field(default_factory=set)


class Tables:
    """The tables of tensors of a copy's modules, which ask the call that has the copy.

    Args:
        part: the facts that all copies of the part share.
        module: the copy, whose dicts of tensors become tables that ask here.
    """

    def __init__(self, part: PartFacts, module: nn.Module):
        self.part = part
        self.call: CallTensors | None = None
        silently_written: set[str] = set()  # by the modules, which no version shows
        never_written: set[str] = set()
        for m in module.modules():
            parameters, buffers = _torch.tensor_tables(m)
            stats_name = None
            if getattr(m, "track_running_stats", False):
                stats = (buffers.get(x) for x in ("running_mean", "running_var"))
                names = {x.name for x in stats if x is not None}
                stats_name = min(names, default=None)
                # Batch norm kernels write running statistics past the version counter.
                # In eval() torch's own only read them, which saves a comparison.
                if m.training:
                    silently_written |= names
                elif type(m).__module__ == _batchnorm.__name__:
                    never_written |= names
            table = ParameterTable(self, parameters, stats_name)
            _torch.set_tensor_tables(m, table, BufferTable(self, buffers))
        # A buffer may be one of several modules.
        self.silently_written: frozenset[str] = frozenset(silently_written)
        self.never_written: frozenset[str] = frozenset(never_written - silently_written)

    @property
    def current_call(self) -> CallTensors:
        """The call that has the copy.

        Raises:
            RuntimeError: it is over, or another has the copy: the read comes from a
                backward.
        """
        # A backward that runs the forward again, as torch.utils.checkpoint does, runs
        # within another autograd node than the call.
        if self.call is None or _torch.current_node() is not self.call.node:
            raise RuntimeError(
                f"{self.part.title} is run again by a backward after its call is over, "
                "as torch.utils.checkpoint does within a forward: leave it out (of a "
                "Hugging Face model: gradient_checkpointing_disable()), and recompute "
                "units by ff.remat(step)"
            )
        return self.call


# A tensor that a forward reads: the tensor, its version at that time (torch's count of
# writes), and its values then if they are to be compared; None if the version tells.
# One is made for each tensor of each call, so it is a plain tuple.
TensorRead: TypeAlias = tuple[Tensor, int, Tensor | None]


class CallTensors:
    """The parameters and buffers of one call of a part, and what it does to them.

    Args:
        tables: those of the copy that the call has.
        params: by name; they may be sharded.
        buffers: by name.
        mutable: whether the call may write them.
    """

    tables: Tables
    part: PartFacts
    params: Mapping[str, Leaf]
    buffers: Mapping[str, Tensor]
    mutable: bool

    def __init__(
        self,
        tables: Tables,
        params: Mapping[str, Leaf],
        buffers: Mapping[str, Tensor],
        mutable: bool,
    ):
        self.tables, self.part = tables, tables.part
        self.params, self.buffers, self.mutable = params, buffers, mutable
        self.node: Any = _torch.current_node()  # torch's own class of nodes
        plan = self.part.plan
        column = None if self.part.fetch else plan.columns.get(self.part.name)
        self.flow: SplitFlow = SplitFlow(params, column, plan.meets_split)
        self._is_first_call = not self.part.is_checked
        self._leaves: dict[str, Leaf] = {}
        self._fetched: dict[tuple[str, bool], Leaf] = {}  # by name, and grad mode
        self._params_read: dict[int, TensorRead] = {}  # by id
        self._param_names: dict[int, str] = {}  # by id
        self._buffers_read: dict[str, TensorRead] = {}  # by name

    def leaf(self, name: str) -> Leaf:
        """Returns a parameter as the call was given it; in a first call, watched."""
        if name not in self._leaves:
            x = self.params[name]
            if isinstance(x, Tensor) and not is_sharded(x):
                # A frozen one is the user's tensor, which a forward that is about to
                # be refused must not change.
                is_copied = self._is_first_call and name in self.part.frozen
                x = self._watch(name, _copy_counted(x) if is_copied else x)
            self._leaves[name] = x
        return self._leaves[name]

    def parameter(self, name: str) -> Leaf:
        """Returns a parameter that the module's forward reads."""
        leaf = self.leaf(name)
        if self.part.fetch is None:
            return self.flow.read_param(name, leaf)
        # What was fetched without gradients is no leaf of the graph with them.
        key = name, torch.is_grad_enabled()
        if key not in self._fetched:
            x = self.part.fetch(name, leaf)
            self._fetched[key] = self._watch(name, x) if isinstance(x, Tensor) else x
        return self._fetched[key]

    def _watch(self, name: str, x: Tensor) -> Tensor:
        """Notes a parameter's version, and in a first call on data its values."""
        key = id(x)
        if key not in self._params_read and not x.is_inference():
            compares = self._is_first_call and not _is_virtual((x,))
            before = x.detach().clone() if compares else None
            self._params_read[key], self._param_names[key] = (
                (x, x._version, before),
                name,
            )
        return x

    def buffer(self, name: str) -> Tensor:
        """Returns a buffer that the module's forward reads, and may write: a copy."""
        if name not in self._buffers_read:
            before = self.buffers[name]
            x = _copy_counted(before)
            # Without data there are no values to compare: a buffer that was seen to be
            # written in a call on data is taken to be written again.
            is_virtual = _is_virtual((x, before))
            is_silent = name in self.tables.silently_written
            is_written = is_silent or is_virtual and name in self.part.silently_written
            is_certain = is_virtual or name in self.tables.never_written
            version = _WRITTEN if is_written else x._version
            self._buffers_read[name] = x, version, None if is_certain else before
        return self._buffers_read[name][0]

    def write(self, name: str, x: Tensor) -> None:
        """Puts another tensor in a buffer's place."""
        self._buffers_read[name] = x, _WRITTEN, None

    def current_buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns buffers as they are now, for a unit that the module calls."""
        buffers = {n: self.buffers[n] for n in names}
        names_read = buffers.keys() & self._buffers_read.keys()
        return buffers | self._select_written(names_read)

    def written_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that were written.

        Raises:
            RuntimeError: there are some, without ``mutable=True``; or a parameter was.
                What a first call wrote into one is put back.
        """
        if written := _find_written(self._params_read):
            for x, _, before in map(self._params_read.__getitem__, written):
                if before is not None:
                    x.data.copy_(before)
            name = next(
                self._param_names[key] for key in self._params_read if key in written
            )
            raise RuntimeError(
                f"{self.part.title} changes the parameter {name!r} in place: a "
                "parameter changes by the optimizer alone. Compute with another "
                "tensor; an average of weights is a function of the train step's "
                "state; what is no parameter, make a buffer"
            )
        # One call on data counts for all: to copy and compare all parameters in each
        # call would cost much.
        if self._is_first_call and self._params_read:
            reads = self._params_read.values()
            self.part.is_checked |= all(before is not None for *_, before in reads)
        buffers = self._select_written(self._buffers_read)
        if buffers and not self.mutable:
            names = ", ".join(map(repr, buffers))
            raise RuntimeError(
                f"{self.part.title} writes the buffer {names}: apply(params, buffers, "
                "..., mutable=True) returns (output, new buffers), and the module's "
                "eval() may write none"
            )
        for name in buffers:
            if name in self.part.overlapping:
                raise RuntimeError(
                    f"{self.part.title} writes the buffer {name!r}, whose memory is "
                    "another buffer's too: clone one of them in the module"
                )
        return buffers

    def _select_written(self, names: Collection[str]) -> dict[str, Tensor]:
        """Returns those of the buffers read that were written."""
        keys = _find_written(
            {n: x for n, x in self._buffers_read.items() if n in names}
        )
        written = {n: x for n, x in self._buffers_read.items() if n in keys}
        silently = {n for n, (x, v, _) in written.items() if x._version == v}
        self.part.silently_written |= silently
        return {n: x for n, (x, *_) in written.items()}


_WRITTEN = -1  # a version that no tensor has, so that it differs


_Key = TypeVar("_Key", bound=Hashable)


def _find_written(reads: Mapping[_Key, TensorRead]) -> set[_Key]:
    """Returns the keys of tensors that were written since they were read."""
    written: set[_Key] = set()
    # Some operators write what they say they read, and writes through .data count
    # nothing: so values are compared too. That is in each call, as any may be the first
    # to write.
    doubtful: dict[_Key, tuple[Tensor, Tensor]] = {}
    for key, (x, version, before) in reads.items():
        if x._version != version:
            written.add(key)
        elif before is not None:
            doubtful[key] = x, before
    return written | _ask_values(_find_unlike, doubtful) if doubtful else written


def _is_virtual(tensors: tuple[Tensor, ...]) -> bool:
    """Returns whether one of the tensors has no values."""
    return _torch.fake_active() or any(
        x.is_meta or isinstance(_torch.unwrapped(x), _torch.FakeTensor) for x in tensors
    )


def _ask_values(ask: Callable[[_T], _Result], arg: _T) -> _Result:
    """Returns ``ask(arg)``, of the values themselves.

    While a step is checked, a question about a value is answered both ways, to see the
    step's branches. This question is not the step's.
    """
    if frame().tracer is None:
        return ask(arg)
    with _torch.outside_function_modes(), _torch.beneath_modes(_REAL):
        return ask(arg)


_REAL = torch.empty(0)  # of no mode's kind


def _is_equal(x: Tensor, before: Tensor) -> bool:
    """Returns whether two tensors have the same values; NaN equals NaN."""
    with _torch.beneath_functorch(), torch.no_grad():
        x, before = _torch.unwrapped(x), _torch.unwrapped(before)
        if x.shape != before.shape:
            return False
        if torch.equal(x, before):
            return True
        return bool(((x == before) | (x != x) & (before != before)).all())


def _find_unlike(pairs: Mapping[_Key, tuple[Tensor, Tensor]]) -> set[_Key]:
    """Returns the keys of pairs whose values differ; NaN equals NaN.

    Cost: one wait for each device, for all pairs on it.
    """
    # On a device comparisons are only enqueued: each answer that is read waits for it.
    on_device: dict[torch.device, dict[_Key, Tensor]] = {}
    unlike: set[_Key] = set()
    for key, (x, before) in pairs.items():
        if x.shape != before.shape or x.device != before.device or _is_on_host(x):
            unlike |= set() if _is_equal(x, before) else {key}
            continue
        with _torch.beneath_functorch(), torch.no_grad():
            x, before = _torch.unwrapped(x), _torch.unwrapped(before)
            differs = (x != before) & ((x == x) | (before == before))
            on_device.setdefault(x.device, {})[key] = differs.any()
    with _torch.beneath_functorch():
        for flags in on_device.values():
            answers = _read_flags(torch.stack(list(flags.values())))
            unlike |= {key for key, yes in zip(flags, answers, strict=True) if yes}
    return unlike


def _is_on_host(x: Tensor) -> bool:
    """Returns whether a value can be read without a wait."""
    return x.is_cpu


def _read_flags(flags: Tensor) -> list[bool]:
    return flags.tolist()


def _copy_counted(x: Tensor) -> Tensor:
    """Returns a copy that counts its writes, as one made in inference mode does not."""
    if not torch.is_inference_mode_enabled():
        return x.clone()
    with torch.inference_mode(False):
        return x.clone()


class _Table(dict[str, Any]):
    """A module's dict of tensors, by attribute, which asks the call for them.

    What it stores is a tensor's name in the whole module.
    """

    def __init__(self, tables: Tables, table: Mapping[str, AbsentTensor | None]):
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
        stats_name: of a batch norm a buffer in whose dtype parameters are read: its
            kernels take no other, and `precision` does not cast buffers.
    """

    def __init__(
        self,
        tables: Tables,
        table: Mapping[str, AbsentTensor | None],
        stats_name: str | None,
    ):
        super().__init__(tables, table)
        self.stats_name = stats_name

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        if name is None:
            return None
        call = self.tables.current_call
        x = call.parameter(name)
        if self.stats_name is None:
            return x
        return x.to(call.buffers[self.stats_name].dtype)

    def items(self) -> Any:
        # Code that lists parameters asks for dtypes and devices: nothing is gathered.
        call, names = self.tables.current_call, dict.items(self)
        return [(k, None if n is None else call.leaf(n)) for k, n in names]

    def __setitem__(self, attribute: str, _: Tensor | None) -> None:
        raise RuntimeError(
            f"the module's forward sets the parameter {attribute!r}: a parameter "
            "changes by the optimizer alone; compute with another tensor"
        )


class BufferTable(_Table):
    """The buffers of one module of a copy, by attribute."""

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        return None if name is None else self.tables.current_call.buffer(name)

    def __setitem__(self, attribute: str, value: Tensor | None) -> None:
        name = dict.get(self, attribute)
        if name is None or value is None:
            raise RuntimeError(
                f"the module's forward registers or removes the buffer {attribute!r}: "
                "register it, with its shape, where the module is made"
            )
        self.tables.current_call.write(name, value)
