"""Where two steps part is told: the unit, its call, the phase, the rank, the leaf.

``FSFUNC_LONG_TESTS=1`` plants a hundred faults.
"""

import os
import random
from dataclasses import dataclass

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.core.execution_context import running
from fsfunc.core.frames import frame
from fsfunc.testing import first_difference
from tests.checks import simulated

EVERY = os.environ.get("FSFUNC_LONG_TESTS") == "1"
BLOCKS = 16 if EVERY else 2  # each calls two units within: 48 unit calls
WIDTH, ROWS = 2, 8
TINY = 1e-9


@dataclass
class Fault:
    """What goes wrong, in which call of a unit."""

    kind: str = ""
    path: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    leaf: str = ""
    rank: int | None = None
    micro: int | None = None

    def strikes(self, kind):
        """True in the unit's body, on the rank and in the microbatch that it is for."""
        f, at = frame(), self.rank
        return (
            self.kind == kind
            and not ff.recording()
            and (f.path, f.numbers) == (self.path, self.numbers)
            and (at is None or f.at is not None and f.at.rank == at)
            and (self.micro is None or f.micro[-1][0] == self.micro)
        )


NOW = Fault()


class Owed(torch.autograd.Function):
    """The identity, whose backward is a little too large."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * (1 + TINY)


def computed(w, x):
    """What each unit does, and the faults in it."""
    x = Owed.apply(x) if NOW.strikes("backward of an input") else x
    w = Owed.apply(w) if NOW.strikes("backward of a parameter") else w
    y = x @ w
    if running().recompute and NOW.strikes("recompute"):
        y = y * (1 + TINY)
    y = torch.tanh(y)
    return y * (1 + TINY) if NOW.strikes("forward") else y


@ff.unit
def mixing(p, x):
    return x + computed(p["w"], x)


@ff.unit
def gating(p, x):
    return computed(p["w"], x) * p["gain"]


@ff.unit
def block(p, x):
    y = gating(p["gating"], mixing(p["mixing"], x))
    return x + computed(p["w"], y)


def loss_fn(params, x):
    for p in params:
        x = block(p, x)
    return x.square().mean()


OPTIMIZER = ff.sharded_adam(1e-2, weight_decay=0.1)


def train_step(state, x):
    loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
    new = state.apply_gradients(grads, OPTIMIZER)
    if NOW.kind == "update":
        new = new.replace(params=at_leaf(new.params, lambda w: w * (1 + TINY)))
    return new, {"loss": loss}


def at_leaf(params, fn):
    """Does ``fn`` to one leaf."""
    paths, leaves, structure = tree.flatten_with_paths(params, is_leaf=ff.is_sharded)
    i = paths.index(NOW.leaf)
    leaves[i] = tree.map(fn, leaves[i])
    return tree.unflatten(structure, leaves)


class Reduction(ff.Interpretation):
    """Sums the gradients of a leaf in place of averaging them."""

    def gradient(self, run):
        def changed(call):
            outcome = run(call)
            _, (grads,) = outcome.mean()
            return outcome.with_mean((at_leaf(grads, lambda g: g * 2),))

        return changed


class Stale(ff.Interpretation):
    """Gives a unit a parameter that was not updated."""

    def unit(self, run, call):
        def stale(p, x):
            at, rank = call.frame.at, NOW.rank
            here = (call.path, call.numbers) == (NOW.path, NOW.numbers)
            here = here and (rank is None or at is not None and at.rank == rank)
            if here and not ff.recording():
                p = {**p, "w": p["w"] * (1 - TINY)}
            return run(p, x)

        return stale


DATA, PIPE = simulated(data=2), simulated(pipe=2)
BOTH, HYBRID = simulated(data=2, pipe=2), simulated(data=2, node=2)


def pipeline(f, mesh, **how):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=4, **how)


STACKS = {
    **{f"zero {z}": lambda f, z=z: ff.shard(f, DATA, "data", zero=z) for z in range(4)},
    "remat outside": lambda f: ff.remat(ff.shard(f, DATA, "data")),
    "remat inside": lambda f: ff.shard(ff.remat(f), DATA, "data"),
    "accumulated": lambda f: ff.shard(ff.accumulate(f, 2), DATA, "data"),
    "accumulated, rematerialized": lambda f: ff.remat(ff.accumulate(f, 4)),
    "pipeline": lambda f: pipeline(f, PIPE),
    "zero bubbles": lambda f: pipeline(f, PIPE, schedule=ff.schedules.zb_h1),
    "sharded pipeline": lambda f: ff.shard(
        pipeline(ff.remat(f), BOTH), BOTH, "data", zero=2
    ),
    "hybrid": lambda f: ff.shard(f, HYBRID, "data", replicate="node"),
    "donated": lambda f: ff.donate(ff.shard(f, DATA, "data", zero=1)),
    "offloaded": lambda f: ff.shard(ff.offload(f, params="host"), DATA, "data"),
}
MESHES = {
    "accumulated, rematerialized": None, "pipeline": PIPE, "zero bubbles": PIPE,
    "sharded pipeline": BOTH, "hybrid": HYBRID,
}  # fmt: skip
MICRO = {
    "accumulated": 2, "accumulated, rematerialized": 4, "pipeline": 4,
    "zero bubbles": 4, "sharded pipeline": 4,
}  # fmt: skip
PHASES = {
    "forward": "forward", "recompute": "recompute", "stale": "forward",
    "backward of an input": "backward", "backward of a parameter": "backward",
    "reduction": "reduction", "update": "update",
}  # fmt: skip


def planted(seed):
    """A fault, and the stack that it is in; drawn."""
    draw = random.Random(seed)
    stack = draw.choice([*STACKS])
    kinds = [k for k in PHASES if k != "recompute" or "remat" in stack]
    kind, k = draw.choice(kinds), draw.randrange(BLOCKS)
    name, inner = draw.choice([("", ""), ("gating", 1), ("mixing", 0)])
    if kind == "backward of an input":  # that of the first unit is not differentiated
        k = max(k, 1)
    path = ("block", name) if name else ("block",)
    numbers = (k, inner) if name else (k,)
    leaf = "/".join([str(k), *path[1:], "w"])
    fault = Fault(kind, path, numbers, leaf)
    mesh = MESHES.get(stack, DATA)
    if kind in ("reduction", "update"):
        return stack, fault
    if mesh is not None and "data" in mesh.axes:
        fault.rank = draw.randrange(mesh.size)
    if mesh is BOTH:  # a unit runs on one stage alone
        stage = k // (BLOCKS // 2)
        fault.rank = 2 * draw.randrange(2) + stage
    if kind != "stale" and stack in MICRO and draw.random() < 0.5:
        fault.micro = draw.randrange(MICRO[stack])
    return stack, fault


PLANTED = [planted(seed) for seed in range(100 if EVERY else 12)]


def data():
    zeros = torch.zeros
    params = [
        {
            "w": zeros(WIDTH, WIDTH),
            "mixing": {"w": zeros(WIDTH, WIDTH)},
            "gating": {"w": zeros(WIDTH, WIDTH), "gain": zeros(WIDTH)},
        }
        for _ in range(BLOCKS)
    ]
    x = zeros(ROWS, WIDTH)
    return ff.init_state(train_step, params, OPTIMIZER, x), x


def searched(stack, fault, monkeypatch, **how):
    step = train_step
    if fault.kind == "stale":
        step = ff.transformed(step, Stale())
    step = STACKS[stack](step)
    if fault.kind == "reduction":
        step = ff.transformed(step, Reduction())

    def right(state, x):
        monkeypatch.setitem(globals(), "NOW", Fault())
        return train_step(state, x)

    def wrong(state, x):
        monkeypatch.setitem(globals(), "NOW", fault)
        return step(state, x)

    wrong.interpretations = step.interpretations
    how = {"calls": 1, "goes_on": lambda out: out[0], "draws": 1, **how}
    return first_difference(right, wrong, *data(), **how)


@pytest.mark.parametrize("stack", STACKS if EVERY else ["remat inside", "pipeline"])
def test_equal_steps_do_not_part(stack, monkeypatch):
    assert searched(stack, Fault(), monkeypatch) is None


@pytest.mark.parametrize(("stack", "fault"), PLANTED)
def test_a_fault_is_found_where_it_is(stack, fault, monkeypatch):
    seen = searched(stack, fault, monkeypatch)
    assert seen is not None
    assert seen.phase == PHASES[fault.kind]
    if fault.kind in ("reduction", "update"):
        assert fault.leaf in seen.leaf
        return
    assert (seen.unit, seen.numbers) == ("/".join(fault.path), fault.numbers)
    if fault.rank is not None:
        assert seen.rank == fault.rank
    if fault.micro is not None:
        assert seen.microbatch == (fault.micro, MICRO[stack])
