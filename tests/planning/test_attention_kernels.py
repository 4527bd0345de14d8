"""Which attention a GPU runs, how it is priced, and which generation is assumed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.planning.attention_kernels import find_generation, pick_kernel
from fsfunc.planning.cost_model import attention_share
from fsfunc.planning.events import Op
from tests.checks import refused

H100, A100 = ff.hardware.H100, ff.hardware.A100_80
B, HEADS, T = 2, 4, 64


def heads(size, length=T, dtype=torch.bfloat16):
    return torch.empty(B, HEADS, length, size, dtype=dtype)


MASK = torch.ones(T, T, dtype=torch.bool)
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
# (size of q and k, size of v, dtype, mask, causal, keys): the kernel, by the checks of
# ATen's sdp_utils.cpp.
PICKED = [
    ((128, 128, HALF, None, True, T), "flash"),
    ((256, 256, HALF, None, False, T), "flash"),
    ((20, 20, HALF, None, True, T), "flash"),  # padded to 24
    ((128, 128, HALF, None, False, 2 * T), "flash"),
    ((192, 128, HALF, None, True, T), "efficient"),  # DeepSeek's
    ((264, 264, HALF, None, True, T), "efficient"),
    ((128, 128, HALF, MASK, False, T), "efficient"),
    ((128, 128, SINGLE, None, True, T), "efficient"),
    ((128, 128, HALF, None, True, 2 * T), "efficient"),
    ((20, 20, HALF, MASK, False, T), "math"),
    ((192, 132, HALF, None, True, T), "math"),
    ((128, 128, DOUBLE, None, True, T), "math"),
]


@pytest.mark.parametrize("case, kernel", PICKED)
def test_the_kernel_is_the_one_that_cuda_picks(case, kernel):
    size, value_size, dtype, mask, is_causal, keys = case
    q, k, v = heads(size, T, dtype), heads(size, keys, dtype), heads(value_size, keys)
    assert pick_kernel(q, k, v.to(dtype), mask, is_causal) == kernel


@pytest.mark.parametrize("apart", ["q", "k", "v", "mask"])
def test_no_fused_kernel_takes_features_that_lie_apart(apart):
    given = {"q": heads(128), "k": heads(128), "v": heads(128)}
    given |= {"mask": MASK} if apart == "mask" else {}
    strided = given | {apart: given[apart].mT.contiguous().mT}
    for tensors, kernel in (
        (given, "efficient" if apart == "mask" else "flash"), (strided, "math"),
    ):  # fmt: skip
        mask = tensors.get("mask")
        q, k, v = (tensors[name] for name in "qkv")
        assert pick_kernel(q, k, v, mask, mask is None) == kernel


@ff.unit
def attention(p, x, mask=None):
    q, k, v = (
        (x @ p[name]).view(B, T, HEADS, -1).transpose(1, 2) for name in ("q", "k", "v")
    )
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=p["drop"].shape[0] / 2,
    )
    return y.transpose(1, 2).flatten(2)


def planned(size, value_size, device="cuda", mask=None, dtype=HALF, dropout=0):
    shapes = {"q": (32, HEADS * size), "k": (32, HEADS * size)}
    shapes |= {"v": (32, HEADS * value_size), "drop": (dropout,)}
    p = {name: torch.zeros(s, dtype=dtype) for name, s in shapes.items()}
    loss = lambda p, x, *mask: attention(p, x, *mask).float().sum()  # noqa: E731
    x = torch.zeros(B, T, 32, dtype=dtype)
    masks = () if mask is None else (mask,)
    return ff.plan(ff.value_and_grad(loss), p, x, *masks, device=device)


def attentions(plan):
    return [r.op for r in plan[0].ran if "_attention" in r.op.name]


@pytest.mark.parametrize("dropout", [0, 1])
def test_heads_of_unlike_sizes_keep_no_scores_on_a_gpu(dropout):
    cuda, cpu = (planned(24, 16, device, dropout=dropout) for device in ("cuda", "cpu"))
    forward, backward = attentions(cuda)
    assert "efficient_attention" in forward.name
    assert "efficient_attention_backward" in backward.name
    assert forward.causal and backward.causal
    assert forward.dims == backward.dims == (B * HEADS, T, T, 24)
    assert forward.flops == 2 * B * HEADS * T * T * (24 + 16)
    assert backward.flops == 2 * B * HEADS * T * T * (3 * 24 + 2 * 16)
    assert not any("softmax" in r.op.name for r in cuda[0].ran)
    assert not attentions(cpu) and cuda.peak_bytes < cpu.peak_bytes


def test_a_mask_is_for_the_efficient_kernel_alone():
    names = {op.name for op in attentions(planned(16, 16))}
    assert all("flash_attention" in name for name in names) and len(names) == 2
    masked = attentions(planned(16, 16, mask=MASK))
    assert all("efficient_attention" in op.name for op in masked) and len(masked) == 2
    assert not any(op.causal for op in masked)


def op_of(name):
    return Op(f"aten._scaled_dot_product_{name}", 1, 1, HALF, (8, 4096, 4096, 128))


def test_the_efficient_kernel_is_of_the_first_generation_but_beside_cudnns():
    def share(name, generation=None, hardware=A100):
        return attention_share(op_of(name), hardware, generation)

    first, second = share("flash_attention", "fa1"), share("flash_attention", "fa2")
    assert share("efficient_attention") == share("efficient_attention", "fa2") == first
    assert first < second == share("flash_attention")
    third = share("flash_attention", "fa3", H100)
    assert share("efficient_attention", "fa3", H100) == third


def test_a_generation_is_found_by_its_number_a_version_and_a_year():
    words = {
        "1": "fa1", "fa2": "fa2", "3": "fa3", "2.0.1": "fa1", "torch==2.2": "fa2",
        "2.10": "fa2", "2.11": "fa3", "2023": "fa1", "2025": "fa2", "2027": "fa3",
    }  # fmt: skip
    assert {word: find_generation(word, H100) for word in words} == words
    assert find_generation("2.14", A100) == find_generation("2026", A100) == "fa2"


@pytest.mark.parametrize(
    "word, hardware, said",
    [
        ("3", A100, "A100-80 knows no attention"),
        ("2", ff.hardware.CPU, "one rate for all attention"),
        ("1.13", A100, "no fused attention"),
    ],
)
def test_what_names_no_generation_is_refused(word, hardware, said):
    refused(lambda: find_generation(word, hardware), ValueError, said)


def test_an_estimate_says_which_generation_it_assumes():
    plan = planned(16, 16)
    likeliest, third = ff.estimate(plan, H100), ff.estimate(plan, H100, attention="fa3")
    assert likeliest.attention == "fa2" and third.attention == "fa3"
    assert "attention by kernels of the generation of FlashAttention-3" in str(third)
    without = ff.plan(lambda x: x @ x, torch.zeros(8, 8))
    assert ff.estimate(without, ff.hardware.CPU).attention is None
