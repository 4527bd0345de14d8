"""Exact runs: equal programs have equal bits there, and others are told apart."""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.testing import NoExactRule, assert_equals_one_device, exact, residues
from fsfunc.testing.finite_field import PRIME

WIDTH, HEADS, WORDS, LENGTH = 4, 2, 5, 3


@ff.unit
def embed(table, tokens):
    return F.embedding(tokens, table)


@ff.unit
def block(p, x):
    rows, length, width = x.shape
    h = F.layer_norm(x, (width,), p["scale"], p["bias"])
    heads = (h @ p["qkv"]).view(rows, length, 3, HEADS, -1)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.transpose(1, 2).reshape(x.shape) @ p["out"]
    return x + F.gelu(F.rms_norm(x, (width,), p["gain"]) @ p["up"]) @ p["down"]


@ff.unit
def head(p, x, targets):
    return F.cross_entropy((x @ p).flatten(0, 1), targets.flatten())


def loss_fn(params, batch):
    x = embed(params["table"], batch["tokens"])
    for p in params["blocks"]:
        x = block(p, x)
    return head(params["head"], x, batch["targets"])


def parameters():
    zeros = torch.zeros
    return {
        "table": zeros(WORDS, WIDTH),
        "blocks": [
            {
                "scale": zeros(WIDTH), "bias": zeros(WIDTH), "gain": zeros(WIDTH),
                "qkv": zeros(WIDTH, 3 * WIDTH), "out": zeros(WIDTH, WIDTH),
                "up": zeros(WIDTH, 2 * WIDTH), "down": zeros(2 * WIDTH, WIDTH),
            }
            for _ in range(2)
        ],
        "head": zeros(WIDTH, WORDS),
    }  # fmt: skip


def batch_of(rows=12):
    draw = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, WORDS, (2, rows, LENGTH), generator=draw)
    return {"tokens": tokens, "targets": targets}


OPTIMIZER = ff.chain(
    ff.clip_by_global_norm(1.0), ff.sharded_adam(1e-2, weight_decay=0.1)
)


def train_step(state, batch):
    loss, grads = ff.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads, OPTIMIZER), {"loss": loss}


def check(transformed, mesh, **how):
    batch = batch_of()
    state = ff.init_state(train_step, parameters(), OPTIMIZER, batch)
    assert_equals_one_device(
        train_step, transformed, mesh, state, batch, goes_on=lambda out: out[0],
        exact=True, **how,
    )  # fmt: skip


def simulated(**axes):
    return ff.make_mesh(axes, "simulated")


FOUR, DATA = simulated(data=4), simulated(data=2)
HYBRID = simulated(data=2, node=2)
PIPE, BOTH = simulated(pipe=2), simulated(data=2, pipe=2)

STACKS = {
    "zero 3": (FOUR, lambda f: ff.shard(f, FOUR, "data")),
    "zero 3, three ranks": (simulated(data=3), None),
    "zero 2, rematerialized": (
        DATA, lambda f: ff.remat(ff.shard(f, DATA, "data", zero=2)),
    ),
    "zero 1, donated": (DATA, lambda f: ff.donate(ff.shard(f, DATA, "data", zero=1))),
    "zero 0": (DATA, lambda f: ff.shard(f, DATA, "data", zero=0)),
    "hybrid": (HYBRID, lambda f: ff.shard(f, HYBRID, "data", replicate="node")),
    "accumulated": (
        HYBRID,
        lambda f: ff.shard(ff.remat(ff.accumulate(f, 3)), HYBRID, ("data", "node")),
    ),
    "pipeline": (
        BOTH,
        lambda f: ff.shard(
            ff.pipeline(f, BOTH, "pipe", n_microbatches=2), BOTH, "data"
        ),
    ),
    "zero bubbles": (
        PIPE,
        lambda f: ff.pipeline(
            f, PIPE, "pipe", n_microbatches=4, schedule=ff.schedules.zb_h1
        ),
    ),
    "bfloat16": (
        DATA, lambda f: ff.shard(ff.precision(f, torch.bfloat16), DATA, "data"),
    ),
    "offloaded": (
        DATA, lambda f: ff.shard(ff.offload(f, params="host"), DATA, "data"),
    ),
    "compiled units": (DATA, lambda f: ff.shard(ff.jit(f), DATA, "data")),
    "a compiled step": (
        DATA, lambda f: ff.jit(ff.shard(f, DATA, "data"), whole_step=True),
    ),
}  # fmt: skip


