"""What ``remat`` keeps: policies as data, and the names they speak of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc._torch import TorchDispatchMode
from fsfunc.accounting import is_aside

__all__ = ["Policy", "SaveAllBut", "SaveOnly", "Tape", "checkpoint_name"]


@dataclass(frozen=True)
class Policy:
    """Which named values ``remat`` keeps."""

    names: frozenset[str]

    def __init__(self, *names: str):
        flat = [
            n for name in names for n in ([name] if isinstance(name, str) else name)
        ]
        object.__setattr__(self, "names", frozenset(flat))

    def keeps(self, name: str) -> bool:
        raise NotImplementedError


class SaveOnly(Policy):
    """Keeps the values of these names, and recomputes the rest.

    >>> SaveOnly("attention").keeps("attention"), SaveOnly("attention").keeps("mlp")
    (True, False)
    """

    def keeps(self, name: str) -> bool:
        return name in self.names


class SaveAllBut(Policy):
    """Keeps every named value but these; what has no name is recomputed.

    >>> SaveAllBut("attention").keeps("attention"), SaveAllBut("attention").keeps("mlp")
    (False, True)
    """

    def keeps(self, name: str) -> bool:
        return name not in self.names


_TAPE: ContextVar[Tape | None] = ContextVar("fsfunc_tape", default=None)


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """``x``, known by ``name`` to the policy of a ``remat`` around the unit.

    >>> import torch
    >>> checkpoint_name(torch.ones(2), "hidden").tolist()
    [1.0, 1.0]
    """
    tape = _TAPE.get()
    if tape is not None:
        tape.name(x, name)
    return x


class Tape:
    """The kept values of one unit call, by the number of the op that made them.

    The first run counts the unit's ops and remembers which made which storage; where a
    named value is kept, it is kept under its op's number. The second run counts again,
    and in place of such an op returns what was kept; its autograd node is made all the
    same. Ops of transforms and collectives on the way do not count.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.kept: dict[int, Tensor] = {}
        self.makers: dict[int, tuple[Any, ...]] = {}
        self.replaying = False

    def name(self, x: Tensor, name: str) -> None:
        made = self.makers.get(_torch.storage_key(x))
        if made is not None and not self.replaying and self.policy.keeps(name):
            number, size, stride, offset = made
            self.kept[number] = x.detach().as_strided(size, stride, offset)

    def made(self, out: Tensor, number: int, func: Any) -> None:
        """An op of the first run returned ``out``."""
        key = _torch.storage_key(out)
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            # Written in place, or random: to leave the op out would change the rest.
            self.makers.pop(key, None)
        elif key not in self.makers:
            meta = out.size(), out.stride(), out.storage_offset()
            self.makers[key] = (number, *meta)

    @contextmanager
    def keep(self) -> Iterator[None]:
        """The first run."""
        token = _TAPE.set(self)
        try:
            with _Numbering(self):
                yield
        finally:
            _TAPE.reset(token)
            self.makers.clear()

    @contextmanager
    def replay(self) -> Iterator[None]:
        """The second run."""
        self.replaying = True
        with _Numbering(self):
            yield


class _Numbering(TorchDispatchMode):
    def __init__(self, tape: Tape):
        super().__init__()
        self.tape, self.count = tape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_aside():
            return func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        if self.tape.replaying and number in self.tape.kept:
            return self.tape.kept[number].detach()
        out = func(*args, **kwargs)
        if not self.tape.replaying and isinstance(out, Tensor):
            self.tape.made(out, number, func)
        return out
