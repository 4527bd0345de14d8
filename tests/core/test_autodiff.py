"""`value_and_grad`: torch's own gradients, on any tree, and differentiable again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from tests.checks import all_refused, same
from tests.covering import examples
from tests.probes import LiveBytes


def params():
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(4, 3, generator=g),
        "none": None,
        "steps": 3,
        "name": "model",
        "ids": torch.arange(3),
        "deep": [torch.randn(3, generator=g), {"unused": torch.ones(2, 2)}],
    }


def loss(p, x):
    h = torch.tanh(x @ p["w"] + p["deep"][0])
    return (h[:, p["ids"]] ** 2).sum() / p["steps"]


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def by_autograd(p, x):
    w, b = (t.clone().requires_grad_() for t in (p["w"], p["deep"][0]))
    value = loss({**p, "w": w, "deep": [b, p["deep"][1]]}, x)
    return value.detach(), *torch.autograd.grad(value, [w, b])


def test_it_gives_the_bits_of_autograd_and_none_for_what_is_no_number() -> None:
    value, grads = ff.value_and_grad(loss)(params(), X)
    expected, w, b = by_autograd(params(), X)
    same((value, grads["w"], grads["deep"][0]), (expected, w, b))
    assert grads["none"] is None and grads["steps"] is None and grads["name"] is None
    assert grads["ids"] is None
    same(grads["deep"][1]["unused"], torch.zeros(2, 2))
    assert not value.requires_grad and not w.requires_grad


@pytest.mark.parametrize("argnums", [1, -3, (0,), (-1, 1)])
def test_argnums_choose_the_arguments(argnums) -> None:
    args = [torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0)]
    _, grads = ff.value_and_grad(lambda a, b, c: a * b * c, argnums=argnums)(*args)
    every = [15.0, 10.0, 6.0]
    if isinstance(argnums, int):
        assert grads.item() == every[argnums]
    else:
        assert [g.item() for g in grads] == [every[i] for i in argnums]


def weighted(w, x, keep):
    errors = ((x @ w) ** 2) * keep
    return ff.Weighted(errors.sum(), keep.sum())


@settings(max_examples=examples(10))
@given(st.lists(st.booleans(), min_size=8, max_size=8).filter(any), st.integers(0, 3))
def test_weighted_is_exact_for_uneven_microbatches(keep, power) -> None:
    keep = torch.tensor(keep, dtype=torch.float64)
    x = torch.arange(16.0, dtype=torch.float64).view(8, 2)
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    grad = ff.value_and_grad(weighted, batch_argnums=(1, 2))
    value, g = grad(w, x, keep)
    mean = ((x @ w) ** 2 * keep).sum() / keep.sum()
    same(value, mean)
    same(ff.accumulate(grad, 2**power)(w, x, keep), (value, g))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_it_can_be_differentiated_again_in_every_way() -> None:
    def f(w, x):
        return (torch.sin(w * x) ** 2).sum()

    w, x = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    ours = lambda w, x=x: ff.value_and_grad(f)(w, x)[1]  # noqa: E731
    theirs = lambda w, x=x: torch.func.grad(f)(w, x)  # noqa: E731
    close = torch.testing.assert_close
    close(torch.func.jacrev(ours)(w), torch.func.jacrev(theirs)(w))
    close(torch.func.jacfwd(ours)(w), torch.func.jacfwd(theirs)(w))
    xs = torch.randn(5, 3, dtype=torch.float64)
    per_sample = torch.func.vmap(ours, in_dims=(None, 0))
    close(per_sample(w, xs), torch.stack([theirs(w, x) for x in xs]))
    close(torch.func.jvp(ours, (w,), (x,))[1], torch.func.jvp(theirs, (w,), (x,))[1])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, x)
        tangent = torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent
    close(tangent, torch.func.jvp(theirs, (w,), (x,))[1])
    nested = ff.value_and_grad(lambda w: (ours(w) ** 2).sum())
    close(nested(w)[1], torch.func.grad(lambda w: (theirs(w) ** 2).sum())(w))


def slope(w, z):
    return ff.value_and_grad(lambda z: (w * z**2).sum())(z)


SLOPES = {  # losses by w, and the same on torch.func
    "gradient": (
        lambda w, z: (slope(w, z)[1] ** 2).sum(),
        lambda w, z: (2 * w * z) ** 2,
    ),
    "value": (lambda w, z: slope(w, z)[0], lambda w, z: w * z**2),
    "twice": (
        lambda w, z: ff.value_and_grad(lambda z: slope(w, z)[1].prod())(z)[1].sum(),
        lambda w, z: 4 * w * w * z,
    ),
    "of the gradient": (
        lambda w, z: ff.value_and_grad(lambda w: (slope(w, z)[1] ** 2).sum())(w)[1],
        lambda w, z: 8 * w * z**2,
    ),
    "in a unit": (
        lambda w, z: (ff.unit(lambda w, z: slope(w, z)[1])(w, z) ** 2).sum(),
        lambda w, z: (2 * w * z) ** 2,
    ),
}


@pytest.mark.parametrize("around", [lambda f: f, ff.remat], ids=["plain", "remat"])
@pytest.mark.parametrize("name", SLOPES)
def test_a_nested_call_is_differentiable_by_what_it_closes_over(name, around) -> None:
    """An energy model's loss is made of a gradient by the data."""
    w, z = torch.tensor(3.0), torch.tensor([1.0, 2.0])
    loss, right = SLOPES[name]
    expected = torch.func.grad_and_value(lambda w: right(w, z).sum())(w)
    same(ff.value_and_grad(around(loss))(w, z), expected[::-1])
    same(torch.func.grad_and_value(loss)(w, z), expected)
    w.requires_grad_()
    same(torch.autograd.grad(around(ff.unit(loss))(w, z), w)[0], expected[0])


