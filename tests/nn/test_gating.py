"""Gates: equal to the papers' masks, which they never make."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import (
    MixtralTopKRouter,
    load_balancing_loss_func,
)

import fsfunc.nn as nn
from tests.checks import all_refused, close
from tests.covering import examples

LAST = torch.Generator().manual_seed(0)


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=LAST, dtype=dtype)


def as_masks(routing):
    """A routing as GShard's combine weights: [tokens, experts, places]."""
    (tokens, _), experts = routing.indices.shape, len(routing.counts)
    combine = torch.zeros(tokens, experts, routing.capacity, dtype=torch.float64)
    for t, k in routing.kept.nonzero().tolist():
        e, c = routing.indices[t, k], routing.positions[t, k]
        assert combine[t, e, c] == 0
        combine[t, e, c] = routing.weights[t, k]
    return combine


def by_masks(logits, noise, capacity):
    """Top2Gate as published: loss and combine weights, out of masks alone."""
    experts = logits.shape[1]
    gates = logits.softmax(1)
    mask1 = F.one_hot(logits.argmax(1), experts)
    others = (logits + noise).masked_fill(mask1.bool(), -math.inf)
    mask2 = F.one_hot(others.argmax(1), experts)
    aux = (gates.mean(0) * mask1.double().mean(0)).mean()
    place1 = mask1.cumsum(0) - 1
    place2 = mask2.cumsum(0) - 1 + mask1.sum(0)
    mask1, mask2 = mask1 * (place1 < capacity), mask2 * (place2 < capacity)
    share1, share2 = (gates * mask1).sum(1), (gates * mask2).sum(1)
    total = (share1 + share2).clamp(min=torch.finfo(torch.float64).eps)
    combine = torch.zeros(*logits.shape, capacity, dtype=torch.float64)
    for share, mask, place in [(share1, mask1, place1), (share2, mask2, place2)]:
        places = F.one_hot((place * mask).sum(1), capacity)
        taken = mask[:, :, None] * places[:, None]
        combine = combine + (share / total)[:, None, None] * taken
    return aux, combine


@settings(max_examples=examples(15))
@given(
    tokens=st.integers(1, 12),
    experts=st.integers(2, 6),
    factor=st.sampled_from([0.3, 1.0, 1.7]),
    noisy=st.booleans(),
)
def test_top_2_is_the_published_gate(tokens, experts, factor, noisy) -> None:
    LAST.manual_seed(tokens * 10 + experts)
    logits = draw(tokens, experts).requires_grad_()
    noise = draw(tokens, experts) * noisy
    found = nn.top_2_gating(
        logits, noise=noise if noisy else None, capacity_factor=factor
    )
    capacity = math.ceil(Fraction(str(factor)) * 2 * tokens / experts)
    assert found.capacity == capacity
    aux, combine = by_masks(logits, noise, capacity)
    close(as_masks(found), combine.detach(), 1e-12)
    assert found.dropped == 2 * tokens - (combine != 0).sum()
    close(found.aux_loss, aux, 1e-12)
    to = draw(tokens, 2)  # a cotangent of weights, as one of the masks
    masks = as_masks(found._replace(weights=to))
    grads = [
        torch.autograd.grad(loss, logits)[0]
        for loss in [
            (found.weights * to).sum() + found.aux_loss * 3,
            (combine * masks).sum() + aux * 3,
        ]
    ]
    close(*grads, tolerance=1e-12)


def test_fairscales_numbers() -> None:
    """Seed 3 gives FairScale's own test a loss of 0.0267, and weights of 12 in all."""
    torch.manual_seed(3)
    x, gate = torch.randn(12, 4), torch.nn.Linear(4, 6, bias=False)
    gumbel = torch.distributions.Gumbel(0.0, 1.0).rsample((12, 6))
    routing = nn.top_2_gating(gate(x), noise=gumbel)
    assert routing.capacity == 4
    assert routing.aux_loss.item() == pytest.approx(0.026696, abs=1e-6)
    assert routing.weights.sum().item() == pytest.approx(12.0)


