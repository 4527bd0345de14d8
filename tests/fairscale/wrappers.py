"""FairScale's wrappers train a small model: losses, norms, weights, moments as JSON.

As torchrun starts it, or alone, with FairScale 0.4.13 to import; rank 0 prints them by
the name of the case. `plain` is the same training by torch on one device.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.fairscale.without_cuda import without_cuda
from tests.models import affine, floats, layers

WIDTH = 3  # a layer has 12 numbers, of which 4 ranks have equal parts and 5 have not
ROWS, STEPS, MAX_NORM = 24, 3, 0.125
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.25, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.0625}),
}


class Case(NamedTuple):
    wrapper: str  # "fsdp", "oss" or "sdp"
    optimizer: str  # of OPTIMIZERS
    p: float | None = None  # of the norm that gradients are clipped to
    reduced: str = ""  # with two microbatches: "once" or "each" time
    options: dict[str, Any] = {}  # of the wrapper
    units: bool = True  # the first layer is wrapped too


HALF = {"mixed_precision": True}
CASES = {
    "fsdp": Case("fsdp", "sgd"),
    "fsdp, adam": Case("fsdp", "adam"),
    "fsdp, clipped": Case("fsdp", "adam", 2.0),
    "fsdp, clipped by the largest": Case("fsdp", "sgd", math.inf),
    "fsdp, clipped by the sum": Case("fsdp", "adam", 1.0),
    "fsdp, whole": Case("fsdp", "adam", 2.0, units=False),
    "fsdp, kept": Case("fsdp", "sgd", 2.0, "once", {"reshard_after_forward": False}),
    "fsdp, by leaf": Case("fsdp", "adam", 2.0, "", {"flatten_parameters": False}),
    "fsdp, by leaf, kept": Case("fsdp", "sgd", math.inf, "each", {
        "flatten_parameters": False, "reshard_after_forward": False}),
    "fsdp, no_sync": Case("fsdp", "adam", 2.0, "once"),
    "fsdp, accumulated": Case("fsdp", "sgd", None, "each"),
    "fsdp, on the host": Case("fsdp", "adam", None, "", {"move_params_to_cpu": True}),
    "fsdp, half": Case("fsdp", "sgd", None, "", HALF),
    "fsdp, half, reduced in float32": Case(
        "fsdp", "adam", 2.0, "", HALF | {"fp32_reduce_scatter": True}),
    "oss": Case("oss", "sgd"),
    "oss, clipped": Case("oss", "adam", 2.0),
    "oss, clipped by the largest": Case("oss", "sgd", math.inf, "once"),
    "sdp": Case("sdp", "adam"),
    "sdp, clipped": Case("sdp", "sgd", 2.0),
    "sdp, no_sync": Case("sdp", "adam", math.inf, "once"),
    "sdp, without buckets": Case("sdp", "sgd", 2.0, "once", {"reduce_buffer_size": 0}),
}  # fmt: skip


class Layer(nn.Module):
    """What `tests.models.layer` computes, as a module."""

    def __init__(self, p: dict[str, Tensor]):
        super().__init__()
        self.w, self.b = nn.Parameter(p["w"].clone()), nn.Parameter(p["b"].clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(affine({"w": self.w, "b": self.b}, x))


class Sides(NamedTuple):
    """What differs between wrappers."""

    model: Any
    optimizer: Any
    quiet: Callable[[], Any]  # nothing is reduced inside
    clip: Callable[[float], Any]
    ready: Callable[[], Any]  # gradients are means over ranks
    weights: Callable[[], dict[str, Tensor]]
    moments: Callable[[], list[Tensor]]  # the first ones


def start() -> list[dict[str, Tensor]]:
    return layers(2, WIDTH, make=floats)


def batch(t: int) -> Tensor:
    return floats(ROWS, WIDTH, seed=50 + t)


def train(case: Case, sides: Sides, rank: int = 0, n: int = 1) -> dict[str, Any]:
    losses, norms = [], []
    for t in range(STEPS):
        # FairScale's trap: by default torch drops gradients, and with them the views
        # of SDP's buckets, which then go on reducing zeros.
        sides.optimizer.zero_grad(set_to_none=False)
        parts = batch(t).chunk(n)[rank].chunk(2 if case.reduced else 1)
        total = torch.zeros(())
        for part in parts:
            waits = case.reduced == "once" and part is not parts[-1]
            with sides.quiet() if waits else contextlib.nullcontext():
                # Half precision ends at the model: the loss is in float32.
                loss = sides.model(part).float().square().mean() / len(parts)
                loss.backward()
            total += loss.detach()
        sides.ready()
        if case.p is not None:
            norms.append(float(sides.clip(case.p)))
        sides.optimizer.step()
        if n > 1:
            dist.all_reduce(total)
        losses.append(float(total) / n)
    found = {"losses": losses, "norms": norms}
    found |= {"weights": numbers(sides.weights().values())}
    return found | {"moments": numbers(sides.moments())}


def numbers(leaves: Iterable[Tensor]) -> list[float]:
    """All of them in a row, as float32 tells them apart."""
    return [round(x, 9) for leaf in leaves for x in leaf.flatten().tolist()]


def first_moments(state: dict[int, dict[str, Any]]) -> list[Tensor]:
    """SGD's or Adam's, in the order of parameters."""
    ordered = [state[k] for k in sorted(state)]
    return [s["exp_avg" if "exp_avg" in s else "momentum_buffer"] for s in ordered]


def plain(case: Case) -> dict[str, Any]:
    model = nn.Sequential(*map(Layer, start()))
    make, options = OPTIMIZERS[case.optimizer]
    optimizer = make(model.parameters(), **options)
    clip = lambda p: clip_grad_norm_(model.parameters(), MAX_NORM, p)  # noqa: E731
    none = lambda: None  # noqa: E731
    moments = lambda: first_moments(optimizer.state_dict()["state"])  # noqa: E731
    quiet, weights = contextlib.nullcontext, model.state_dict
    return train(case, Sides(model, optimizer, quiet, clip, none, weights, moments))


# A layer that is trained from the start, between two that are thawed later

THAWED = ["refreshed", "clipped", "added"]  # what OSS is told of it, or asked to do
FROM = 2  # the step


def thawed(
    how: str, make: Callable[..., Any], rank: int = 0, n: int = 1
) -> list[float]:
    """The weights after twice as many steps of SGD with momentum."""
    model = nn.Sequential(*map(Layer, layers(3, WIDTH, make=floats)))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    known = model[:2] if how == "added" else model
    optimizer = make(known.parameters(), lr=0.25, momentum=0.9)
    for t in range(2 * FROM):
        if t == FROM:
            model.requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": list(model[2].parameters())})
            elif hasattr(optimizer, "refresh_trainable"):
                # FairScale's trap: without it what has thawed differs by rank.
                optimizer.refresh_trainable()
        optimizer.zero_grad()
        model(batch(t).chunk(n)[rank]).square().mean().backward()
        average(model, n)
        if how == "clipped" and hasattr(optimizer, "clip_grad_norm"):
            optimizer.clip_grad_norm(MAX_NORM)
        elif how == "clipped":
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return numbers(model.parameters())


def average(model: nn.Module, n: int) -> None:
    """The gradients' means: OSS alone leaves them to others."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in grads if n > 1 else []:
        dist.all_reduce(grad)
        grad /= n


