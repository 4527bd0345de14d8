"""Experts on many ranks: equal to one device, by four all-to-alls a layer and step."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
import fsfunc.nn as nn
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.comm.typed_maps import LawError
from tests.checks import all_refused, close, simulated
from tests.covering import examples
from tests.probes import LiveBytes

LAST = torch.Generator().manual_seed(0)
D, HIDDEN = 4, 3


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=LAST, dtype=dtype)


def two_layers(p, x):
    """One expert: finite at a row of zeros, and not zero there."""
    return torch.tanh(x @ p["in"] + p["bias"]) @ p["out"]


def two_layers_grouped(p, rows, ends):
    """All experts of a rank, on rows that lie expert by expert."""
    starts = [0, *ends.tolist()]
    parts = zip(starts, starts[1:], strict=False)
    one = [{name: w[i] for name, w in p.items()} for i in range(len(ends))]
    return torch.cat([two_layers(one[i], rows[a:b]) for i, (a, b) in enumerate(parts)])


def experts(count):
    return {
        "in": draw(count, D, HIDDEN), "bias": draw(count, HIDDEN),
        "out": draw(count, HIDDEN, 2),
    }  # fmt: skip


def every_expert_on_every_token(x, routing, params):
    """The layer without a single move: tokens times experts, times weights."""
    y = torch.func.vmap(two_layers, in_dims=(0, None))(params, x)
    rows = y[routing.indices, torch.arange(len(x))[:, None]]
    return (rows * (routing.weights * routing.kept)[..., None]).sum(1)


def every_third(z):
    """Of rows; the others are padding."""
    return torch.arange(len(z)) % 3 == 0


GATES = {
    "top 1": lambda z: nn.top_1_gating(z, capacity_factor=1.25),
    "top 2": nn.top_2_gating,
    "top 2, tight": lambda z: nn.top_2_gating(z, capacity_factor=0.5),
    "dropless 1": lambda z: nn.top_k_gating(z, 1, normalize=False),
    "dropless 2": lambda z: nn.top_k_gating(z, 2),
    "padded": lambda z: nn.top_2_gating(z, used_token=every_third(z)),
    "dropless, padded": lambda z: nn.top_k_gating(z, 2, used_token=every_third(z)),
}
CALLS = {"one": (two_layers, False), "grouped": (two_layers_grouped, True)}
DRAWN = {
    "tokens": st.integers(1, 7),
    "here": st.integers(1, 3),
    "gate": st.sampled_from(sorted(GATES)),
    "call": st.sampled_from(sorted(CALLS)),
}


def loss_of(gate, call="one", axis=None, plain=False):
    """A group's own loss, by parameters and tokens."""
    fn, grouped = CALLS[call]

    def loss(params, x):
        routing = GATES[gate](x @ params["gate"])
        if plain:
            y = every_expert_on_every_token(x, routing, params["experts"])
        else:
            how = {"grouped": grouped}
            y = nn.expert_layer(x, routing, fn, params["experts"], axis, **how)
        return (y**3).sum() + routing.aux_loss + 0.1 * routing.z_loss, y

    return loss


def drawn(count):
    return {"gate": draw(D, count), "experts": experts(count)}


def mine_of(params, n):
    """A rank's experts, and the gate."""
    mine = part(params["experts"], n, ff.axis_index("expert"))
    return {"gate": params["gate"], "experts": mine}


def by_group(loss, params, groups):
    """One device: the sum of the groups' losses, results and derivatives."""
    grad = torch.func.grad(loss, argnums=(0, 1), has_aux=True)
    found = [grad(params, x) for x in groups]
    total = tree.map(lambda *gs: sum(gs), *(by_params for (by_params, _), _ in found))
    return total, [by_x for (_, by_x), _ in found], [y for _, y in found]


def part(leaves, n, i):
    return {name: leaf.chunk(n)[i] for name, leaf in leaves.items()}


