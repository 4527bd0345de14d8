"""A step is recorded with as many rows as its real calls have, in `accumulate` too."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import close, refused, simulated
from tests.models import floats

MESH, STAGES = simulated(2), simulated(data=2, pipe=2)
OPTIMIZER = ff.sharded_adam(0.01)
P = {"w": floats(6, 3, seed=1), "v": floats(3, 2, seed=2)}
XS, H = [floats(8, 3, seed=3 + i) for i in range(2)], floats(8, 3, seed=9)
cell = ff.unit(lambda w, h, x: torch.tanh(torch.cat([h, x], 1) @ w))
head = ff.unit(lambda v, y: y @ v)
vag = ff.value_and_grad


def two(n):
    return lambda f: ff.accumulate(f, n)


def stages(f, n=2):
    return ff.pipeline(f, STAGES, "pipe", n_microbatches=n)


def data(f, mesh=MESH, **options):
    return ff.shard(f, mesh, "data", **options)


STACKS = {
    "shard(acc)": lambda f: data(ff.accumulate(f, 2)),
    "shard(acc), zero=2": lambda f: data(ff.accumulate(f, 4), zero=2),
    "acc(shard)": lambda f: ff.accumulate(data(f), 2),
    "shard(acc(acc))": lambda f: data(ff.accumulate(ff.accumulate(f, 2), 2)),
    "shard(acc(remat))": lambda f: data(ff.accumulate(ff.remat(f), 2)),
    "donate(acc(shard))": lambda f: ff.donate(ff.accumulate(data(f), 2)),
    "shard(pipe)": lambda f: data(stages(f), STAGES),
    "shard(pipe), uneven": lambda f: data(stages(f, 3), STAGES),
    "shard(acc(pipe))": lambda f: data(ff.accumulate(stages(f), 2), STAGES),
}


def mesh_of(stack):
    return STAGES if "pipe" in stack else MESH


def rows_of(stack, values):
    """The rows of all ranks along "data", of each one's."""
    return torch.cat(values[:: 2 if "pipe" in stack else 1])


def error(p, h, x):
    y = cell(p["w"], h, x)
    y = cell(p["w"], y, x)
    return head(p["v"], y).square().mean(), y


def carried(argnums, tell):
    """Truncated backpropagation through time: the hidden state is carried on."""

    def one(p, both):
        return error(p, *both)

    def step(s, x):
        h = s.extra
        if tell == "a tree":
            (loss, y), grads = vag(one, has_aux=True)(s.params, (h, x))
        elif tell == "keywords":
            g = vag(error, has_aux=True, batch_argnums=("h", "x"))
            (loss, y), grads = g(s.params, h=h, x=x)
        else:
            g = vag(error, argnums, has_aux=True, batch_argnums=(1, 2))
            (loss, y), grads = g(s.params, h, x)
        if argnums != 0:
            grads, by_h = grads
            y = y + 0.1 * by_h / by_h.norm(dim=1, keepdim=True)
        return s.apply_gradients(grads, OPTIMIZER).replace(extra=y.detach()), loss

    return step


def run(step, params, xs, h, **told):
    state, losses = ff.init_state(step, params, OPTIMIZER, xs[0], extra=h, **told), []
    for x in xs:
        state, loss = step(state, x)
        losses.append(loss)
    return ff.unshard(state.params), state.extra, torch.stack(losses)


TOLD = [
    *((stack, "positions", "fake") for stack in STACKS),
    *(("shard(acc)", tell, "real") for tell in ("keywords", "a tree")),
    ("shard(acc(pipe))", "keywords", "real"),
]


@pytest.mark.parametrize("stack, tell, record", TOLD)
def test_a_hidden_state_that_each_rank_owns_is_cut_with_the_batch(stack, tell, record):
    mesh, step = mesh_of(stack), carried(0, tell)

    def main():
        x, h = ff.local_batch((XS, H), mesh, "data")
        own = {"extra": ff.Own("data")}
        return run(STACKS[stack](step), P, x, h, layouts=own, record=record)

    params, hidden, losses = zip(*ff.spmd(main, mesh)(), strict=True)
    found = params[0], rows_of(stack, hidden), sum(losses) / len(losses)
    close(found, run(step, P, XS, H))


def test_gradients_by_a_hidden_state_have_its_rows():
    def main():
        x, h = ff.local_batch((XS, H), MESH, "data")
        step = data(ff.accumulate(carried((0, 1), "positions"), 2))
        return run(step, P, x, h, layouts={"extra": ff.Own("data")})

    expected = run(carried((0, 1), "positions"), P, XS, H)
    params, hidden, losses = zip(*ff.spmd(main, MESH)(), strict=True)
    close((params[0], torch.cat(hidden), sum(losses) / 2), expected)


