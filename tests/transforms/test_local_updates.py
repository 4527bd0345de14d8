"""Ranks that train by themselves, and meet now and then: as one device plays them all.

And as FairScale does, whose numbers stand here: SlowMoDistributedDataParallel of 0.4.13
over 2 to 4 gloo processes, one a node, 10 steps of SGD(0.125) on `sample` from
`START`, the slow momentum's buffers made before the first step.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.optim.coded_moments import decode_state
from tests.checks import all_refused, close, same, simulated
from tests.covering import examples
from tests.models import WIDTH, affine, chain, floats, layers, train_step

LR = 0.125


def nodes(n, data=1):
    return simulated(node=n, data=data)


# As one device plays them


def parameters(make=floats):
    """Leaves in units and beside them; of all kinds, and of no even size."""
    odd = {"scalar": torch.tensor(0.5), "empty": torch.zeros(0), "none": None}
    return {"layers": layers(1, make=make), "odd": odd, "n": torch.tensor([3, 4])}


def loss(p, x):
    odd = p["odd"]
    return chain()(p["layers"], x) + odd["scalar"] ** 2 + odd["empty"].sum()


def batch_of(t):
    return floats(8, WIDTH, seed=50 + t)


def mapped(f, *trees):
    """Floating tensors alone; other leaves are the first tree's."""
    real = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()  # noqa: E731
    return tree.map(lambda x, *xs: f(x, *xs) if real(x) else x, *trees)


def mean(trees):
    return mapped(lambda *xs: sum(xs) / len(xs), *trees)


class Average:
    """The mean of all, each so many steps."""

    def __init__(self, params, every=2):
        self.every = every

    def meet(self, t, before, after):
        return after if t % self.every else [mean(after)] * len(after)


class Slow(Average):
    """The equations of SlowMo, and plain averages each step in between."""

    beta, alpha = 0.5, 0.75

    def __init__(self, params, every=3):
        self.every, self.anchor = every, params
        self.m = mapped(torch.zeros_like, params)

    def meet(self, t, before, after):
        x = mean(after)
        if t % self.every:
            return [x] * len(after)
        change = mapped(lambda a, x: (a - x) / LR, self.anchor, x)
        self.m = mapped(lambda m, d: self.beta * m + d, self.m, change)
        self.anchor = mapped(lambda a, m: a - self.alpha * LR * m, self.anchor, self.m)
        return [self.anchor] * len(after)


GRAPH = [[[(0, 1)]], [[(1, 0)], [(0, 1)]], []]


class Push:
    """Push-sum of numerators by a matrix made of the graph."""

    def __init__(self, params, graph=GRAPH):
        self.graph, self.w = graph, [1.0, 1.0]

    def meet(self, t, before, after):
        x = [
            mapped(lambda b, a, w=w: w * b + (a - b), b, a)
            for w, b, a in zip(self.w, before, after, strict=True)
        ]
        moves = self.graph[(t - 1) % len(self.graph)]
        n = len(x)
        p = torch.eye(n)
        for s, d in (pair for pairs in moves for pair in pairs):
            p[d, s] += 1.0
        p /= p.sum(0)  # what a rank gives adds up to 1
        mixed = [
            mapped(lambda *xs, i=i: sum(p[i, j] * x for j, x in enumerate(xs)), *x)
            for i in range(n)
        ]
        self.w = (p @ torch.tensor(self.w)).tolist()
        return [
            mapped(lambda x, w=w: x / w, t) for t, w in zip(mixed, self.w, strict=True)
        ]


SLOWMO: dict[str, Any] = dict(every=3, beta=0.5, alpha=0.75, lr=LR, average_every=1)


KINDS = {
    "local_sgd": (lambda s, m: ff.local_sgd(s, m, "node", every=2), Average),
    "slowmo": (lambda s, m: ff.slowmo(s, m, "node", **SLOWMO), Slow),
    "gossip": (lambda s, m: ff.gossip(s, m, "node", GRAPH), Push),
}
OPTIMIZERS = {"adam": lambda: ff.sharded_adam(LR), "sgd": lambda: ff.sgd(LR)}


