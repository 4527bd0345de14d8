"""The recipes give what one device gives."""

import torch

import fsfunc as ff
from examples import recipes
from tests.checks import close


def test_two_models_are_one_device_s():
    weights, x = {k: torch.randn(8, 8) for k in "gd"}, torch.randn(8, 8)
    whole = {k: ff.TrainState(w, recipes.adam.init(w)) for k, w in weights.items()}
    expected, _ = recipes.gan_step(whole, x)
    for state in ff.spmd(recipes.gan, recipes.mesh)(weights, x):
        close(state["g"].params, expected["g"].params, 1e-6)
        close(state["d"].params, expected["d"].params, 1e-6)


def test_adapters_and_a_state_of_one_s_own():
    w, x = torch.randn(8, 8), torch.randn(8, 8)
    adapters = {"a": torch.randn(8, 2), "b": torch.zeros(2, 8)}
    extra = {"w": w, "seen": torch.zeros(())}
    start = ff.TrainState(adapters, recipes.adam.init(adapters), extra=extra)
    expected, _ = recipes.lora_step(start, x)
    for state in ff.spmd(recipes.lora, recipes.mesh)(w, adapters, x):
        close(state.params, expected.params, 1e-6)
        assert torch.equal(state.extra["w"], w) and state.extra["seen"] == 1


def test_a_dataset_of_one_s_own(tmp_path):
    text = bytes(range(256)) * 8
    path = tmp_path / "text"
    path.write_bytes(text)
    rows = ff.spmd(recipes.first_batch, recipes.mesh)(str(path))
    windows = {text[i : i + 16] for i in range(0, len(text), 16)}
    assert {bytes(row.tolist()) for row in torch.cat(rows)} <= windows


def test_it_runs_as_a_program(capsys):
    recipes.main()
    assert "frozen weight changed: False" in capsys.readouterr().out