AGAIN = "zero 3", "zero 1, donated", "accumulated", "pipeline"


@pytest.mark.parametrize("name", STACKS)
def test_a_step_is_the_same_function_under_every_stack(name):
    mesh, stack = STACKS[name]
    stack = stack or (lambda f: ff.shard(f, mesh, "data"))
    how = {"axis": ()} if "data" not in mesh.axes else {}
    # All of a state is drawn, so that one call computes all; a second one meets what
    # the first one left in buffers.
    check(stack(train_step), mesh, calls=1 + (name in AGAIN), **how)


# What is proven, and how sure that is


def test_a_proof_says_what_was_compared():
    batch, mesh = batch_of(), simulated(data=2)
    state = ff.init_state(train_step, parameters(), OPTIMIZER, batch)
    proof = ff.prove(
        train_step, ff.shard(train_step, mesh, "data"), mesh, state, batch,
        goes_on=lambda out: out[0],
    )  # fmt: skip
    assert ("1/loss", "f64[]") in proof.leaves and proof.calls == 2
    assert proof.functions > 10 and proof.divisions > 10
    # A norm is clipped or is not: draws go on until both have been seen.
    assert proof.decided == 2 and proof.one_way == 0 and proof.draws >= 2
    assert 0 < proof.chance < 1e-9
    said = str(proof)
    stack = "shard(train_step, data=2, zero=3)"
    assert said.startswith(f"{stack} on Mesh({{'data': 2}}, 'simulated') equals")
    assert f"{proof.draws} draws; wrong with a chance of about" in said
    assert "0/params/blocks/0-1/qkv ×2" in said


def test_a_fault_behind_a_comparison_is_seen_from_both_sides():
    """What is scaled only where the norm is too large: half of all draws see it."""
    mesh, x = simulated(data=2), torch.zeros(4, 3)

    def one(w, x):
        size = (x @ w).square().mean()
        return torch.where(size > 1, size, size * 0)

    def both(w, x):
        size = ff.pmean((x @ w).square().mean(), "data")
        return torch.where(size > 1, size, size * 0)

    w = torch.zeros(3)
    proof = ff.prove(one, both, mesh, w, x)
    assert proof.decided == 2 and not proof.one_way

    def wrong(w, x):
        size = ff.pmean((x @ w).square().mean(), "data")
        return torch.where(size > 1, size * (1 + 1e-9), size * 0)

    with pytest.raises(AssertionError, match="differs"):
        ff.prove(one, wrong, mesh, w, x)


# What differs, however little


def off_by(relative):
    """A train step whose loss, and gradients, are a little too large."""

    def train_step(state, batch):
        def loss_fn_off(params, batch):
            loss = loss_fn(params, batch)
            return loss + relative * loss

        loss, grads = ff.value_and_grad(loss_fn_off)(state.params, batch)
        return state.apply_gradients(grads, OPTIMIZER), {"loss": loss}

    return train_step


@pytest.mark.parametrize("relative", [1e-3, 1e-6, 1e-9, 1e-12])
def test_a_difference_is_seen_whatever_its_size(relative):
    with pytest.raises(AssertionError, match="is not train_step on one device"):
        check(ff.shard(off_by(relative), DATA, "data"), DATA, calls=1)


def test_a_common_mistake_is_named():
    gradients = lambda w, x: torch.func.grad(lambda w: (x @ w).square().mean())(w)  # noqa: E731
    mesh = simulated(data=2)
    with pytest.raises(AssertionError, match="2 times too large, the size of .data."):
        assert_equals_one_device(
            gradients, lambda w, x: ff.psum(gradients(w, x), "data"), mesh,
            torch.zeros(3), torch.zeros(4, 3), exact=True,
        )  # fmt: skip


