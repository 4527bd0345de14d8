"""Saving and training, killed at random moments, again and again; a program.

    python killed.py FOLDER KILLS SEED

Each life goes on from the newest checkpoint, on 1 to 3 simulated ranks, and saves after
every step. The parameters count the steps, so any checkpoint can be told whole. Prints
what happened as one line of JSON. A life is a fork of one process that has imported
torch already; it has no threads yet.
"""

import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch

import fsfunc as ff

SIZE, KEEP, SLOWEST = 300_000, 2, 60  # seconds
unit = ff.unit(lambda p, x: p["w"].sum() + p["b"].sum())


def loss_fn(params, batch):
    return -unit(params, batch)  # a step of 1 upward


def build(mesh):
    optimizer = ff.sgd(1.0)
    step = ff.shard(optimizer(ff.value_and_grad(loss_fn)), mesh, "data", zero=3)
    params = {"w": torch.zeros(SIZE), "b": torch.zeros(3)}
    batch = torch.zeros(1)
    return ff.donate(step), ff.init_state(step, params, optimizer, batch), batch


def live(folder, pipe, mesh, in_background):
    """Steps and saves until it is killed; says which are certain to be there."""
    step, state, batch = build(mesh)
    newest = ff.latest(folder)
    if newest is not None:
        state = ff.load(newest, state)
        check(state, int(newest.name[5:]))
    before = None
    while True:
        state, _ = step(state, batch)
        path = folder / f"step-{state.step:06}"
        if in_background:
            saving = ff.save_async(path, state, keep=KEEP)
            if before is not None and mesh.rank == 0:
                pipe(state.step - 1)  # a save waits for the one before
            before = saving
        else:
            ff.save(path, state, keep=KEEP)
            if mesh.rank == 0:
                pipe(state.step)


def check(state, count):
    """Raises unless this is the state after so many steps."""
    assert state.step == count, (state.step, count)
    for x in ff.tree.leaves(state.params):
        assert bool((x == count).all()), (count, x)


def one_life(folder, choose):
    """Forks, kills; returns the last step that was certain to be there."""
    reads, writes = os.pipe()
    ranks, in_background = choose.choice((1, 2, 3)), choose.random() < 0.5
    pid = os.fork()
    if not pid:
        try:
            os.close(reads)
            mesh = ff.make_mesh({"data": ranks}, "simulated")
            say = lambda count: os.write(writes, b"%d\n" % count)  # noqa: E731
            ff.spmd(lambda: live(folder, say, mesh, in_background), mesh)()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writes)
    if choose.random() < 0.8:  # else perhaps before anything
        select.select([reads], [], [], SLOWEST)
    time.sleep(choose.uniform(0, 0.06))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reads) as pipe:
        said = [int(line) for line in pipe.read().split()]
    assert os.WIFSIGNALED(status), "it ended by itself"
    return max(said, default=0)


def warm_up():
    """What every life would import and compile for itself; its threads end here."""
    with tempfile.TemporaryDirectory() as folder:
        mesh = ff.make_mesh({"data": 2}, "simulated")

        def main():
            step, state, batch = build(mesh)
            state, _ = step(state, batch)
            ff.save(f"{folder}/a", state)
            ff.save_async(f"{folder}/b", ff.load(f"{folder}/a", state)).wait()

        ff.spmd(main, mesh)()
    assert threading.active_count() == 1


def main():
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    warm_up()
    choose, newest = random.Random(seed), 0
    remains = {"saving": 0, "deleting": 0}
    target = {"w": torch.empty(SIZE), "b": torch.empty(3)}
    for _ in range(kills):
        certain = max(one_life(folder, choose), newest)
        path = ff.latest(folder)
        newest = 0 if path is None else int(path.name[5:])
        assert newest >= certain, f"step {certain} was saved, and {newest} is there"
        left = [p for p in folder.iterdir() if not p.name.startswith(".")]
        assert len(left) <= KEEP + 1, left  # one is complete before one goes
        for p in left:
            found = ff.load(p, target, at="params")
            step = ff.load(p, 0, at="step")
            check(ff.TrainState(found, step=step), int(p.name[5:]))
        for p in folder.iterdir():
            ending = p.name.rpartition(".")[2].partition("-")[0]
            remains[ending] = remains.get(ending, 0) + (ending in remains)
    remains = {k: remains[k] for k in ("saving", "deleting")}
    ff.save(folder / f"step-{newest + 1:06}", {"w": torch.ones(1)}, keep=KEEP)
    names = sorted(p.name for p in folder.iterdir())
    print(json.dumps({"steps": newest, "remains": remains, "names": names}))


if __name__ == "__main__":
    main()
