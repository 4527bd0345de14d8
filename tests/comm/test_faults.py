"""A rank goes wrong, stops, or is restarted: all others hear of it, and in time.

Of each class of fault, and of what is due, some kinds are run here, over both
transports; all with FSFUNC_LONG_TESTS=1 (benchmarks/faults.py draws more).
"""

import json
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch.distributed as dist

import fsfunc as ff
from fsfunc.comm.backends.process_groups import fresh
from tests.covering import LONG_TESTS
from tests.programs import forked

STOPPED = """
    import os, signal, sys, time, torch, torch.distributed as dist, fsfunc as ff
    from datetime import timedelta
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    theirs = ff.make_mesh({"a": 2, "b": 2})
    ours = ff.make_mesh({"c": 2, "d": 2}, timeout=1.5)
    line = ff.make_mesh({"e": 4}, timeout=timedelta(seconds=1))

    def total(mesh, axis):
        return ff.spmd(lambda: ff.psum(torch.ones(5), axis), mesh)()[0].tolist()

    pid = torch.tensor([os.getpid()])
    pids = ff.spmd(lambda: ff.all_gather(pid, ("a", "b")), theirs)()[0].tolist()
    meshes = [(line, "e"), (ours, "d"), (theirs, "b")]
    assert [total(*m) for m in meshes] == [[4.0] * 5, [2.0] * 5, [2.0] * 5]
    rank = dist.get_rank()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 2 has seen enough
        os._exit(0)
    for mesh, axis in meshes if rank == 2 else meshes[:1]:
        began = time.perf_counter()
        limit = mesh.link.groups.timeout.total_seconds()
        try:
            total(mesh, axis)
        except RuntimeError as error:
            waited = time.perf_counter() - began
            soon = limit <= waited < limit + 27
            print(rank, soon, str(error).replace(chr(10), " | "), flush=True)
    if rank == 2:
        os.kill(pids[3], signal.SIGCONT)
"""


@pytest.mark.processes
def test_a_stopped_rank_is_waited_for_no_longer_than_was_said(processes):
    lines = processes(STOPPED, 4).splitlines()
    assert [line.split()[:2] for line in lines] == [
        [str(rank), "True"] for rank in (0, 1, 2, 2, 2)
    ]
    for line, axis in zip(lines, "eeedb", strict=True):
        ranks = "[0, 1, 2, 3]" if axis == "e" else "[2, 3]"
        assert f'psum over "{axis}", float32[5]' in line
        assert f"waits in vain for others of ranks {ranks}" in line
        assert "Rank 3 does not answer: its process is stopped" in line
        assert line.count(" | ") == 5  # a title, and where each of four is


@pytest.mark.parametrize("backend", ["simulated", "processes"])
def test_a_timeout_is_a_time(backend):
    for timeout in (0, -1.0, 1e-9, timedelta(0)):
        with pytest.raises(ValueError, match="timeout="):
            ff.make_mesh({"data": 1}, backend, timeout=timeout)
    assert ff.make_mesh({"data": 2}, "simulated", timeout=timedelta(seconds=1))


