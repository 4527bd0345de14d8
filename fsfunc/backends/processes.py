"""Real processes over torch.distributed: NCCL where there are GPUs, gloo elsewhere.

On the CPU the collectives are pairwise exchanges straight from and into the caller's
buffers: the same bytes as a ring, without gloo's staging copies. Sums run in rank
order, so their bits are those of the simulated ranks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc.arena import Arena
from fsfunc.backends.attempts import agent_store
from fsfunc.backends.base import Link, Work
from fsfunc.backends.groups import Groups
from fsfunc.backends.sending import Transfers

__all__ = ["ProcessLink", "connect"]

_TAGS = 2**20  # more than can be in flight at once


class _Exchange(Work):
    """Works of torch.distributed, then a local finish."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Tensor], held: Any):
        self.works, self.finish, self.held = works, finish, held
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            for work in self.works:
                work.wait()
            self.result = self.finish()
            del self.works, self.finish, self.held  # and the buffers with them
        return self.result

    def done(self) -> bool:
        return self.result is not None or all(w.is_completed() for w in self.works)


class _Pairs:
    """One collective's exchanges, pair by pair: who is in it, and under which tag."""

    def __init__(self, where: Any, group: Any, tag: int):
        self.n, self.me, self.ranks = where.size, where.index, where.ranks
        self.group, self.tag = group, tag
        self.others = [r for r in range(self.n) if r != self.me]

    def each(self, *parts: Tensor) -> dict[int, Tensor]:
        """By index, the others' parts (or the same one for each)."""
        return {r: parts[r % len(parts)] for r in self.others}

    def swap(
        self, sent: Mapping[int, Tensor], got: Mapping[int, Tensor], step: int = 0
    ) -> list[Any]:
        """Sends and receives by index along the axis; empty tensors stay at home."""
        tag = 2 * self.tag + step
        works = [
            dist.irecv(y, self.ranks[r], self.group, tag)
            for r, y in got.items()
            if y.numel()
        ]
        works += [
            dist.isend(x, self.ranks[r], self.group, tag)
            for r, x in sent.items()
            if x.numel()
        ]
        return works


