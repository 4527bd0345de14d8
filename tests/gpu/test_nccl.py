"""One rank over NCCL: the numbers of the step that nobody sharded."""

import socket

import pytest
import torch

import fsfunc as ff
from tests.gpu.programs import (
    ADAM,
    DEVICE,
    EXACT,
    close,
    dropped,
    example,
    step_of,
    trained,
)
from tests.programs import python

pytestmark = pytest.mark.gpu


def precise(f):
    return ff.precision(f, compute=torch.bfloat16, reduce=torch.float32)


def hosted(f):
    return ff.offload(f, params="host", moments="host", activations="host")


# name -> transforms within shard, those around it, zero
STACKS = {
    **{f"zero={zero}, bf16": (precise, None, zero) for zero in range(4)},
    "remat": (ff.remat, None, 3),
    "remat, bf16, zero=2": (lambda f: ff.remat(precise(f)), None, 2),
    "accumulated": (lambda f: ff.accumulate(f, 2), None, 3),
    "accumulated around": (None, lambda f: ff.accumulate(f, 2), 2),
    "offloaded": (None, hosted, 3),
    "offloaded, remat, accumulated": (
        lambda f: ff.remat(ff.accumulate(f, 2)),
        hosted,
        3,
    ),
    "offloaded, bf16, donated": (precise, lambda f: ff.donate(hosted(f)), 1),
    "donated": (None, ff.donate, 0),
}


def optimizer_of(name):
    """One that rounds alike on the host and on the device, where the host updates."""
    return EXACT if "offloaded" in name else ADAM


def inner_and_outer(name):
    inner, outer, zero = STACKS[name]
    nothing = lambda f: f  # noqa: E731
    return inner or nothing, outer or nothing, zero


def seen_by_a_hook():
    """What a hook on an activation knows of the mesh, while the backward runs."""
    mesh, seen = ff.make_mesh({"data": 1}), []

    @ff.unit
    def looks(params, x):
        h = torch.tanh(x @ params["w"])
        if h.requires_grad:
            h.register_hook(lambda g: seen.append(ff.axis_size("data")))
        return x + h @ params["v"]

    step = ff.shard(step_of(looks), mesh, "data")
    params, batch = example()
    state = ff.init_state(step, params, ADAM, batch)
    del seen[:]
    step(state, batch)
    return seen


def run(path):
    """The program: every stack over one process, one after the other."""
    mesh = ff.make_mesh({"data": 1})
    found = {"backend": torch.distributed.get_backend()}
    for name in STACKS:
        inner, outer, zero = inner_and_outer(name)
        optimizer = optimizer_of(name)
        step = ff.shard(inner(step_of(dropped, optimizer)), mesh, "data", zero=zero)
        try:
            losses, params = trained(outer(step), optimizer)
        except Exception as error:  # the other stacks are looked at, too
            found[name] = repr(error)
            continue
        found[name] = losses.cpu(), [{k: p[k].cpu() for k in p} for p in params]
    try:
        found["hook"] = seen_by_a_hook()
    except Exception as error:
        found["hook"] = repr(error)
    torch.save(found, path)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the program found; by a file: what NCCL prints is not looked at."""
    path = tmp_path_factory.mktemp("nccl") / "found"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = python(
        "-c",
        f"from tests.gpu.test_nccl import run; run({str(path)!r})",
        timeout=100,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **launched,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def test_the_backend(found):
    assert found["backend"] == ("nccl" if DEVICE.type == "cuda" else "gloo")


@pytest.mark.parametrize("name", STACKS)
def test_one_rank_is_one_device(found, name):
    assert not isinstance(found[name], str), found[name]
    inner, outer, zero = inner_and_outer(name)
    accumulated = ff.accumulate if name == "accumulated around" else lambda f, n: f
    optimizer = optimizer_of(name)
    step = accumulated(inner(step_of(dropped, optimizer)), 2)
    losses, params = trained(step, optimizer)
    close(found[name], (losses, params))
    assert {p["w"].dtype for p in found[name][1]} == {torch.float32}
    moved = [(a["w"] - b["w"].cpu()).abs().mean()
             for a, b in zip(found[name][1], example()[0], strict=True)]  # fmt: skip
    assert min(moved) > 0.005  # and they were trained


def test_a_hook_of_the_backward_knows_the_mesh(found):
    assert found["hook"] == [1, 1, 1]
