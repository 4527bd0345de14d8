"""Real processes: FSDP2's checkpoints and ours; errors reach every rank; kills.

As a program for torchrun, with a folder, it prints a line of JSON for each claim and
rank.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsfunc as ff
from fsfunc import tree
from fsfunc.checkpoint import safetensors
from tests.programs import forked

SHAPES = {"0.weight": (7, 5), "0.bias": (7,), "1.weight": (3, 7), "1.bias": (3,)}


def model(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    on = init_device_mesh("cpu", (2,))
    for part in (*net, net):
        fully_shard(part, mesh=on)
    return net


def whole(net):
    state = get_model_state_dict(net)
    return {name: x.full_tensor() for name, x in state.items()}


def flat_target(mesh):
    """The same leaves as ours: in one flat buffer, as shard lays them."""
    linear = ff.unit(lambda p, x: nn.functional.linear(x, p["weight"], p["bias"]))

    def loss(params, x):
        for i in range(2):
            own = {k: params[f"{i}.{k}"] for k in ("weight", "bias")}
            x = linear(own, x)
        return x.sum()

    empty = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return ff.place(ff.shard(loss, mesh, "data"), empty, torch.ones(2, 5))


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], x) for k, x in expected.items()
    )


def theirs_by_us(mesh, folder):
    net = model(1)
    writer = HuggingFaceStorageWriter(str(folder / "theirs"), save_distributed=True)
    dcp.save(get_model_state_dict(net), storage_writer=writer)
    found = ff.load(folder / "theirs", flat_target(mesh))
    return equal(ff.unshard(found), whole(net))


def ours_by_them(mesh, folder):
    net = model(2)
    ours = tree.map(torch.ones_like, flat_target(mesh))
    ours = tree.map(lambda x: x + torch.arange(x.numel()) + 100 * mesh.rank, ours)
    ff.save(folder / "ours", ours)
    state = get_model_state_dict(net)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "ours")))
    found = {name: x.full_tensor() for name, x in state.items()}
    return equal(found, ff.unshard(ours))


def one_rank_fails(mesh, folder, rank, save):
    """Its disk is full, and the other is told; then all goes well again."""
    real = safetensors.write_file

    def full(*_):
        raise OSError(28, "No space left on device")

    state = {"w": torch.ones(3), "v": torch.ones(3)}
    ff.save(folder / f"good-{save}-{rank}-1", state)
    if mesh.rank == rank:
        safetensors.write_file = full
    said = ""
    try:
        if save == "save":
            ff.save(folder / f"bad-{save}-{rank}", state)
        else:
            ff.save_async(folder / f"bad-{save}-{rank}", state).wait()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    safetensors.write_file = real
    dist.barrier()
    ff.save(folder / f"good-{save}-{rank}-2", state, keep=1)
    found = ff.load(folder / f"good-{save}-{rank}-2", state)
    gone = not (folder / f"good-{save}-{rank}-1").exists()
    gone &= not (folder / f"bad-{save}-{rank}").exists()
    return "No space left" in said and gone and equal(found, state)


def one_rank_reads_badly(mesh, folder):
    """A flipped byte in what one rank alone reads."""
    path = folder / "flipped"
    layout = ff.Layout((2, 1 << 20), torch.uint8, (ff.Split(0, "data", 2),), "w")
    state = {"w": ff.Sharded(torch.ones(1, 1 << 20, dtype=torch.uint8), layout)}
    ff.save(path, state)
    if mesh.rank == 0:
        file = sorted(path.glob("*.safetensors"))[1]
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    try:
        ff.load(path, state)
    except Exception as error:
        return "damaged between bytes" in str(error)
    return False


def background(mesh, folder):
    """Steps and their collectives go on beside it; two in flight."""
    optimizer = ff.sgd(1.0)
    unit = ff.unit(lambda p, x: (p * x).sum())
    step = optimizer(ff.value_and_grad(lambda p, x: -unit(p, x)))
    step = ff.donate(ff.shard(step, mesh, "data"))
    batch = torch.ones(1)
    state = ff.init_state(step, torch.zeros(200_000), optimizer, batch)
    savings = []
    for i in range(6):
        savings.append(ff.save_async(folder / f"step-{i}", state, keep=3))
        for _ in range(3):
            state, _ = step(state, batch)
    for saving in savings:
        saving.wait()
    good = bool((ff.unshard(state).params == 18).all())
    for i in (3, 4, 5):
        found = ff.unshard(ff.load(folder / f"step-{i}", state))
        good &= bool((found.params == 3 * i).all()) and found.step == 3 * i
    names = sorted(p.name for p in folder.glob("step-*"))
    dist.barrier()
    return good and names == ["step-3", "step-4", "step-5"]


def each_ranks_own(mesh, folder):
    """A leaf in which they differ: each has its own back, and a reader sees a stack."""
    mine = {"h": torch.arange(4.0) + mesh.rank, "w": torch.ones(3)}
    ff.save(folder / "own", mine)
    found = ff.load(folder / "own", tree.map(torch.zeros_like, mine))
    saved = ff.metadata(folder / "own").tensors
    own = {p: dict(x.stacked_axes) for p, x in saved.items()}
    return equal(found, mine) and own == {"h": {"data": 2}, "w": {}}


def sent(mesh, folder):
    """The bytes that a save and a load send: [op, bytes] of this rank."""
    state = flat_target(mesh)
    with ff.ledger() as log:
        ff.save(folder / "sent", state)
        ff.load(folder / "sent", state)
    return [[r.op, str(r.bytes)] for r in log.of(mesh.rank)]


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    mesh = ff.make_mesh({"data": 2})
    claims = {
        "theirs by us": lambda: theirs_by_us(mesh, folder),
        "ours by them": lambda: ours_by_them(mesh, folder),
        "reads badly": lambda: one_rank_reads_badly(mesh, folder),
        "background": lambda: background(mesh, folder),
        "own": lambda: each_ranks_own(mesh, folder),
        "sent": lambda: sent(mesh, folder),
    }
    for save in ("save", "save_async"):
        for rank in (0, 1):
            claims[f"{save} fails on {rank}"] = lambda s=save, r=rank: one_rank_fails(
                mesh, folder, r, s
            )
    for name, claim in claims.items():
        line = json.dumps([name, mesh.rank, claim()])
        os.write(1, f"{line}\n".encode())
    dist.destroy_process_group()


@pytest.mark.processes
def test_every_claim_holds_on_two_processes(processes, tmp_path):
    (tmp_path / "one").mkdir()
    lines = processes(Path(__file__), 2, str(tmp_path / "one")).splitlines()
    found = {(name, rank): value for name, rank, value in map(json.loads, lines)}
    assert len(found) == 20
    mesh = ff.make_mesh({"data": 2}, "simulated")
    simulated = ff.spmd(lambda: sent(mesh, tmp_path), mesh)()
    for rank in (0, 1):
        assert found.pop(("sent", rank)) == simulated[rank]
    assert all(value is True for value in found.values()), found


KILLED = Path(__file__).with_name("killed.py")
KILLS = 30


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_at_any_moment_nothing_is_lost_or_half_read(tmp_path):
    done = forked(KILLED, tmp_path, KILLS, 0, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] > KILLS / 2
    # The moments were those that matter: in the middle of a save.
    assert found["remains"]["saving"] > KILLS / 10
    # The remains are gone with the next save, and only so many checkpoints stay.
    assert len(found["names"]) == 2 and not any(n[0] == "." for n in found["names"])


if __name__ == "__main__":
    main()
