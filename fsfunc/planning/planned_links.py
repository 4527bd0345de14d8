"""The link of a rank that is planned: nothing moves, and what would is noted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsfunc.comm.backends.abstract import AbstractLink
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.ledgers import Ledger
from fsfunc.planning.events import Asked, SendStarted, Started, Waited
from fsfunc.planning.observer import Observer

__all__ = ["PlannedLink"]


class _Planned(Handle):
    """A collective or transfer that is noted again when it is waited for.

    Until then it holds ``x``, as links do that read it.
    """

    def __init__(self, work: Handle, number: int, observer: Observer, x: Any):
        self.work, self.number, self.observer = work, number, observer
        self.x: Tensor | None = x
        self.over = self.asked = False

    def wait(self) -> Tensor:
        if not self.over:
            self.over, self.x = True, None
            self.observer.book.events.append(Waited(self.number))
        return self.work.wait()

    def done(self) -> bool:
        """When others come is not known here: a message lasts for one action more."""
        over, self.asked = self.over or self.asked, True
        self.x = None if over else self.x
        return over


class PlannedLink(AbstractLink):
    """Notes in the observer's book when each transfer starts and is waited for.

    Args:
        log: the ledger into which the collectives are written, each just before.
    """

    def __init__(self, rank: int, observer: Observer, log: Ledger):
        super().__init__(rank)
        self.observer, self.log, self.count = observer, log, 0

    def _noted(self, work: Handle, event: Any, x: Tensor) -> Handle:
        self.observer.book.events.append(event)
        self.count += 1
        return _Planned(work, self.count - 1, self.observer, x)

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        what: str = "",
        **how: Any,
    ) -> Handle:
        event = Started(self.count, self.log.records[-1], where.ranks)
        return self._noted(super().start(op, x, where, out=out, **how), event, x)

    def send(self, x: Tensor, where: Any, to: int, what: str = "") -> Handle:
        event = SendStarted(self.count, self.log.records[-1], where.ranks[to])
        return self._noted(super().send(x, where, to), event, x)

    def receive(self, like: Tensor, where: Any, source: int, what: str = "") -> Handle:
        size = like.numel() * like.element_size()
        event = Asked(self.count, size, where.ranks[source])
        return self._noted(super().receive(like, where, source), event, like)
