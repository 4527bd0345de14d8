"""The laws of one sharded unit: what it keeps, what it forgets, what it refuses."""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc import tree
from fsfunc.arena import Arena
from tests.checks import close

MESH = ff.make_mesh({"data": 2}, "simulated")
ZEROS = pytest.mark.parametrize("zero", [0, 1, 2, 3])


@pytest.fixture
def poisoned(monkeypatch):
    """NaN wherever a gathered or reduced buffer was, once it is let go of."""
    monkeypatch.setattr(Arena, "poison", True)


def ranks(main, mesh=MESH):
    return ff.spmd(main, mesh)()


class KeepsItself(torch.autograd.Function):
    """An old-style Function that keeps its input past ``save_for_backward``."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.w, ctx.x = w, x
        return x @ w

    @staticmethod
    def backward(ctx, g):
        return ctx.x.T @ g, g @ ctx.w.T


def checkpointed(p, x):
    f = lambda w, x: torch.tanh(x @ w)  # noqa: E731
    return torch.utils.checkpoint.checkpoint(f, p["w"], x, use_reentrant=False)


def autocast(p, x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ p["w"]).float()


def attention(p, x):
    q, k, v = (x @ p["w"]).expand(3, 1, 1, *x.shape).unbind(0)
    mask = torch.zeros(x.shape[0], x.shape[0])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, 0]


inner = ff.unit(lambda p, x: torch.sin(x @ p["w"]))
KINDS = {
    "plain": lambda p, x: torch.tanh(x @ p["w"]),
    "transposed": lambda p, x: torch.tanh(F.linear(x, p["w"])),
    "keeps itself": lambda p, x: torch.tanh(KeepsItself.apply(p["w"], x)),
    "returns a view": lambda p, x: (torch.tanh(x @ p["w"]), p["w"].T, p["w"]),
    "detached": lambda p, x: x @ p["w"].detach() * p["w"].sum(),
    "cast": lambda p, x: (x.bfloat16() @ p["w"].bfloat16()).float(),
    "normalised": lambda p, x: torch.tanh(x @ F.normalize(p["w"])),
    "embedding": lambda p, x: F.embedding(torch.arange(3), p["w"]) * x.sum(),
    "attention": attention,
    "dropout": lambda p, x: F.dropout(x @ p["w"], 0.5) @ p["w"],
    "checkpoint": checkpointed,
    "autocast": autocast,
    "nested": lambda p, x: inner({"w": p["w"]}, x) + inner({"w": p["w"]}, x) @ p["w"],
    "around": lambda p, x: inner(p["inner"], x) * p["w"].sum(),
    "layer norm": lambda p, x: F.layer_norm(x @ p["w"], (3,), p["w"][0], p["w"][1]),
    "in place": lambda p, x: (x @ p["w"]).mul_(2).relu_(),
}
ORDERS = {
    "shard": lambda f, shard: shard(f),
    "remat inside": lambda f, shard: shard(ff.remat(f)),
    "remat outside": lambda f, shard: ff.remat(shard(f)),
}


def chain(fn):
    """A loss through three calls of ``fn``: a first, a middle and a last unit."""
    unit = ff.unit(fn)

    def loss(params, x):
        for p in params:
            out = unit(p, x)
            x = out if isinstance(out, torch.Tensor) else sum(o.sum() * x for o in out)
        return x.square().mean()

    return loss


def three(seed=0):
    draw = torch.Generator().manual_seed(seed)
    make = lambda: torch.randn(3, 3, generator=draw)  # noqa: E731
    return [{"w": make(), "inner": {"w": make()}} for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zero", [1, 3])
def test_nothing_reads_a_buffer_that_was_let_go(poisoned, kind, order, zero):
    """Of whatever kind: the gradient is that of one device, though buffers turn NaN."""
    loss = chain(KINDS[kind])
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(9))
    params = three()
    torch.manual_seed(1)
    value, grads = ff.value_and_grad(loss)(params, x)

    def main():
        torch.manual_seed(1)
        shard = lambda f: ff.shard(f, MESH, "data", zero=zero)  # noqa: E731
        step = ORDERS[order](ff.value_and_grad(loss), shard)
        placed = ff.place(step, params, x)
        found = []
        for _ in range(2):
            torch.manual_seed(1)
            mine, g = step(placed, x)
            found.append((mine, ff.unshard(g)))
        return found

    if kind == "dropout":  # the two ranks draw different masks, by design
        return finite(ranks(main))
    for rank in ranks(main):
        for mine, g in rank:
            close(mine, value, 1e-5)
            close(g, grads, 1e-5)


def finite(values):
    assert all(x.isfinite().all() for x in tree.leaves([*values]))


def test_every_rank_reduces_in_one_order_whatever_its_loss_reads():
    """Rank 0 ignores a unit, rank 1 a leaf, rank 2 all: nobody waits in vain."""
    mesh = ff.make_mesh({"data": 4}, "simulated")
    unit = ff.unit(lambda p, x: (torch.sin(x @ p["w"]), x * p["b"]))
    params = {n: {"w": torch.eye(2) * 2, "b": torch.ones(2)} for n in "abc"}
    x = torch.ones(1, 2)

    def loss(params, x, rank):
        a, _ = unit(params["a"], x)
        b, scaled = unit(params["b"], a)  # no path to rank 0's loss
        c, _ = unit(params["c"], a if rank == 0 else b)
        if rank == 2:
            return x.sum()
        return (c + a).sum() if rank != 1 else (c + a + scaled).sum()

    def main():
        step = ff.shard(ff.value_and_grad(loss), mesh, "data")
        placed = ff.place(step, params, x, 3)
        with ff.ledger() as log:
            _, grads = step(placed, x, mesh.rank)
        sent = [(r.op, r.unit, r.phase) for r in log.of(mesh.rank)]
        return ff.unshard(grads), sent

    each = [ff.value_and_grad(loss)(params, x, rank)[1] for rank in range(4)]
    expected = tree.map(lambda *g: sum(g) / 4, *each)
    every = ff.spmd(main, mesh)()
    assert [sent for _, sent in every] == [every[0][1]] * 4
    assert [op for op, _, _ in every[0][1]].count("psum_scatter") == 3
    for grads, _ in every:
        close(grads, expected, 1e-6)


def test_a_checkpoint_inside_a_unit_computes_again_once():
    """To look at what it saved must not run its hooks: they run the body."""
    runs = {0: 0, 1: 0}

    def body(w, x):
        runs[MESH.rank] += 1
        return torch.tanh(x @ w)

    again = torch.utils.checkpoint.checkpoint
    unit = ff.unit(lambda p, x: again(body, p, x, use_reentrant=False))

    def main():
        x, loss = torch.ones(2, 4), lambda p, x: unit(p[1], unit(p[0], x)).sum()
        step = ff.shard(ff.value_and_grad(loss), MESH, "data")
        placed = ff.place(step, [torch.eye(4)] * 2, x)
        step(placed, x)
        runs[MESH.rank] = 0
        step(placed, x)
        return runs[MESH.rank]

    assert ranks(main) == [4, 4]  # two units, forward and backward


@ZEROS
def test_an_output_that_is_a_parameter_is_the_callers_own(zero):
    """Written in place by the caller, it changes neither the state nor a buffer."""
    unit = ff.unit(lambda p, x: (p, p.view(-1)[1:], x @ p))

    def spoils(p, x):
        with torch.no_grad():
            same, view, _ = unit(p, x)
            same.zero_()
            view.zero_()
        return unit(p, x)[2].sum()

    def main():
        evaluate, x = ff.shard(spoils, MESH, "data", zero=zero), torch.ones(1, 2)
        placed = ff.place(evaluate, torch.ones(2, 2), x)
        return evaluate(placed, x).item(), ff.unshard(placed)

    for value, params in ranks(main):
        assert value == 4 and torch.equal(params, torch.ones(2, 2))


@ZEROS
def test_inputs_that_need_no_gradient_keep_needing_none(zero):
    """A float mask that requires grad would push attention onto its slow kernel."""
    seen = {0: [], 1: []}

    def unit(p, x, mask, *, more):
        mine = seen[ff.axis_index("data")]
        mine.append((mask.requires_grad, more["m"].requires_grad, x.requires_grad))
        h = (x @ p["w"])[None, None]
        out = F.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        mine.append(type(out.grad_fn).__name__)
        return {"out": out[0, 0] + more["m"], "none": None, "n": 3}, mask

    unit = ff.unit(unit)

    def loss(params, x, mask):
        first, same = unit(params, x, mask, more={"m": torch.ones(3), "k": None})
        assert not same.requires_grad and first["n"] == 3 and first["none"] is None
        second, _ = unit(params, first["out"], mask, more={"m": torch.ones(3)})
        return second["out"].sum()

    def main():
        step = ff.shard(ff.value_and_grad(loss), MESH, "data", zero=zero)
        args = torch.randn(4, 3), torch.zeros(4, 4)
        placed = ff.place(step, {"w": torch.randn(3, 3)}, *args)
        mine = seen[MESH.rank] = []
        step(placed, *args)
        return mine

    for first, kernel, second, again in ranks(main):
        assert (first, second) == ((False, False, False), (False, False, True))
        assert "FlashAttention" in kernel and "FlashAttention" in again
