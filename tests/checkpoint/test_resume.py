"""n steps are k steps, a checkpoint, another process, and n - k steps: bit by bit.

    python test_resume.py KIND FOLDER     (KIND: simulated; or processes, by torchrun)

goes on from every checkpoint in FOLDER and prints, for each scheme and rank, a line of
JSON: the losses and the bits of the whole state after the last step.
"""

import functools
import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.mesh import here
from tests.checkpoint.stacks import loss_of, params_of
from tests.programs import forked

BEFORE, AFTER, ROWS = 3, 4, 12  # an epoch has 5 batches: they go on into the next


class Tokens(torch.utils.data.Dataset):
    """Rows of which some are drawn anew each time, as augmentation does."""

    def __len__(self):
        return 5 * ROWS + 7

    def __getitem__(self, i):
        return torch.randint(7, (), dtype=torch.int64) if i % 2 else torch.tensor(i % 7)


PARTS = {
    "adam": lambda: ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.01)),
    "sgd": lambda: ff.sgd(1e-3, momentum=0.9),
    "shard": lambda f, mesh: ff.shard(f, mesh, "data"),
    "zero1": lambda f, mesh: ff.shard(f, mesh, "data", zero=1),
    "zero2": lambda f, mesh: ff.shard(f, mesh, "data", zero=2),
    "hsdp": lambda f, mesh: ff.shard(f, mesh, "data", replicate="node"),
    "pipe": lambda f, mesh: ff.pipeline(f, mesh, "pipe", n_microbatches=2),
    "accumulate": lambda f, mesh: ff.accumulate(f, 2),
    "remat": lambda f, mesh: ff.remat(f),
    "donate": lambda f, mesh: ff.donate(f),
}
PAIR = {"data": 2}
# name -> mesh, optimizer, transforms from the innermost
ON_TWO = {
    "zero=3": (PAIR, "adam", ["shard"]),
    "zero=1, donated": (PAIR, "adam", ["zero1", "donate"]),
    "zero=2, momentum": (PAIR, "sgd", ["remat", "zero2"]),
    "accumulated": (PAIR, "sgd", ["accumulate", "shard", "donate"]),
    "pipeline": ({"pipe": 2}, "adam", ["pipe"]),
}
SCHEMES = {
    **ON_TWO,
    "one device": (None, "adam", ["accumulate"]),
    "HSDP": ({"node": 2, "data": 2}, "adam", ["hsdp"]),
    "on three": ({"data": 3}, "sgd", ["accumulate", "shard"]),
    "shard(pipeline)": ({"data": 2, "pipe": 2}, "adam", ["pipe", "shard"]),
}


class Run:
    """A scheme on this rank: its step, state and loader."""

    def __init__(self, mesh, scheme):
        axes, optimizer, transforms = scheme
        opt = PARTS[optimizer]()
        self.mesh, step = mesh, opt(ff.value_and_grad(loss_of(0.2, 0.25)))
        for name in transforms:
            step = PARTS[name](step, mesh)
        self.step = step
        cut = tuple(a for a in axes or () if a != "pipe")
        if mesh is not None and not cut:
            cut = None
        self.loader = batches(mesh, cut)
        if mesh is None:
            params = params_of()
            self.state = ff.TrainState(params, opt.init(params))
        else:
            like = batches(mesh, cut)
            self.state = ff.init_state(step, params_of, opt, next(iter(like)))

    def go(self, count):
        losses, rows = [], iter(self.loader)
        for _ in range(count):
            self.state, metrics = self.step(self.state, next(rows))
            losses.append(float(metrics["loss"]))
        return losses

    def everything(self):
        return {"train": self.state, "data": self.loader.position}

    def save(self, path, save=ff.save):
        return save(path, self.everything())

    def load(self, path):
        found = ff.load(path, self.everything())
        self.state = found["train"]
        self.loader.seek(found["data"])

    def digest(self):
        whole = self.state if self.mesh is None else ff.unshard(self.state)
        sha = hashlib.sha256()
        for x in tree.leaves(whole):
            if isinstance(x, torch.Tensor):
                sha.update(x.detach().contiguous().numpy().tobytes())
            else:
                sha.update(repr(x).encode())
        return sha.hexdigest()


