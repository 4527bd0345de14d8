"""The law over real processes: each is judged by one device; some are refused there.

As a program it prints a line for each rank: how many were right, how many refused.
"""

import re
import warnings
from pathlib import Path

import pytest

import fsfunc as ff
from tests.derivatives import refused
from tests.derivatives.cases import LOSSES, STEPS
from tests.derivatives.judging import W, X, assert_lawful, by_law, of_ranks, rank_main
from tests.derivatives.test_law import taken_by

SOME_WAYS = [3, None]  # by turns; simulated ranks go all of them
PROGRAMS = dict(STEPS) | {name: taken_by("vag_w", f) for name, f in LOSSES.items()}
PROGRAMS = dict([*PROGRAMS.items()][::3])
REFUSED = dict([*(refused.STEPS | refused.PLAIN).items()][::3])


def main():
    warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
    mesh = ff.make_mesh({"data": 2})
    right = 0
    for step in PROGRAMS.values():
        expected, way = by_law(step, 2)[mesh.rank], SOME_WAYS[right % 2]
        assert_lawful([rank_main(mesh, way, of_ranks(step))()], [expected])
        right += 1
    told = 0
    for name, (step, text) in REFUSED.items():
        try:
            refused.attempt(step, mesh, 3, W, X, name in refused.PLAIN)
        except ValueError as error:
            assert re.search(text, str(error)), error
            told += 1
    print(f"{right} right, {told} refused")


@pytest.mark.processes
def test_processes_keep_the_law(processes):
    said = f"{len(PROGRAMS)} right, {len(REFUSED)} refused"
    assert processes(Path(__file__), 2, timeout=240).splitlines() == [said] * 2


if __name__ == "__main__":
    main()
