"""Processes that come and die while a run trains: its numbers are those of one device.

They start without a launcher, and meet in a store that this process holds.
"""

import ast
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fsfunc as ff
from examples import loop
from tests import forking
from tests.checks import close
from tests.examples.programs import SCRIPT, TIME_LIMIT
from tests.programs import environment

pytestmark = pytest.mark.processes

ELASTIC, LOOP = SCRIPT.parent / "elastic.py", SCRIPT.parent / "loop.py"
STEPS = 24
# A process that is there at once and joins once a file is.
LATE = f"""
import os, runpy, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
del sys.argv[:2]
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def elastic() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield __import__("elastic")
        for name in ("elastic", "meeting"):
            sys.modules.pop(name, None)


Whole = tuple[list[float], ff.TrainState]


@pytest.fixture(scope="module")
def undisturbed(elastic: ModuleType) -> Whole:
    """The losses of all steps on one simulated rank, and its last state."""
    mesh = ff.make_mesh({"node": 1, "data": 1}, "simulated")

    def main() -> Whole:
        step, losses = elastic.step_for(mesh), []
        first = elastic.rows(mesh, 0)
        state = ff.init_state(step, elastic.init, elastic.OPTIMIZER, first)
        for i in range(STEPS):
            state, loss = step(state, elastic.rows(mesh, i))
            losses.append(loss.item())
        return losses, ff.unshard(state)

    return ff.spmd(main, mesh)()[0]


class Elastic:
    """The example as its user starts it: some processes at once, others later.

    Args:
        first: what the first of these runs before.
    """

    def __init__(
        self, folder: Path, at_once: int, late: int, *more: str, first: str = ""
    ):
        self.folder, self.late = folder, [folder / f"late {i}" for i in range(late)]
        host = "127.0.0.1"
        store = torch.distributed.TCPStore(
            host, 0, is_master=True, wait_for_workers=False
        )
        self.store = store  # as long as this object
        options = [
            *(f"{host}:{store.port}", f"--steps={STEPS}", "--pause=0.05"),
            *("--timeout=20", f"--folder={folder / 'kept'}", *more),
        ]
        starts = [[str(ELASTIC)]] * at_once
        for i, path in enumerate(self.late):
            starts.append(
                ["-c", (first if not i else "") + LATE, str(path), str(ELASTIC)]
            )
        self.outs = [folder / f"out {i}" for i in range(len(starts))]
        for out in self.outs:
            out.touch()
        errs = [str(folder / f"err {i}") for i in range(len(starts))]
        self.running = forking.Running(
            [
                forking.Program([*start, *options], environment(), str(out), err)
                for start, out, err in zip(starts, self.outs, errs, strict=True)
            ],
            together=False,
        )
        self.limit = time.monotonic() + TIME_LIMIT

    def __enter__(self) -> "Elastic":
        return self

    def __exit__(self, *_: object) -> None:
        self.running.end()

    def printed(self) -> str:
        return "".join(path.read_text() for path in self.outs)

    def all_printed(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()}"
            for path in sorted(self.folder.iterdir())
            if path.is_file()
        )

    def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            assert self.running.wait(0) is None, self.all_printed()
            assert time.monotonic() < self.limit, self.all_printed()
            time.sleep(0.01)

    def until_step(self, number: int) -> None:
        self.until(lambda: f"step {number} loss" in self.printed())

    def until_axes(self, **axes: int) -> None:
        """Waits until each of that many ranks has gone on."""
        lines = [f"rank {r} of {axes}" for r in range(axes["node"] * axes["data"])]
        self.until(lambda: all(line in self.printed() for line in lines))

    def kill(self, number: int) -> None:
        os.kill(self.running.pids[number], signal.SIGKILL)

    def comes(self, number: int = 0) -> None:
        self.late[number].touch()

    def ended(self) -> list[int]:
        ended = self.running.wait(self.limit - time.monotonic())
        assert ended is not None, self.all_printed()
        return ended

    def check(self, whole: Whole) -> None:
        """Judges each loss that was printed, and the last checkpoint."""
        losses, last = whole
        found = re.findall(r"^step (\d+) loss (.*)$", self.printed(), re.M)
        assert {int(number) for number, _ in found} == {*range(1, STEPS + 1)}
        for number, loss in found:
            expected = losses[int(number) - 1]
            assert abs(ast.literal_eval(loss) - expected) < 1e-9, self.all_printed()
        saved = ff.load(self.folder / "kept" / f"step-{STEPS}", last)
        close(saved.params, last.params, 1e-9)
        close(saved.opt_state, last.opt_state, 1e-9)

    def rank_that_printed(self, line: str) -> int:
        """The number of the process that printed a line."""
        return next(i for i, out in enumerate(self.outs) if line in out.read_text())


def test_a_process_joins(undisturbed: Whole, tmp_path: Path) -> None:
    with Elastic(tmp_path, 2, 1, "--least=2", f"--every={STEPS}") as run:
        run.until_step(4)
        run.comes()
        run.until_axes(node=1, data=3)
        assert run.ended() == [0, 0, 0]
        run.check(undisturbed)


def test_a_replica_stands_in_for_one_that_was_killed(
    undisturbed: Whole, tmp_path: Path
) -> None:
    """Of 2 x 2 one dies: three go on from memory, and then with a new one."""
    more = "--least=3", "--replicate", f"--every={STEPS}"
    with Elastic(tmp_path, 4, 1, *more) as run:
        run.until_axes(node=2, data=2)
        run.until_step(4)
        run.kill(killed := run.rank_that_printed("rank 0 of {'node': 2, 'data': 2}"))
        run.until_axes(node=1, data=3)
        run.comes()
        assert run.ended() == [-9 if i == killed else 0 for i in range(5)]
        assert run.printed().count("of {'node': 2, 'data': 2}") == 8
        assert "load the last checkpoint" not in run.printed()
        run.check(undisturbed)


def test_without_a_replica_it_goes_on_from_the_checkpoint(
    undisturbed: Whole, tmp_path: Path
) -> None:
    with Elastic(tmp_path, 3, 0, "--least=2", "--every=6") as run:
        run.until_axes(node=1, data=3)
        run.until_step(8)
        run.kill(1)
        assert sorted(run.ended()) == [-9, 0, 0]
        assert run.printed().count("alone, which is gone.") == 2
        last = tmp_path / "kept" / "step-6"
        assert run.printed().count(f"load the last checkpoint, {last}") == 2
        assert run.printed().count("of {'node': 1, 'data': 2}, step 6") == 2
        run.check(undisturbed)


DIES_THERE = """
import os, torch.distributed as dist
dist.init_process_group = lambda *args, **how: os._exit(0)
"""


def test_one_dies_between_the_list_and_the_mesh(
    undisturbed: Whole, tmp_path: Path
) -> None:
    """Those that waited for it meet again, and a new one finds them."""
    more = "--least=3", "--timeout=4", f"--every={STEPS}"
    with Elastic(tmp_path, 2, 2, *more, first=DIES_THERE) as run:
        run.comes()
        run.until(lambda: "wait timeout" in run.printed())
        run.comes(1)
        run.until_axes(node=1, data=3)
        assert run.ended() == [0] * 4
        run.check(undisturbed)


# Under torchrun: its agents start all processes anew


def test_torchrun_goes_on_with_fewer_nodes(tmp_path: Path) -> None:
    """Of two agents one is stopped: the other's processes load the checkpoint."""
    kept, steps = tmp_path / "kept", 160
    options = [f"--steps={steps}", "--every=20"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # An agent that is gone for two seconds is; then one alone begins a second later.
    times = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
    agents = []
    for i, is_host in enumerate(("true", "false")):
        torchrun = [
            *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=run"),
            *(f"--rdzv-conf=is_host={is_host},{times}", "--local-addr=127.0.0.1"),
            *("--max-restarts=3", "--monitor-interval=0.1"),
        ]
        given = [*torchrun, str(LOOP), *options, f"--folder={kept}"]
        files = str(tmp_path / f"out {i}"), str(tmp_path / f"err {i}")
        agents.append(forking.Program(given, environment(), *files))
    running = forking.Running(agents, together=False)
    limit = time.monotonic() + TIME_LIMIT

    def said() -> str:
        paths = sorted(path for path in tmp_path.iterdir() if path.is_file())
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    try:
        while not list(kept.glob("step-*")):
            assert running.wait(0) is None and time.monotonic() < limit, said()
            time.sleep(0.01)
        os.kill(running.pids[1], signal.SIGTERM)
        ended = running.wait(limit - time.monotonic())
        assert ended is not None and ended[0] == 0 and ended[1] != 0, said()
    finally:
        running.end()
    rows = [json.loads(line) for line in (kept / "log.jsonl").read_text().splitlines()]
    # The first step was run once: what was trained with two did not begin anew.
    assert [row["step"] for row in rows].count(0) == 1
    assert ff.metadata(kept / f"step-{steps}").mesh == {"data": 1}
    expected, _ = loop.main(loop.parse([*options, "--ranks=1"]))[0]
    losses = {row["step"]: row["loss"] for row in rows}
    assert sorted(losses) == [*range(steps)]
    assert [losses[i] for i in range(steps)] == pytest.approx(expected, abs=1e-4)