def test_the_peak_is_that_of_autograd_and_far_below_torch_func() -> None:
    d = 64
    weights = [torch.randn(d, d) / 8 for _ in range(16)]  # a quarter activation each
    x = torch.randn(4 * d, d)

    def f(ws):
        h = x
        for w in ws:
            h = torch.tanh(h @ w)
        return h.sum()

    def plain(ws):
        ws = [w.detach().requires_grad_() for w in ws]
        return torch.autograd.grad(f(ws), ws)

    def peak(run):
        with LiveBytes(weights, x) as memory:
            run(weights)
        return memory.peak / (x.numel() * 4)

    ours, theirs = peak(ff.value_and_grad(f)), peak(torch.func.grad_and_value(f))
    assert ours == pytest.approx(peak(plain), abs=0.01)
    assert ours <= 17.5 and theirs > 40, (ours, theirs)  # measured: 17.25 and 51


def value_of(value, **how):
    return lambda: ff.value_and_grad(value, **how)(torch.ones(2))


def of_three(argnums):
    f = ff.value_and_grad(lambda a, b, c: a, argnums=argnums)
    return lambda: f(*torch.ones(3))


def in_inference_mode():
    """Nothing is recorded in it: the gradients would be zeros, in silence."""
    w = torch.ones(2)
    with torch.inference_mode():
        ff.value_and_grad(lambda w: (w**2).sum())(w)


test_bad_input_is_refused = all_refused(
    {
        "argument 3": (of_three(3), ValueError, "3 positional"),
        "argument -4": (of_three(-4), ValueError, "3 positional"),
        "one twice": (of_three((0, -3)), ValueError, "twice"),
        "a vector": (value_of(lambda w: w), ValueError, r"shape \(2,\)"),
        "an integer": (value_of(lambda w: w.sum().long()), ValueError, "int64"),
        "a number": (value_of(lambda w: 1.0), TypeError, "got float"),
        "a weight": (value_of(lambda w: ff.Weighted(w, 2)), ValueError, "Weighted"),
        "a pair": (value_of(lambda w: (w.sum(), 0)), TypeError, "got tuple"),
        "no pair": (value_of(lambda w: w.sum(), has_aux=True), TypeError, "aux"),
        "inference": (in_inference_mode, RuntimeError, "call it outside that mode"),
    }
)
