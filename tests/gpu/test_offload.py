"""What lies with the host is what lay on the device, and nobody reads it too early."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests import models
from tests.checks import simulated
from tests.gpu.programs import (
    ADAM,
    DEVICE,
    EXACT,
    close,
    dropped,
    example,
    on_host,
    on_ranks,
    same,
    slow,
    step_of,
)

pytestmark = pytest.mark.gpu

KINDS = ["params moments activations", "params", "moments", "activations"]
AROUND = {
    "plain": lambda f: f,
    "remat": ff.remat,
    "microbatches": lambda f: ff.accumulate(f, 2),
}


def offloaded(step, kinds, where):
    return ff.offload(step, **dict.fromkeys(kinds.split(), where))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kinds", KINDS)
def test_what_lies_with_the_host_trains_alike(tmp_path, kinds, around, ranks):
    """Pinned memory, or a mapped file: brought, used on the device, and put back.

    Adam's products round, and host and device fuse others of them with a sum.
    """
    mesh = simulated(ranks)
    step = ff.shard(AROUND[around](step_of(dropped)), mesh, "data")
    if around == "microbatches":  # of shards, too
        step = ff.accumulate(step, 2)
    expected = on_ranks(step, mesh)
    for where in "host", tmp_path:
        close(on_ranks(ff.donate(offloaded(step, kinds, where)), mesh), expected)


STACKS = {
    "zero=3": lambda f, mesh: ff.shard(f, mesh, "data"),
    "zero=3, remat": lambda f, mesh: ff.shard(ff.remat(f), mesh, "data"),
    "zero=2": lambda f, mesh: ff.shard(f, mesh, "data", zero=2),
    "zero=1, bf16": lambda f, mesh: ff.shard(
        ff.precision(f, torch.bfloat16, torch.float32), mesh, "data", zero=1
    ),
    "zero=3, microbatches, donated": lambda f, mesh: ff.donate(
        ff.accumulate(ff.shard(f, mesh, "data"), 2)
    ),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kinds", KINDS)
def test_bits_behind_slow_kernels(kinds, stack):
    """A copy that does not wait for a kernel brings what was there before.

    Powers of two as rates, so host and device round alike: to the bit, in four steps.
    """
    mesh = simulated(2)
    step = STACKS[stack](step_of(slow, EXACT), mesh)
    how = {"optimizer": EXACT, "steps": 4}
    expected = on_ranks(step, mesh, **how)
    same(on_ranks(offloaded(step, kinds, "host"), mesh, **how), expected)


def test_the_host_reads_a_state_that_the_device_still_writes():
    """What is offloaded is up to date for whoever reads it right after a step."""
    mesh = simulated(1)
    step = ff.shard(step_of(slow, EXACT), mesh, "data")
    far = offloaded(step, "params moments", "host")

    def main(step):
        torch.manual_seed(0)
        params, batch = example()
        state = ff.init_state(step, params, EXACT, batch)
        found = []
        for _ in range(3):
            state, _ = step(state, batch)
            # A numpy array is read by the host, which no stream holds back.
            parts = [p[k].local for p in state.params for k in "wv"]
            found.append([x.cpu().numpy().copy() for x in parts])
        return found

    for mine, theirs in zip(
        ff.spmd(main, mesh)(far)[0], ff.spmd(main, mesh)(step)[0], strict=True
    ):
        for a, b in zip(mine, theirs, strict=True):
            assert (a == b).all()


def test_where_it_lies():
    """On the host, in pinned memory; and gathered parameters on the device."""
    mesh, seen = simulated(2), []

    @ff.unit
    def looks(params, x):
        seen.append(params["w"].device.type)
        return x @ params["w"]

    step = offloaded(
        ff.shard(step_of(looks, ADAM), mesh, "data"), "params moments", "host"
    )

    def main():
        params, batch = example()
        params = [{"w": p["w"]} for p in params]
        state = ff.init_state(step, params, ADAM, batch)
        state, _ = step(state, batch)
        return state

    for state in ff.spmd(main, mesh)():
        parts = [p["w"].local for p in state.params]
        parts += [m["w"].local for m in state.opt_state.mu]
        assert {x.device.type for x in parts} == {"cpu"}
        assert all(x.is_pinned() for x in parts) == (DEVICE.type == "cuda")
    assert set(seen) == {DEVICE.type}


@pytest.mark.parametrize("kind", [torch.uint8, torch.bfloat16, None])
def test_an_update_of_moments_with_the_host(kind):
    """Clipped by a norm that is a number on the device.

    Of moments in few bits one may round to the other side, as host and device compute
    its last bit: a hundredth of the parameters may be farther.
    """
    adam = ff.sharded_adam(1e-2, moment_dtype=kind)
    optimizer = ff.chain(ff.clip_by_global_norm(0.1), adam)
    mesh = simulated(2)
    gradient = ff.value_and_grad(models.chain(dropped))

    def main(*kinds):
        params, batch = example()
        torch.manual_seed(0)
        step = ff.shard(optimizer(gradient), mesh, "data")
        step = ff.offload(step, **dict.fromkeys(kinds, "host")) if kinds else step
        state = ff.init_state(step, params, optimizer, batch)
        for _ in range(2):
            state, loss = step(state, batch)
        return on_host((loss["loss"], ff.unshard(state.params)))

    expected = ff.spmd(main, mesh)()
    for kinds in ["moments"], ["params"], ["params", "moments"]:
        found = ff.spmd(main, mesh)(*kinds)
        if kind is None:
            close(found, expected)
            continue
        pairs = zip(tree.leaves(list(found)), tree.leaves(list(expected)), strict=True)
        near = [torch.isclose(a, b, rtol=1e-5, atol=1e-5).flatten() for a, b in pairs]
        assert torch.cat(near).float().mean() > 0.99


def weights_alone(path, leaf):
    return leaf.ndim > 1


OPTIMIZERS = {
    "clipped": lambda: ff.chain(ff.clip_by_global_norm(0.1), ADAM),
    "moments in bf16": lambda: ff.sharded_adam(
        1e-2, eps=1e-3, moment_dtype=torch.bfloat16
    ),
    "some decay": lambda: ff.sharded_adam(1e-2, eps=1e-3, mask=weights_alone),
    "nesterov": lambda: ff.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: ff.lion(1e-2),
    "lamb": lambda: ff.lamb(1e-2, eps=1e-3),
    "lars": lambda: ff.lars(1e-1, trust_coefficient=0.1),
    "adafactor": lambda: ff.adafactor(1e-2),
    "muon": lambda: ff.muon(1e-2),
    "shampoo": lambda: ff.shampoo(1e-2),
    "schedule free": lambda: ff.schedule_free(ff.sgd(1.0), 1e-2),
    "torch's RMSprop": lambda: ff.from_torch(torch.optim.RMSprop, lr=1e-2),
    "torch's Adagrad": lambda: ff.from_torch(torch.optim.Adagrad, lr=1e-2),
    "torch's SGD": lambda: ff.from_torch(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "masters": lambda: ff.master_weights(ADAM),
    "averaged": lambda: ff.ema(ADAM, 0.9),
    "averaged at the end": lambda: ff.swa(ADAM, start=0, every=1),
    "scaled loss": lambda: ff.loss_scale(ADAM),
    "finite alone": lambda: ff.apply_if_finite(ADAM),
    "in the backward": lambda: ff.step_in_backward(ADAM),
    "in parts": lambda: ff.partition(
        {"up": ff.lamb(1e-2, eps=1e-3), "down": ADAM},
        lambda path, leaf: "up" if path.endswith("w") else "down",
    ),
}


@pytest.mark.parametrize("kinds", ["params", "moments", "params moments"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_meets_what_lies_elsewhere(name, kinds):
    """Parameters, gradients and moments come together where one of them computes."""
    optimizer, mesh = OPTIMIZERS[name](), simulated(2)
    unit = ff.unit(lambda p, x: x + torch.tanh(x @ p["w"]) @ p["v"])
    grad = ff.value_and_grad(models.chain(unit))

    def main(kinds):
        torch.manual_seed(0)
        params, batch = example()
        mine = ff.local_batch(batch, mesh, "data")
        step = ff.shard(optimizer(grad), mesh, "data")
        step = offloaded(step, kinds, "host") if kinds else step
        state = ff.init_state(step, params, optimizer, mine)
        for _ in range(2):
            state, metrics = step(state, mine)
        return on_host((metrics["loss"], ff.unshard(state.params)))

    expected = ff.spmd(main, mesh)("")
    for found, right in zip(ff.spmd(main, mesh)(kinds), expected, strict=True):
        for x, y in zip(tree.leaves(found), tree.leaves(right), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
