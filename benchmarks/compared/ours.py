"""fsfunc's train steps, under the names of the benchmark's competitors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from compared.models import functional_loss, init_params, make_batch
from compared.peers import ADAMW, Competitor, Setting
from torch import Tensor

import fsfunc as ff


def adamw() -> Any:
    return ff.sharded_adam(ADAMW["lr"], weight_decay=ADAMW["weight_decay"])


def train_step(loss_fn: Callable[..., Tensor]) -> Callable[..., Any]:
    """The user's own step, and the optimizer that it closes over."""
    optimizer = adamw()

    def step(state: Any, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        loss, grads = ff.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads, optimizer), loss

    step.optimizer = optimizer
    return step


def mesh_of(setting: Setting, axis: str) -> Any:
    shared = not setting.gloo
    return ff.make_mesh({axis: setting.ranks}, "processes", shared_memory=shared)


def build(
    setting: Setting,
    *,
    zero: int | None = None,
    remat: bool = False,
    donate: bool = True,
    jit: bool = False,
    whole: bool = False,
    offload: bool = False,
) -> Competitor:
    """A competitor; `zero=None` is one device, with no transform around the step.

    Recomputation is put on the blocks alone, as the peers put theirs, and so is `jit`,
    unless it compiles the step `whole`. With `offload` parameters and moments lie with
    the host.
    """
    mesh = None if zero is None else mesh_of(setting, "data")
    step, optimizer = transformed(
        setting, mesh, zero, remat=remat, jit=jit, whole=whole, offload=offload
    )
    params = init_params(setting.size, device=setting.device)
    batch = setting.batch()
    held = [ff.init_state(step, params, optimizer, batch)]
    return advancing(ff.donate(step) if donate else step, held, batch)


def transformed(
    setting: Setting,
    mesh: Any,
    zero: int | None,
    *,
    remat: bool,
    jit: bool,
    whole: bool,
    offload: bool,
) -> tuple[Callable[..., Any], Any]:
    """The user's own step with transforms around it, and the optimizer."""
    loss_fn = functional_loss(setting.size, ff.unit, ff.remat if remat else _same)
    step = train = train_step(loss_fn)
    if setting.compute is not None:
        step = ff.precision(step, compute=setting.compute, reduce=torch.float32)
    if zero is not None:
        step = ff.shard(step, mesh, "data", zero=zero, min_bytes=setting.min_bytes)
    if offload:
        step = ff.offload(step, params="host", moments="host")
    if jit:
        backend = "inductor" if setting.kernels else "aot_eager"
        step = ff.jit(step, only="block", backend=backend)
    if whole:
        backend = "inductor" if setting.kernels else "eager"
        step = ff.jit(step, whole_step=True, backend=backend)
    return step, train.optimizer


def planned_on_cpu(
    setting: Setting,
    *,
    zero: int | None = None,
    donate: bool = True,
    **kind: bool,
) -> Any:
    """The plan of the same step on a GPU, made of the CPU's tensors without data."""
    mesh = ff.make_mesh({"data": 1}, "abstract")
    kinds = {"remat": False, "jit": False, "whole": False, "offload": False, **kind}
    step, optimizer = transformed(setting, mesh, zero, **kinds)
    batch = make_batch(setting.size, setting.rank)
    return ff.plan(
        ff.donate(step) if donate else step,
        lambda: init_params(setting.size),
        optimizer,
        batch,
        mesh=mesh,
        device="cuda",
    )


def advancing(
    step: Callable[..., Any], held: list[Any], batch: dict[str, Tensor]
) -> Competitor:
    """The competitor that replaces the state in `held`, its only holder."""

    def advance() -> Tensor:
        held[0], loss = step(held[0], batch)
        return loss

    plan = lambda: ff.plan(step, held[0], batch)  # noqa: E731
    return Competitor(advance, sent=None, state=held, plan=plan)


def sent_bytes(competitor: Competitor) -> float:
    """What one step of it sends from this rank, by the ledger."""
    with ff.ledger() as log:
        competitor.step()
    return float(log.bytes())


def optimizer_step(params: list[Tensor], grads: list[Tensor]) -> Callable[[], None]:
    """One donated `sharded_adam` update of `params` by `grads`."""
    optimizer = adamw()

    def apply(state: Any, grads: list[Tensor]) -> Any:
        return state.apply_gradients(grads, optimizer), None

    held = [ff.init_state(apply, params, optimizer, grads)]
    donated = ff.donate(apply)

    def step() -> None:
        held[0], _ = donated(held[0], grads)

    return step


def chain(units: int, width: int, *, ranks: int | None) -> Callable[[], None]:
    """Forward and backward of `units` calls of x·w; sharded where `ranks` is set."""

    @ff.unit
    def scale(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return x * p["w"]

    def loss_fn(params: list[dict[str, Tensor]], x: Tensor) -> Tensor:
        for p in params:
            x = scale(p, x)
        return x.sum()

    gradient = ff.value_and_grad(loss_fn)
    params: Any = [{"w": torch.ones(width)} for _ in range(units)]
    x = torch.ones(width)
    if ranks is not None:
        mesh = ff.make_mesh({"data": ranks}, backend="processes")
        gradient = ff.shard(gradient, mesh, "data")
        params = ff.place(gradient, params, x)
    return lambda: gradient(params, x) and None


def simulated_example(ranks: int = 8, width: int = 16) -> Callable[[], None]:
    """What a property test does with one example: state, a sharded step, back whole."""

    @ff.unit
    def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"] + p["b"])

    def loss_fn(params: list[dict[str, Tensor]], batch: Tensor) -> Tensor:
        for p in params:
            batch = layer(p, batch)
        return batch.square().mean()

    train = train_step(loss_fn)
    draw = torch.Generator().manual_seed(0)
    params = [
        {"w": torch.randn(width, width, generator=draw), "b": torch.zeros(width)}
        for _ in range(3)
    ]
    batch = torch.randn(2 * ranks, width, generator=draw)

    def example() -> None:
        mesh = ff.make_mesh({"data": ranks}, backend="simulated")

        def main() -> Any:
            step = ff.shard(train, mesh, "data", zero=3)
            mine = ff.local_batch(batch, mesh, "data")
            state = ff.init_state(step, params, train.optimizer, mine)
            state, _ = step(state, mine)
            return ff.unshard(state.params)

        ff.spmd(main, mesh)()

    return example


def _same(function: Any) -> Any:
    return function


def _builders() -> dict[str, Callable[[Setting], Competitor]]:
    kinds: dict[str, dict[str, Any]] = {
        "ours": {},
        "ours_remat": {"remat": True},
        **{f"zero{z}": {"zero": z} for z in range(4)},
        "zero3_remat": {"zero": 3, "remat": True},
        "zero3_offload": {"zero": 3, "offload": True},
    }
    made = {name: functools.partial(build, **kind) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        made[f"{name}_pure"] = functools.partial(build, donate=False, **kind)
    for name in ("ours", "zero0", "zero3", "zero3_remat"):
        made[f"{name}_jit"] = functools.partial(build, jit=True, **kinds[name])
        more = {"jit": True, "donate": False, **kinds[name]}
        made[f"{name}_jit_pure"] = functools.partial(build, **more)
        more = {"whole": True, **kinds[name]}
        made[f"{name}_jit_whole"] = functools.partial(build, **more)
        made[f"{name}_jit_whole_pure"] = functools.partial(build, donate=False, **more)
    return made


BUILDERS = _builders()
