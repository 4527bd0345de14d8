"""One rank of `checkpoints.py`: the same state saved and loaded by all competitors."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compared import peers
from compared.models import Size, functional_loss, init_params
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsfunc as ff

BLOCK = "bs=8M"


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every competitor's runs on this rank, in turn."""
    folder, rank = Path(task["disk"]), task["rank"]
    setting = peers.Setting(Size(**task["size"]), rank, task["ranks"])
    state = ours(setting)
    parts = [x for x in ff.tree.leaves(state) if isinstance(x, torch.Tensor)]
    nbytes = sum(x.nbytes for x in parts)
    theirs = fsdp2(setting)
    ff.save(folder / "kept", state)
    dcp.save(theirs, checkpoint_id=folder / "kept-dcp")
    mine = sorted((folder / "kept").glob(f"shard-{rank + 1:05}-*"))
    meta = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x  # noqa: E731
    target = ff.tree.map(meta, state)
    waits: list[float] = []
    held = [ff.load(folder / "kept", target)]

    def in_place(path: Path) -> None:
        held[0] = ff.load(path, held[0], donate=True)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        source = Path(memory) / "random"
        fill(source, nbytes)
        runs: dict[str, tuple[Callable[[Path], Any], bool]] = {
            "dd write": (lambda at: write(source, at.with_suffix(f".{rank}")), True),
            "save": (lambda at: ff.save(at, state), True),
            "dcp save": (lambda at: dcp.save(theirs, checkpoint_id=at), True),
            "save_async": (lambda at: ff.save_async(at, state), True),
            "dd read": (lambda _: read(mine), False),
            "load": (lambda _: ff.load(folder / "kept", target), False),
            "load in place": (lambda _: in_place(folder / "kept"), False),
            "dcp load": (
                lambda _: dcp.load(theirs, checkpoint_id=folder / "kept-dcp"),
                False,
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(-1, task["rounds"]):  # the first warms up
            for name in rotated(list(runs), turn):
                run, writes = runs[name]
                seconds, after = timed(run, folder, writes)
                if hasattr(after, "wait"):
                    start = time.perf_counter()
                    after.wait()
                    waits += [time.perf_counter() - start] * (turn >= 0)
                del after
                times[name] += [seconds] * (turn >= 0)
                clear(folder, rank)
    dcp_bytes = sum(f.stat().st_size for f in (folder / "kept-dcp").iterdir())
    dist.barrier()
    return {"times": times, "bytes": nbytes, "dcp_bytes": dcp_bytes, "waits": waits}


def rotated(names: list[str], turn: int) -> list[str]:
    """Another one first in each round: what a run leaves behind meets all alike."""
    at = turn % len(names)
    return names[at:] + names[:at]


def timed(run: Callable[[Path], Any], folder: Path, writes: bool) -> tuple[float, Any]:
    """Seconds of a run, from a disk at rest, and nothing cached of what is read."""
    os.sync()
    if not writes:
        for file in folder.glob("kept*/*"):
            forget(file)
    dist.barrier()
    start = time.perf_counter()
    out = run(folder / "now")
    return time.perf_counter() - start, out


def clear(folder: Path, rank: int) -> None:
    """Removes what a run has written."""
    dist.barrier()
    if rank == 0:
        for path in folder.glob("now*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()


def forget(file: Path) -> None:
    """Drops a file from the page cache."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def fill(file: Path, nbytes: int) -> None:
    """Random bytes, which no disk can make less of."""
    with open(file, "wb") as out:
        for start in range(0, nbytes, 1 << 24):
            out.write(os.urandom(min(1 << 24, nbytes - start)))


def write(source: Path, file: Path) -> None:
    dd(f"if={source}", f"of={file}", "conv=fdatasync")


def read(files: list[Path]) -> None:
    for file in files:
        dd(f"if={file}", "of=/dev/null")


def dd(*arguments: str) -> None:
    subprocess.run(["dd", BLOCK, *arguments], check=True, stderr=subprocess.DEVNULL)


def ours(setting: peers.Setting) -> Any:
    """A state of which every page is in memory."""
    from compared.ours import train_step

    train = train_step(functional_loss(setting.size, ff.unit, lambda f: f))
    mesh = ff.make_mesh({"data": setting.ranks}, backend="processes")
    step = ff.shard(train, mesh, "data", zero=3)
    params = init_params(setting.size)
    state = ff.init_state(step, params, train.optimizer, setting.batch())
    for x in ff.tree.leaves(state.opt_state):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.uniform_()
    return state


def fsdp2(setting: peers.Setting) -> dict[str, Any]:
    """FSDP2's state dicts of the model and of AdamW, after one update."""
    model: nn.Module = setting.model()
    mesh = init_device_mesh("cpu", (setting.ranks,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    params, moments = get_state_dict(model, optimizer)
    return {"model": params, "optimizer": moments}
