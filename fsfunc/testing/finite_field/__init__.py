"""Exact runs: steps computed in a finite field, where equal functions have equal bits.

runs.py               exact: the context; residues: the data
field.py              numbers of the field, their arithmetic and random functions
mode.py               the dispatch mode, which finds the rule of an operator
rules.py              the table of rules, and the rules of elementwise operators
reductions.py linear_algebra.py matrices.py resampling.py indexing.py
optimizer_kernels.py  the rules of other operators
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
