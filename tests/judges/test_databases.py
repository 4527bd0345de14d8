"""torch's databases of operators, modules and optimizers: nothing in them is wrong.

Each case is right, or refused in our words. Under `.ci/judges` all are judged, else a
drawn sample.
"""

import re

import pytest

from tests.judges.conftest import ASKED
from tests.programs import python

EVERY = [
    *(f"tests.judges.operators --part {i} 8" for i in range(8)),
    *(f"tests.judges.modules --part {i} 2" for i in range(2)),
    "tests.judges.optimizers",
    "tests.judges.exact_operators",
]
SAMPLE = ["tests.judges --sample 4 0", "tests.judges.exact_operators --sample 40 0"]
# Who refused in torch's words, and of which cases, of which four are named.
UNTOLD = re.compile(r"^ +\d+ torch: .*", re.M)
CASE = re.compile(r"(\S+) \d+ \(on leaves\)")
# Python functions of torch, which read the shape of a part that has one dim for a mask.
THEIRS = "masked."


@pytest.mark.slow
@pytest.mark.parametrize("program", EVERY if ASKED else SAMPLE)
def test_each_case_is_right_or_refused(program):
    done = python("-m", *program.split(), timeout=3600 if ASKED else 300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(" (right|equal)", done.stdout)
    for line in UNTOLD.findall(done.stdout):
        cases = CASE.findall(line)
        assert cases and all(name.startswith(THEIRS) for name in cases), line
