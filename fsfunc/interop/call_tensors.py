"""Parameters and buffers of one call of a part, and what the call did to them.

The modules of a copy look for their parameters and buffers in tables, which ask the
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


class CallTensors:
    """The parameters and buffers of a copy's modules, in the call that has the copy.

    Args:
        part: what is known of it.
        module: the copy, whose tables of tensors now ask here.
    """

    def __init__(self, part: Knowledge, module: nn.Module):
        self.part, self._running = part, False
        hidden: set[str] = set()  # written by the modules, which no version shows
        trusted: set[str] = set()  # not written by them
        for m in module.modules():
            parameters, buffers = _torch.tables(m)
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
            _torch.set_tables(m, table, BufferTable(self, buffers))
        self._written, self._trusted = frozenset(hidden), frozenset(trusted - hidden)

    def begin(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor], mutable: bool
    ) -> None:
        """A call takes the copy.

        Args:
            params: by name; they may be sharded.
            buffers: by name.
            mutable: whether the call may write them.
        """
        self.params, self.buffers, self.mutable = params, buffers, mutable
        self._running, self._node = True, _torch.current_node()
        self._first = not self.part.looked
        self._leaves: dict[str, Any] = {}
        self._fetched: dict[Any, Any] = {}
        self._watched: dict[int, tuple[str, Tensor, int, Tensor | None]] = {}
        self._held: dict[str, tuple[Tensor, int]] = {}
        self.flow = self._flow(params)

    def end(self) -> None:
        """The call is over: what it was given is let go."""
        self._running, self.params, self.buffers = False, {}, {}
        self._leaves, self._fetched, self._watched, self._held = {}, {}, {}, {}
        del self.flow  # its last input holds a graph, with what was gathered for it

    def _flow(self, params: Mapping[str, Any]) -> SplitFlow:
        plan = self.part.plan
        column = None if self.part.fetch else plan.columns.get(self.part.name)
        return SplitFlow(params, column, plan.meeting)

    @property
    def given(self) -> CallTensors:
        """These, where the call that has them asks.

        Raises:
            RuntimeError: none runs, or another: the read comes from a backward.
        """
        if not self._running or _torch.current_node() is not self._node:
            raise RuntimeError(
                f"{self.part.who} is run again by a backward after its call is over, "
                "as torch.utils.checkpoint does within a forward: leave it out (of a "
                "Hugging Face model: gradient_checkpointing_disable()), and recompute "
                "units by ff.remat(step)"
            )
        return self

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
        if id(x) not in self._watched and not x.is_inference():
            look = self._first and not _is_virtual((x,))
            before = x.detach().clone() if look else None
            self._watched[id(x)] = name, x, x._version, before
        return x

    def _check_parameters(self) -> None:
        """Looks at the parameters: by versions, and at first by values.

        Raises:
            RuntimeError: one was written. What a first call wrote is put back.
        """
        for name, x, version, before in self._watched.values():
            kept = before is None or _unanswered(_equal, x.detach(), before)
            if x._version != version or not kept:
                if before is not None:
                    x.data.copy_(before)
                raise RuntimeError(
                    f"{self.part.who} changes the parameter {name!r} in place: a "
                    "parameter changes by the optimizer alone. Compute with another "
                    "tensor; an average of weights is a function of the train step's "
                    "state; what is no parameter, make a buffer"
                )
        if self._watched and not any(b is None for *_, b in self._watched.values()):
            self.part.looked = True

    def buffer(self, name: str) -> Tensor:
        """A buffer that the module's forward reads, and may write."""
        found = self._held.get(name)
        if found is None:
            x = _own(self.buffers[name])
            found = self._held[name] = x, _NEW if name in self._written else x._version
        return found[0]

    def write(self, name: str, x: Tensor) -> None:
        """Puts another tensor in a buffer's place."""
        self._held[name] = x, _NEW

    def current(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Buffers as they now are, to hand on."""
        found = {n: self.buffers[n] for n in names}
        changed = self._changed_of(found.keys() & self._held.keys())
        return found | {n: self._held[n][0] for n in changed}

    def changed(self) -> dict[str, Tensor]:
        """The buffers that were written.

        Raises:
            RuntimeError: there are some, without ``mutable=True``; or a parameter was.
        """
        self.given._check_parameters()
        changed = self._changed_of(self._held)
        found = {n: x for n, (x, _) in self._held.items() if n in changed}
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

    def _changed_of(self, names: Iterable[str]) -> set[str]:
        """Those of the buffers held that were written."""
        changed, doubtful = set(), {}
        for name in names:
            x, version = self._held[name]
            before = self.buffers[name]
            if x._version != version:
                changed.add(name)
            elif name in self._trusted or x is before:
                continue
            elif _is_virtual((x, before)):
                changed |= self.part.hidden & {name}
            else:
                doubtful[name] = x, before
        # Some operators write what they say they read, and .data counts nothing. Any
        # call may do so for the first time, so each one is asked for values.
        unlike = _unanswered(_unlike, doubtful) if doubtful else set()
        self.part.hidden |= unlike
        return changed | unlike


_NEW = -1  # a version that no tensor has


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


def _unlike(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> set[str]:
    """The names of pairs of which the values differ; NaN equals NaN.

    Cost: of all pairs on a device one wait for it.
    """
    far: dict[torch.device, dict[str, Tensor]] = {}
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

    def __init__(self, tensors: CallTensors, table: Mapping[str, Any]):
        super().__init__({k: None if x is None else x.name for k, x in table.items()})
        self.tensors = tensors

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

    def __init__(
        self, tensors: CallTensors, table: Mapping[str, Any], like: str | None
    ):
        super().__init__(tensors, table)
        self.like = like

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        if name is None:
            return None
        given = self.tensors.given
        x = given.parameter(name)
        return x if self.like is None else x.to(given.buffers[self.like].dtype)

    def items(self) -> Any:
        # Who lists them wants to know of dtypes and devices: nothing is gathered.
        given, names = self.tensors.given, dict.items(self)
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
        return None if name is None else self.tensors.given.buffer(name)

    def __setitem__(self, attribute: str, value: Any) -> None:
        name = dict.get(self, attribute)
        if name is None or value is None:
            raise RuntimeError(
                f"the module's forward registers or removes the buffer {attribute!r}: "
                "register it, with its shape, where the module is made"
            )
        self.tensors.given.write(name, value)