def test_a_mean_over_the_wrong_rows_is_seen_at_any_weight():
    """A regularizer of weight 1e-9 is taken of this rank's rows in the place of all."""

    def step(w, x, reduce=lambda m: m):
        def loss(w, x):
            spread = (x @ w - reduce((x @ w).mean())).square().mean()
            return (x @ w).square().mean() + 1e-9 * spread

        return ff.value_and_grad(loss)(w, x)

    mesh = simulated(data=2)
    sharded = ff.shard(lambda w, x: step(w, x), mesh, "data", zero=0)
    with pytest.raises(AssertionError, match="differs"):
        assert_equals_one_device(
            step, sharded, mesh, torch.zeros(3), torch.zeros(4, 3), exact=True
        )
    # In floats it passes: 1e-9 is below every tolerance that rounding needs.
    draw = torch.randn(3), torch.randn(4, 3)
    assert_equals_one_device(step, sharded, mesh, *draw, tolerance=1e-6)


# Context


def test_random_residues_depend_on_the_path_and_the_seed():
    w = torch.zeros(3, dtype=torch.bfloat16)
    values = {"a": w, "b": torch.zeros(3), "tied": w, "n": torch.arange(3), "x": 0.5}
    drawn, again, other = residues(values), residues(values), residues(values, seed=1)
    assert drawn["a"].dtype == torch.float64 and drawn["a"] is drawn["tied"]
    assert torch.equal(drawn["a"], again["a"])
    assert not torch.equal(drawn["a"], drawn["b"])
    assert not torch.equal(drawn["a"], other["a"])
    assert drawn["n"] is values["n"] and drawn["x"] == 0.5
    assert bool((drawn["b"] >= 0).all()) and bool((drawn["b"] < PRIME).all())
    with pytest.raises(TypeError, match="'w' is complex"):
        residues({"w": torch.zeros(2, dtype=torch.complex64)})


def test_what_has_no_rule_is_refused_by_name():
    x = residues(torch.zeros(3, 3))
    unit = ff.unit(lambda w, x: torch.linalg.matrix_exp(x) @ w)
    with exact():
        with pytest.raises(
            NoExactRule,
            match=r"linalg_matrix_exp .* at .*test_exact.py:\d+, in unit '<lambda>'",
        ):
            unit(x, x)
        with pytest.raises(NoExactRule, match="bernoulli_.* draws numbers.*p=0.0"):
            F.dropout(x, 0.5)
        with pytest.raises(NoExactRule, match="codes of 8 bits"):
            x.to(torch.int8)
        with pytest.raises(NoExactRule, match="complex"):
            x.to(torch.complex64)
    outside = torch.zeros(3, 3)
    with exact(), pytest.raises(NoExactRule, match="float32 of shape .3, 3., made out"):
        outside.copy_(x)


def test_a_constant_is_one_number_however_it_is_written():
    """In a tensor, of any dtype, too: also one that is as large as numbers are."""
    x = residues(torch.zeros(3))
    narrow = torch.tensor([1e8, 0.1])  # made outside
    with exact():
        for constant in (1e8, 0.1, 3.5e7, -2.0):
            for dtype in (torch.float32, torch.float64):
                made = torch.tensor(constant, dtype=dtype)
                assert torch.equal(x * made, x * constant), (constant, dtype)
                assert torch.equal(x * torch.full((3,), constant), x * constant)
        assert torch.equal(x[:2] * narrow, torch.stack([x[0] * 1e8, x[1] * 0.1]))
        # And two constants of a few bits are two.
        near = torch.tensor([0.5, 0.498], dtype=torch.bfloat16)
        assert not torch.equal(near[0] * x, near[1] * x)


def test_a_rule_that_refuses_says_what_and_where():
    x = residues(torch.zeros(3))
    at = torch.tensor([0, 1, 1])
    with exact():
        with pytest.raises(
            NoExactRule, match=r"scatter_reduce in .* at .*test_exact.py:\d+: .*'prod'"
        ):
            x.scatter_reduce(0, at, x, "prod")
        with pytest.raises(NoExactRule, match=r"mul in .* at .*test_exact.py:.*NaN"):
            x * float("nan")