class ProcessLink(Link):
    """This process's connection; c10d groups are made once, in one order everywhere."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.arena = Arena()
        self.paired = dist.get_backend() != "fake"  # torch's stand-in has no pairs
        self.issued: Counter[tuple[int, ...]] = Counter()
        self.groups = Groups.of_world()
        self.transfers = Transfers(self.groups)

    def connect(self, every: Sequence[tuple[int, ...]]) -> None:
        """Makes the c10d group of each rank tuple; all processes call this alike."""
        for ranks in every:
            if len(ranks) == 1:
                continue
            # Pairs of ranks have no order, and NCCL's own collectives have one.
            unlike = list(ranks) != sorted(ranks) and dist.get_backend() != "gloo"
            order: Any = {"sort_ranks": False} if unlike else {}
            self.groups.make(ranks, **order)
        self.transfers.connect(every)

    def send(self, x: Tensor, where: Any, to: int) -> Work:
        return self.transfers.send(x, where, to)

    def receive(self, like: Tensor, where: Any, source: int) -> Work:
        return self.transfers.receive(like, where, source)

    def trim(self) -> None:
        self.arena.trim(0)

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        any_order: bool = False,
        **how: Any,
    ) -> Work:
        x, group = x.detach(), self.groups.get(where.ranks)
        if x.device.type != "cpu" or not self.paired:
            return self._native(op, x, where, out, group, **how)
        pairs = _Pairs(where, group, self.issued[where.ranks] % _TAGS)
        self.issued[where.ranks] += 1
        if op == "psum" and not (any_order or where.size == 2 or x.numel() < 1024):
            return self._pair_psum_in_two(x, pairs, out)
        return getattr(self, "_pair_" + op)(x, pairs, out, **how)

    def _room(self, x: Tensor, times: int = 1) -> Tensor:
        """A buffer of the shape of ``x``, dim 0 taken ``times`` over."""
        shape = (times * x.shape[0], *x.shape[1:]) if x.ndim else ()
        return self.arena.get(times * x.numel(), x.dtype, x).view(shape)

    def _pair_all_gather(self, x: Tensor, pairs: _Pairs, out: Tensor | None) -> Work:
        full = self._room(x, pairs.n) if out is None else out
        parts = full.tensor_split(pairs.n)
        works = pairs.swap(pairs.each(x), pairs.each(*parts))
        parts[pairs.me].copy_(x)
        return _Exchange(works, lambda: full, x)

    def _pair_psum_scatter(self, x: Tensor, pairs: _Pairs, out: Tensor | None) -> Work:
        parts = x.tensor_split(pairs.n)
        mine = parts[pairs.me]
        got = {r: self._room(mine) for r in pairs.others}
        works = pairs.swap(pairs.each(*parts), got)
        return _Exchange(works, lambda: _sum(mine, got, pairs.me, out), x)

    def _pair_psum(self, x: Tensor, pairs: _Pairs, out: Tensor | None) -> Work:
        """In one hop: for two ranks, the bytes of a ring."""
        got = {r: self._room(x) for r in pairs.others}
        works = pairs.swap(pairs.each(x), got)
        return _Exchange(works, lambda: _sum(x, got, pairs.me, out), x)

    def _pair_psum_in_two(self, x: Tensor, pairs: _Pairs, out: Tensor | None) -> Work:
        """A scatter, and in its wait a gather: all ranks must come to that wait."""
        n, me = pairs.n, pairs.me
        total = self._room(x) if out is None else out
        cuts, sums = x.view(-1).tensor_split(n), total.view(-1).tensor_split(n)
        got = {r: self._room(cuts[me]) for r in pairs.others}
        works = pairs.swap(pairs.each(*cuts), got)

        def finish() -> Tensor:
            _sum(cuts[me], got, me, sums[me])
            for work in pairs.swap(
                pairs.each(sums[me]),
                pairs.each(*sums),
                step=1,
            ):
                work.wait()
            return total

        return _Exchange(works, finish, x)

    def _pair_pmax(self, x: Tensor, pairs: _Pairs, out: Tensor | None) -> Work:
        got = {r: self._room(x) for r in pairs.others}
        works = pairs.swap(pairs.each(x), got)

        def finish() -> Tensor:
            largest = torch.stack([x, *got.values()]).amax(0)
            return largest if out is None else out.copy_(largest)

        return _Exchange(works, finish, x)

    def _pair_all_to_all(self, x: Tensor, pairs: _Pairs, out: Tensor | None) -> Work:
        y = torch.empty_like(x) if out is None else out
        cuts, slots = x.tensor_split(pairs.n), y.tensor_split(pairs.n)
        works = pairs.swap(pairs.each(*cuts), pairs.each(*slots))
        slots[pairs.me].copy_(cuts[pairs.me])
        return _Exchange(works, lambda: y, x)

    def _pair_ppermute(
        self,
        x: Tensor,
        group: _Pairs,
        out: Tensor | None,
        pairs: Sequence[tuple[int, int]],
    ) -> Work:
        y, sent, got = _permuted(x, group.me, out, pairs)
        return _Exchange(group.swap(sent, got), lambda: y, x)

    def _pair_pbroadcast(
        self, x: Tensor, pairs: _Pairs, out: Tensor | None, source: int
    ) -> Work:
        y = torch.empty_like(x) if out is None else out
        if pairs.me != source:
            return _Exchange(pairs.swap({}, {source: y}), lambda: y, x)
        works = pairs.swap(pairs.each(x), {})
        return _Exchange(works, lambda: y.copy_(x), x)

    def _native(
        self,
        op: str,
        x: Tensor,
        where: Any,
        out: Tensor | None,
        group: Any,
        pairs: Sequence[tuple[int, int]] = (),
        source: int = 0,
    ) -> Work:
        """torch.distributed's own collectives, which is right on NCCL."""
        n = where.size
        if op == "ppermute":
            y, sent, got = _permuted(x, where.index, out, pairs)
            calls = [
                dist.P2POp(send, t, where.ranks[r], group)
                for send, by_rank in ((dist.isend, sent), (dist.irecv, got))
                for r, t in by_rank.items()
            ]
            # One batch: single sends and receives would wait for each other on NCCL.
            works = dist.batch_isend_irecv(calls) if calls else []
            return _Exchange(works, lambda: y, x)
        if op == "all_gather":
            y = x.new_empty((n * x.shape[0], *x.shape[1:])) if out is None else out
            work = _ALL_GATHER(y, x, group=group, async_op=True)
        elif op == "psum_scatter":
            y = x.new_empty((x.shape[0] // n, *x.shape[1:])) if out is None else out
            work = _REDUCE_SCATTER(y, x, group=group, async_op=True)
        elif op == "all_to_all":
            y = torch.empty_like(x) if out is None else out
            work = dist.all_to_all_single(y, x, group=group, async_op=True)
        else:
            y = x.clone() if out is None else out.copy_(x)
            if op == "pbroadcast":
                root = where.ranks[source]
                work = dist.broadcast(y, root, group=group, async_op=True)
            else:
                kind = dist.ReduceOp.MAX if op == "pmax" else dist.ReduceOp.SUM
                work = dist.all_reduce(y, kind, group=group, async_op=True)
        return _Exchange([work], lambda: y, x)


# torch 2.13 renamed these two; 2.11 only knows the old names.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None)
_ALL_GATHER = _ALL_GATHER or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None)
_REDUCE_SCATTER = _REDUCE_SCATTER or dist.reduce_scatter_tensor


def _permuted(
    x: Tensor, me: int, out: Tensor | None, pairs: Sequence[tuple[int, int]]
) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """(a rank's result, what it sends by target, where it receives by source)."""
    y = torch.zeros_like(x) if out is None else out.zero_()
    if (me, me) in pairs:
        y.copy_(x)
    sent = {d: x for s, d in pairs if s == me != d}
    return y, sent, {s: y for s, d in pairs if d == me != s}


def _sum(mine: Tensor, got: Mapping[int, Tensor], me: int, out: Any) -> Tensor:
    """The sum of the ranks' parts in rank order, as the simulated ranks add them.

    It is made in the first received part: that memory is warm.
    """
    parts = [mine if r == me else got[r] for r in range(len(got) + 1)]
    total = (parts[1] if me == 0 else parts[0]) if out is None else out
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
    return total


def connect(axes: Mapping[str, int], size: int) -> ProcessLink:
    """The link of this process to the others of a mesh of ``size`` ranks.

    Raises:
        ValueError: the mesh and the processes differ in number.
        RuntimeError: nobody started a process group, and torchrun's variables are
            not there.
    """
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            raise RuntimeError(
                'a mesh over "processes" needs torchrun, or init_process_group before '
                'it; in one process use backend="simulated"'
            )
        world = int(os.environ["WORLD_SIZE"])
        _check_size(axes, size, world)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if (store := agent_store()) is None:
            dist.init_process_group(backend)
        else:
            rank = int(os.environ["RANK"])
            dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    _check_size(axes, size, dist.get_world_size())
    return ProcessLink()


def _check_size(axes: Mapping[str, int], size: int, world: int) -> None:
    if size != world:
        raise ValueError(
            f"the mesh {dict(axes)} has {size} ranks, but there are {world} processes: "
            f"choose axes whose product is {world}, or --nproc-per-node {size}"
        )