def attempt(store, size, absent=()):
    """What each rank finds in a store of its own attempt, having left its number."""
    found = {}

    def rank(r):
        mine = fresh(store.clone(), r, size, patience=10)
        mine.set(f"rank {r}", "here")
        mine.wait([f"rank {i}" for i in range(size) if i not in absent])
        found[r] = mine.check(["old"]), mine
        return mine

    threads = [Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == size
    return found


@pytest.fixture
def store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("size", [1, 3])
def test_each_attempt_has_a_store_of_its_own(store, size):
    for _ in range(3):
        found = attempt(store, size)
        assert not any(old for old, _ in found.values())
        next(iter(found.values()))[1].set("old", "1")


def test_ranks_that_do_not_come_are_named(store):
    for rank, absent in ((1, "rank 0"), (0, "rank 1, rank 2")):
        # what rank 1 left is of an earlier attempt
        said = f"^{absent} did not join rank {rank} of 3"
        with pytest.raises(TimeoutError, match=said):
            fresh(store, rank, 3, patience=0.1)


JOINING = {"never joins", "is killed as it joins", "stops as it joins"}
EARLY = {
    "has another optimizer",
    "has another learning rate",
    "begins from other values",
}
CHOSEN = [
    # in a step: gone, no more heard of, raises, numbers, and another program
    "is killed", "aborts", "stops", "raises in a backward", "returns NaN",
    "calls another collective", "evaluates alone",
    *sorted(EARLY),
    "is killed while it saves", "may not write",
    "catches a mismatch", "loses its loader's worker", "is killed before others come",
    # at any collective, and as the mesh is made
    "exits at a collective", "is interrupted at a collective", "is killed as it joins",
    # and what is no fault
    "sees another batch size", "raises as all others do", "has a fork that reduces",
    "leaves junk in the store", "is another user's",
]  # fmt: skip
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    """What became of one fault of each kind."""
    path = tmp_path_factory.mktemp("faults") / "json"
    options = ["--sample", "--at-once", "2", "--timeout", "3", "--limit", "60"]
    options += ["--json", str(path)]
    options += [] if LONG_TESTS else ["--only", ",".join(CHOSEN)]
    done = forked(BENCHMARKS / "faults.py", *options, timeout=300)
    assert path.exists(), done.stderr
    return json.loads(path.read_text())["ours"]


@pytest.mark.processes
def test_each_ends_as_is_due_on_every_survivor(outcomes):
    kinds = {row["kind"] for row in outcomes}
    assert len(kinds) == (52 if LONG_TESTS else len(CHOSEN)) and kinds >= {*CHOSEN}
    assert {row["shared"] for row in outcomes} == {True, False}
    for row in outcomes:
        assert row["verdict"] == row["due"], row
        assert row["happened"] or row["kind"] == "nothing", row
        assert row["seconds"] < 20, row  # a timeout of three, and a slow machine
        assert set(row["intact"]) <= {"intact"}, row
        told = row["survivors"] if row["due"] == "told" else 0
        if row["kind"] in EARLY:  # nobody is in the right: all that differ are named
            assert all("unlike" in text for text in row["errors"].values()), row
        kept = 0 if row["kind"] in EARLY else told  # there is no state yet
        assert len(row["intact"]) == kept or row["kind"] in JOINING, row
        assert row["names it"] == told, row  # the rank that went wrong


@pytest.mark.processes
def test_what_takes_a_rank_by_a_signal_is_on_its_own_screen(outcomes):
    (row,) = [row for row in outcomes if row["kind"] == "aborts"]
    said = row["own screen"]
    assert "Fatal Python error: Aborted" in said and "in in_the_loss" in said


@pytest.mark.processes
def test_the_errors_say_what_happened(outcomes):
    """The cause, not gloo's "Connection closed by peer"."""
    says = {
        "has another optimizer": "optimizer: rank 0: sharded_adam; rank 1: sgd",
        "has another learning rate": "learning_rate: rank 0: 0.02; rank 1: 0.01",
        "begins from other values": "the init functions of ranks make unlike param",
        "raises in the loss": "raised ValueError: no such token at ",
        "raises in a backward": "raised ArithmeticError: no such gradient at ",
        "raises in the loader": "raised OSError: no such shard at ",
        "is killed": "its process was killed",
        "stops": "its process is stopped",
        "returns NaN": "'x': 1 of 32 elements NaN",
        "comes too late": "runs, at ",
        "never joins": "did not join rank ",
        "is killed while it saves": "its process was killed",
        "stops while it saves": "does not answer: its process ",
        "may not write": "could not go on: PermissionError",
        "removes the folder": "could not go on: FileNotFoundError",
        "catches a mismatch": "this mesh is closed since CollectiveMismatch in psum",
        "catches an interrupt": "this mesh is closed since KeyboardInterrupt in psum",
        "is killed, and no descriptor left": "its process was killed",
        "loses its loader's worker": "raised RuntimeError: DataLoader worker (pid ",
        "is killed before others come": "rank ",
        "is killed at a collective": "its process was killed",
        "stops at a collective": "does not answer: its process is stopped",
        "raises at a collective": "raised ArithmeticError: no such number at ",
        "is interrupted at a collective": "raised KeyboardInterrupt",
        "stops as it joins": "did not join rank ",
    }
    for row in outcomes:
        kind, said = row["kind"], says.get(row["kind"], "")
        if kind == "exits at a collective":  # with 3, or as if all were well
            said = "raised SystemExit: 3 at " if row["at"] % 2 else "has returned, and "
        for rank, text in row["errors"].items():
            own = int(rank) == row["rank"]
            assert own or said in text, (kind, text)
