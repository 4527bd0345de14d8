"""All programs of the law over real processes, and all that is refused there.

Prints a line for each rank: how many were right, and how many were refused.
"""

import re
import warnings

import fsfunc as ff
from tests.derivatives import refused
from tests.derivatives.cases import LOSSES, STEPS
from tests.derivatives.judging import WAYS, W, X, assert_lawful, by_law, rank_main
from tests.derivatives.test_law import REFUSED, taken_by

warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
mesh = ff.make_mesh({"data": 2})
programs = dict(STEPS)
for how in ("vag_w", "grad_w"):
    programs |= {(name, how): taken_by(how, LOSSES[name]) for name in LOSSES}

right = 0
for name, step in programs.items():
    expected = by_law(step, 2)[mesh.rank]
    for way in WAYS:
        if (*name, way) not in REFUSED:
            assert_lawful([rank_main(step, mesh, way)()], [expected])
            right += 1

told = 0
for name, (step, text) in (refused.STEPS | refused.PLAIN).items():
    for zero in (1, 3):
        try:
            refused.attempt(step, mesh, zero, W, X, name in refused.PLAIN)
        except ValueError as error:
            assert re.search(text, str(error)), error
            told += 1
print(f"{right} right, {told} refused")
