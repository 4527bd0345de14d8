"""States on a card: made, saved, loaded and brought to the host."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import simulated
from tests.gpu.programs import (
    ADAM,
    DEVICE,
    WIDTH,
    close,
    example,
    layer,
    on_host,
    same,
    step_of,
)

pytestmark = pytest.mark.gpu

MESHES = [(None, 3), (1, 3), (2, 0), (2, 3), (3, 1), (4, 2), (3, 3)]
ROWS = 12


def drawn(side=400):
    """Parameters that the device draws."""

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE) / 4

    large = torch.empty(side, side, device=DEVICE).uniform_(-1, 1)
    blocks = [{"w": normal(WIDTH, WIDTH), "v": normal(WIDTH, WIDTH)} for _ in range(2)]
    return {"blocks": blocks, "large": large, "scale": normal(7)}


def loss(params, x):
    for p in params["blocks"]:
        x = layer(p, x)
    return head(params, x)


@ff.unit
def head(params, x):
    return (x @ params["large"][:WIDTH]).square().mean() + params["scale"].sum() ** 2


def in_blocks():
    """`drawn`, of which one leaf is more than one block of random numbers."""
    return drawn(400 if DEVICE.type == "cpu" else 2200)


OPTIMIZER = ff.sharded_adam(1e-2, eps=1e-3)


def step_on(ranks, zero):
    step = OPTIMIZER(ff.value_and_grad(loss))
    mesh = simulated(ranks or 1)
    return (step if ranks is None else ff.shard(step, mesh, "data", zero=zero)), mesh


def everywhere(main, ranks, mesh):
    return [main()] if ranks is None else list(ff.spmd(main, mesh)())


def batch_of(mesh, ranks):
    batch = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(DEVICE)
    return batch if ranks is None else ff.local_batch(batch, mesh, "data")


@pytest.mark.parametrize(("ranks", "zero"), MESHES)
def test_a_drawn_state_is_the_same_on_any_mesh(ranks, zero):
    def main_of(step, mesh, ranks):
        def main():
            torch.manual_seed(3)
            batch = batch_of(mesh, ranks)
            state = ff.init_state(step, in_blocks, OPTIMIZER, batch)
            found = ff.unshard(state.params)
            assert {x.device.type for x in tree.leaves(found)} == {DEVICE.type}
            return found

        return main

    expected = main_of(step_on(None, 0)[0], None, None)()
    step, mesh = step_on(ranks, zero)
    for found in everywhere(main_of(step, mesh, ranks), ranks, mesh):
        same(found, expected)
    values = expected["large"].flatten()
    assert len(values.unique()) > 0.5 * len(values)


@pytest.mark.parametrize("where", ["in place", "abstract"])
@pytest.mark.parametrize(("ranks", "zero"), MESHES)
def test_a_saved_state_is_loaded_on_any_mesh(tmp_path, ranks, zero, where):
    """And trained on: the steps of the run that nobody ended."""
    first, two = step_on(2, 3)
    path = tmp_path / "state"

    def begun():
        torch.manual_seed(3)
        batch = batch_of(two, 2)
        state, _ = first(ff.init_state(first, drawn, OPTIMIZER, batch), batch)
        ff.save(path, state)
        now = ff.unshard((state.params, state.opt_state))
        return now, ff.unshard(first(state, batch)[0].params)

    now, later = ff.spmd(begun, two)()[0]
    step, mesh = step_on(ranks, zero)

    def main():
        torch.manual_seed(4)
        batch = batch_of(mesh, ranks)
        make = ff.abstract_state if where == "abstract" else ff.init_state
        empty = make(step, drawn, OPTIMIZER, batch)
        there = {"device": DEVICE} if where == "abstract" else {}
        state = ff.load(path, empty, **there)
        found = ff.unshard((state.params, state.opt_state))
        kinds = {x.device.type for x in tree.leaves(found[0])}
        assert kinds == {DEVICE.type}
        return found, ff.unshard(step(state, batch)[0].params)

    for found, then in everywhere(main, ranks, mesh):
        same(found, now)
        close(then, later)


def test_a_state_that_is_saved_in_the_background(tmp_path):
    """Donated steps go on meanwhile, and what is saved is the state as it was."""
    mesh = simulated(2)
    step = ff.donate(ff.shard(step_of(layer), mesh, "data"))

    def main():
        params, batch = example()
        state = ff.init_state(step, params, ADAM, batch)
        state, _ = step(state, batch)
        expected = on_host(ff.unshard(state.params))
        saving = ff.save_async(tmp_path / "state", state)
        for _ in range(3):
            state, _ = step(state, batch)
        saving.wait()
        loaded = ff.load(tmp_path / "state", state)
        assert loaded.step == 1
        return expected, ff.unshard(loaded.params)

    for expected, found in ff.spmd(main, mesh)():
        same(found, expected)


def test_the_cards_generator_is_saved_with_a_state(tmp_path):
    mesh = simulated(2)
    step = ff.shard(step_of(layer), mesh, "data")

    def main():
        params, batch = example()
        state = ff.init_state(step, params, ADAM, batch)
        torch.manual_seed(8)
        torch.rand(3, device=DEVICE)
        ff.save(tmp_path / "state", state)
        after = torch.rand(4, device=DEVICE)
        torch.manual_seed(9)
        ff.load(tmp_path / "state", state)
        return after, torch.rand(4, device=DEVICE)

    for after, again in ff.spmd(main, mesh)():
        assert torch.equal(after, again)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_whole_tensors_go_to_the_host(zero):
    step, mesh = step_on(3, zero)

    def main():
        torch.manual_seed(3)
        state = ff.init_state(step, drawn, OPTIMIZER, batch_of(mesh, 3))
        return ff.unshard(state, to="cpu"), ff.unshard(state)

    for there, here in ff.spmd(main, mesh)():
        kinds = {x.device.type for x in tree.leaves(there.params)}
        assert kinds == {"cpu"}
        same(there.params, here.params)
        same(there.opt_state, here.opt_state)


def test_noise_is_the_same_on_any_mesh():
    def main_of(step, mesh, ranks):
        def main():
            torch.manual_seed(3)
            state = ff.init_state(step, drawn, OPTIMIZER, batch_of(mesh, ranks))
            return ff.unshard(ff.randn_like(state.params))

        return main

    expected = main_of(step_on(None, 0)[0], None, None)()
    for ranks, zero in (2, 3), (3, 1):
        step, mesh = step_on(ranks, zero)
        for found in everywhere(main_of(step, mesh, ranks), ranks, mesh):
            same(found, expected)
