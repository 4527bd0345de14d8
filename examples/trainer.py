"""Train as Tango's FairScale engine does, from a file with the same knobs.

    python examples/trainer.py                          the settings below, 2 ranks
    python examples/trainer.py config.json              yours, in place of these
    torchrun --nproc-per-node 2 examples/trainer.py     2 processes

A knob is an argument or a transform, as `make_step` lists them; none changes what is
trained, and all but half precision give the losses of one device. What a file leaves
out is as `Config` and its parts have it; a key that none of them has is refused.
"""

import dataclasses
import difflib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

import fsfunc as ff

EXAMPLE = {
    "model": {
        "type": "fairscale::with_wrapped_modules",
        "model": {"type": "simple_regression_model"},
        "modules_to_wrap": ["blocks\\.[0-9]+", "regression_head"],
        "fsdp_config": {"reshard_after_forward": True},
        "activation_checkpointing": True,
    },
    "training_engine": {
        "type": "fairscale",
        "optimizer": {"type": "torch::AdamW", "lr": 0.03},
        "lr_scheduler": {"type": "warmup_cosine", "warmup_steps": 5, "total_steps": 60},
        "max_grad_norm": 1.0,
    },
    "train_steps": 60,
}


class SimpleRegressionModel(nn.Module):
    """Three blocks and a head; a batch (x, y) to a dict with its mean squared error."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
        self.blocks = nn.Sequential(*blocks)
        self.regression_head = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.regression_head(self.blocks(x)).squeeze(-1)
        return {"loss": F.mse_loss(output.to(y.dtype), y), "output": output}


MODELS = {"simple_regression_model": SimpleRegressionModel}
OPTIMIZERS = [f"torch::{x}" for x in ("Adam", "AdamW", "NAdam", "RMSprop", "SGD")]
SCHEDULES = ("constant", "linear", "cosine_decay", "warmup_cosine")


@dataclass(frozen=True)
class FSDPConfig:
    reshard_after_forward: bool = True  # parameters are gathered again in the backward
    move_params_to_cpu: bool = False
    move_grads_to_cpu: bool | None = None  # None: with the parameters
    mixed_precision: bool = False  # parameters are gathered, and used, in half


@dataclass(frozen=True)
class Model:
    type: str = "fairscale::with_wrapped_modules"
    model: dict = field(default_factory=lambda: {"type": "simple_regression_model"})
    modules_to_wrap: list[str] = field(default_factory=list)  # regular expressions
    fsdp_config: FSDPConfig | None = None  # None: nothing is sharded
    activation_checkpointing: bool = False  # of what modules_to_wrap names


@dataclass(frozen=True)
class TrainingEngine:
    type: str = "fairscale"
    optimizer: dict = field(default_factory=lambda: {"type": "torch::AdamW"})
    lr_scheduler: dict | None = None  # a schedule of fsfunc, which begins with lr
    amp: bool = False  # autocast
    amp_use_bfloat16: bool | None = None  # None: on CPU; else half is float16
    max_grad_norm: float | None = None
    fsdp_config: FSDPConfig | None = None  # None: the model's


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=Model)
    training_engine: TrainingEngine = field(default_factory=TrainingEngine)
    batch_size: int = 16  # of all devices together
    train_steps: int = 60
    devices: int = 2  # simulated; torchrun brings its own number
    seed: int = 0


def read(kind: Any, given: Any, name: str = "config") -> Any:
    """What a file says, as a dataclass; ValueError where its fields are others."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    nested: Any = next((one for one in kinds if dataclasses.is_dataclass(one)), None)
    if nested is not None and isinstance(given, dict):
        fields, values = typing.get_type_hints(nested), {}
        for key, value in given.items():
            if key not in fields:
                near = difflib.get_close_matches(str(key), fields, 1) or fields
                raise ValueError(f"{name}.{key}: no such knob; {', '.join(near)}?")
            values[key] = read(fields[key], value, f"{name}.{key}")
        return nested(**values)
    for one in kinds:
        item = next(iter(typing.get_args(one)), None)
        if item is not None and isinstance(given, list):
            return [read(item, x, f"{name}[{i}]") for i, x in enumerate(given)]
        if type(given) is one or (one is float and type(given) is int):
            return given
    wanted = " or ".join(getattr(one, "__name__", str(one)) for one in kinds)
    raise ValueError(f"{name} is {given!r}: it must be {wanted}")


def settle(config: Config) -> FSDPConfig | None:
    """How all is sharded, if it is; ValueError where knobs contradict each other."""
    model, engine = config.model, config.training_engine
    if (model.type, engine.type) != (Model.type, TrainingEngine.type):
        raise ValueError(
            f"types {model.type!r} and {engine.type!r}: this script knows "
            f"{Model.type!r} and {TrainingEngine.type!r}"
        )
    fsdp, other = model.fsdp_config or engine.fsdp_config, engine.fsdp_config
    if other is not None and fsdp != other:
        raise ValueError(
            f"the model's {fsdp} and the engine's {other} differ: a step is sharded "
            "one way, so give it once, or the same twice"
        )
    half = engine.amp or (fsdp is not None and fsdp.mixed_precision)
    if engine.amp_use_bfloat16 is not None and not half:
        raise ValueError(
            f"amp_use_bfloat16={engine.amp_use_bfloat16} says what half precision is, "
            "and nothing is in half: set amp or mixed_precision, or leave it out"
        )
    for pattern in model.modules_to_wrap:
        try:
            re.compile(pattern)
        except re.error as error:
            said = f"modules_to_wrap: {pattern!r} is not a regular expression: {error}"
            raise ValueError(said) from error
    if model.activation_checkpointing and not model.modules_to_wrap:
        raise ValueError(
            "activation_checkpointing is of what modules_to_wrap names, and that is "
            'nothing: ["blocks\\\\.[0-9]+"], for one'
        )
    if fsdp and fsdp.move_grads_to_cpu and not fsdp.move_params_to_cpu:
        raise ValueError(
            "move_grads_to_cpu without move_params_to_cpu: gradients are needed where "
            "parameters are; set both, or leave it out"
        )
    return fsdp


