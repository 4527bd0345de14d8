"""What a run on fake tensors shows of a step: groups, order, refusals."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.tracing.recorder import record
from tests.checks import close, same

MESH = ff.make_mesh({"data": 2}, "simulated")
layer = ff.unit(lambda p, x: torch.tanh(x @ p["w"]) * p["s"])


@ff.unit
def embed(p, x):
    return x * p


@ff.unit
def reads_the_inner_ones(p, x):
    return embed(p["inner"], x) + p["inner"]


def layers(n, **extra):
    one = lambda: {"w": torch.ones(2, 2), "s": torch.ones(())}  # noqa: E731
    return {"layers": [one() for _ in range(n)], **extra}


X = torch.ones(3, 2)


def recorded(loss, params, *, min_bytes=0, how="fake", plain=False, **options):
    """What recording ``loss``'s gradient under shard finds, on one rank."""

    def main():
        f = loss if plain else ff.value_and_grad(loss)
        recorder = record(ff.shard(f, MESH, "data", **options), params, (X,), how)
        groups = recorder.leaf_groups(min_bytes)
        return groups, recorder.gather_order(groups), recorder

    return ff.spmd(main, MESH)()[0]


def paths(groups):
    return [list(g.paths) for g in groups]


def stack(p, x):
    for q in p["layers"]:
        x = layer(q, x)
    return x.sum()


def test_dtypes_and_untrained_leaves_lie_apart():
    p = {"w": torch.ones(2, 2), "s": torch.ones(()), "n": torch.ones(3).long()}
    wide = {**p, "wide": torch.ones(2, 2, dtype=torch.float64), "none": None}
    unit = ff.unit(lambda p, x: x @ p["w"] * p["s"] + p["wide"].sum() + p["n"].sum())
    groups, _, _ = recorded(lambda p, x: unit(p, x).sum(), wide)
    assert paths(groups) == [["n"], ["s", "w"], ["wide"]]
    assert [g.dtype for g in groups] == [torch.int64, torch.float32, torch.float64]

    def half(p, x):
        return ff.value_and_grad(lambda t, x: unit(p | t, x).sum())({"w": p["w"]}, x)

    groups, _, recorder = recorded(half, wide, plain=True)
    assert paths(groups) == [["n"], ["s"], ["w"], ["wide"]]
    assert recorder.trained == {"w"}


def test_an_outer_unit_that_reads_an_inner_ones_leaf_takes_it():
    loss = lambda p, x: reads_the_inner_ones(p, x).sum()  # noqa: E731
    p = {"inner": torch.ones(2)}
    groups, _, _ = recorded(loss, p)
    assert [g.buffer for g in groups] == ["reads_the_inner_ones:inner"]

    expected = ff.value_and_grad(loss)(p, X)[1]
    same(ff.spmd(lambda: run(loss, p), MESH)()[0], expected)


def test_a_leaf_read_outside_every_unit_stays_whole():
    """Its gradient is the mean over the ranks all the same."""

    def loss(p, x):
        return (layer(p["layers"][0], x) * p["gain"]).sum()

    params = layers(1, gain=torch.ones(2))
    groups, _, recorder = recorded(loss, params)
    assert recorder.whole_leaves() == {"gain"} and "gain" not in sum(paths(groups), [])

    def main():
        x = X * (1 + ff.axis_index("data"))
        step = ff.shard(ff.value_and_grad(loss), MESH, "data")
        placed = ff.place(step, params, x)
        _, grads = step(placed, x)
        assert type(placed["gain"]) is torch.Tensor is type(grads["gain"])
        return grads["gain"]

    each = [ff.value_and_grad(loss)(params, X * k)[1]["gain"] for k in (1, 2)]
    for found in ff.spmd(main, MESH)():
        torch.testing.assert_close(found, sum(each) / 2)


def test_a_leaf_that_comes_in_as_an_input_stays_whole():
    scaled = ff.unit(lambda p, x, gain: x @ p["w"] * gain)

    def loss(p, x):
        return scaled({"w": p["layers"][0]["w"]}, x, p["gain"]).sum()

    params = layers(1, gain=torch.ones(2))
    assert recorded(loss, params)[2].whole_leaves() == {"gain"}
    ff.spmd(lambda: run(loss, params), MESH)()