@settings(max_examples=examples(25))
@given(n=st.integers(1, 3), engine=st.sampled_from(["autograd", "func"]), **DRAWN)
def test_ranks_are_every_expert_on_every_token(n, engine, tokens, here, gate, call):
    """Gradients by experts are those of the sum of all ranks' losses."""
    count = n * here if n * here > 1 else 2
    LAST.manual_seed(tokens + n)
    params, groups = drawn(count), [draw(tokens, D) for _ in range(n)]

    def main():
        mine, x = mine_of(params, n), groups[ff.axis_index("expert")]
        loss = loss_of(gate, call, None if n == 1 and engine == "func" else "expert")
        if engine == "func":
            return torch.func.grad(loss, argnums=(0, 1), has_aux=True)(mine, x)
        (_, y), grads = ff.value_and_grad(loss, (0, 1), has_aux=True)(mine, x)
        return grads, y

    with ff.ledger() as log:
        out = ff.spmd(main, simulated(expert=n))()
    total, by_x, ys = by_group(loss_of(gate, plain=True), params, groups)
    for i, ((by_params, by_own), y) in enumerate(out):
        close(by_params["experts"], part(total["experts"], n, i), 1e-12)
        close((by_own, y.detach()), (by_x[i], ys[i].detach()), 1e-12)
    close(sum(grads["gate"] for (grads, _), _ in out), total["gate"], 1e-12)
    assert_spent(log, n, count, [GATES[gate](x @ params["gate"]) for x in groups])


def assert_spent(log, n, count, routings):
    """Four all-to-alls a rank, two of D features and two of the experts' 2."""
    if n == 1:
        assert not log.records
        return
    capacity = routings[0].capacity
    if capacity is None:
        loads = [r.counts.reshape(n, -1).sum(1).max() for r in routings]
        rows = n * int(max(loads))
    else:
        rows = count * capacity
    for rank in range(n):
        assert log.count("all_to_all", "expert", rank=rank) == 4
        sent = 8 * rows * 2 * (D + 2) * (n - 1) / n
        assert log.bytes("expert", "all_to_all", rank=rank) == pytest.approx(sent)
        table = 0 if capacity is not None else 8 * count * (n - 1)
        assert log.bytes("expert", "all_gather", rank=rank) == table
        assert log.count(rank=rank) == 4 + (capacity is None)


@settings(max_examples=examples(8))
@given(
    sizes=st.lists(st.integers(0, 5), min_size=2, max_size=3), here=st.integers(1, 2)
)
def test_dropless_takes_uneven_ranks_and_computes_on_tokens_alone(sizes, here) -> None:
    """Some without a token; and experts see each choice once, and nothing else."""
    n, seen = len(sizes), []
    LAST.manual_seed(sum(sizes))
    params, groups = drawn(n * here), [draw(m, D) for m in sizes]

    def counted(p, x):
        seen.append(len(x))
        return two_layers(p, x)

    def main():
        mine, x = mine_of(params, n), groups[ff.axis_index("expert")]
        routing = nn.top_k_gating(x @ params["gate"], 2)
        return nn.expert_layer(x, routing, counted, mine["experts"], "expert")

    out = ff.spmd(main, simulated(expert=n))()
    assert sum(seen) == 2 * sum(sizes) and len(seen) == n * here
    for x, y in zip(groups, out, strict=True):
        routing = nn.top_k_gating(x @ params["gate"], 2)
        expected = every_expert_on_every_token(x, routing, params["experts"])
        close(y, expected, 1e-12)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("gate", ["top 2, tight", "dropless 2"])
def test_second_derivatives_and_forward_ones(gate) -> None:
    params, x, to = drawn(4), [draw(3, D), draw(3, D)], [draw(3, D), draw(3, D)]

    def penalty(axis):
        def of(params, x):
            loss = loss_of(gate, axis=axis)
            by_x = torch.func.grad(loss, argnums=1, has_aux=True)(params, x)[0]
            return (by_x**2).sum(), by_x

        return of

    def forward(params, axis, i):
        layer = loss_of(gate, axis=axis)
        return torch.func.jvp(lambda x: layer(params, x)[1], (x[i],), (to[i],))

    def main():
        i, mine = ff.axis_index("expert"), mine_of(params, 2)
        grads, _ = torch.func.grad(penalty("expert"), has_aux=True)(mine, x[i])
        return grads, forward(mine, "expert", i)

    total, *_ = by_group(penalty(None), params, x)
    for i, (grads, ran) in enumerate(ff.spmd(main, simulated(expert=2))()):
        close(grads["experts"], part(total["experts"], 2, i), 1e-9)
        close(ran, forward(params, None, i), 1e-12)


def test_results_have_the_dtype_of_experts_and_weights_stay_exact() -> None:
    x, w = draw(50, 8).bfloat16(), draw(4, 8).bfloat16()
    routing = nn.top_2_gating(x[:, :4], capacity_factor=4)
    y = nn.expert_layer(x, routing, lambda w, x: x * w, w)
    rows = x[:, None] * w[routing.indices]
    exact = (rows.float() * routing.weights[..., None]).sum(1)
    assert y.dtype == torch.bfloat16
    close(y, exact.bfloat16(), 0)


