"""Exact runs: steps computed in a finite field, where equal functions have equal bits.

runs.py               exact(), residues()
field.py              the field; companions of exponentials and roots
mode.py               which operator is computed how
rules.py              a table of rules; those of elementwise operators
reductions.py linear_algebra.py matrices.py resampling.py indexing.py
optimizer_kernels.py  the others
"""

from fsfunc.testing.finite_field.field import PRIME, Field
from fsfunc.testing.finite_field.mode import Exact, NoExactRule
from fsfunc.testing.finite_field.runs import (
    exact,
    exact_ratio,
    is_exact,
    residues,
    values,
)
