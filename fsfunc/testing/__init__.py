"""Assertions for tests of sharded steps, and of your own transforms and collectives.

Each assertion checks one law; its docstring says what it compares.
`fsfunc.testing.strategies` draws meshes, models and stacks for hypothesis. Law 1, that
a transformed step equals the plain one on one device, is ten lines:

>>> from hypothesis import given, settings
>>> import fsfunc as ff
>>> from fsfunc.testing import assert_equals_one_device, strategies as draw
>>> def mine(f):  # your own transform; here one of fsfunc's
...     return ff.remat(f)
>>> @settings(max_examples=5, deadline=None)  # the first example warms up
... @given(draw.meshes().flatmap(draw.transform_stacks), draw.train_steps())
... def test_mine(stack, drawn):
...     one, ranks = mine(drawn.gradient), mine(stack(drawn.gradient))
...     data = drawn.params, drawn.batch(2 * stack.rows)
...     assert_equals_one_device(one, ranks, stack.mesh, *data)
>>> test_mine()

A collective has `check_collective`; what a step sends, `assert_cost`. An optimizer is
tested as a step, ``optimizer(drawn.gradient)``, whose state is a ``TrainState``.

one_device.py       assert_equals_one_device: law 1 of any transform
step_runs.py        calls of a step on one device and on ranks
proofs.py           prove: law 1 in a finite field, as a report
mistakes.py         the ten commonest mistakes, as explanations of a difference
parting.py          first_difference: the first value at which two steps part
observed_runs.py    runs under observers, which save the values of all units
recomputed_values.py    the values inside a unit, and those of its recompute
alignment.py        comparison of values that two runs cut differently
observed_differences.py comparison of two runs' values in order
places.py           FirstDifference: a place in a step, in words
comparing.py        comparison of trees; data whose sums are exact
finite_field/       exact: steps computed in a finite field
costs.py            assert_cost: what a step sends; live_bytes: its memory
transposes.py       check_collective, by typed dot products
rank_checks.py      check_replicated; check_batch; check_types
nan_checks.py       finite: where NaN came from; poison: NaN in unwritten memory
recordings/         recorded, replay: one rank's call again, without the others
drawn_models.py     the models, steps and stacks that strategies draw
strategies.py       strategies of hypothesis
"""

from typing import TYPE_CHECKING

from fsfunc.runtime.lazy_imports import lazy_names as _later_names
from fsfunc.testing.comparing import assert_equal, integers
from fsfunc.testing.costs import Living, assert_cost, live_bytes
from fsfunc.testing.finite_field import NoExactRule, exact, residues
from fsfunc.testing.nan_checks import NotFinite, finite, poison
from fsfunc.testing.one_device import assert_equals_one_device
from fsfunc.testing.parting import first_difference
from fsfunc.testing.places import FirstDifference
from fsfunc.testing.proofs import Proof, prove
from fsfunc.testing.rank_checks import (
    OddBatch,
    check_batch,
    check_replicated,
    check_types,
)
from fsfunc.testing.recordings import PartsFromRecording, recorded, replay
from fsfunc.testing.transposes import check_collective

if TYPE_CHECKING:
    from fsfunc.testing import strategies
else:  # It needs hypothesis.
    __getattr__, __dir__ = _later_names(
        __name__, {"strategies": "fsfunc.testing.strategies"}
    )

# What a checker takes for public; at run time `help` and `*` go by the names there are.
if TYPE_CHECKING:
    __all__ = [
        "assert_cost",
        "assert_equal",
        "assert_equals_one_device",
        "check_batch",
        "check_collective",
        "check_replicated",
        "check_types",
        "exact",
        "finite",
        "first_difference",
        "FirstDifference",
        "integers",
        "live_bytes",
        "Living",
        "NoExactRule",
        "NotFinite",
        "OddBatch",
        "PartsFromRecording",
        "poison",
        "Proof",
        "prove",
        "recorded",
        "replay",
        "residues",
        "strategies",
    ]
