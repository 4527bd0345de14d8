"""The laws of one sharded unit: what it reduces, gives away and asks for."""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc import tree
from tests.checks import close, on_ranks, simulated
from tests.models import chain, floats, layers

MESH = simulated(2)
ZEROS = pytest.mark.parametrize("zero", [1, 3])


def ranks(main, mesh=MESH):
    return ff.spmd(main, mesh)()


def test_every_rank_reduces_in_one_order_whatever_its_loss_reads():
    """Rank 0 ignores a unit, rank 1 a leaf, rank 2 all: nobody waits in vain."""
    mesh = simulated(4)
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


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64])
def test_what_is_not_differentiated_is_no_variable_in_a_unit(zero, kind):
    """A unit of frozen leaves computes no derivatives, and a loss can ask for it."""
    asked = []

    @ff.unit
    def unit(p, x):
        asked.append(p.requires_grad)
        return x @ p.abs()

    def loss(w, frozen, x):
        y = unit(frozen, x)
        asked.append(y.requires_grad)
        return scale(w, y).mean()

    scale = ff.unit(lambda w, y: w * y)
    step = lambda s, x: ff.value_and_grad(loss)(*s, x)[1]  # noqa: E731
    given, x = (torch.ones(()), torch.eye(3, dtype=kind)), floats(2, 3)

    close(
        on_ranks(ff.shard(step, MESH, "data", zero=zero), given, x)[0], step(given, x)
    )
    assert not any(asked)


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


tied = ff.unit(lambda p, x: torch.tanh(x @ p["in"]) @ p["out"].T + p["b"])
WIDE = {"dtype": torch.float64}


def tied_loss(params, x):
    both = {"in": params["w"], "e": params["e"], "out": params["w"]}
    return tied({**both, "b": params["b"]}, x).square().mean()


TIED = {"b": torch.ones(3, **WIDE), "e": torch.zeros(0, 3, **WIDE)}
TIED["w"], ROWS = floats(3, 3, **WIDE), floats(4, 3, seed=1, **WIDE)


@pytest.mark.parametrize(
    "zero, within", [(0, "remat"), (1, "accumulate"), (2, ""), (3, "remat")]
)
def test_a_leaf_under_two_names_of_one_call(zero, within):
    """Tied weights: the gradient is the sum of both, whoever differentiates."""
    wrap = {"remat": ff.remat, "accumulate": lambda f: ff.accumulate(f, 2)}

    grad, of_rows = ff.value_and_grad(tied_loss), torch.func.grad(tied_loss, argnums=1)
    shard = lambda f: ff.shard(f, MESH, "data", zero=zero)  # noqa: E731
    laid = shard(wrap.get(within, lambda f: f)(grad))
    for found in on_ranks(laid, TIED, ROWS):
        close(found, grad(TIED, ROWS), 1e-9)
    rows = on_ranks(shard(of_rows), TIED, ROWS, laid=laid)
    close(torch.cat(list(rows)) / 2, of_rows(TIED, ROWS), 1e-9)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_unit_that_shares_a_buffer_may_be_called_twice(zero):
    """Its calls' gradients add up where those of its neighbours lie."""
    unit = ff.unit(lambda p, x: torch.tanh(x @ p["w"]))
    params = [{"w": floats(3, 3, seed=k)} for k in range(3)]
    x = floats(4, 3, seed=9)

    def loss(params, x, twice):
        for p in params:
            x = unit(p, x)
            x = unit(p, x) if twice else x
        return x.square().mean()

    def main():
        gradient = ff.value_and_grad(loss)
        step = ff.shard(gradient, MESH, "data", zero=zero, min_bytes=10**6)
        mine = ff.local_batch(x, MESH, "data")
        placed = ff.place(step, params, mine, False)
        return [ff.unshard(step(placed, mine, twice)[1]) for twice in (False, True)]

    expected = [ff.value_and_grad(loss)(params, x, twice)[1] for twice in (False, True)]
    for found in ranks(main):
        close(found, expected)


@pytest.mark.parametrize(("units", "messages"), [(8, 8), (20, 7), (64, 8)])
def test_many_small_neighbours_share_messages_by_themselves(units, messages):
    """An eighth of the bytes in each: at zero=0 alone, and with the same bits."""
    params, x = layers(units, make=floats), floats(4, 4, seed=9)
    gradient = ff.value_and_grad(chain())

    def main(options):
        step = ff.shard(gradient, MESH, "data", **options)
        mine = ff.local_batch(x, MESH, "data")
        placed = ff.place(step, params, mine)
        planned = ff.plan(step, placed, mine)
        with ff.ledger() as log:
            _, grads = step(placed, mine)
        found = ff.unshard(grads)
        reduced = [r.op for r in log.of(MESH.rank)].count("psum") - 1  # the loss's
        assert planned.count("psum") == reduced + 1
        return tree.leaves(found), reduced

    def sent(**options):
        return ff.spmd(lambda: main(options), MESH)()[0]

    apart, each = sent(zero=0, min_bytes=0)
    joined, some = sent(zero=0)
    assert (each, some) == (units, messages)
    assert all(map(torch.equal, apart, joined))
