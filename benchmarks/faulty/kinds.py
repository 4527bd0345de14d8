"""One rank of a run that goes wrong: the same training under fsfunc and under FSDP2.

A rank writes what happens as JSON lines: each loss, what it ended by, and whether its
state is then what it was before the step. See faults.py.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from faulty.anywhere import FAULTS, JOINING, at_a_collective, at_joining
from faulty.beside import BESIDE
from faulty.saves import SAVES
from torch import Tensor, nn

import fsfunc as ff

WIDTH, LAYERS, ROWS, STEPS, EVERY = 8, 3, 4, 6, 3
LATE = 0.3  # of the timeout: a rank that is late, and in time


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank, in which step; and under which conditions."""

    kind: str
    rank: int = 0
    step: int = 2
    ranks: int = 2
    check: bool = False
    donated: bool = False
    timeout: float = 2.0
    shared: bool = True  # memory, for the messages of the host; else gloo
    at: int = 20  # the number of a collective of the rank, and other choices


KINDS = {
    "comes too late": "told",
    "stops": "told",
    "raises in the loss": "told",
    "raises in a backward": "told",
    "raises in the loader": "told",
    "is killed": "told",
    "aborts": "told",
    "returns NaN": "told",
    "sends another shape": "told",
    "sends another dtype": "told",
    "calls another collective": "told",
    "calls units in another order": "told",
    "calls fewer units": "told",
    "skips a step": "told",
    "evaluates alone": "told",
    "has another optimizer": "told",
    "has another learning rate": "told",
    "begins from other values": "told",
    "comes late": "right",
    "sees another batch size": "right",
    "has a slow link": "right",
    "nothing": "right",
}
CALLED = BESIDE | SAVES
ANYWHERE = FAULTS | JOINING
# Of fsfunc alone: FSDP2 has no saves, no messages, no step that is tried again.
OURS = {
    "raises as all others do": "right",
    "never joins": "told",
    **{kind: due for kind, (due, _) in (CALLED | ANYWHERE).items()},
}


class Rank:
    """This rank's notes, and whether its fault is due."""

    def __init__(self, fault: Fault, rank: int, path: str):
        self.fault, self.rank, self.file = fault, rank, open(path, "a")
        self.step, self.kept = -1, list[int]()

    def note(self, **said: Any) -> None:
        self.file.write(json.dumps({"at": time.time(), **said}) + "\n")
        self.file.flush()

    def now(self, *kinds: str) -> bool:
        """Whether the fault is of one of these kinds, and of this step."""
        return self.step == self.fault.step and self.fault.kind in kinds

    def due(self, *kinds: str) -> bool:
        """Whether it is now, and this rank's."""
        fault = self.fault
        if self.rank != fault.rank or not self.now(*(kinds or (fault.kind,))):
            return False
        self.note(fault=fault.kind)
        return True

    def early(self, *kinds: str) -> bool:
        """The same of what goes wrong before the first step."""
        self.step, before = self.fault.step, self.step
        found, self.step = self.due(*kinds), before
        return found

    def batch(self) -> Tensor:
        """The rows of this rank in this step."""
        rows = ROWS + 3 if self.due("sees another batch size") else ROWS
        x = rows_of(self.rank, self.step, rows)
        if self.due("returns NaN"):
            x[1, 2] = float("nan")
        if self.due("raises in the loader"):
            raise OSError("no such shard")
        return x

    def in_the_loss(self) -> None:
        if self.due("raises in the loss"):
            raise ValueError("no such token")
        if self.due("is killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due("stops"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.due("aborts"):
            os.abort()
        if self.due("comes too late"):
            time.sleep(self.fault.timeout + 3)
        if not ff.recording() and self.due("comes late"):
            time.sleep(LATE * self.fault.timeout)

    def order(self) -> list[int]:
        order = list(range(LAYERS))
        if self.due("calls units in another order"):
            order.reverse()
        return order[1:] if self.due("calls fewer units") else order

    def shown(self, x: Tensor) -> tuple[Tensor, bool]:
        """(what is reduced over the ranks by hand, whether by another operation)."""
        found = x.detach().abs().amax(0)
        if self.due("sends another shape"):
            found = found[:3]
        if self.due("sends another dtype"):
            found = found.double()
        return found, self.due("calls another collective")


def rows_of(rank: int, step: int, rows: int = ROWS) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS + 3, WIDTH, generator=draw)[:rows]