# FairScale's


def fsdp(case: Case) -> Sides:
    from fairscale.nn import FullyShardedDataParallel as FSDP

    wrap = partial(FSDP, compute_device=torch.device("cpu"), **case.options)
    first, last = map(Layer, start())
    # The root keeps a layer: in half precision, one without parameters of its own
    # raises an IndexError where its state dict is asked for.
    model = wrap(nn.Sequential(wrap(first) if case.units else first, last))
    make, options = OPTIMIZERS[case.optimizer]
    optimizer = make(model.parameters(), **options)

    def weights() -> dict[str, Tensor]:
        """The whole state dict, which is what the ranks' own are put together to."""
        whole = {k: x.cpu().clone() for k, x in model.state_dict().items()}
        if dist.get_world_size() == 1:
            return whole  # which was never cut: putting it together asserts
        own: list[Any] = [None] * dist.get_world_size()
        mine = {k: x.clone() for k, x in model.local_state_dict().items()}
        dist.all_gather_object(own, (mine, model.local_metadata_dict()))
        joined = FSDP.consolidate_shard_weights(
            [x for x, _ in own], [x for _, x in own]
        )
        assert whole.keys() == joined.keys()
        assert all(torch.equal(x, joined[k]) for k, x in whole.items())
        return whole

    def moments() -> list[Tensor]:
        """Rank 0's alone: they are gathered there."""
        # FairScale refuses leaves by themselves, and one rank is an AttributeError.
        flat = case.options.get("flatten_parameters", True)
        if not flat or dist.get_world_size() == 1:
            return []
        state = model.gather_full_optim_state_dict(optimizer)
        found = first_moments(state["state"]) if state else []
        return found[2:] + found[:2] if case.units else found  # the root's come first

    clip = lambda p: model.clip_grad_norm_(MAX_NORM, p)  # noqa: E731
    none = lambda: None  # noqa: E731
    return Sides(model, optimizer, model.no_sync, clip, none, weights, moments)


def oss(case: Case) -> Sides:
    from fairscale.nn import ShardedDataParallel
    from fairscale.optim import OSS

    inner = nn.Sequential(*map(Layer, start()))
    make, options = OPTIMIZERS[case.optimizer]
    optimizer = OSS(inner.parameters(), optim=make, **options)
    model, quiet = inner, contextlib.nullcontext
    ready = partial(average, inner, dist.get_world_size())
    if case.wrapper == "sdp":
        model = ShardedDataParallel(inner, optimizer, **case.options)
        quiet, ready = model.no_sync, lambda: None

    def moments() -> list[Tensor]:
        optimizer.consolidate_state_dict(-1)
        return first_moments(optimizer.state_dict(all_ranks=True)["state"])

    clip = lambda p: optimizer.clip_grad_norm(MAX_NORM, p)  # noqa: E731
    weights = inner.state_dict
    return Sides(model, optimizer, quiet, clip, ready, weights, moments)


def main() -> None:
    # Read when FairScale is imported: gloo has none for its buckets.
    os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"
    from fairscale.optim import OSS

    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {
        how: thawed(how, partial(OSS, optim=torch.optim.SGD), rank, n) for how in THAWED
    }
    # OSS would look for a device that is said to be there: FSDP comes last.
    for name, case in sorted(CASES.items(), key=lambda item: item[1].wrapper == "fsdp"):
        if case.wrapper == "fsdp":
            without_cuda()
        wrap = fsdp if case.wrapper == "fsdp" else oss
        found[name] = train(case, wrap(case), rank, n)
    if not rank:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