def test_the_second_expert_is_drawn_by_its_probability() -> None:
    """With Gumbel noise; and it is never the first, whatever the logits."""
    LAST.manual_seed(0)
    logits = torch.tensor([3.0, 0.0, math.log(3.0)]).expand(20_000, 3)
    noise = -torch.empty_like(logits).exponential_(generator=LAST).log()
    second = nn.top_2_gating(logits, noise=noise).indices[:, 1]
    assert 0.74 < (second == 2).double().mean() < 0.76 and (second != 0).all()
    alone = torch.tensor([[-math.inf, 1.0, -math.inf]])
    routing = nn.top_2_gating(alone)
    assert routing.indices[0, 0] == 1 and routing.indices[0, 1] != 1
    assert routing.weights.tolist() == [[1.0, 0.0]]


@settings(max_examples=examples(10))
@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_top_k_is_mixtrals_router(tokens, experts, data) -> None:
    k = data.draw(st.integers(1, experts))
    sizes = {"num_local_experts": experts, "num_experts_per_tok": k, "hidden_size": 5}
    router = MixtralTopKRouter(MixtralConfig(**sizes))
    router.weight.data = draw(experts, 5, dtype=torch.float32)
    logits, weights, indices = router(draw(tokens, 5, dtype=torch.float32))
    routing = nn.top_k_gating(logits, k)
    assert (routing.indices == indices).all() and routing.capacity is None
    close(routing.weights, weights, 1e-6)
    aux = load_balancing_loss_func((logits,), experts, k)
    close(routing.aux_loss, aux, 1e-6)
    close(routing.z_loss, logits.logsumexp(1).square().mean(), 1e-6)
    assert routing.dropped == 0 and routing.kept.all()


def test_top_1_is_switchs() -> None:
    logits = draw(3, 5, 4).requires_grad_()
    routing = nn.top_1_gating(logits, capacity_factor=1.25)
    probs = logits.reshape(-1, 4).softmax(1)
    best, index = probs.max(1)
    fractions = F.one_hot(index, 4).double().mean(0)
    assert routing.capacity == 5  # ceil(1.25 * 15 / 4)
    assert (routing.indices[:, 0] == index).all()
    kept = routing.kept[:, 0]
    close(routing.weights[:, 0], torch.where(kept, best, 0), 1e-12)
    close(routing.aux_loss, 4 * (fractions * probs.mean(0)).sum(), 1e-12)
    loss = routing.weights.sum() + routing.aux_loss + routing.z_loss
    assert (torch.autograd.grad(loss, logits)[0] != 0).all(-1).any()


@settings(max_examples=examples(15))
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=8),
    factor=st.sampled_from([None, 0.5, 1.1, 3]),
    least=st.integers(0, 2),
)
def test_queues_hold_first_choices_first_and_tokens_in_order(rows, factor, least):
    indices = torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)
    weights = torch.ones(len(rows), 2)
    least = least if factor else 0
    routing = nn.route(indices, weights, 4, capacity_factor=factor, min_capacity=least)
    queues = [[] for _ in range(4)]
    for k in range(2):
        for t, row in enumerate(rows):
            assert routing.positions[t, k] == len(queues[row[k]])
            queues[row[k]].append((t, k))
    assert routing.counts.tolist() == [len(queue) for queue in queues]
    if factor is not None:
        places = math.ceil(Fraction(str(factor)) * 2 * len(rows) / 4)
        assert routing.capacity == max(least, places)
        assert (routing.kept == (routing.positions < routing.capacity)).all()
        assert (routing.weights == routing.kept).all()
    assert routing.dropped == (~routing.kept).sum()