def test_a_replicated_state_with_rows_of_the_batch_is_told_of():
    def step(s, x):
        (loss, y), _ = vag(error, has_aux=True, batch_argnums=(1, 2))(s["p"], s["h"], x)
        return {"p": s["p"], "h": y.detach()}, loss

    def main(cut):
        x, h = ff.local_batch((XS[0], H), MESH, "data")
        ff.place(data(cut(step)), {"p": P, "h": h}, x)

    h = ff.spmd(lambda: ff.local_batch(H, MESH, "data"), MESH)()
    assert len(h[0]) == 4
    with pytest.raises(RuntimeError, match="4 .*2|2 .*4") as raised:
        ff.spmd(lambda: main(two(2)), MESH)()
    notes = " ".join(raised.value.__notes__)
    assert "'h', of the state, has as many rows as the batch" in notes
    assert "ff.Own(" in notes and "'p" not in notes


def beside(p, x):
    y = cell(p["w"], x, x)
    z = head(p["v"], y)
    aux = {"rows": y, "sum": ff.Summed((z > 0).sum()), "mean": z.mean(), "n": 2}
    return z.square().mean(), {**aux, "int": torch.tensor(3), "none": None}


def bank(p, x):
    """A step that puts rows of the loss together with those of the batch."""
    (loss, aux), grads = vag(beside, has_aux=True)(p, x)
    apart = (aux["rows"] - x).square()
    if len(aux["rows"]) > 2:
        apart = 2 * apart
    return tree.map(lambda a, g: a - 0.1 * g, p, grads), (loss, aux, apart)


@pytest.mark.parametrize(
    "stack, record",
    [*((s, "fake") for s in STACKS), ("acc(shard)", "real"), ("shard(pipe)", "real")],
)
def test_rows_that_a_loss_returns_are_those_of_the_whole_batch(stack, record):
    mesh = mesh_of(stack)

    def main():
        step, x = STACKS[stack](bank), ff.local_batch(XS[0], mesh, "data")
        p = ff.place(step, P, x, record=record)
        trained, (loss, aux, apart) = step(p, x)
        return ff.unshard(trained), loss, aux, apart

    params, loss, aux, apart = zip(*ff.spmd(main, mesh)(), strict=True)
    expected, (value, others, distance) = bank(P, XS[0])
    close((params[0], loss[0]), (expected, value))
    close(rows_of(stack, apart), distance)
    rows = rows_of(stack, [a["rows"] for a in aux])
    close({**aux[0], "rows": rows}, others)


@pytest.mark.parametrize("n", [2, 3])
def test_a_pipelined_evaluation_returns_the_rows_of_the_whole_batch(n):
    def evaluate(p, x):
        return beside(p, x)[1]["rows"]

    def main():
        loss = data(stages(evaluate, n), STAGES)
        f = lambda p, x: (loss(p, x) - x).square()  # noqa: E731
        x = ff.local_batch(XS[0], STAGES, "data")
        return f(ff.place(loss, P, x), x)

    found = ff.spmd(main, STAGES)()
    close(torch.cat(found[::2]), (evaluate(P, XS[0]) - XS[0]).square())


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("stack", ["shard(acc)", "acc(shard)"])
def test_a_sharded_leaf_beside_a_loss_is_no_row(stack, zero):
    def f(p, x):
        return cell(p["w"], x, x).mean(), p["w"]

    def step(p, x):
        return vag(f, has_aux=True)(p, x)[0][1]

    def main():
        x = ff.local_batch(XS[0], MESH, "data")
        g = data(ff.accumulate(step, 2), zero=zero)
        if stack != "shard(acc)":
            g = ff.accumulate(data(step, zero=zero), 2)
        return ff.unshard(g(ff.place(g, P, x), x))

    close(ff.spmd(main, MESH)()[0], P["w"])


def test_a_plan_has_the_rows_of_the_whole_batch():
    mesh = ff.make_mesh({"data": 2}, "abstract")
    step = data(ff.accumulate(bank, 4), mesh)
    assert ff.plan(step, P, torch.empty(8, 3)).ranks


def test_parts_that_do_not_come_out_even_are_refused_as_without_a_mesh():
    def main():
        x, h = ff.local_batch((XS, H), MESH, "data")
        step = data(ff.accumulate(carried(0, "positions"), 3))
        run(step, P, x, h, layouts={"extra": ff.Own("data")})

    refused(lambda: ff.spmd(main, MESH)(), ValueError, "4 is not a multiple of 3")
