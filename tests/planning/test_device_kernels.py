"""Kernels of a GPU in a plan, and chains that a compiler fuses, by lists by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fsfunc as ff
from fsfunc.planning.events import Ran
from tests.checks import refused

DEVICES = ("cpu", "cuda")
B, T, D, H, INNER = 2, 256, 512, 4, 1376  # a Llama's layer, in small


@ff.unit
def block(p, x):
    def heads(name):
        return (h @ p[name]).view(B, T, H, D // H).transpose(1, 2)

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * p["cos"].detach() + torch.cat((-b, a), -1) * p["sin"].detach()

    h = F.rms_norm(x, (D,), p["norm1"], 1e-5)
    q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + found.transpose(1, 2).reshape(B, T, D) @ p["o"]
    h = F.rms_norm(x, (D,), p["norm2"], 1e-5)
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def params():
    shapes = dict.fromkeys("qkvo", (D, D)) | dict.fromkeys(["norm1", "norm2"], (D,))
    shapes |= dict.fromkeys(["cos", "sin"], (T, D // H))
    shapes |= {"gate": (D, INNER), "up": (D, INNER), "down": (INNER, D)}
    return {name: torch.zeros(s, dtype=torch.bfloat16) for name, s in shapes.items()}


def by_phase(plan, name="block"):
    """Bytes of what is no product and no attention, by phase, in units of B T D."""
    found = Counter()
    for event in plan[0].events:
        if isinstance(event, Ran) and event.unit == name and not event.op.flops:
            found[event.phase] += event.op.bytes / (B * T * D)
    return found


def zeros():
    return torch.zeros(B, T, D, dtype=torch.bfloat16)


def planned(jit=False, device="cuda", unit=block, given=params):
    x = zeros()
    f = lambda p, x: unit(p, x).float().sum()  # noqa: E731
    grad = ff.value_and_grad(f, (0, 1))
    return ff.plan(ff.jit(grad) if jit else grad, given(), x, device=device)


@ff.unit
def mpt(p, x):
    rows = (F.layer_norm(x, (D,), p["norm1"]) @ p["qkv"]).chunk(3, -1)
    q, k, v = (y.view(B, T, H, D // H).transpose(1, 2) for y in rows)
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + found.transpose(1, 2).reshape(B, T, D) @ p["o"]
    return x + F.gelu(F.layer_norm(x, (D,), p["norm2"]) @ p["up"]) @ p["down"]


def mpt_params():
    shapes = {"qkv": (D, 3 * D), "o": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    shapes |= {"norm1": (D,), "norm2": (D,)}
    return {name: torch.zeros(s, dtype=torch.bfloat16) for name, s in shapes.items()}


# Kernels, and the bytes that they read and write forward and backward, 2 an element, in
# units of [B, T, D]: of what comes broadcast, and of what a row has once, nothing.
WIDE = INNER / D
NORM = (2 + 2), (4 + 2) + 4  # x -> y; (dy, x) -> dx, and again -> dw
RESIDUAL = (4 + 2), (4 + 2)  # the sum; that of both derivatives
LLAMA = {
    "two norms": (2 * NORM[0], 2 * NORM[1]),
    "two residuals": (2 * RESIDUAL[0], 2 * RESIDUAL[1]),
    # x cos, -b of half, cat, its sin, their sum; and the same backward.
    "rotary positions of q and k": (2 * (4 + 2 + 4 + 4 + 6), 2 * (4 + 2 + 4 + 4 + 6)),
    "silu": (WIDE * (2 + 2), WIDE * (4 + 2)),
    "silu, times up": (WIDE * (4 + 2), WIDE * 2 * (4 + 2)),
    "of h, derivatives by q, k, v; by gate, up": (0, 2 * (4 + 2) + (4 + 2)),
}
MPT = {
    "two norms": LLAMA["two norms"],
    "two residuals": LLAMA["two residuals"],
    "gelu": (4 * (2 + 2), 4 * (4 + 2)),
    "derivatives of q, k and v, as one": (0, 3 * (2 + 2)),
}


@pytest.mark.parametrize(
    "table, unit, given", [(LLAMA, block, params), (MPT, mpt, mpt_params)]
)
def test_a_layers_kernels_are_those_of_a_list_by_hand(table, unit, given):
    """What is no product and no attention, within 3%: broadcasts, and sums by rows."""
    found = by_phase(planned(unit=unit, given=given), unit.__name__)
    forward, backward = map(sum, zip(*table.values(), strict=True))
    assert found["forward"] == pytest.approx(forward, rel=0.03)
    assert found["backward"] == pytest.approx(backward, rel=0.03)


def test_a_llamas_kernels_are_those_of_a_gpu():
    found, cpu = by_phase(planned()), by_phase(planned(device="cpu"))
    names = Counter(e.op.name for e in planned()[0].events if isinstance(e, Ran))
    assert names["fsfunc_cuda.rms_norm"] == names["fsfunc_cuda.rms_norm_backward"] == 2
    assert not names["aten.rsqrt"] and not names["aten.pow"]
    # Of its two norms a GPU keeps their inputs and a number a row.
    assert cpu["forward"] > 1.3 * found["forward"]
    assert cpu["backward"] > 1.3 * found["backward"]
    assert planned().peak_bytes < planned(device="cpu").peak_bytes
    assert planned().flops == planned(device="cpu").flops
    loss = lambda p, x: block(p, x).float().sum()  # noqa: E731
    again = ff.remat(ff.value_and_grad(loss, (0, 1)))
    remat = by_phase(ff.plan(again, params(), zeros(), device="cuda"))
    assert remat["forward"] == found["forward"]
    assert remat["recompute"] == found["forward"] - 6  # but for the last residual
    assert remat["backward"] == found["backward"]
    other = params() | {"norm1": torch.zeros(D), "norm2": torch.zeros(D)}
    x = zeros()
    with pytest.warns(UserWarning, match="Mismatch dtype"):  # as on a GPU
        mixed = ff.plan(lambda p, x: block(p, x), other, x, device="cuda")
    assert any(e.op.name == "aten.rsqrt" for e in mixed[0].events if type(e) is Ran)


@ff.unit
def dropping(p, x):
    q = F.dropout(x @ p, 0.5).view(2, 64, 4, 16).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True)


def test_dropout_is_one_kernel_and_leaves_attention_fused():
    grad = ff.value_and_grad(lambda p, x: dropping(p, x).sum())
    halves = {"dtype": torch.bfloat16}  # which flash takes; of float32 it takes none
    args = torch.zeros(64, 64, **halves), torch.zeros(2, 64, 64, **halves)
    names = [{e.op.name for e in ff.plan(grad, *args, device=device)[0].events
              if isinstance(e, Ran)} for device in ("cpu", "cuda")]  # fmt: skip
    assert "aten.native_dropout" in names[1] and "aten.native_dropout" not in names[0]
    for kinds, word in zip(names, ("softmax", "flash"), strict=True):
        assert any(word in n for n in kinds)
    assert not any("softmax" in n for n in names[1])


def test_another_device_is_refused():
    args = (lambda p, x: p, torch.zeros(2), torch.zeros(2))
    refused(lambda: ff.plan(*args, device="gpu"), ValueError, "device='gpu'.*'cuda'")


# What a compiler fuses


@ff.unit
def chain(p, x):
    """Two products with three operators between them, and two after."""
    y = x @ p
    return torch.relu(torch.tanh(y + 1) * 2 @ p) + 3


def sizes(plan):
    events = [e for e in plan[0].events if isinstance(e, Ran) and not e.op.flops]
    return [(e.phase, e.op.name, e.op.bytes) for e in events if e.unit == "chain"]


def test_a_chain_reads_what_comes_and_writes_what_is_read_elsewhere():
    grad = ff.value_and_grad(lambda p, x: chain(p, x).sum())
    n, args = 4 * 32 * 32, (torch.zeros(32, 32), torch.zeros(32, 32))
    eager, fused = ff.plan(grad, *args), ff.plan(ff.jit(grad), *args)
    assert [row for row in sizes(fused) if row[0] == "forward"] == [
        ("forward", "fused", 2 * n),  # reads y, which is kept, and writes the double
        ("forward", "fused", 2 * n + n // 4),  # a product, relu + 3, and its signs
    ]
    assert [row[1] for row in sizes(eager)][:4] == [
        "aten.add", "aten.tanh", "aten.mul", "aten.relu"
    ]  # fmt: skip
    assert sum(x for _, _, x in sizes(fused)) < sum(x for _, _, x in sizes(eager))
    assert fused.flops == eager.flops and fused.peak_bytes < eager.peak_bytes
    assert sizes(ff.plan(ff.jit(grad, only="other"), *args)) == sizes(eager)


@ff.unit
def rotated(p, x):
    """Rotary positions, counted and stacked anew, between two products."""
    a, b = (x @ p).unflatten(-1, (-1, 2)).unbind(-1)
    angle = torch.arange(len(x))[:, None] * 0.1
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2) @ p


def test_positions_are_one_kernel_however_they_are_counted_and_stacked():
    grad = ff.value_and_grad(lambda p, x: rotated(p, x).sum())
    args = (torch.zeros(32, 32), torch.zeros(32, 32))
    events = ff.plan(ff.jit(grad), *args)[0].events
    ops = [e for e in events if isinstance(e, Ran) and not e.op.flops]
    ops = [e.op for e in ops if (e.unit, e.phase) == ("rotated", "forward")]
    assert [op.name for op in ops] == ["fused"]
    n = 4 * 32 * 32
    # What goes, and of what comes the larger half: views of one storage count once.
    assert 1.5 * n <= ops[0].bytes < 2.5 * n


def test_units_are_kernels_of_their_own():
    unit = ff.unit(lambda p, x: torch.tanh(x * p) + 1)
    two = ff.jit(ff.value_and_grad(lambda p, x: unit(p, unit(p, x)).sum()))
    events = ff.plan(two, torch.zeros(8), torch.zeros(8))[0].events
    names = Counter((e.phase, e.op.name) for e in events if isinstance(e, Ran))
    assert names["forward", "fused"] == names["backward", "fused"] == 2


def shared_by_silu():
    """What silu's backward shares with silu, again written and read in float32.

    That is 1 + exp(-x) of torch 2.11 and 2.12, where later ones have a sigmoid.
    """
    table = select_decomp_table()
    x = torch.ones(2, dtype=torch.bfloat16)
    graph = make_fx(torch.ops.aten.silu_backward.default, table)(x, x).graph
    names = {str(node.target) for node in graph.nodes}
    return 0 if "aten.sigmoid.default" in names else 2 * 4 * WIDE


def test_llamas_kernels_halve_where_they_are_compiled():
    plain, fused = by_phase(planned()), by_phase(planned(jit=True))
    fused["backward"] -= shared_by_silu()
    for phase in ("forward", "backward"):
        assert fused[phase] < 0.75 * plain[phase]


def test_second_derivatives_are_whole():
    """A norm's backward is of operators where it is differentiated, as on a GPU."""

    @ff.unit
    def layer(p, x):
        return torch.tanh(F.rms_norm(x, (8,), p["n"]) @ p["w"])

    def squares(p, x):
        grads = ff.value_and_grad(lambda p: layer(p, layer(p, x)).sum())(p)[1]
        return sum(g.square().sum() for g in grads.values())

    args = {"n": torch.zeros(8), "w": torch.zeros(8, 8)}, torch.zeros(4, 8)
    both = [ff.plan(ff.value_and_grad(squares), *args, device=d) for d in DEVICES]
    assert both[0].flops == both[1].flops


def test_torchs_layers_have_fused_attention_under_dropout_too():
    """Which a CPU has not, and a Transformer's layer is trained with."""
    made = torch.nn.TransformerEncoderLayer(64, 4, 64, 0.1, batch_first=True)
    apply, params, buffers = ff.from_module(made.bfloat16())  # flash takes no float32
    grad = ff.value_and_grad(lambda params, x: apply(params, buffers, x).sum())
    x = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    plan = ff.plan(grad, params, x, device="cuda")
    names = {event.op.name for event in plan[0].ran}
    assert any("flash_attention" in name for name in names)
    assert not any("softmax" in name or "bmm" in name for name in names)