def played(rule, optimizer, params, steps):
    """Two nodes' parameters, by turns on one device, and the rule that joins them."""
    step, rule = train_step(loss, optimizer), rule(params)
    states = [ff.TrainState(params, optimizer.init(params)) for _ in range(2)]
    for t in range(steps):
        halves = batch_of(t).chunk(2)
        after = [step(s, x)[0] for s, x in zip(states, halves, strict=True)]
        both = ([s.params for s in each] for each in (states, after))
        joined = rule.meet(t + 1, *both)
        states = [s.replace(params=p) for s, p in zip(after, joined, strict=True)]
    return states


def copy_of(state, mesh):
    """What a rank's own copy is, whole."""
    whole = ff.unshard(state.copies)
    i = mesh.coordinate("node")
    return tree.map(lambda x: x[i] if isinstance(x, torch.Tensor) else x, whole)


@settings(max_examples=examples(9))
@given(
    kind=st.sampled_from(sorted(KINDS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    zero=st.sampled_from([None, 0, 1, 2, 3]),
    donated=st.sampled_from(["", "within", "around"]),
    more=st.sampled_from(["", "remat", "accumulate"]),
    saved=st.booleans(),
)
def test_ranks_are_what_one_device_plays(
    tmp_path_factory, kind, optimizer, zero, donated, more, saved
):
    """Also where the copies of all ranks were saved, and loaded again."""
    path = tmp_path_factory.mktemp("copies") / "saved"
    wrap, rule = KINDS[kind]
    optimizer, mesh = OPTIMIZERS[optimizer](), nodes(2, 1 if zero is None else 2)
    expected = played(rule, optimizer, parameters(), steps=4)

    def main():
        step = train_step(loss, optimizer)
        step = ff.remat(step) if more == "remat" else step
        step = ff.accumulate(step, 2) if more == "accumulate" else step
        step = step if zero is None else ff.shard(step, mesh, "data", zero=zero)
        step = ff.donate(step) if donated == "within" else step
        step = wrap(step, mesh)
        step = ff.donate(step) if donated == "around" else step
        mine = lambda t: ff.local_batch(batch_of(t), mesh, ("node", "data"))  # noqa: E731
        state = ff.init_state(step, parameters(), optimizer, mine(0))
        for t in range(4):
            before = state
            state, _ = step(state, mine(t))
            if saved and t == 1:
                ff.save(path, state)
                again = ff.load(path, state)
                same(ff.unshard(again), ff.unshard(state))
                state = again
        if donated:
            with pytest.raises(RuntimeError, match="donated"):
                ff.unshard(before)
        return copy_of(state, mesh), ff.unshard(ff.consensus(state).params)

    out = ff.spmd(main, mesh)()
    for rank, (state, agreed) in enumerate(out):
        close(state, expected[mesh.coordinate("node", rank)], 2e-6)
        same(agreed, out[0][1])
    if kind != "gossip":
        close(out[0][1], mean([s.params for s in expected]), 2e-6)


# As FairScale does

START = {"w": torch.arange(3.0).view(3, 1) / 4 - 0.25, "b": torch.tensor([0.5])}
SLOW: dict[str, Any] = dict(beta=0.5, alpha=0.75, lr=LR, every=4)
FAIRSCALE = {
    "slowmo and averages of 3": (
        lambda s, m: ff.slowmo(s, m, "node", average_every=3, **SLOW),
        [[-0.2140618, -0.3965455, -0.2144471, 0.2595642],
         [-0.236952, -0.4269306, -0.2243912, 0.1554703],
         [-0.271402, -0.4343438, -0.1979518, -0.108378]],
    ),
    "slowmo of 3": (
        lambda s, m: ff.slowmo(s, m, "node", average_every=2, **SLOW),
        [[-0.2361681, -0.4214022, -0.2192011, 0.100774]] * 3,
    ),
    "gossip on a ring of 3": (
        lambda s, m: ff.gossip(s, m, "node", ff.graphs.ring(3)),
        [[-0.2604828, -0.4266099, -0.2005139, 0.116196],
         [-0.2113791, -0.3483959, -0.1650992, 0.2268324],
         [-0.2564385, -0.4172281, -0.1944201, 0.0632003]],
    ),
    "gossip by powers of 4": (
        lambda s, m: ff.gossip(s, m, "node", ff.graphs.directed_exponential(4)),
        [[-0.1702748, -0.2476205, -0.0973051, 0.199252],
         [-0.2230357, -0.3604159, -0.1664314, 0.0344617],
         [-0.2194213, -0.3674711, -0.1776697, -0.1184569],
         [-0.1666603, -0.2546756, -0.1085434, 0.0463333]],
    ),
}  # fmt: skip


def sample(t, rank):
    x = torch.sin(torch.arange(6.0).view(2, 3) + 2 * t + 3 * rank)
    return x, torch.cos(x.sum(1, keepdim=True) + rank)


@pytest.mark.parametrize("name", FAIRSCALE)
def test_numbers_of_fairscale(name):
    wrap, expected = FAIRSCALE[name]
    mesh, optimizer, layer = nodes(len(expected)), ff.sgd(LR), ff.unit(affine)

    def main():
        step = train_step(lambda p, x, y: (layer(p, x) - y).square().mean(), optimizer)
        step = ff.donate(wrap(ff.shard(step, mesh, "data"), mesh))
        whole = ff.shard(lambda state, x, y: x.mean(), mesh, "data")
        start = ff.TrainState(START, optimizer.init(START))
        start = ff.place(whole, start, *sample(0, 0))
        state, _ = step(start, *sample(0, mesh.rank))
        for t in range(1, 10):
            state, _ = step(state, *sample(t, mesh.rank))
        params = copy_of(state, mesh).params
        return torch.cat([params["w"].view(-1), params["b"]])

    close(list(ff.spmd(main, mesh)()), [torch.tensor(row) for row in expected], 1e-6)


# Graphs


@pytest.mark.parametrize("n", [3, 4, 9])
def test_a_round_of_meetings_mixes_everything(n):
    """Columns and rows of each meeting add up to 1, and means come ever closer."""
    graphs = ff.graphs
    made = [graphs.ring(n, 2), graphs.directed_exponential(n)]
    made += [graphs.n_peer_exponential(n, 2), graphs.directed_linear(n)]
    if n % 2 == 0:
        made += [graphs.bipartite_exponential(n), graphs.bipartite_linear(n)]
    for graph in made:
        total = torch.eye(n, dtype=torch.float64)
        for moves in graph * (8 * n):
            p = torch.eye(n, dtype=torch.float64)
            for s, d in (pair for pairs in moves for pair in pairs):
                p[d, s] += 1
            p /= p.sum(0)
            assert torch.allclose(p.sum(1), torch.ones(n, dtype=torch.float64))
            total = p @ total
        if graph != made[0] or n % 2:
            assert torch.allclose(total, torch.full_like(total, 1 / n), atol=1e-3)


# What is sent


def bytes_sent(wrap, steps, zero=3):
    """Over "node", step by step, of a rank; and the bytes of its parameters."""
    mesh, optimizer = nodes(2, 2), ff.sgd(LR)

    def main():
        step = wrap(
            ff.shard(train_step(chain(), optimizer), mesh, "data", zero=zero), mesh
        )
        mine = ff.local_batch(batch_of(0), mesh, ("node", "data"))
        state, sent = ff.init_state(step, layers(2), optimizer, mine), []
        first = mesh.rank == 0
        planned = ff.plan(step, state.replace(count=steps - 1), mine) if first else None
        for _ in range(steps):
            with ff.ledger() as log:
                state, _ = step(state, mine)
            sent.append(log.bytes("node"))
        if planned:  # of the last step
            assert planned.bytes("node") == sent[-1]
        return sent

    return ff.spmd(main, mesh)()[0]


PART = 2 * (WIDTH + 1) * WIDTH * 4 // 2  # float32, of which "data" has halves
TURNS = [[[(0, 1), (1, 0)]], [[(1, 0)]]]  # rank 0 sends in the first meeting alone


@pytest.mark.parametrize(
    ("wrap", "zero", "expected"),
    [
        (lambda s, m: ff.local_sgd(s, m, "node", every=3), 3, [0, 0, PART] * 2),
        (lambda s, m: ff.local_sgd(s, m, "node", every=1), 0, [2 * PART]),
        (lambda s, m: ff.slowmo(s, m, "node", every=2, lr=LR), 3, [0, PART] * 2),
        (lambda s, m: ff.gossip(s, m, "node", TURNS), 3, [PART, 0] * 2),
    ],
)
def test_bytes_are_those_of_a_mean_now_and_then(wrap, zero, expected):
    """2 (n - 1) / n of the parameters, with n = 2."""
    assert bytes_sent(wrap, len(expected), zero) == expected


# What is kept


def test_half_parameters_are_averaged_in_float32():
    mesh = nodes(3)
    values = [60000.0, 60000.0, 30000.0]  # whose sum is no float16

    def main():
        start = torch.zeros(3, dtype=torch.float16)
        x = torch.full((3,), -values[mesh.rank] / LR, dtype=torch.float32)
        step = ff.local_sgd(
            lambda s, x: (s.replace(params=s.params - (x * LR).half()), None),
            mesh, "node", every=1,
        )  # fmt: skip
        state, _ = step(ff.TrainState(start), x)
        return copy_of(state, mesh).params

    for found in ff.spmd(main, mesh)():
        same(found, torch.full((3,), 50000.0, dtype=torch.float16))


def test_without_a_shard_what_a_step_makes_of_a_state_is_a_copy_of_the_ranks():
    mesh = nodes(2)

    def count(s, x):
        return s.replace(extra={"n": s.extra["n"] + 1, "x": s.extra["x"] + x}), None

    def main():
        step, x = ff.local_sgd(count, mesh, "node", every=2), torch.tensor(mesh.rank)
        start = {"n": torch.tensor(0), "x": torch.tensor(0.0)}
        state = ff.TrainState(torch.zeros(3), extra=start)
        for _ in range(3):
            state, _ = step(state, x)
        return copy_of(state, mesh).extra, ff.consensus(state).extra["x"]

    for rank, found in enumerate(ff.spmd(main, mesh)()):
        own = {"n": torch.tensor(3), "x": torch.tensor(3.0 * rank)}
        same(found, (own, torch.tensor(1.5)))


# What is refused

MESH = nodes(2)
PLAIN = train_step(chain(), ff.sgd(LR))


SGD = ff.sgd(LR)


def state_of(params, optimizer=SGD):
    return ff.TrainState(params, optimizer.init(params))


def run(step, params=lambda: layers(1), *optimizer):
    """A first call of ``step()`` on two nodes."""
    start = lambda: state_of(params(), *optimizer)  # noqa: E731
    return lambda: ff.spmd(lambda: step()(start(), batch_of(0)), MESH)()


def local(step=PLAIN):
    return ff.local_sgd(step, MESH, "node", every=2)


def slow(rate):
    return ff.slowmo(PLAIN, MESH, "node", every=2, lr=rate)


def another_rank_s():
    step = local(ff.shard(PLAIN, MESH, "data"))
    start = lambda: ff.init_state(step, layers(1), SGD, batch_of(0))  # noqa: E731
    states = ff.spmd(start, MESH)()
    ff.spmd(lambda: step(states[0], batch_of(0)), MESH)()


def tracked():
    return [{"w": torch.eye(WIDTH).requires_grad_() * 2}]


def spanning(p, x):
    return ff.psum(chain()(p, x), "node")


def unlike_integers():
    step = local(lambda s, x: (s.replace(params={"n": s.params["n"] + x}), None))
    ff.consensus(step(ff.TrainState({"n": torch.tensor(1)}), MESH.rank)[0])


def graph(moves):
    return lambda: ff.gossip(PLAIN, MESH, "node", moves)


test_bad_input_is_refused = all_refused({
    "every=0": (
        lambda: ff.local_sgd(PLAIN, MESH, "node", every=0), ValueError, "at least 1"),
    "an axis that is not there": (
        lambda: ff.local_sgd(PLAIN, MESH, "pod", every=1), ValueError, "unknown axis"),
    "lr=0": (lambda: slow(0.0), ValueError, "above 0"),
    "beta<0": (
        lambda: ff.slowmo(PLAIN, MESH, "node", lr=1.0, beta=-1.0), ValueError, "beta"),
    "a rate of zero": (
        run(lambda: ff.slowmo(PLAIN, MESH, "node", every=1, lr=ff.linear(0.0, 1.0, 4))),
        ValueError, "above 0 at a slow step"),
    "a rank off the axis": (graph([[[(0, 2)]]]), ValueError, "indices of 0 to 1"),
    "a source twice": (graph([[[(0, 1), (0, 0)]]]), ValueError, "make two moves"),
    "no graph": (graph([]), ValueError, "list over time"),
    "a ring of one": (lambda: ff.graphs.ring(1), ValueError, "at least 2"),
    "an odd bipartite graph": (
        lambda: ff.graphs.bipartite_linear(5), ValueError, "even"),
    "too many peers": (lambda: ff.graphs.ring(4, 3), ValueError, "peers, from 1 to 2"),
    "unlike beginnings": (
        run(local, lambda: layers(1, seed=MESH.rank)), RanksDiffer,
        "parameters differ"),
    "unlike rates": (
        run(lambda: slow(ff.linear(1.0, 0.5, 10 + MESH.rank))), RanksDiffer,
        "slowmo/lr at count 1"),
    "inside a shard": (
        run(lambda: ff.shard(local(), MESH, "data"), list), ValueError, "goes around"),
    "over an axis of the shard": (
        run(lambda: local(ff.shard(PLAIN, MESH, "node"))), ValueError,
        "each axis once"),
    "another rank's state": (another_rank_s, ValueError, "give each rank its own"),
    "parameters that follow masters": (
        run(local, lambda: [{"w": torch.eye(WIDTH).bfloat16()}],
            ff.master_weights(SGD)), ValueError, "ff.precision"),
    "parameters between z and x": (
        run(local, lambda: layers(1), ff.schedule_free(SGD, LR)), ValueError, "/z/0/b"),
    "a loss that spans ranks": (
        run(lambda: local(train_step(spanning, SGD))), ValueError, "outside of it"),
    "a step that is differentiated": (
        run(local, tracked), ValueError, "inside the step"),
    "consensus of a plain state": (
        lambda: ff.consensus(state_of(layers(1))), TypeError, "LocalState"),
    "consensus of unlike integers": (
        lambda: ff.spmd(unlike_integers, MESH)(), RanksDiffer, "no mean"),
}, sent=True)  # fmt: skip


def test_moments_of_8_bits_have_a_consensus_by_what_they_stand_for():
    """Within a step of their codes; the same codes on every rank, to go on with."""
    optimizer = ff.sharded_adam(0.1, moment_dtype=torch.uint8)
    plain = train_step(chain(), optimizer)
    mesh = nodes(2, 2)

    def main():
        step = ff.local_sgd(ff.shard(plain, mesh, "data"), mesh, "node", every=2)
        mine = [ff.local_batch(batch_of(t), mesh, ("node", "data")) for t in range(4)]
        state = ff.init_state(step, layers(2), optimizer, mine[0])
        for x in mine[:3]:
            state, _ = step(state, x)
        agreed = ff.consensus(state)
        own = decode_state(copy_of(state, mesh).opt_state)
        agreed_moments = decode_state(ff.unshard(agreed).opt_state)
        for name in ("mu", "nu"):
            owns, means = getattr(own, name), getattr(agreed_moments, name)
            for x, y in zip(owns, means, strict=True):
                wanted = ff.pmean(x, "node")
                near = wanted.abs() / 8 + wanted.abs().max() * 2.0**-18
                assert ((y - wanted).abs() <= near).all() and wanted.abs().sum() > 0
        ff.testing.check_replicated(agreed.params, "node")
        step(agreed, mine[3])  # which compares all of it
        return agreed.opt_state.count

    assert ff.spmd(main, mesh)() == [3] * 4
