"""The structure of a module without its tensors, copied for each call that runs it.

A module's forward reads its parameters and buffers as attributes, and may set others.
So each call borrows a copy of its own: two ranks, a recompute beside another call, and
a module that calls itself do not meet. A copy's tables of parameters and buffers look
up what the call was given; what a forward sets on its module is gone after the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm as _batchnorm

from fsfunc import _torch
from fsfunc.interop.arguments import without_caches
from fsfunc.interop.attributes import Attribute, AttributeWatch, copied
from fsfunc.interop.call_tensors import (
    BufferTable,
    CallTensors,
    Knowledge,
    ParameterTable,
)
from fsfunc.interop.module_tensors import Tensors, check_closures, computed
from fsfunc.interop.stubs import Absent, Hook, LateHooks, Seen, make_stub, shown_by

__all__ = ["Copy", "without_tensors"]


def without_tensors(module: nn.Module, tensors: Tensors) -> nn.Module:
    """A copy of ``module`` in which each of its tensors is :class:`Absent`.

    Raises:
        TypeError: something in it cannot be copied, or holds what is.
    """
    check_closures(module)
    memo: dict[int, Any] = {
        id(x): Absent(name, tuple(x.shape), x.dtype) for name, x in tensors.all.items()
    }
    for name, x in computed(module):
        memo.setdefault(id(x), Absent(name, tuple(x.shape), x.dtype))
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
        stubs: the units in it, by name within it: what to run in their place.
        fetch: reads a parameter outside every unit; None inside one.
        where: the name of the part.
        knowledge: what calls of the part have shown.
        fills: whether it may fill a cache.
    """

    def __init__(
        self,
        template: nn.Module,
        stubs: Mapping[str, Callable[..., Any]],
        fetch: Callable[[str, Any], Any] | None,
        where: str,
        knowledge: Knowledge,
        fills: bool,
    ):
        self.module, things = copied(template)
        self.fills = fills
        if not fills:
            without_caches(things)
        self.where, self._fetch, self._knowledge = where, fetch, knowledge
        self.mutable = False
        self._given: CallTensors | None = None
        hidden: set[str] = set()
        trusted: set[str] = set()
        for _, m in self.module.named_modules():
            parameters, buffers = _torch.tables(m)
            like = None
            if getattr(m, "track_running_stats", False):
                own = (buffers.get(x) for x in ("running_mean", "running_var"))
                names = {x.name for x in own if x is not None}
                like = min(names, default=None)
                if m.training:  # written, and no version counter shows it
                    hidden |= names
                elif type(m).__module__ == _batchnorm.__name__:
                    trusted |= names
            table = ParameterTable(self, parameters, like)
            _torch.set_tables(m, table, BufferTable(self, buffers))
        self._written, self._trusted = frozenset(hidden), frozenset(trusted - hidden)
        for name, call in stubs.items():
            make_stub(self.module.get_submodule(name), call, self)
        units = map(self.module.get_submodule, stubs)
        self._hooks = {id(m): LateHooks(m) for m in units}
        if fetch is None and where:
            for hooks in _torch.hook_tables(self.module, before=False):
                hooks.clear()  # they run on the unit's output, outside it

        def unit_of(path: str) -> str | None:
            names = accumulate(path.split("."), "{}.{}".format)
            return next((name for name in names if name in stubs), None)

        self._watch = AttributeWatch(self.module, things, unit_of)

    # What a call is given

    def begin(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor], mutable: bool
    ) -> None:
        """A call takes the copy."""
        self._given = CallTensors(
            self._knowledge, params, buffers, self._fetch, self._written, self._trusted
        )
        self.mutable = mutable

    @property
    def given(self) -> CallTensors:
        """What the call that runs was given.

        Raises:
            RuntimeError: none runs, or another: the read comes from a backward.
        """
        found = self._given
        if found is None or _torch.current_node() is not found.node:
            raise RuntimeError(
                f"{self._who} is run again by a backward after its call is over, as "
                "torch.utils.checkpoint does within a forward: leave it out (of a "
                "Hugging Face model: gradient_checkpointing_disable()), and recompute "
                "units by ff.remat(step)"
            )
        return found

    def changed(self) -> dict[str, Tensor]:
        """The buffers that were written.

        Raises:
            RuntimeError: there are some, and nobody asked for them; or a parameter was.
        """
        given = self.given
        given.check(self._who)
        found = dict(given.changed())
        if found and not self.mutable:
            names = ", ".join(map(repr, found))
            raise RuntimeError(
                f"{self._who} writes the buffer {names}: apply(params, buffers, ..., "
                "mutable=True) returns (output, new buffers), and the module's eval() "
                "may write none"
            )
        for name in found:
            if name in self._knowledge.fixed:
                raise RuntimeError(
                    f"{self._who} writes the buffer {name!r}, whose memory is another "
                    "buffer's too: clone one of them in the module"
                )
        return found

    def enter(self) -> None:
        """A unit in it is called.

        Raises:
            RuntimeError: things that the unit has too were changed, which in the unit's
                own copy they are not.
        """
        if said := self._watch.unseen():
            raise RuntimeError(f"{self._who} {said}")

    def late_hooks(self, m: nn.Module) -> dict[str, list[Hook]]:
        """What the call has hung on modules within a unit, which run on another copy.

        Raises:
            RuntimeError: hooks that only the unit itself could run.
        """
        return self._hooks[id(m)].found()

    def show(self, paths: Sequence[str]) -> Seen:
        """What modules in it, by path, will have been given and have returned."""
        return shown_by(self.module, paths)

    def left(self, unit: str, where: str, filled: Any) -> None:
        """A unit in it has run, and filled one of its attributes.

        Raises:
            RuntimeError: that is shared with others, which see none of it.
        """
        if self._watch.is_shared(filled):
            raise RuntimeError(
                f"unit {unit!r} fills {where}, which others have too, and see none of "
                "it: return what is new, or make a unit of what is around both"
            )

    def end(self) -> tuple[dict[Attribute, str | None], set[Attribute]]:
        """The call is over: what it was given and what it set are let go.

        Returns:
            the attributes that it set, and why that is refused, if it is; and which of
            them it filled.
        """
        self._given = None
        return ({}, set()) if self._watch.is_kept() else self._watch.restored()

    @property
    def spoiled(self) -> bool:
        """Whether the next call on this copy might see what one before it did."""
        return self._watch.is_closed or self._watch.written() is not None

    def check(self, found: Mapping[Attribute, str | None]) -> None:
        """Raises where what a call set, or wrote into, would be missed.

        Raises:
            RuntimeError: an attribute of a unit, set from outside; a count or a sum; a
                tensor that is no buffer, written in place.
        """
        written = self._watch.written()
        if written:
            raise RuntimeError(
                f"{self._who} writes in place into {written!r}, which is no buffer: "
                "register it as one, and apply(..., mutable=True) returns it"
            )
        for refused in filter(None, found.values()):
            raise RuntimeError(f"{self._who} {refused}")

    @property
    def _who(self) -> str:
        if self._fetch is not None:
            return "the module"
        return f"unit {self.where or type(self.module).__name__!r}"