def batches(mesh, axis):
    if mesh is None or axis:
        return ff.batches(Tokens(), mesh, axis, ROWS, seed=5)
    return ff.batches(Tokens(), None, None, ROWS, seed=5)  # a pipeline: all of it


def on(scheme, main, backend="simulated"):
    """What ``main(mesh)`` returns, on every rank of this process."""
    torch.manual_seed(11)
    if scheme[0] is None:
        return [main(None)]
    mesh = ff.make_mesh(scheme[0], backend)
    return ff.spmd(lambda: main(mesh), mesh)()


def resumed(mesh, scheme, path):
    """What follows, after other random numbers than those of the run that saved."""
    torch.manual_seed(99)
    run = Run(mesh, scheme)
    run.load(path)
    return run.go(AFTER), run.digest()


def main():
    torch.set_num_threads(1)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    for i, (name, scheme) in enumerate(SCHEMES.items()):
        if kind == "processes" and name not in ON_TWO:
            continue
        go = lambda mesh, s=scheme, i=i: resumed(mesh, s, folder / str(i))  # noqa: E731
        found = on(scheme, go, kind)
        first = 0 if kind == "simulated" else here().rank
        for rank, result in enumerate(found, first):
            os.write(1, f"{json.dumps([name, rank, result])}\n".encode())
    if kind == "processes":
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A function: where a scheme was saved, and how it went on without a stop."""
    folder = tmp_path_factory.mktemp("stopped")

    @functools.cache
    def of(name):
        i = list(SCHEMES).index(name)

        def main(mesh):
            run = Run(mesh, SCHEMES[name])
            run.go(BEFORE)
            saving = run.save(folder / str(i), ff.save_async if i % 2 else ff.save)
            later = run.go(AFTER), run.digest()
            if saving is not None:
                saving.wait()
            return later

        return folder / str(i), on(SCHEMES[name], main)

    return of


def check(lines, expected):
    found = {(name, rank): result for name, rank, result in map(json.loads, lines)}
    assert len(found) == sum(map(len, expected.values()))
    for name, ranks in expected.items():
        for rank, (losses, digest) in enumerate(ranks):
            assert found[name, rank][0] == losses, (name, rank)
            assert found[name, rank][1] == digest, (name, rank)


@pytest.mark.slow  # a program of its own
def test_another_process_goes_on_bit_by_bit(stopped):
    expected = {name: stopped(name)[1] for name in SCHEMES}
    done = forked(Path(__file__), "simulated", stopped("zero=3")[0].parent, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    check(done.stdout.splitlines(), expected)


@pytest.mark.processes
def test_real_processes_go_on_bit_by_bit(stopped, processes):
    """From what simulated ranks saved."""
    expected = {name: stopped(name)[1] for name in ON_TWO}
    folder = stopped("zero=3")[0].parent
    check(processes(Path(__file__), 2, "processes", str(folder)).splitlines(), expected)


# Of two microbatches on each of two ranks, or of one on each of four, or of four on
# one: dropout masks follow the microbatch.
ELSEWHERE = {
    "four ranks": ({"data": 4}, "sgd", ["shard"]),
    "four ranks, HSDP": ({"node": 2, "data": 2}, "sgd", ["hsdp"]),
    "two ranks, zero=1": (PAIR, "sgd", ["accumulate", "zero1"]),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_another_number_of_ranks_goes_on_to_rounding(stopped, where):
    path, expected = stopped("accumulated")

    def main(mesh):
        run = Run(mesh, ELSEWHERE[where])
        run.load(path)
        return run.go(AFTER)

    losses = on(ELSEWHERE[where], main)[0]
    assert losses == pytest.approx(expected[0][0], rel=1e-6)


if __name__ == "__main__":
    main()