@settings(max_examples=examples(15))
@given(
    used=st.lists(st.booleans(), min_size=1, max_size=8),
    gate=st.sampled_from(["top 1", "top 2", "top k"]),
    factor=st.sampled_from([None, 0.6]),
)
def test_padding_is_as_if_it_were_not_there(used, gate, factor) -> None:
    """But for capacity, which is of the shape of the tokens."""
    LAST.manual_seed(len(used))
    logits, used = draw(len(used), 4), torch.tensor(used)
    logits[~used] = torch.tensor([math.nan, math.inf, 0.0, -1.0], dtype=logits.dtype)
    leaf = logits.requires_grad_()
    gates = {
        "top 1": nn.top_1_gating,
        "top 2": nn.top_2_gating,
        "top k": lambda z, **how: nn.top_k_gating(z, 3, **how),
    }
    k = {"top 1": 1, "top 2": 2, "top k": 3}[gate]
    found = gates[gate](leaf, capacity_factor=factor, used_token=used)
    room = {"capacity_factor": None}
    if factor is not None:
        room = {"capacity_factor": 1e-9, "min_capacity": found.capacity}
    expected = gates[gate](leaf[used], **room)
    assert factor is None or found.capacity == math.ceil(0.6 * k * len(used) / 4)
    for name in ("indices", "weights", "positions", "kept"):
        close(getattr(found, name)[used], getattr(expected, name), 1e-12)
    for name in ("counts", "dropped", "aux_loss", "z_loss"):
        close(getattr(found, name), getattr(expected, name), 1e-12)
    assert not found.kept[~used].any() and not found.weights[~used].any()
    aux = load_balancing_loss_func((leaf[used],), 4, k) if used.any() else 0.0
    if gate == "top k":
        close(found.aux_loss, torch.as_tensor(aux).double(), 1e-6)
    (grad,) = torch.autograd.grad(found.aux_loss + found.z_loss, leaf)
    assert grad.isfinite().all() and not grad[~used].any()


@pytest.mark.parametrize("gate", [nn.top_1_gating, nn.top_2_gating])
def test_gates_compute_in_fp32_and_take_any_group(gate) -> None:
    logits = draw(6, 4).bfloat16()
    routing = gate(logits)
    exact = gate(logits.float())
    assert routing.weights.dtype == routing.z_loss.dtype == torch.float32
    close(routing.weights, exact.weights, 0)
    close(routing.aux_loss, exact.aux_loss, 0)
    nobody = gate(logits[:0])
    assert (nobody.aux_loss, nobody.z_loss, nobody.dropped) == (0, 0, 0)


X = torch.zeros(4, 3)
test_bad_input_is_refused = all_refused({
    "too few experts": (lambda: nn.top_2_gating(X[:, :1]), ValueError,
        r"2 choices .*\(4, 1\)"),
    "no choice": (lambda: nn.top_k_gating(X, 0), ValueError, "one at least"),
    "too many choices": (lambda: nn.top_k_gating(X, 4), ValueError, "each once"),
    "no dims": (lambda: nn.top_k_gating(X.sum(), 1), ValueError, "last dim"),
    "noise of another shape": (lambda: nn.top_2_gating(X, noise=X[0]), ValueError,
        r"noise of shape \(3,\)"),
    "factor 0": (lambda: nn.top_1_gating(X, capacity_factor=0), ValueError,
        "None drops nobody"),
    "factor nan": (lambda: nn.top_1_gating(X, capacity_factor=math.nan), ValueError,
        "finite"),
    "negative room": (lambda: nn.top_1_gating(X, min_capacity=-1), ValueError,
        "min_capacity=-1"),
    "room without a factor": (lambda: nn.top_k_gating(X, 2, min_capacity=1), ValueError,
        "without a"),
    "unlike shapes": (lambda: nn.route(X[:, :2].long(), X, 3), ValueError,
        r"\[tokens, choices\]"),
    "padding in integers": (lambda: nn.top_1_gating(X, used_token=torch.ones(4).long()),
        TypeError, r"used_token of torch.int64: .* attention_mask.bool\(\)"),
    "padding of another shape": (lambda: nn.top_k_gating(X, 2, used_token=torch.ones(2,
        2).bool()), ValueError,
        r"used_token of shape \(2, 2\) for tokens of shape \(4,\)"),
    "no such expert": (lambda: nn.route(X.long() + 3, X, 3), RuntimeError,
        "out of bounds"),
})  # fmt: skip


def test_a_factor_is_meant_as_it_is_written() -> None:
    """In floats 1.1 * 50 is more than 55."""
    zeros = torch.zeros(50, 1, dtype=torch.int64)
    assert nn.route(zeros, torch.ones(50, 1), 1, capacity_factor=1.1).capacity == 55
