"""Recomputes within compiled units: a unit runs once, and its backward computes again.

The numbers, what is sent and what is planned are those of ``remat``; what is held is
less than without it.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import fsfunc as ff
from fsfunc._torch.partitions import partitioner
from fsfunc.transforms.compilation import _Compiler
from tests.checks import close, same, with_ledger
from tests.core.test_compiled import (
    PIPE,
    RAN,
    STEPS,
    UNITS,
    forgotten,  # noqa: F401  # a fixture that each test has
    loss_of,
    pipe,
    plain,
    shard,
    trained,
)
from tests.covering import by_turns
from tests.models import floats

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

HELD = []  # by run of a forward


@pytest.fixture
def eager(monkeypatch):
    """Graphs that are parted as the real compiler's are, and run operator by operator.

    Each run of a forward is noted.
    """

    def forward(graph, inputs):
        def ran(*args):
            RAN.append(graph)
            given = {x.untyped_storage()._cdata for x in args}
            out = graph(*args)
            made = {x.untyped_storage()._cdata: x for x in out}
            HELD.append(sum(x.nbytes for key, x in made.items() if key not in given))
            return out

        return make_boxed_func(ran)

    @functools.cache  # of equal backends graphs are shared
    def backend(share):
        parted = {} if share is None else {"partition_fn": partitioner(share)}
        backward = lambda graph, inputs: make_boxed_func(graph)  # noqa: E731
        return aot_autograd(fw_compiler=forward, bw_compiler=backward, **parted)

    def compile(self, fn, share=None):
        options = {"backend": backend(share), "fullgraph": True, "dynamic": False}
        return torch.compile(fn, **options)

    monkeypatch.setattr(_Compiler, "_compile", compile)


STACKS = {
    "zero=3": (lambda s, p: shard(ff.remat(s, p)), 1),
    "zero=3, casts": (
        lambda s, p: shard(ff.precision(ff.remat(s, p), compute=torch.float32)), 1,
    ),
    "zero=0": (lambda s, p: shard(ff.remat(s, p), zero=0), 1),
    "accumulate": (lambda s, p: ff.accumulate(shard(ff.remat(s, p)), 2), 2),
    "remat(shard)": (lambda s, p: ff.remat(shard(s), p), 2),
    "zero=0, casts": (
        lambda s, p: shard(
            ff.precision(ff.remat(s, p), compute=torch.float32), zero=0
        ), 2,
    ),
}  # fmt: skip


POLICIES = [None, ff.MinCut(0.3)]
# Of each stack, but the one in which a recompute differs.
BY_TURNS = by_turns([s for s in STACKS if s != "remat(shard)"], POLICIES)
BY_TURNS += [("remat(shard)", policy) for policy in POLICIES]


@pytest.mark.parametrize(("stack", "policy"), BY_TURNS)
def test_a_unit_runs_once_and_is_the_recomputed_one(eager, stack, policy):
    """The same bits, and the same record of what was sent, call by call."""
    transform, runs = STACKS[stack]
    expected = trained(loss_of(plain), lambda s: transform(s, None))
    *found, sent = trained(loss_of(plain), lambda s: ff.jit(transform(s, policy)))
    same(tuple(found), expected[:2])
    if policy and stack == "remat(shard)":  # there a recompute's are of a forward phase
        cut = lambda records: [r[:3] for r in records]  # noqa: E731
        assert cut(sent) == cut(expected[2])
    else:
        assert sent == expected[2]
    each = 1 + (stack == "accumulate") if policy else runs
    assert len(RAN) == STEPS * UNITS * 2 * each  # on two ranks


def test_what_a_pipeline_recomputes_runs_twice(eager):
    expected = trained(loss_of(plain), lambda s: pipe(ff.remat(s)), PIPE)
    same(trained(loss_of(plain), lambda s: ff.jit(pipe(ff.remat(s))), PIPE), expected)
    assert len(RAN) == STEPS * UNITS * 2 * 2  # microbatches


@ff.unit
def look_up(p, tokens):
    return F.embedding(tokens, p)


def test_a_unit_that_needs_no_parameters_again_is_gathered_again(eager):
    """As every unit under remat is: what is sent hangs on no choice of a compiler."""
    tokens = torch.arange(4)

    def sent(transform):
        step = shard(transform(ff.value_and_grad(loss)))
        given = [floats(4, 4, seed=i) for i in range(2)], tokens
        log = with_ledger(lambda mesh: step, *given, planned=True)[0][1]
        return [(r.op, r.bytes, r.phase) for r in log.records]

    loss = lambda ps, x: (look_up(ps[0], x) @ look_up(ps[1], x).t()).sum()  # noqa: E731
    expected = sent(ff.remat)
    for policy in (None, ff.MinCut()):
        assert sent(lambda f, p=policy: ff.jit(ff.remat(f, p))) == expected


@ff.unit
def mlp(p, x):
    h = F.gelu(x @ p["up"]) * torch.sigmoid(x)
    return torch.tanh(h @ p["down"]) + x


WIDTH = 16
PARAMS = [
    {"up": floats(WIDTH, WIDTH, seed=i), "down": floats(WIDTH, WIDTH, seed=i + 1)}
    for i in range(4)
]
ROWS = floats(256, WIDTH, seed=9)


def held_after_forward(transform):
    """Bytes that the forward pass of a unit makes for its backward, and its output."""
    HELD.clear()
    loss = lambda p, x: mlp(p, x).square().mean()  # noqa: E731
    transform(ff.value_and_grad(loss))(PARAMS[0], ROWS)
    return HELD[0]


def test_less_is_held_for_the_backward(eager):
    """All, a share, and inputs alone."""
    whole = held_after_forward(ff.jit)
    some = [
        held_after_forward(lambda f, s=s: ff.jit(ff.remat(f, ff.MinCut(s))))
        for s in (1.0, 0.7)
    ]
    none = held_after_forward(lambda f: ff.jit(ff.remat(f)))
    assert whole > some[0] > some[1] > none == ROWS.nbytes


def test_under_zero_what_costs_little_is_computed_again(eager):
    loss = lambda p, x: mlp(p, x).square().mean()  # noqa: E731

    def held(transform, **zero):
        HELD.clear()
        step = shard(ff.jit(transform(ff.value_and_grad(loss))), **zero)
        with_ledger(lambda mesh: step, PARAMS[0], ROWS)
        return HELD[0]

    same, least = (lambda f: f), (lambda f: ff.remat(f, ff.MinCut(1.0)))
    assert held(same, zero=3) == held(least, zero=3) == held(least, zero=0)
    assert held(same, zero=0) > held(same, zero=1) == held(least, zero=3)


@ff.unit
def dropped(p, x):
    h = F.dropout(torch.sin(x @ p["up"]), 0.5)
    h = torch.native_dropout(h, 0.25, True)[0]
    return torch.tanh(h * torch.rand_like(h)) @ p["down"]


@pytest.mark.parametrize("policy", ["none", None, ff.MinCut(0.1), ff.MinCut(0.6)])
def test_what_was_drawn_is_not_drawn_again(eager, policy):
    loss = lambda ps, x: dropped(ps[1], dropped(ps[0], x)).sum()  # noqa: E731
    again = loss if policy == "none" else ff.remat(loss, policy)
    torch.manual_seed(3)
    expected = ff.value_and_grad(loss)(PARAMS[:2], ROWS)
    torch.manual_seed(3)
    close(ff.value_and_grad(ff.jit(again))(PARAMS[:2], ROWS), expected)
    assert len(RAN) == 2


def refused(transform):
    loss = transform(lambda p, x: plain(p, x).sum())
    given = {"up": floats(4, 8), "down": floats(4, 8)}
    return ff.value_and_grad(loss)(given, floats(2, 4))


def least(f):
    return ff.remat(f, ff.MinCut())


REFUSED = {
    "without jit": least,
    "another backend": lambda f: ff.jit(least(f), backend="eager"),
    "several graphs": lambda f: ff.jit(least(f), fullgraph=False),
    "a unit that is left out": lambda f: ff.jit(least(f), only="other"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_least_cut_is_of_compiled_units(case):
    with pytest.raises(ValueError, match="unit 'layer' is under remat.*put jit around"):
        refused(REFUSED[case])
    with pytest.raises(ValueError, match="share is above 0"):
        ff.MinCut(0.0)


@pytest.mark.slow  # the real compiler
@pytest.mark.parametrize("policy", [None, ff.MinCut(0.5)])
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}])
def test_fused_kernels_compute_again_near_the_plain_numbers(policy, options):
    expected = trained(loss_of(plain), lambda s: shard(ff.remat(s)))
    stack = lambda s: ff.jit(shard(ff.remat(s, policy)), **options)  # noqa: E731
    found = trained(loss_of(plain), stack)
    close(found[:2], expected[:2])
    assert found[2] == expected[2]