def test_what_contradicts_itself_is_refused():
    mesh, w = simulated(data=2), torch.zeros(2)
    step = lambda w, x: w * 2  # noqa: E731
    with exact(), pytest.raises(RuntimeError, match="inside of an exact run"):
        ff.prove(step, step, mesh, w, w)
    with pytest.raises(ValueError, match="draws=0: nothing would be compared"):
        ff.prove(step, step, mesh, w, w, draws=0)
    with pytest.raises(ValueError, match="tolerance=0.1 in an exact run"):
        assert_equals_one_device(step, step, mesh, w, w, exact=True, tolerance=0.1)


def test_what_writes_adds_in_the_field():
    """Sums that are made in place are residues, as those of new tensors are."""
    top, at = torch.full((2,), PRIME - 1.0, dtype=torch.float64), torch.tensor([0, 0])
    with exact():
        put = top.clone().index_put_((at,), top, accumulate=True)
        columns = torch.ones(1, 2, requires_grad=True)
        columns[:, at].mul(PRIME - 1).sum().backward()
        scattered = top.clone().scatter_(0, at, top, reduce="add")
        added = torch.empty(2, dtype=torch.float64)
        torch.add(top, top, out=added)
        counted = torch.zeros(2, dtype=torch.int64).copy_(top)
        windows = torch.ones(3, requires_grad=True)
        (windows.unfold(0, 2, 1) * (PRIME - 1)).sum().backward()
    assert put.tolist() == scattered.tolist() == [PRIME - 3, PRIME - 1]
    assert added.tolist() == [PRIME - 2] * 2
    assert counted.tolist() == [-1, -1]
    assert columns.grad.tolist() == [[PRIME - 2, 0]]
    assert windows.grad.tolist() == [PRIME - 1, PRIME - 2, PRIME - 1]


@pytest.fixture
def filled_with_nan():
    """Memory that nobody has written holds NaN, as torch fills it on request."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_with_nan")
def test_memory_that_nobody_has_written_holds_zeros():
    """Else whether a run is refused would depend on what was there before."""
    with exact():
        x = torch.ones(2, 2)
        for unwritten in (torch.empty(2, 2), x.new_empty(2, 2), torch.empty_like(x)):
            assert (unwritten @ x).tolist() == [[0.0, 0.0]] * 2


def test_quantised_messages_are_refused():
    step = ff.shard(train_step, DATA, "data", gather=ff.QuantizedGather())
    with pytest.raises(NoExactRule, match="codes of 8 bits"):
        check(step, DATA)


def test_ranks_that_are_started_inside_compute_exactly():
    mesh, x = simulated(data=2), residues(torch.zeros(5))

    def main():
        return ff.psum(x * 0.5, "data")

    with exact():
        for total in ff.spmd(main, mesh)():
            assert torch.equal(total, x)
    assert not torch.equal(ff.spmd(main, mesh)()[0], x / 2)


PROGRAM = """
import fsfunc as ff
from tests.testing.test_exact import (
    OPTIMIZER, batch_of, off_by, parameters, train_step
)

for shared in (True, False):
    mesh = ff.make_mesh({"data": 2}, shared_memory=shared)
    batch = batch_of()
    state = ff.init_state(train_step, parameters(), OPTIMIZER, batch)

    def proof(step):
        sharded = ff.shard(step, mesh, "data")
        return ff.prove(
            train_step, sharded, mesh, state, batch, goes_on=lambda out: out[0], draws=1
        )

    print(str(proof(train_step)).splitlines()[0])
    try:
        proof(off_by(1e-12))
    except AssertionError as error:
        print("told apart:", str(error).splitlines()[1])
"""


@pytest.mark.processes(slow=False)
def test_processes_compute_exactly_too(processes):
    printed = processes(PROGRAM, 2).splitlines()
    stack = "shard(train_step, data=2, zero=3)"
    equal = f"{stack} on Mesh({{'data': 2}}, 'processes') equals train_step"
    assert sum(line.startswith(equal) for line in printed) == 4
    assert sum(line.startswith("told apart: '0/params") for line in printed) == 4
