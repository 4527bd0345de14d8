"""Ranks that move nothing: shapes go through, and the ledger sees every collective."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsfunc.backends.base import Done, Link, Work

__all__ = ["AbstractLink"]


class AbstractLink(Link):
    """Every result has the right shape and dtype, and meaningless values."""

    def __init__(self, rank: int = 0):
        self.rank = rank

    def start(
        self, op: str, x: Tensor, where: Any, *, out: Tensor | None = None, **how: Any
    ) -> Work:
        n = where.size
        if out is not None:
            return Done(out)
        if op == "all_gather":
            return Done(x.new_empty((n * x.shape[0], *x.shape[1:])))
        if op == "psum_scatter":
            return Done(x.new_empty((x.shape[0] // n, *x.shape[1:])))
        return Done(x.clone())

    def send(self, x: Tensor, where: Any, to: int) -> Work:
        return Done(x.new_empty(0))

    def receive(self, like: Tensor, where: Any, source: int) -> Work:
        return Done(like)
