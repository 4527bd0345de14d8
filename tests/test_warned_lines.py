"""A warning stands at the user's line that caused it, and nothing else warns."""

import re
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from tests import threaded
from tests.checks import simulated

MESH = simulated()
SGD = ff.sgd(0.1)
X = torch.randn(4, 3)


@ff.unit
def unit(params, x):
    return (x @ params["w"]).square().mean()


def stepped(optimizer, params, batch, transform=lambda step: step, loss=unit):
    step = transform(optimizer(ff.value_and_grad(loss)))

    def main():
        return step(ff.init_state(step, params, optimizer, batch), batch)

    return ff.spmd(main, MESH)()


def sharded(step):
    return ff.shard(step, MESH, "data", equal_batches="data")


def equal_batches():
    stepped(SGD, {"w": torch.ones(3)}, X, lambda step: ff.shard(step, MESH, "data"))


def nothing_is_cut():
    plain = lambda params, x: (x @ params["w"]).square().mean()  # noqa: E731
    stepped(SGD, {"w": torch.ones(3)}, X, sharded, plain)


def unscaled():
    stepped(
        SGD,
        {"w": torch.ones(3)},
        X,
        lambda step: ff.precision(sharded(step), torch.float16),
    )


def narrow_moments():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    stepped(ff.sharded_adam(0.1), params, X.bfloat16(), sharded)


def narrow_averages():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    stepped(ff.ema(SGD, 0.999), params, X.bfloat16(), sharded)


def narrow_sums():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    stepped(
        SGD,
        params,
        torch.ones(300, 3, dtype=torch.bfloat16),
        lambda step: sharded(ff.accumulate(step, 300)),
    )


WARNINGS = {
    equal_batches: "equal batches",
    nothing_is_cut: "cuts nothing",
    unscaled: "float16",
    narrow_moments: "moments have 16 bits",
    narrow_averages: "averages are as narrow",
    narrow_sums: "microbatches are added",
}


@pytest.mark.parametrize("cause", WARNINGS, ids=lambda cause: cause.__name__)
def test_a_warning_stands_at_the_users_line(cause):
    with pytest.warns(UserWarning, match=WARNINGS[cause]) as seen:
        cause()
    # FSFUNC_THREADED=1: in a thread of torch's own no line of the user's is under way.
    torchs = {Path(threaded.__file__)} if threaded.ASKED else set()
    assert {Path(w.filename) for w in seen} - torchs == {Path(__file__)}


def test_a_checkpoint_that_is_passed_over_is_told_at_the_users_line(tmp_path):
    for i in (1, 2):
        ff.save(tmp_path / f"step-{i}", {"w": torch.ones(3)})
    file = max((tmp_path / "step-2").iterdir(), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="cannot be loaded") as seen:
        assert ff.latest(tmp_path).name == "step-1"
    assert [Path(w.filename) for w in seen] == [Path(__file__)]


def test_one_function_warns():
    """But for the version of torch, which no call of a user's causes."""
    root = Path(ff.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"warnings\.warn|from warnings import", path.read_text())
    }
    assert found == {"comm/attribution.py", "_torch/versions.py"}
