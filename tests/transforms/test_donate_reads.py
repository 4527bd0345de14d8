"""Donated equals not donated, whatever a step reads of the old state, or it says why.

What a step keeps of an old leaf before the update (a view, a copy, a graph) it may read
after it; the old leaf itself then raises.
"""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.donated import overlaps
from fsfunc.sharded.leaf import is_sharded
from tests.checks import same, unchanged
from tests.models import chain, floats, layers

MESH = ff.make_mesh({"data": 2}, "simulated")
X = torch.arange(16.0).view(4, 4) / 16
OLD = "read it before the update, or keep a copy"


def loss(params, x):
    return chain()(params["layers"], x)


def fresh():
    return {"layers": layers(2, make=floats), "frozen": torch.ones(3)}


def trained(path, leaf):
    return "frozen" not in path


def label(path, leaf):
    return path[-1] if trained(path, leaf) else None


OPTIMIZERS = {
    "adam": lambda: ff.masked(ff.sharded_adam(0.1), trained),
    "sgd": lambda: ff.masked(ff.sgd(0.1, momentum=0.9), trained),
    "partition": lambda: ff.partition(
        {"w": ff.sgd(0.1), "b": ff.sharded_adam(0.1)}, label
    ),
    "clipped": lambda: ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.1)),
    "torch's": lambda: ff.from_torch(torch.optim.RMSprop, lr=0.1),
    "added": lambda: ff.scale(-0.1),
}
ALL = {"clipped", "torch's", "added"}  # which train the leaf that no unit reads, too
ALONE = ("alone", "remat")
STACKS = {
    "alone": lambda f: f,
    "remat": ff.remat,
    "zero=0": lambda f: ff.shard(f, MESH, "data", zero=0),
    "zero=1": lambda f: ff.shard(f, MESH, "data", zero=1),
    "zero=2, bf16": lambda f: ff.precision(
        ff.shard(f, MESH, "data", zero=2), compute=torch.bfloat16
    ),
    "zero=3": lambda f: ff.shard(f, MESH, "data"),
    "zero=3, merged": lambda f: ff.shard(f, MESH, "data", min_bytes=1 << 20),
    "accumulate": lambda f: ff.accumulate(ff.shard(f, MESH, "data"), 2),
}


def parts(values):
    """What the rank holds, in memory of its own."""
    return mapped(torch.Tensor.double, values)


def mapped(of, values):
    return tree.map(lambda x: of(x) if isinstance(x, torch.Tensor) else x, values)


# What is kept of a state before the update, and what is then done with it after.
KEPT = {
    "itself": lambda s: s.params,
    "moments": lambda s: [x for x in tree.leaves(s.opt_state, is_leaf=is_sharded)
                          if is_sharded(x) or isinstance(x, torch.Tensor)],
    "mapped": lambda s: mapped(lambda x: x, s.params),
    "as it is": lambda s: mapped(lambda x: x.float().contiguous(), s.params),
    "view": lambda s: mapped(lambda x: x.view(-1), s.params),
    "detached": lambda s: mapped(lambda x: x.detach(), s.params),
    "data": lambda s: mapped(lambda x: x.data, s.params),
    "copy": lambda s: mapped(lambda x: x.clone(), s.params),
    "frozen": lambda s: s.params["frozen"],
}  # fmt: skip
RIGHT = {"view", "detached", "data", "copy"}  # never refused
USES = {
    "summed": lambda s, kept, x: parts(kept),
    "returned": lambda s, kept, x: kept,
    "evaluated": lambda s, kept, x: loss(kept, x),
    "differentiated": lambda s, kept, x: ff.value_and_grad(loss)(kept, x)[0],
    "stock": lambda s, kept, x: parts(torch.func.grad(loss)(kept, x)),
    "where": lambda s, kept, x: parts(
        tree.map(lambda a, b: torch.where(a > 0, a, b), s.params, kept)
    ),
    "moved": lambda s, kept, x: ff.global_norm(
        tree.map(lambda a, b: a - b, s.params, kept)
    ),
    "unshard": lambda s, kept, x: parts(ff.unshard(kept)),
}
WHOLE = set(USES) - {"summed"}  # of whole parameters


