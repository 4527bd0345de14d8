"""A kit to test sharded steps with, your own transforms and collectives among them.

Each check is one law: what it compares, and what its message says, stands in its
docstring. `fsfunc.testing.strategies` draws meshes, models and stacks for hypothesis.
"""

from fsfunc.testing.comparing import assert_equal
from fsfunc.testing.costs import assert_cost
from fsfunc.testing.finiteness import NotFinite, finite
from fsfunc.testing.integer_data import integers
from fsfunc.testing.live_memory import Living, live_bytes
from fsfunc.testing.one_device import assert_equals_one_device
from fsfunc.testing.poisoning import poison
from fsfunc.testing.replication import check_replicated
from fsfunc.testing.transposes import check_collective
from fsfunc.testing.type_checking import check_types

__all__ = [
    "Living",
    "NotFinite",
    "assert_cost",
    "assert_equal",
    "assert_equals_one_device",
    "check_collective",
    "check_replicated",
    "check_types",
    "finite",
    "integers",
    "live_bytes",
    "poison",
]