def weights() -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(WIDTH, WIDTH, generator=draw) / 3 for _ in range(LAYERS)]


def first_weights(rank: Rank) -> list[Tensor]:
    found = weights()
    return [w + 1 for w in found] if rank.early("begins from other values") else found


class Backward(torch.autograd.Function):
    """The identity, whose backward asks whether to raise."""

    @staticmethod
    def forward(x: Tensor, due: Callable[..., bool]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.due = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.due("raises in a backward"):
            raise ArithmeticError("no such gradient")
        return grads[0].clone(), None


def digest(tensors: list[Tensor]) -> str:
    """Of a rank's own part of a state."""
    parts = [bytes(t.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())
             for t in tensors if t.numel()]  # fmt: skip
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


class AllRaise(Exception):
    """What all ranks raise alike, in the middle of a forward pass, and catch."""


def ours(rank: Rank, size: int) -> None:
    """Training as the README has it, with an evaluation every third step."""
    fault = rank.fault
    if fault.kind == "never joins" and rank.rank == fault.rank:
        rank.note(fault=fault.kind)
        time.sleep(fault.timeout + 3)
        raise OSError("no such network")
    if fault.kind in ANYWHERE and rank.rank == fault.rank:
        at_a_collective(rank) if fault.kind in FAULTS else at_joining(rank)
    with warnings.catch_warnings():
        if fault.kind in JOINING:  # messages go by gloo, it says
            warnings.simplefilter("ignore", RuntimeWarning)
        mesh = ff.make_mesh(
            {"data": size}, timeout=fault.timeout, shared_memory=fault.shared
        )
    slow(rank)

    @ff.unit
    def layer(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(Backward.apply(x @ w, rank.due))

    def loss(ws: list[Tensor], x: Tensor) -> Tensor:
        rank.in_the_loss()
        for i in rank.order():
            x = layer(ws[i], x)
            if again and rank.now("raises as all others do"):
                rank.due()
                again.pop()
                raise AllRaise
        mine, other = rank.shown(x)
        most = ff.psum(mine, "data") if other else ff.pmax(mine, "data")
        return x.square().mean() + 0.01 * most.mean()

    rate = 2e-2 if rank.early("has another learning rate") else 1e-2
    optimizer = ff.sharded_adam(rate, weight_decay=0.0)
    if rank.early("has another optimizer"):
        optimizer = ff.sgd(rate)
    step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
    step = ff.donate(step) if fault.donated else step
    evaluate = ff.shard(loss, mesh, "data")

    def tensors(state: Any) -> list[Tensor]:
        leaves = ff.tree.leaves((state.params, state.opt_state))
        return [t for t in leaves if isinstance(t, Tensor)]

    given, again = first_weights(rank), [1, 2, 3]

    def beside(state: Any) -> None:
        if rank.now(*CALLED):
            CALLED[fault.kind][1](rank, mesh, state)

    def init() -> list[Tensor]:
        return [w.clone() for w in given]

    def run() -> None:
        state = ff.init_state(step, init, optimizer, rows_of(rank.rank, 0))
        before = ""
        for rank.step in range(STEPS):
            try:
                before = digest(tensors(state))
                x = rank.batch()
                if rank.due("evaluates alone"):
                    evaluate(state.params, x)
                if rank.due("skips a step"):
                    continue
                beside(state)
                while True:
                    try:
                        state, metrics = step(state, x)
                        break
                    except AllRaise:
                        pass
                before = digest(tensors(state))
                rank.note(step=rank.step, loss=float(value := metrics["loss"]))
                if not math.isfinite(value):  # alike on every rank: all of them ask
                    ff.testing.check_batch({"x": x}, "data")
                if rank.step % EVERY == EVERY - 1:
                    evaluate(state.params, x)
            except Exception:
                try:
                    same = digest(tensors(state)) == before
                    rank.note(intact="intact" if same else "changed")
                except RuntimeError:  # donated, and taken: it says so
                    rank.note(intact="taken, and says so")
                raise

    ff.spmd(run, mesh)()


def fsdp2(rank: Rank, size: int) -> None:
    """The same training on FSDP2, as its tutorial has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    limit = datetime.timedelta(seconds=rank.fault.timeout)
    dist.init_process_group("gloo", timeout=limit)
    slow(rank)
    mesh = init_device_mesh("cpu", (size,))

    class Layer(nn.Module):
        def __init__(self, w: Tensor):
            super().__init__()
            self.w = nn.Parameter(w)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(Backward.apply(x @ self.w, rank.due))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(map(Layer, first_weights(rank)))

        def forward(self, x: Tensor) -> Tensor:
            rank.in_the_loss()
            for i in rank.order():
                x = self.layers[i](x)
            mine, other = rank.shown(x)
            kind = dist.ReduceOp.SUM if other else dist.ReduceOp.MAX
            dist.all_reduce(mine, kind)
            return x.square().mean() + 0.01 * mine.mean()

    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rate = 2e-2 if rank.early("has another learning rate") else 1e-2
    adam: Any = torch.optim.Adam(model.parameters(), rate)
    if rank.early("has another optimizer"):
        adam = torch.optim.SGD(model.parameters(), rate)

    def tensors() -> list[Tensor]:
        state = [v for s in adam.state.values() for v in s.values()]
        every = [*model.parameters(), *filter(torch.is_tensor, state)]
        return [getattr(t, "to_local", lambda t=t: t)() for t in every]

    before = ""
    for rank.step in range(STEPS):
        try:
            before = digest(tensors())
            x = rank.batch()
            if rank.due("evaluates alone"):
                with torch.no_grad():
                    model(x)
            if rank.due("skips a step"):
                continue
            value = model(x)
            value.backward()
            adam.step()
            adam.zero_grad()
            before = digest(tensors())
            total = value.detach().clone()
            dist.all_reduce(total)
            rank.note(step=rank.step, loss=float(total) / size)
            if rank.step % EVERY == EVERY - 1:
                with torch.no_grad():
                    model(x)
        except Exception:
            same = digest(tensors()) == before
            rank.note(intact="intact" if same else "changed")
            raise


def slow(rank: Rank) -> None:
    """From here on this rank's sends leave late, if that is its fault."""
    if not rank.early("has a slow link"):
        return
    sends = {name: getattr(dist, name) for name in ("isend", "all_reduce")}

    def late(send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(*args: Any, **options: Any) -> Any:
            time.sleep(0.02)
            return send(*args, **options)

        return sent

    for name, send in sends.items():
        setattr(dist, name, late(send))


def plain(ranks: int, long: tuple[int, int] | None = None) -> list[float]:
    """The losses of one device: the mean of the ranks' means.

    Args:
        long: (rank, step) of a batch with more rows.
    """
    ws = [w.requires_grad_() for w in weights()]
    adam, losses = torch.optim.Adam(ws, 1e-2), []
    for step in range(STEPS):
        parts, most = [], []
        for rank in range(ranks):
            x = rows_of(rank, step, ROWS + 3 * ((rank, step) == long))
            for w in ws:
                x = torch.tanh(x @ w)
            parts.append(x.square().mean())
            most.append(x.detach().abs().amax(0))
        value = torch.stack(parts).mean() + 0.01 * torch.stack(most).amax(0).mean()
        adam.zero_grad()
        value.backward()
        adam.step()
        losses.append(value.item())
    return losses


def work(side: str, fault: Fault, index: int, path: str) -> None:
    """What a rank does until it ends, or raises."""
    os.environ["FSFUNC_CHECK"] = str(int(fault.check))
    rank = Rank(fault, index, path)
    try:
        {"ours": ours, "fsdp2": fsdp2}[side](rank, fault.ranks)
    except BaseException as error:
        rank.note(error=type(error).__name__, text=str(error)[:2000])
        raise
    rank.note(done=True)
