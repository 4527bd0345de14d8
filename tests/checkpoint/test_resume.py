"""n steps are k steps, a checkpoint, another process, and n - k steps: bit by bit."""

import functools
import json
from pathlib import Path

import pytest

import fsfunc as ff
from tests.checkpoint.resuming import AFTER, BEFORE, ON_TWO, PAIR, SCHEMES, Run, on
from tests.programs import forked

PROGRAM = Path(__file__).with_name("resuming.py")


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
    done = forked(PROGRAM, "simulated", stopped("zero=3")[0].parent, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    check(done.stdout.splitlines(), expected)


@pytest.mark.processes
def test_real_processes_go_on_bit_by_bit(stopped, processes):
    """From what simulated ranks saved."""
    expected = {name: stopped(name)[1] for name in ON_TWO}
    folder = stopped("zero=3")[0].parent
    check(processes(PROGRAM, 2, "processes", str(folder)).splitlines(), expected)


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
