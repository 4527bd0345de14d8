"""What a card does in a second: products, and copies within it and to its host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

RUNS = 10


def seconds(call: Callable[[], Any], device: str, runs: int = RUNS) -> float:
    """The median of calls that are waited for, after one that is not counted."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    call()
    taken = []
    for _ in range(runs):
        wait()
        start = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def matrix_rate(device: str) -> float:
    """FLOPs per second of products of square bf16 matrices: the best size's."""
    edges = (256,) if device == "cpu" else (4096, 8192, 16384)
    return max(_product_rate(edge, device) for edge in edges)


def _product_rate(edge: int, device: str) -> float:
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in "ab")
    out = torch.empty_like(a)
    return 2 * edge**3 / seconds(lambda: torch.mm(a, b, out=out), device)


def copy_rates(device: str) -> dict[str, float]:
    """Bytes per second: within the device both what is read and what is written."""
    count = 2**30 if device == "cuda" else 2**20
    here, there = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in "ab")
    rates = {"device": 2 * count / seconds(lambda: here.copy_(there), device)}
    for name, pinned in {"pinned": device == "cuda", "pageable": False}.items():
        with_host = torch.zeros(count // 4, dtype=torch.uint8, pin_memory=pinned)
        part = here[: count // 4]
        to = seconds(lambda x=part, y=with_host: x.copy_(y, non_blocking=True), device)
        back = seconds(
            lambda x=part, y=with_host: y.copy_(x, non_blocking=True), device
        )
        rates[f"{name}, to the device"] = count / 4 / to
        rates[f"{name}, to the host"] = count / 4 / back
    return rates
