"""One step over four axes at once, and over any of them, is the step of one device.

Stages lie along "pipe", samples along "data", parts of their sequences along "context"
(to ``shard`` these are data, too), and heads, features and the vocabulary along
"model": weights are split as Megatron splits them, sequences whole or split between
layers.
"""

from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.nn import all_to_all_attention, ring_attention, zigzag
from tests import checks
from tests.checks import close, simulated
from tests.models import train_step
from tests.nn.models import LAYOUTS, model, parameters, samples

OPTIMIZER = ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.01))
PAIRS = ["data model", "data context", "model context", "pipe context", "pipe model"]
ONE = simulated(1)
INNER = {"": lambda f: f, "remat": ff.remat, "cut": lambda f: ff.accumulate(f, 2)}


def part(batch, mesh):
    """A rank's rows, and of these its part of each sequence."""
    if "data" in mesh.axes:
        batch = ff.local_batch(batch, mesh, "data")
    if (n := mesh.axes.get("context", 1)) > 1:
        at = ff.axis_index("context")
        batch = {k: zigzag(x, n, 1).chunk(n, 1)[at] for k, x in batch.items()}
    return batch


def trained(step, mesh=ONE, **how):
    """Parameters and moments, whole, and the last loss, on each rank."""
    how |= {"mesh": mesh, "over": lambda b: part(b, mesh)}
    how["look"] = lambda state: ff.unshard(state.opt_state)
    runs = checks.trained(step, parameters(), OPTIMIZER, samples(), **how)
    return [((run.params, run.seen[-1]), run.outs[-1]) for run in runs]


(WHOLE,) = trained(train_step(model({}), OPTIMIZER))


@settings(max_examples=2)
@given(
    st.sampled_from(["model", *PAIRS]),
    st.integers(0, 3),
    st.sampled_from(list(INNER)),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from([ring_attention, all_to_all_attention]),
)
@example("pipe data model context", 3, "remat", None, False, ring_attention)
@example("model context", 0, "remat", None, False, ring_attention)
@example("data context", 2, "cut", None, True, all_to_all_attention)
def test_a_step_over_all_axes_is_that_of_one_device(
    names, zero, inner, dim, donated, attend
):
    axes = dict.fromkeys(names.split(), 2)
    mesh, data = simulated(**axes), tuple(a for a in axes if a in ("data", "context"))
    dim = dim if names in ("model", "data model") else None
    if "pipe" in axes and inner == "cut":
        inner = ""

    step = INNER[inner](train_step(model(axes, dim, attend), OPTIMIZER))
    if "pipe" in axes:
        step = ff.pipeline(step, mesh, "pipe", n_microbatches=2)
    step = ff.shard(step, mesh, data, zero=zero) if data else step
    step = ff.donate(step) if donated else step
    for found in trained(step, mesh, layouts=LAYOUTS if "model" in axes else None):
        close(found, WHOLE, 1e-9)