def step_of(optimizer, plan):
    """A step that keeps and reads as ``plan`` says: (what, use, before or after)."""

    def step(state, x):
        _, grads = ff.value_and_grad(loss)(state.params, x)
        kept = [KEPT[what](state) for what, _, _ in plan]
        seen = [
            USES[use](state, k, x) if not after else None
            for k, (_, use, after) in zip(kept, plan, strict=True)
        ]
        new = state.apply_gradients(grads, optimizer)
        for i, (_, use, after) in enumerate(plan):
            if after:
                seen[i] = USES[use](new, kept[i], x)
        return new, (seen, loss(new.params, x))

    return step


def run(name, stack, plan, donated):
    """Two steps; what they returned, or how they were refused."""
    optimizer = OPTIMIZERS[name]()
    step = STACKS[stack](step_of(optimizer, plan))
    step = ff.donate(step) if donated else step
    plain = STACKS[stack](step_of(optimizer, []))
    x = X if stack in ALONE else ff.local_batch(X, MESH, "data")
    state = ff.init_state(plain, fresh, optimizer, x)
    out = []
    for _ in range(2):
        watch = nullcontext() if donated else unchanged(ff.unshard(state))
        try:
            with watch:
                state, seen = step(state, x)
            seen = tree.map(snapshot, seen)
        except RuntimeError as error:
            if OLD not in str(error):
                raise
            return [*out, "refused"]
        out.append(seen)
    return [*out, ff.unshard(state)]


def snapshot(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def fits(plan):
    return all(use not in WHOLE or what not in PARTIAL for what, use, _ in plan)


PARTIAL = {"view", "moments", "frozen"}
WHEN = st.booleans()  # after the update
READS = st.tuples(st.sampled_from(list(KEPT)), st.sampled_from(list(USES)), WHEN)


@example("sgd", "alone", [("itself", "where", True)], False)
@example("sgd", "zero=3", [("itself", "moved", True)], False)
@example("adam", "alone", [("itself", "stock", True)], False)
@example("adam", "zero=1", [("as it is", "moved", True)], True)
@example(
    "adam", "zero=0", [("detached", "moved", True), ("frozen", "summed", True)], True
)
@given(
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(list(STACKS)),
    st.lists(READS, max_size=3).filter(fits),
    st.booleans(),
)
@settings(max_examples=5)
def test_donated_is_not_donated_whatever_is_read(name, stack, plan, late):
    """Also with leaves that are marked when the step is over, as those of processes."""

    def main():
        return [run(name, stack, plan, donated) for donated in (False, True)]

    alone = stack in ALONE
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr("fsfunc.transforms.donation._ranks_meet", lambda: False)
        found = [main()] if alone else ff.spmd(main, MESH)()
    for pure, donated in found:
        if donated[-1] != "refused":
            same(donated, pure)
            continue
        same(donated[:-1], pure[: len(donated) - 1])
        late = [what for what, use, after in plan if after or use == "returned"]
        read = set(late) - RIGHT
        assert read - ({"frozen"} if name not in ALL else set())


def test_leaves_of_other_dtypes_in_one_memory_are_seen_to_overlap():
    memory = torch.arange(16.0, dtype=torch.float64)
    pairs = torch.view_as_complex(memory.view(8, 2))
    cases = [
        (memory[8:], pairs[4:], True),
        (memory[:8], pairs[4:], False),
        (memory[:4].view(torch.float32), memory[4:8], False),
        (memory[4:8].view(torch.int32), memory[4:5], True),
    ]
    for first, second, meet in cases:
        ends: list[tuple[int, int]] = []
        assert not overlaps(first, ends)
        assert overlaps(second, ends) == meet