@pytest.mark.parametrize("gate", ["top 2", "dropless 2"])
def test_memory_is_of_choices_and_not_of_masks(gate) -> None:
    tokens, count, d = 1024, 16, 4
    x, scales = draw(tokens, d).requires_grad_(), draw(count, 1).requires_grad_()
    logits = draw(tokens, count).requires_grad_()
    with LiveBytes(x, scales, logits) as live:
        y = nn.expert_layer(x, GATES[gate](logits), lambda w, x: w * x, scales)
        y.sum().backward()
    choices = 8 * 2 * tokens  # bytes of a number for each
    assert live.peak < choices * (6 * d + 2 * count + 24)
    mask = 8 * tokens * count * (2 * tokens // count)
    assert live.peak < mask / 10


def test_a_dropped_choice_reads_nobodys_row() -> None:
    """Its weight is 0, and 0 times another token's infinity is not."""
    x = torch.tensor([[torch.inf], [1.0], [2.0]], requires_grad=True)
    to = torch.tensor([[0], [1], [1]])
    routing = nn.route(to, torch.ones(3, 1), 2, capacity_factor=0.6)
    y = nn.expert_layer(x, routing, lambda p, x: x, {})
    assert y.tolist() == [[torch.inf], [1.0], [0.0]]
    y.sum().backward()
    assert x.grad.tolist() == [[1.0], [1.0], [0.0]]


@pytest.mark.parametrize("factor", [1.0, None])
def test_of_padding_alone_there_is_nothing(factor) -> None:
    x = draw(3, D).requires_grad_()
    routing = nn.top_k_gating(
        x, 2, capacity_factor=factor, used_token=torch.zeros(3).bool()
    )
    y = nn.expert_layer(x, routing, two_layers, experts(D))
    (grad,) = torch.autograd.grad(y.sum() + routing.aux_loss + routing.z_loss, x)
    assert y.shape == (3, 2) and not y.any() and not grad.any()


def split_leaf(n, dim=0, axis="expert", count=4):
    whole = torch.arange(1.0, count + 1)[:, None].expand(count, count)
    layout = ff.Layout(tuple(whole.shape), whole.dtype, (ff.Split(dim, axis, n),), "w")
    i = ff.axis_index(axis)
    return ff.Sharded(whole.chunk(n, dim)[i].clone(), layout)


def test_leaves_that_are_laid_out_know_their_axis() -> None:
    x, routing = torch.ones(4, 1), nn.top_1_gating(torch.eye(4))

    def layer(params, axis=None):
        fn = lambda p, x: p["w"][0] * x  # noqa: E731
        return nn.expert_layer(x, routing, fn, params, axis).flatten().tolist()

    def main():
        mixed = {"b": torch.zeros(2), "w": split_leaf(2)}
        return layer(mixed), layer(mixed, "expert")

    for found in ff.spmd(main, simulated(expert=2))():
        assert found == (layer({"w": torch.arange(1.0, 5.0)[:, None]}),) * 2


@pytest.mark.parametrize("gate", ["top 2", "dropless 2"])
def test_on_an_abstract_mesh_the_load_is_even(gate) -> None:
    """One rank stands for all, and sends what ranks with an even load would."""

    def main(i=0):
        turns = torch.arange(16)[:, None] + torch.arange(2) + i
        z = 9.0 * F.one_hot(turns % 8, 8).sum(1) + torch.rand(16, 8)
        weights = {name: w[:2] for name, w in experts(2).items()}
        x = torch.ones(16, D, dtype=torch.float64)
        y = nn.expert_layer(x, GATES[gate](z), two_layers, weights, "expert")
        return y.shape

    logs = []
    for backend in ("abstract", "simulated"):
        with ff.ledger() as log:
            out = ff.spmd(main, ff.make_mesh({"expert": 4}, backend))()
        assert out[0] == (16, 2) and len(out) == (1 if backend == "abstract" else 4)
        logs.append(log.table())
    assert logs[0] == logs[1]


X, TO = torch.zeros(4, 2), torch.zeros(4, 1, dtype=torch.int64)


def routed(count=4, tokens=4, factor=1.0):
    return nn.route(TO[:tokens], torch.ones(tokens, 1), count, capacity_factor=factor)


def layer(params=None, x=X, axis="expert", fn=lambda p, x: x, grouped=False, **route):
    params = torch.zeros(2) if params is None else params
    return nn.expert_layer(x, routed(**route), fn, params, axis, grouped=grouped)


REFUSED = {
    "experts that the axis does not divide": (lambda: layer(count=5),
        r'5 experts over axis "expert" of size 2'),
    "fewer experts than ranks": (lambda: layer(count=1), "not a multiple of 2"),
    "dispatch of such": (lambda: nn.dispatch(X, routed(7), "expert"), "7 is not a"),
    "combine of such": (lambda: nn.combine(X, routed(7), "expert"), "7 is not a"),
    "all experts on each rank": (lambda: layer({"w": torch.zeros(4, 3)}),
        r"params at 'w' is of \(4, 3\).*this rank's 2 of 4"),
    "a part where all are due": (lambda: layer(torch.zeros(2), axis=None),
        "this rank's 4 of 4"),
    "a scalar": (lambda: layer(torch.zeros(())), r"params is of \(\): give"),
    "a number": (lambda: layer({"n": 2}), "params at 'n' is of 2: give"),
    "other tokens": (lambda: layer(tokens=3), r"\(4, 2\), but the routing is of 3"),
    "tokens of three dims": (lambda: nn.dispatch(X[None], routed(), "expert"),
        r"\(1, 4, 2\)"),
    "a leaf split along another dim": (lambda: layer(split_leaf(2, dim=1)),
        "split it along dim 0, over one axis"),
    "a leaf split over another axis": (lambda: layer(split_leaf(1, axis="data")),
        'split over data=1 .*"expert"'),
    "dispatch without places": (lambda: nn.dispatch(X, routed(factor=None)),
        "capacity_factor="),
    "combine without places": (lambda: nn.combine(X, routed(factor=None)),
        "expert_layer, which takes all"),
    "another number of rows": (lambda: nn.combine(torch.zeros(2, 3, 2), routed(),
        "expert"), r"2 experts with 2 x 1 places: give \[2, 2, features\]"),
    "an expert that loses rows": (lambda: layer(fn=lambda p, x: x[1:]), r"give \[2, 2"),
    "one that loses rows, grouped": (lambda: layer(fn=lambda p, x, ends: x[1:],
        grouped=True), "a row of"),
    "one that loses rows, dropless": (lambda: layer(fn=lambda p, x: x[1:], factor=None),
        "a row of"),
}  # fmt: skip


def on_two(call):
    return ff.spmd(call, ff.make_mesh({"data": 1, "expert": 2}, "simulated"))


test_refused_before_anything_is_sent = all_refused({
    k: (on_two(call), ValueError, way)
    for k, (call, way) in REFUSED.items() if "loses" not in k
})  # fmt: skip


@pytest.mark.parametrize("case", [case for case in REFUSED if "loses" in case])
def test_an_expert_that_loses_rows_is_refused(case) -> None:
    call, way = REFUSED[case]
    with pytest.raises(ValueError, match=way):
        on_two(call)()


def test_a_gate_that_nobody_averages_is_refused() -> None:
    """Where the experts' axis is none of the data's."""
    params, groups = drawn(4), draw(4, 5, D)
    mesh = simulated(data=2, expert=2)
    loss_of_rank = loss_of("top 2")

    @ff.unit
    def loss(p, x, by):
        x = ff.pcast(x, "expert", to="V")
        return ff.psum(loss_of_rank(p, x * by)[0], "expert")

    def main(example, x, by=lambda: 1):
        step = ff.value_and_grad(lambda p, x: loss(p, x, by()))
        step, rules = ff.shard(step, mesh, "data"), {"experts/*": ff.Split(0, "expert")}
        step(ff.place(step, params, example, layouts=rules), x)

    def of_its_own(laid_out=None):
        x = groups[ff.axis_index(("data", "expert"))]
        main(x if laid_out is None else laid_out, x)

    for example in (None, groups[0]):  # alike, perhaps, when it was laid out
        with pytest.raises(RanksDiffer, match="along 'expert' are given unlike"):
            ff.spmd(of_its_own, mesh)(example)
    with pytest.raises(LawError, match="by 'gate' differs along \"expert\""):
        place = lambda: 1 + ff.axis_index("expert")  # noqa: E731
        ff.spmd(main, mesh)(groups[0], groups[0], place)
