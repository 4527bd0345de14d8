"""What one leaf, one group or one setting is to an elementwise optimizer."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsfunc import tree
from fsfunc.optim.adam import sharded_adam
from fsfunc.optim.descent import SgdState, sgd
from fsfunc.optim.torch_optimizers import from_torch
from tests.optim.optimizers import DESCENTS, OWN
from tests.optim.trees import (
    assert_bits,
    assert_near,
    donated,
    like,
    params_of,
    trained,
    trained_by_update,
)


def test_gradients_of_another_dtype_are_cast():
    params, grads = {"w": torch.randn(5)}, {"w": torch.randn(5).bfloat16()}
    wide = tree.map(torch.Tensor.float, grads)
    optimizer = sharded_adam()
    assert_bits(
        trained(optimizer, params, [wide] * 2), trained(optimizer, params, [grads] * 2)
    )
    assert_near(
        trained_by_update(optimizer, params, [wide] * 2),
        trained_by_update(optimizer, params, [grads] * 2),
    )


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_moments_of_another_dtype(dtype, moments):
    params, grads = {"w": torch.randn(50).to(dtype)}, {"w": torch.randn(50).to(dtype)}
    optimizer = sharded_adam(moment_dtype=moments)
    after, state = trained(optimizer, params, [grads])
    assert after["w"].dtype == dtype
    assert state.mu["w"].dtype == state.nu["w"].dtype == moments
    wide, wide_state = trained(
        sharded_adam(),
        tree.map(torch.Tensor.float, params),
        [tree.map(torch.Tensor.float, grads)],
    )
    assert_bits(tree.map(lambda x: x.to(dtype), wide), after)
    assert_bits(wide_state.nu["w"].to(moments), state.nu["w"])
    with donated():
        actual = trained(optimizer, params, [grads])
    assert_bits((after, state), actual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", DESCENTS.elements)
def test_sgd_of_16_bits_is_that_of_float32_rounded_each_step(settings, dtype):
    params, grads = ([torch.randn(1001).to(dtype)] for _ in range(2))
    wide = params, SgdState(0, [torch.zeros(1001)] if "momentum" in settings else None)
    optimizer, found = sgd(0.1, **settings), (params, sgd(0.1, **settings).init(params))
    for _ in range(3):
        wide = optimizer.apply(*(tree.map(float_of, x) for x in (grads, *wide[::-1])))
        wide = tree.map(lambda x: x.to(dtype) if isinstance(x, Tensor) else x, wide)
        found = optimizer.apply(grads, found[1], found[0])
        assert_bits(wide, found)


def float_of(x):
    return x.float() if isinstance(x, Tensor) else x


SCHEDULED = {
    kind: lambda rate, kind=kind: from_torch(getattr(torch.optim, kind), lr=rate)
    for kind in ("Rprop", "ASGD", "RMSprop")
} | {"AdamW": sharded_adam}


@pytest.mark.parametrize("first", [0.0, 0.25])
@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_is_the_scheduler_asked_for_each_count(name, first):
    rates, asked = [first, 0.5, 0.125, 0.25], []

    def schedule(count):
        asked.append(count)
        return rates[count]

    params = params_of([(5,)], 0)
    leaf = torch.nn.Parameter(params["head"].clone())
    how = {"fused": True} if SCHEDULED[name] is sharded_adam else {}
    reference = getattr(torch.optim, name)([leaf], lr=rates[0], **how)
    grads = [like(params, k) for k in range(len(rates))]
    for rate, g in zip(rates, grads, strict=True):
        reference.param_groups[0]["lr"] = rate
        leaf.grad = g["head"].clone()
        reference.step()
    after, _ = trained(SCHEDULED[name](schedule), params, grads)
    assert_bits(leaf.detach(), after["head"])
    assert name != "AdamW" or asked == [0, 1, 2, 3]  # once for each count


@pytest.mark.parametrize("name", OWN)
@settings(max_examples=5)
@given(data=st.data())
def test_the_count_may_be_a_tensor(name, data):
    optimizer = OWN[name].ours(**data.draw(OWN[name].settings))
    w, g = torch.randn(3), torch.randn(3)
    state = optimizer.init(w)
    counted = state._replace(count=torch.tensor(0))
    for k in range(2):
        updates = [optimizer.update(g, s, w)[0] for s in (state, counted)]
        assert_near(*updates)
        (after, state), (its, counted) = (
            optimizer.apply(g, s, w) for s in (state, counted)
        )
        assert_bits(after, its)
        assert counted.count.item() == k + 1
        w = after


# torch's own jvp decompositions are scripted when first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize("make", [sharded_adam, functools.partial(sgd, momentum=0.9)])
def test_apply_differentiates(make):
    optimizer = make(0.1)

    def after_two_steps(p):
        new, _ = trained(optimizer, p, [torch.sin(p), torch.cos(p)])
        return new.square().sum()

    p = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
    h = 1e-6
    steps = torch.eye(3, dtype=torch.float64) * h
    expected = torch.stack(
        [(after_two_steps(p + s) - after_two_steps(p - s)) / (2 * h) for s in steps]
    )
    torch.testing.assert_close(torch.func.grad(after_two_steps)(p), expected)
    asking = p.clone().requires_grad_()
    (found,) = torch.autograd.grad(after_two_steps(asking), asking)
    torch.testing.assert_close(found, expected)
    _, tangent = torch.func.jvp(after_two_steps, (p,), (torch.ones_like(p),))
    torch.testing.assert_close(tangent, expected.sum())
    stacked = torch.stack([p, 2 * p])
    torch.testing.assert_close(
        torch.func.vmap(after_two_steps)(stacked)[1], after_two_steps(2 * p)
    )