def run(loss, params, **how):
    """The gradients of a sharded loss, whole again; ``how`` it is placed."""
    step = ff.shard(ff.value_and_grad(loss), MESH, "data")
    return ff.unshard(step(ff.place(step, params, X, **how), X)[1])


def test_a_unit_may_return_its_parameter():
    loss = lambda p, x: (ff.unit(lambda w, x: w)(p, x) * x).sum()  # noqa: E731
    w = torch.arange(2.0)
    assert recorded(loss, w)[2].whole_leaves() == set()
    expected = ff.value_and_grad(loss)(w, X)[1]
    assert torch.equal(ff.spmd(lambda: run(loss, w), MESH)()[0], expected)


def here(text):
    """``file:line`` of the line of this file that holds ``text``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(text)]
    return re.escape(f"{__file__}:{number}")


def test_a_leaf_read_inside_and_outside_is_refused_with_its_line():
    def loss(p, x):
        penalty = sum(w.square().sum() for w in tree.leaves(p["layers"]))  # penalty
        return layer(p["layers"][0], x).sum() + penalty

    where = here("# " + "penalty")
    for how in ("fake", "real"):
        with pytest.raises(ValueError, match=f"sum at {where} .* part of 'layers/0/s'"):
            ff.spmd(lambda how=how: run(loss, layers(1), record=how), MESH)()


@pytest.mark.parametrize("kind", ["if", "mask"])
def test_a_step_that_asks_for_a_value_is_told_where(kind):
    def loss(p, x):
        value = stack(p, x)
        if kind == "if":
            return value if value > 0 else -value  # if
        return value + x[x > 0].sum()  # mask

    where = here("# " + kind)
    with pytest.raises(RuntimeError, match=f'(?s){where}.*record="real"'):
        recorded(loss, layers(2))
    groups, _, _ = recorded(loss, layers(2), how="real")
    assert paths(groups) == paths(recorded(stack, layers(2))[0])

    def main():
        return run(loss, layers(2), record="real")

    expected = ff.value_and_grad(loss)(layers(2), X)[1]
    close(ff.spmd(main, MESH)()[0], expected)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_leaves_that_are_written_by_data_come_back_as_others(zero):
    def step(rebuilt, p, x):
        def write(w, g):
            w, g = (w.data, g) if rebuilt else (w.data.view(-1), g.view(-1))
            return w.sub_(0.1 * g)

        made = tree.map(write, p, ff.value_and_grad(stack)(p, x)[1])
        return made if rebuilt else p

    def main(rebuilt):
        f = ff.shard(partial(step, rebuilt), MESH, "data", zero=zero)
        placed = ff.place(f, layers(2), X)
        for _ in range(2):
            placed = f(placed, X)
        return ff.unshard(placed)

    expected = layers(2)
    for _ in range(2):
        expected = step(True, expected, X)
    close(ff.spmd(partial(main, True), MESH)()[0], expected)
    with pytest.raises(TypeError, match=r"writes into .* by \.data.*as it came"):
        ff.spmd(partial(main, False), MESH)()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_functions_run_in_units_and_by_maps_and_are_told_elsewhere():
    scripted = torch.jit.script(stepped)
    inside = ff.unit(lambda p, x: scripted(x @ p["w"], p["s"]))
    loss = lambda p, x: inside(p["layers"][0], x).sum()  # noqa: E731
    assert paths(recorded(loss, layers(1))[0]) == [["layers/0/s", "layers/0/w"]]

    def beside(p, x):
        return loss(p, x) + scripted(p["scale"], x.mean())  # beside

    with pytest.raises(TypeError, match=f"{here('# beside')}.*torch.jit.script.*unit"):
        recorded(beside, layers(1, scale=torch.ones(())))


def stepped(w, g):
    return w - 0.1 * g


def test_recording_leaves_no_trace():
    """Nothing is sent, drawn or written, also where it fails."""
    unit = ff.unit(lambda p, x: torch.dropout(x * p, 0.5, True))

    def loss(p, x, fail):
        torch.rand(3)
        value = unit(p, x).sum()
        if fail:
            raise ValueError("no")
        return value

    def main():
        step = ff.shard(ff.value_and_grad(loss), MESH, "data")
        w, before = torch.ones(2), torch.get_rng_state()
        with ff.ledger() as log:
            for how in ("fake", "real"):
                record(step, w, (X, False), how)
                with pytest.raises(ValueError, match="no"):
                    record(step, w, (X, True), how)
        assert log.records == [] and torch.equal(torch.get_rng_state(), before)
        assert torch.equal(w, torch.ones(2)) and not w.requires_grad

    ff.spmd(main, MESH)()


@pytest.mark.parametrize("bare", [False, True])
def test_a_step_that_returns_its_state_needs_no_type_check(bare):
    """Unless it returns beside it a part that has lost its layout."""
    optimizer, params = ff.sharded_adam(0.1), layers(1)

    def step(p, x):
        _, grads = ff.value_and_grad(stack)(p, x)
        new = optimizer.apply(grads, optimizer.init(p), p)[0]
        return new, tree.leaves(grads) if bare else 1.0

    def main():
        return record(ff.shard(step, MESH, "data"), params, (X,)).needs_no_check

    assert ff.spmd(main, MESH)() == [not bare] * 2


def first_of(pieces):
    return sum(x.sum() for x in pieces[:2])


PLACES = {
    "places": (lambda w, i: torch.tensor_split(w, i), [1, 3]),
    "a number": (lambda w, i: torch.tensor_split(w, i, dim=1), 2),
    "a method": (lambda w, i: w.tensor_split(i, 1), [1]),
    "by name": (
        lambda w, i: w.tensor_split(tensor_indices_or_sections=i, dim=0),
        [2, 3],
    ),
}


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_a_tensor_is_split_at_places_that_a_tensor_holds(name, outside):
    """torch reads these unheard: a step that does is told where, as by ``.item()``."""
    split, i = PLACES[name]
    w, i = torch.arange(12.0).reshape(4, 3), torch.tensor(i)
    square = ff.unit(lambda w, i: first_of(split(w.square(), i)))
    plain = ff.unit(lambda w, i: w.square())

    def loss(w, i):
        return first_of(split(plain(w, i), i)) if outside else square(w, i)

    def main(**how):
        step = ff.shard(ff.value_and_grad(loss), MESH, "data")
        value, g = step(ff.place(step, w, i, **how), i)
        return value, ff.unshard(g)

    told = f'(?s)value at {__file__}.*record="real"'
    with pytest.raises(RuntimeError, match=told):
        ff.spmd(main, MESH)()
    for found in ff.spmd(lambda: main(record="real"), MESH)():
        close(found, ff.value_and_grad(loss)(w, i))


def backward(loss, params):
    loss.backward()


def backward_of_several(loss, params):
    torch.autograd.backward([loss])


def grad(loss, params):
    torch.autograd.grad(loss, params)


@pytest.mark.parametrize("way", ["init_state", "place", "another's state", "alone"])
@pytest.mark.parametrize("ask", [backward, backward_of_several, grad])
def test_a_derivative_of_what_has_no_graph_names_value_and_grad(ask, way):
    linear, w, sgd = ff.unit(lambda w, x: x @ w), torch.ones(2, 2), ff.sgd(0.1)

    def step(state, x):
        loss = linear(state.params, x).mean()
        ask(loss, state.params)
        return state, loss

    def main():
        sharded = ff.shard(step, MESH, "data")
        if way == "init_state":
            return ff.init_state(sharded, w, sgd, X)
        if way == "place":
            return ff.place(sharded, ff.TrainState(w, sgd.init(w)), X)
        other = ff.shard(lambda s, x: (s, linear(s.params, x).mean()), MESH, "data")
        return sharded(ff.init_state(other, w, sgd, X), X)

    with pytest.raises(RuntimeError, match=r"ff\.value_and_grad\(loss_fn\)"):
        ff.init_state(step, w, sgd, X) if way == "alone" else ff.spmd(main, MESH)()
