"""A rank goes wrong, in each way that the benchmark knows: all others hear of it."""

import json
from pathlib import Path

import pytest

from tests.programs import forked

EARLY = {
    "has another optimizer",
    "has another learning rate",
    "begins from other values",
}
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    """What became of one fault of each kind."""
    path = tmp_path_factory.mktemp("faults") / "json"
    options = ["--sample", "--at-once", "2", "--timeout", "3", "--limit", "60"]
    options += ["--json", str(path)]
    done = forked(BENCHMARKS / "faults.py", *options, timeout=300)
    assert path.exists(), done.stderr
    return json.loads(path.read_text())["ours"]


@pytest.mark.processes
def test_each_ends_as_is_due_on_every_survivor(outcomes):
    assert len({row["kind"] for row in outcomes}) == 39
    for row in outcomes:
        assert row["verdict"] == row["due"], row
        assert row["happened"] or row["kind"] == "nothing", row
        assert row["seconds"] < 20, row  # a timeout of three, and a slow machine
        assert set(row["intact"]) <= {"intact"}, row
        told = row["survivors"] if row["due"] == "told" else 0
        if row["kind"] in EARLY:
            told = 0  # there is no state yet, and nobody is in the right
            assert all("unlike" in text for text in row["errors"].values()), row
        assert len(row["intact"]) == told or row["kind"] == "never joins", row
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
    }
    found = {row["kind"]: row for row in outcomes}
    for kind, said in says.items():
        row = found[kind]
        for rank, text in row["errors"].items():
            own = int(rank) == row["rank"]
            assert own or said in text, (kind, text)
