"""The structure of a module without its tensors, copied for each call that runs it.

A module's forward reads its parameters and buffers as attributes, and may set others.
So each call borrows a copy of its own: two ranks, a recompute beside another call, and
a module that calls itself do not meet. A copy's tables of parameters and buffers look
up what the call was given; what a forward sets on its module is gone after the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from fsfunc import _torch
from fsfunc.interop.absence import Absent
from fsfunc.interop.ports import Attribute, Port, Watch, make_port, watched
from fsfunc.interop.tables import Buffers, Parameters
from fsfunc.interop.tensors import Tensors

__all__ = ["Copy", "without_tensors"]


def without_tensors(module: nn.Module, tensors: Tensors) -> nn.Module:
    """A copy of ``module`` in which each of its tensors is :class:`Absent`.

    Raises:
        TypeError: something in it cannot be copied.
    """
    memo: dict[int, Any] = {
        id(x): Absent(name, tuple(x.shape), x.dtype) for name, x in tensors.all.items()
    }
    for name, m in module.named_modules():
        for attribute, x in vars(m).items():
            if isinstance(x, Tensor) and x.grad_fn is not None:  # made anew each time
                where = f"{name}.{attribute}" if name else attribute
                memo.setdefault(id(x), Absent(where, tuple(x.shape), x.dtype))
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"the structure of {type(module).__name__} cannot be copied, and each call "
            f"needs a copy: {error}"
        ) from error


class Copy:
    """One copy of a part of a module, for one call at a time.

    Args:
        template: the module of which it is a copy, without tensors.
        ports: the units in it, by name within it: what to run in their place.
        fetch: reads a parameter outside every unit; None inside one.
        where: the name of the part.
        fixed: buffers that may not be written.
    """

    def __init__(
        self,
        template: nn.Module,
        ports: Mapping[str, Callable[..., Any]],
        fetch: Callable[[str, Any], Any] | None,
        where: str,
        fixed: frozenset[str],
    ):
        with _torch.outside_modes():  # a fake tensor would stay
            self.module = copy.deepcopy(template)
        self.where, self.fixed, self._fetch = where, fixed, fetch
        self.params: Mapping[str, Any] = {}
        self.given: Mapping[str, Tensor] = {}
        self._held: dict[str, tuple[Tensor, int]] = {}
        self._fetched: dict[Any, Any] = {}
        self.mutable = False
        # Batch norms write their statistics, and no version counter shows it.
        self._hidden: set[str] = set()
        self._unlearned = True
        for _, m in self.module.named_modules():
            parameters, buffers = _torch.tables(m)
            if m.training and getattr(m, "track_running_stats", False):
                own = (buffers.get(x) for x in ("running_mean", "running_var"))
                self._hidden.update(x.name for x in own if x is not None)
            _torch.set_tables(m, Parameters(self, parameters), Buffers(self, buffers))
        for name, call in ports.items():
            make_port(self.module.get_submodule(name), call, self)
        if fetch is None and where:
            for hooks in _torch.hook_tables(self.module, before=False):
                hooks.clear()  # they run on the unit's output, outside it
        self._watch = Watch(watched(self.module))

    # What a call is given

    def begin(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor], mutable: bool
    ) -> None:
        """A call takes the copy."""
        self.params, self.given, self.mutable = params, buffers, mutable

    def parameter(self, name: str) -> Any:
        """A parameter that the module's forward reads."""
        leaf = self.params[name]
        if self._fetch is None:
            return leaf
        key = name, torch.is_grad_enabled()
        if key not in self._fetched:
            self._fetched[key] = self._fetch(name, leaf)
        return self._fetched[key]

    def buffer(self, name: str) -> Tensor:
        """A buffer that the module's forward reads, and may write."""
        found = self._held.get(name)
        if found is None:
            x = _own(self.given[name])
            version = _NEW if name in self._hidden else x._version
            found = self._held[name] = x, version
        return found[0]

    def write(self, name: str, x: Tensor) -> None:
        """Puts another tensor in a buffer's place."""
        self._held[name] = x, _NEW

    def current(self, name: str) -> Tensor:
        """A buffer as it now is, to hand on."""
        return self.buffer(name) if self._is_changed(name) else self.given[name]

    def changed(self) -> dict[str, Tensor]:
        """The buffers that were written.

        Raises:
            RuntimeError: there are some, and nobody asked for them.
        """
        if self._unlearned and self._held:
            self._learn()
        found = {n: x for n, (x, _) in self._held.items() if self._is_changed(n)}
        if found and not self.mutable:
            names = ", ".join(map(repr, found))
            raise RuntimeError(
                f"{self._who} writes the buffer {names}: apply(params, buffers, ..., "
                "mutable=True) returns (output, new buffers), and the module's eval() "
                "may write none"
            )
        for name in found:
            if name in self.fixed:
                raise RuntimeError(
                    f"{self._who} writes the buffer {name!r}, whose memory is another "
                    "buffer's too: clone one of them in the module"
                )
        return found

    def _learn(self) -> None:
        """Looks, in a first call on data, which writes no version counter shows."""
        held = [(n, x) for n, (x, _) in self._held.items() if not self._is_changed(n)]
        virtual = _torch.fake_active() or _torch.functorch_active()
        if virtual or any(
            x.is_meta or isinstance(x, _torch.FakeTensor) for _, x in held
        ):
            return
        self._unlearned = False
        for name, x in held:
            before = self.given[name]
            if not bool(((x == before) | (x != x) & (before != before)).all()):
                self._hidden.add(name)
                self.write(name, x)

    def _is_changed(self, name: str) -> bool:
        found = self._held.get(name)
        return found is not None and found[0]._version != found[1]

    def end(self) -> Set[Attribute]:
        """The call is over: what it was given and what it set are let go.

        Returns:
            the attributes that it set.
        """
        self.params, self.given = {}, {}
        self._held, self._fetched = {}, {}
        return frozenset() if self._watch.is_kept() else self._watch.restored()

    @property
    def spoiled(self) -> bool:
        """Whether a call wrote into what all calls on this copy read."""
        return self._watch.written() is not None

    def check(self, found: Set[Attribute]) -> None:
        """Raises where what a call set, or wrote into, would be missed.

        Raises:
            RuntimeError: an attribute of a unit, set from outside; a tensor that is no
                buffer, written in place.
        """
        written = self._watch.written()
        if written:
            raise RuntimeError(
                f"{self._who} writes in place into {written!r}, which is no buffer: "
                "register it as one, and apply(..., mutable=True) returns it"
            )
        for path, name in found:
            if isinstance(self.module.get_submodule(path), Port):
                raise RuntimeError(
                    f"{self._who} sets {path}.{name} on a unit from outside, which the "
                    "unit does not see: pass it to the call, or make a unit of what is "
                    "around both"
                )

    @property
    def _who(self) -> str:
        if self._fetch is not None:
            return "the module"
        return f"unit {self.where or type(self.module).__name__!r}"


_NEW = -1  # a version that no tensor has


def _own(x: Tensor) -> Tensor:
    """A copy whose writes are counted: inference mode would not."""
    if not torch.is_inference_mode_enabled():
        return x.clone()
    with torch.inference_mode(False):
        return x.clone()
