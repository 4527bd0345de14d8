"""Weight gradients of products: added in place, and the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.pipelining.fused_gradients import _alone
from fsfunc.pipelining.stages import StageVjp
from fsfunc.runtime.memory import BufferPool
from tests.checks import same
from tests.probes import LiveBytes

T, D = 6, 4


def whole(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=draw).float()


def weights() -> dict[str, Tensor]:
    found = {
        "linear": whole(8, D, seed=1),
        "biased": whole(D, 8, seed=2),
        "bias": whole(D, seed=3),
        "plain": whole(D, D, seed=4),
        "viewed": whole(2, 2, D, seed=5),
        "twice": whole(D, D, seed=6),
        "also_added": whole(D, D, seed=7),
        "cut": whole(D, 2 * D, seed=8),
        "first": whole(D, D, seed=9),
        "table": whole(5, D, seed=12),
    }
    return {name: w.requires_grad_() for name, w in found.items()}


def network(p: dict[str, Tensor], x: Tensor, batch: Tensor) -> Tensor:
    h = x + batch @ p["first"]  # its other factor needs no gradient
    h = h + F.embedding(torch.tensor([0, 3, 3, 1, 0, 2]), p["table"])
    h = F.linear(h, p["linear"])
    h = F.linear(h, p["biased"], p["bias"]) @ p["plain"]
    h = F.linear(h, p["viewed"].flatten(0, 1))
    h = (h @ p["twice"]) @ p["twice"]
    h = h @ p["also_added"] + p["also_added"].sum()
    return h @ p["cut"][:, :D]


def backward(vjp: StageVjp, g: Tensor, halves: bool):
    if not halves:
        return vjp.backward([g])
    found = vjp.input_gradient([g])
    vjp.weight_gradient()
    return found


def test_only_what_products_alone_read_is_added_by_them():
    p, x = weights(), whole(T, D).requires_grad_()
    y = network(p, x, whole(T, D, seed=10))
    found = _alone([y.grad_fn], p.values(), BufferPool())
    names = {id(w): name for name, w in p.items()}
    added = [names[id(add.leaf)] for add in found]
    assert sorted(added) == [
        *("biased", "first", "linear", "plain", "table", "twice", "twice", "viewed")
    ]


@pytest.mark.parametrize("halves", [False, True])
def test_several_pull_backs_add_up(halves):
    p, g = weights(), whole(T, D, seed=11)
    x, batch = whole(T, D).requires_grad_(), whole(T, D, seed=10)
    y = network(q := weights(), x, batch)
    dx, *expected = torch.autograd.grad(y, [x, *q.values()], g)
    for _ in range(3):
        mine = x.detach().clone().requires_grad_()
        vjp = StageVjp([network(p, mine, batch)], [mine], list(p.values()))
        same(list(backward(vjp, g, halves)), [dx])
        assert mine.grad is None
    same([w.grad for w in p.values()], [3 * w for w in expected])


@pytest.mark.parametrize("halves", [False, True])
def test_no_second_gradient_is_made(halves):
    n = 64
    x, w = torch.ones(1, n, requires_grad=True), torch.ones(n, n, requires_grad=True)

    def once() -> None:
        backward(StageVjp([F.linear(x, w)], [x], [w]), torch.ones(1, n), halves)

    once()
    with LiveBytes() as live:
        once()
    # The weight and its gradient, both seen for the first time; no third of the kind.
    assert live.peak < 2.5 * n * n * 4, live.peak


def test_memory_of_gradients_that_are_gone_is_used_again():
    pool, w = BufferPool(), whole(D, D).requires_grad_()

    def gradient() -> Tensor:
        x = whole(T, D).requires_grad_()
        StageVjp([x @ w], [x], [w], pool).backward([torch.ones(T, D)])
        found, w.grad = w.grad, None
        assert found is not None
        return found

    first = gradient()
    place, bits = first.data_ptr(), first.clone()
    second = gradient()
    assert second.data_ptr() != place  # somebody holds the first
    same([first, second], [bits, bits])
    del first
    assert gradient().data_ptr() == place
