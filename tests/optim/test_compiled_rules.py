"""Updates under jit: rules without a fused kernel compile, once for any size."""

import pytest
import torch
from torch._dynamo.utils import counters

import fsfunc as ff
from fsfunc.optim.schedules import warmup_cosine
from tests.checks import close, same
from tests.models import floats
from tests.optim.steps import DATA, X, loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def made():
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def forgotten():
    counters.clear()
    yield
    torch._dynamo.reset()


def matrices(path, leaf):
    return leaf.ndim > 1


RATE = warmup_cosine(0.1, 2, 8)
# The optimizer, and how many graphs its update is: where some leaves decay, one more.
KINDS = {
    "lion": (ff.lion(RATE, weight_decay=0.1), 1),
    "lion, no decay": (ff.lion(RATE, weight_decay=0.0), 1),
    "lion, mask": (ff.lion(RATE, weight_decay=0.1, mask=matrices), 2),
    "lion, bfloat16": (ff.lion(0.1, moment_dtype=torch.bfloat16), 1),
    "lamb": (ff.lamb(RATE, weight_decay=0.1), 1),
    "lamb, mask": (ff.lamb(0.1, weight_decay=0.1, mask=matrices), 2),
    "sharded_adam": (ff.sharded_adam(RATE), 0),  # which has a fused kernel
    "sgd": (ff.sgd(RATE, momentum=0.9), 0),
    "lion, 8 bits": (ff.lion(RATE, moment_dtype=torch.uint8), 0),
}
SHAPES = [(30, 40), (17,), (1,), (8, 9, 10), (5, 4)]
PARAMS = [floats(*shape, seed=i) for i, shape in enumerate(SHAPES)]


def grads(step):
    """Gradients, of which one does not lie densely."""
    made = [floats(*shape, seed=10 * step + i) for i, shape in enumerate(SHAPES)]
    made[0] = floats(40, 30, seed=step).t()
    made[4] = floats(1, 1, seed=step).expand(5, 4)
    return made


def updated(optimizer, transform=lambda step: step):
    step = transform(lambda state, g: (state.apply_gradients(g, optimizer), None))
    state = ff.init_state(step, PARAMS, optimizer, grads(0))
    for k in range(3):
        state, _ = step(state, grads(k))
    return state.params, state.opt_state


ORDERS = ["jit", "jit(donate)"]  # by turns, and both of one
BY_TURNS = [(kind, ORDERS[i % 2]) for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "order"), [*BY_TURNS, ("lion", "jit(donate)")])
def test_a_compiled_update_is_the_plain_one(kind, order):
    """The same bits, of graphs that serve all sizes, steps and rates."""
    optimizer, graphs = KINDS[kind]
    expected = updated(optimizer)
    assert not made()
    jit = lambda step: ff.jit(step, backend="aot_eager")  # noqa: E731
    donated = lambda step: jit(ff.donate(step))  # noqa: E731
    same(updated(optimizer, jit if order == "jit" else donated), expected)
    assert made() == graphs


def shard(step, zero):
    return ff.shard(step, DATA, "data", zero=zero)


LION = ff.lion(RATE, weight_decay=0.1)
CHAINS = {
    "lion": LION,
    "clipped": ff.chain(ff.clip_by_global_norm(0.1), LION),
    "scaled": ff.loss_scale(LION),
    "lamb": KINDS["lamb"][0],
}
STACKS = {
    "zero=0": lambda step: shard(step, 0),
    "zero=1": lambda step: shard(step, 1),
    "zero=2, donate": lambda step: ff.donate(shard(step, 2)),
    "zero=3, donate": lambda step: ff.donate(shard(step, 3)),
    "zero=3, accumulate": lambda step: shard(ff.accumulate(step, 2), 3),
}


def trained(optimizer, transform):
    def main():
        step = transform(optimizer(ff.value_and_grad(loss)))
        mine = ff.local_batch(X, DATA, "data")
        state, losses = ff.init_state(step, WEIGHTS, optimizer, mine), []
        with ff.ledger() as log:
            for _ in range(3):
                state, metrics = step(state, mine)
                losses.append(metrics["loss"])
        sent = [(r.op, r.axis, r.bytes, r.phase) for r in log.of(DATA.rank)]
        return losses, ff.unshard(state.params), sent

    return ff.spmd(main, DATA)()[0]


WEIGHTS = list(floats(3, 4, 4, seed=1))


PAIRS = [*zip(STACKS, ["lion", *CHAINS], strict=True)]  # each stack and chain


@pytest.mark.parametrize(("stack", "chain"), PAIRS)
def test_in_a_sharded_step_too(stack, chain):
    """The same bits, and the same record of what was sent."""
    optimizer, transform = CHAINS[chain], STACKS[stack]
    expected = trained(optimizer, transform)
    jit = lambda step: ff.jit(transform(step), only="none", backend="aot_eager")  # noqa: E731
    found = trained(optimizer, jit)
    same(found, expected)
    # Each rank's own step: one graph, and one more where its parts begin elsewhere in
    # the buffers that they lie in.
    assert 2 <= made() <= 3


@pytest.mark.slow  # the real compiler
@pytest.mark.parametrize("kind", ["lion, mask", "lion, bfloat16", "lamb, mask"])
def test_one_kernel_is_near_the_equation(kind):
    optimizer, _ = KINDS[kind]
    close(updated(optimizer, lambda s: ff.donate(ff.jit(s))), updated(optimizer))
