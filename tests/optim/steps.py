"""A small model in train steps, on one device and on simulated ranks."""

from typing import Any, NamedTuple

import torch

import fsfunc as ff
from fsfunc.sharded.leaf import is_sharded
from tests import checks
from tests.checks import simulated
from tests.models import chain, floats

WIDTH = 4


@ff.unit
def layer(w, x):
    return torch.tanh(x @ w)


@ff.unit
def other(w, x):
    return torch.sin(x @ w)


WS = list(floats(3, WIDTH, WIDTH, seed=1))
X = floats(8, WIDTH, seed=9)


loss = chain(layer)


def data(f, mesh, **how):
    return ff.shard(f, mesh, "data", **how)


def pipe(f, mesh):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=2)


# Where a step runs: the stack of transforms, from the outermost.
STACKS = {
    "alone": lambda s, mesh: s,
    "accumulate": lambda s, mesh: ff.accumulate(s, 2),
    "shard": data,
    "shard zero=1": lambda s, mesh: data(s, mesh, zero=1, min_bytes=1000),
    "accumulate(shard)": lambda s, mesh: ff.accumulate(data(s, mesh, zero=2), 2),
    "donate(remat(shard))": lambda s, mesh: ff.donate(ff.remat(data(s, mesh))),
    "pipeline(shard)": lambda s, mesh: pipe(data(s, mesh), mesh),
}
ALONE, DATA = simulated(1), simulated(2)
PIPE = simulated(data=2, pipe=2)


class Run(NamedTuple):
    params: Any  # whole
    losses: list
    state: Any  # the optimizer's, as it lies
    sent: Any  # by its steps
    seen: list  # by `look`, after each step


def mesh_of(stack):
    return PIPE if "pipe" in stack else DATA if "shard" in stack else ALONE


def trained(
    stack,
    optimizer,
    fn=loss,
    batches=(X, X),
    init=WS,
    mesh=None,
    wrap=None,
    look=None,
    **laid,
):
    """A `Run` of each rank: one step a batch, of which it has its rows.

    Args:
        stack: a name of `STACKS`, or a function of its kind, with its mesh.
        wrap: of the step, before the stack.
        look: is given the optimizer's state after each step.
        laid: options of `init_state`.
    """
    mesh = mesh or mesh_of(stack)
    around = STACKS.get(stack) if isinstance(stack, str) else stack
    step = optimizer(ff.value_and_grad(fn))
    step = around(step if wrap is None else wrap(step), mesh)
    look_at = look and (lambda state: look(state.opt_state))
    given = {"batches": [(b,) for b in batches], "look": look_at, **laid}
    return [
        Run(r.params, [m["loss"] for m in r.outs], r.state.opt_state, r.sent, r.seen)
        for r in checks.trained(step, init, optimizer, mesh=mesh, **given)
    ]


def bytes_of(run):
    return sum(size for _, _, size, _, _ in run.sent)


def parts(t):
    """This rank's tensors and numbers."""
    leaves = ff.tree.leaves(t, is_leaf=is_sharded)
    return [x.local if is_sharded(x) else x for x in leaves]


def gain_of(state):
    """AdaScale's gain, and the sum of all."""
    ours = state if hasattr(state, "gain") else state.inner
    return ours.gain.item(), ours.iterations.item()


def squares(g):
    return g.double().square().sum()
