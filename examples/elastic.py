"""Trains over however many processes are there: they come, and they die, as it runs.

    python examples/meeting.py 127.0.0.1:29500    holds the store: start it first
    python examples/elastic.py 127.0.0.1:29500    one process; as often as you like

Start more while it trains, or kill some: those that are there meet anew, and ff.remesh
lays the state out for them. With ``--replicate`` an even number of processes has all
twice, and goes on from memory where one dies; else from a checkpoint in ``--folder``.
"""

import argparse
import time
from pathlib import Path

import torch
from meeting import Meeting

import fsfunc as ff

ROWS, WIDTH, AXES = 24, 8, ("node", "data")
OPTIMIZER = ff.sharded_adam(0.05)


@ff.unit
def layer(p, x):
    return x + torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params, x):
    """How far rows are from being turned; exact for parts of unequal lengths."""
    y = layer(params[1], layer(params[0], x))
    return ff.Weighted((y - x.flip(1)).square().sum(), x.numel())


def init():
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(2, WIDTH, WIDTH, generator=draw, dtype=torch.float64) / 4
    return [{"w": x.clone(), "b": x.new_zeros(WIDTH)} for x in w]


def train_step(state, x):
    loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
    return state.apply_gradients(grads, OPTIMIZER), loss


def step_for(mesh):
    # Not donated: where a process dies, another may go back to the state before.
    return ff.shard(train_step, mesh, "data", replicate="node")


def rows(mesh, number):
    """This rank's rows of a batch that is the same however many ranks there are."""
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    return ff.local_batch(x, mesh, AXES, uneven=True)


def go_on(mesh, begun, state, old_mesh, folder):
    """The state on a new mesh: that of a run that has begun, a checkpoint's, or new."""
    newest = ff.latest(folder, "step-*") if folder else None
    if begun:
        try:
            return ff.remesh(state, mesh, on=old_mesh, checkpoint=str(newest or ""))
        except ValueError as lost:  # on every rank
            if newest is None:
                raise
            print(lost, flush=True)
    begin = ff.init_state if newest is None else ff.abstract_state
    state = begin(step_for(mesh), init, OPTIMIZER, rows(mesh, 0))
    return ff.load(newest, state) if newest else state


def train(mesh, state, options, meeting):
    """Trains to the last step, or until somebody comes; returns whether it is done."""
    step = step_for(mesh)
    while state.step < options.steps:
        if ff.pmax(torch.tensor(float(meeting.is_over())), AXES):  # so all leave here
            return False
        state, loss = step(state, rows(mesh, state.step))
        meeting.keep(state, mesh)
        if mesh.rank == 0:
            print(f"step {state.step} loss {loss.item()!r}", flush=True)
        if options.folder and state.step % options.every == 0:
            ff.save(options.folder / f"step-{state.step}", state)
        time.sleep(options.pause)
    return True


def run(options, meeting):
    """Goes on from generation to generation, until the last step is done."""
    failures, done = 0, False
    while not done:
        try:
            size, *old = meeting.join()
            nodes = 2 if options.replicate and size % 2 == 0 else 1
            mesh = ff.make_mesh({"node": nodes, "data": size // nodes})
            state = go_on(mesh, *old, options.folder)
            meeting.keep(state, mesh)
            print(f"rank {mesh.rank} of {mesh.axes}, step {state.step}", flush=True)
            failures = 0
            done = train(mesh, state, options, meeting)
        except RuntimeError as error:  # another died; or it is a fault, and comes again
            failures += 1
            print(error, flush=True)
            if failures == 4:
                raise
        meeting.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", help="HOST:PORT")
    parser.add_argument("--replicate", action="store_true")
    parser.add_argument("--folder", type=Path, help="of checkpoints")
    # Steps in all, and between two checkpoints; seconds a step; see `Meeting`.
    numbers = {"steps": 300, "every": 10, "pause": 0.1, "least": 1, "timeout": 30.0}
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=type(number), default=number)
    options = parser.parse_args()
    run(options, Meeting(options.store, options.least, options.timeout))
