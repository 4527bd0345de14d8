"""Gradients of a sharded gradient call, shown to observers before they are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsfunc.core.reduction_hooks import Observation
from fsfunc.sharded.leaf import FlatShard
from fsfunc.transforms.gathers import Calls, GatheredCall


class Observed:
    """Gradients of one gradient call that observers have still to see."""

    def __init__(self, observers: Sequence[Observation]):
        self.observers = observers
        # By buffer and microbatch: how many calls give it, and the sum so far.
        self.unseen: dict[Any, tuple[int, Tensor | None]] = {}
        self.shown: set[Any] = set()

    def expect(self, calls: Calls) -> None:
        """Notes a unit call whose gradients will come."""
        for call in calls:
            if call.keeps:
                key = id(call.shard), call.micro
                if key in self.shown:
                    raise RuntimeError(f"{call.name}: its gradient was observed before")
                self.unseen[key] = self.unseen.get(key, (0, None))[0] + 1, None

    def joined(self, call: GatheredCall, shard: FlatShard) -> None:
        """Notes that the call before this one gives the gradient of both."""
        key = id(shard), call.micro
        count, held = self.unseen[key]
        self.unseen[key] = count - 1, held

    def show(self, call: GatheredCall, shard: FlatShard, buffer: Tensor) -> None:
        """Shows the gradient of one microbatch, once all calls gave it."""
        key = id(shard), call.micro
        count, held = self.unseen.pop(key)
        if held is not None:
            buffer = held.add_(buffer)
        if count > 1:
            self.unseen[key] = count - 1, buffer.clone() if held is None else held
            return
        self.shown.add(key)
        for observer in self.observers:
            observer.see(buffer, shard.split_axes)