def pick(registry: Sequence[str], given: dict, what: str) -> tuple[str, dict]:
    """(type, the rest) of what a file describes as {"type": ..., ...}."""
    kind = given.get("type", "")
    if kind not in registry:
        raise ValueError(f"{what} type {kind!r}: it is one of {', '.join(registry)}")
    return kind, {key: value for key, value in given.items() if key != "type"}


def make_optimizer(engine: TrainingEngine, half: torch.dtype | None) -> ff.Optimizer:
    kind, options = pick(OPTIMIZERS, engine.optimizer, "optimizer")
    if engine.lr_scheduler is not None:
        if "lr" not in options:
            raise ValueError("lr_scheduler needs the optimizer's lr, to begin with")
        name, more = pick(SCHEDULES, engine.lr_scheduler, "lr_scheduler")
        try:
            options["lr"] = getattr(ff, name)(options["lr"], **more)
        except TypeError as error:
            raise ValueError(f"lr_scheduler: {error}") from error
    optimizer = ff.from_torch(getattr(torch.optim, kind.split("::")[1]), **options)
    if engine.max_grad_norm is not None:
        optimizer = ff.chain(ff.clip_by_global_norm(engine.max_grad_norm), optimizer)
    return ff.loss_scale(optimizer) if half is torch.float16 else optimizer


def gradients_on(device: torch.device, grad: Callable) -> Callable:
    """``grad``, whose gradients the device keeps until the update."""

    def run(params: Any, batch: Any) -> Any:
        loss, grads = grad(params, batch)
        bring = lambda g: torch.empty_like(g, device=device).copy_(g)  # noqa: E731
        return loss, optree.tree_map(bring, grads)

    return run


def make_step(config: Config, mesh: ff.Mesh, batch: Any) -> tuple[Callable, Any]:
    """(step, its first state); every knob is here."""
    model, engine, fsdp = config.model, config.training_engine, settle(config)
    device = batch[0].device
    bf16 = engine.amp_use_bfloat16
    bf16 = device.type == "cpu" if bf16 is None else bf16
    dtype = torch.bfloat16 if bf16 else torch.float16
    mixed = fsdp is not None and fsdp.mixed_precision
    optimizer = make_optimizer(engine, dtype if engine.amp or mixed else None)

    torch.manual_seed(config.seed)
    kind, options = pick(list(MODELS), model.model, "model")
    wrapped = [re.compile(pattern) for pattern in model.modules_to_wrap]
    module = MODELS[kind](**options).to(device)
    apply, params, buffers = ff.from_module(module, units=wrapped)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        # No cache: it would keep parameters that are gathered for one unit.
        with torch.autocast(device.type, dtype, engine.amp, cache_enabled=False):
            return apply(params, buffers, *batch)["loss"]

    grad = ff.value_and_grad(loss_fn)
    if fsdp and fsdp.move_params_to_cpu and fsdp.move_grads_to_cpu is False:
        grad = gradients_on(device, grad)  # or they go where parameters are
    step = optimizer(grad)
    if model.activation_checkpointing:
        calls = ff.program(loss_fn, params, batch).calls
        named = [any(p.fullmatch(call.name) for p in wrapped) for call in calls]
        step = ff.remat_calls(step, [i for i, it in enumerate(named) if it])
    if mixed:
        step = ff.precision(step, compute=dtype)
    zero = 0 if fsdp is None else 3 if fsdp.reshard_after_forward else 2
    step = ff.donate(ff.shard(step, mesh, "data", zero=zero))
    if fsdp and fsdp.move_params_to_cpu:
        step = ff.offload(step, params="host", moments="host")
    return step, ff.init_state(step, params, optimizer, batch)


def train(config: Config, mesh: ff.Mesh, show: bool = False) -> list[float]:
    """The losses of a run; every rank runs this, and rank 0 shows it."""
    on_gpu = mesh.backend == "processes" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    draw = torch.Generator().manual_seed(config.seed)
    x = torch.randn(config.train_steps * config.batch_size, 4, generator=draw)
    rows, losses = data.TensorDataset(x, x.sum(-1).abs()), []
    first = [t.to(device) for t in rows[: config.batch_size]]
    step, state = make_step(config, mesh, ff.local_batch(first, mesh, "data"))
    loader = ff.batches(rows, mesh, "data", config.batch_size, shuffle=False, epochs=1)
    for number, batch in enumerate(loader):
        state, metrics = step(state, [t.to(device) for t in batch])
        losses.append(metrics["loss"].item())
        if show and mesh.rank == 0 and number % max(1, config.train_steps // 10) == 0:
            print(f"step {number:3}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else EXAMPLE
    settings = read(Config, given)
    ranks = os.environ.get("WORLD_SIZE") or settings.devices
    everyone = ff.make_mesh({"data": int(ranks)})
    ff.spmd(train, everyone)(settings, everyone, True)
