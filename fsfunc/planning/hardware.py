"""``ff.hardware``: known machines by name, and a `machines.Hardware` as JSON.

Of a GPU they say what data sheets do, and what products of matrices are known to reach;
no number was chosen to make a training run come out right. The machine at hand is
described by ``measure_hardware``.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fsfunc.planning.machines import Hardware, Level, nearest, refuse_unknown

__all__ = [
    "A100_40",
    "A100_80",
    "CPU",
    "H100",
    "H200",
    "Hardware",
    "Level",
    "from_json",
    "named",
    "replace",
    "to_json",
]


def replace(hardware: Hardware, **fields: Any) -> Hardware:
    """``hardware`` with other values of the named fields.

    Raises:
        TypeError: a field that ``Hardware`` does not have.
        ValueError: what ``Hardware`` refuses.

    >>> replace(A100_40, memory=80 * 10**9).memory
    80000000000
    """
    refuse_unknown(Hardware, fields)
    return dataclasses.replace(hardware, **fields)


def to_json(hardware: Hardware) -> str:
    """``hardware`` as JSON, which :func:`from_json` reads back to an equal one.

    >>> from_json(to_json(H100)) == H100
    True
    """
    found = {f.name: getattr(hardware, f.name) for f in dataclasses.fields(hardware)}
    found["levels"] = [dataclasses.asdict(level) for level in hardware.levels]
    found |= {name: dict(found[name]) for name in ("peak", "rates")}
    return json.dumps(found, indent=1)


def from_json(text: str) -> Hardware:
    """The hardware that JSON describes, as :func:`to_json` writes it.

    Raises:
        TypeError: a field that ``Hardware`` or ``Level`` does not have, or lacks.
        ValueError: no JSON object, or what ``Hardware`` refuses.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"hardware is a JSON object, got {type(found).__name__}")
    levels = found.get("levels", [])
    if not isinstance(levels, list) or not all(isinstance(x, dict) for x in levels):
        raise ValueError(f"levels is a list of JSON objects, got {levels!r}")
    return Hardware(**{**found, "levels": [Level(**level) for level in levels]})


def named(name: str) -> Hardware:
    """A given hardware: A100-40, A100-80, H100, H200 or CPU.

    Case, dashes, underscores and blanks do not matter, nor does "GB" at the end.

    Raises:
        ValueError: no such hardware; with the names that there are.

    >>> named("a100_40gb") is A100_40, named("H 100") is H100
    (True, True)
    """
    given = {_plain(hardware.name): hardware for hardware in GIVEN}
    found = given.get(_plain(name))
    if found is None:
        names = [hardware.name for hardware in GIVEN]
        raise ValueError(
            f'no hardware is named "{name}"{nearest(name.upper(), names)}; there are: '
            f"{', '.join(names)}; another is described by Hardware(...)"
        )
    return found


def _plain(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum()).removesuffix("gb")


# What cuBLAS reaches of the dense 16-bit peak, square products, as published GEMM
# sweeps agree on within a few percent: tiles that do not fill the chip below 1,024,
# power and the tails of the last wave above.
_AMPERE = (
    (64.0, 0.001),
    (128.0, 0.008),
    (256.0, 0.05),
    (512.0, 0.22),
    (1024.0, 0.45),
    (2048.0, 0.68),
    (4096.0, 0.79),
    (8192.0, 0.84),
)
# Three times the peak wants larger products for the same share.
_HOPPER = (
    (64.0, 0.0004),
    (128.0, 0.003),
    (256.0, 0.02),
    (512.0, 0.11),
    (1024.0, 0.34),
    (2048.0, 0.60),
    (4096.0, 0.75),
    (8192.0, 0.79),
)


def _eight(link: float, network: float) -> tuple[Level, Level]:
    """Nodes of 8 GPUs, with NCCL's latencies."""
    return (
        Level(ranks=8, bandwidth=link, latency=10e-6),
        Level(ranks=0, bandwidth=network, latency=20e-6),
    )


# Sources. Rates, memory and NVLink: NVIDIA's data sheets of the A100 (SXM4), H100 and
# H200 (SXM5): dense, not sparse; NVLink is half of what they state, which counts both
# directions. Attention: Dao (2023), FlashAttention-2, fig. 5 and 6, for the A100 and,
# of the same kernels, the H100: forward and backward with a causal mask.
# float32 runs on the plain cores, as torch does unless it is told to use TF32.

A100_40 = Hardware(
    name="A100-40",
    peak={
        "bfloat16": 312e12,
        "float16": 312e12,
        "float32": 19.5e12,
        "float64": 19.5e12,
    },
    efficiency=_AMPERE,
    attention=0.55,
    bandwidth=1.555e12,
    overhead=5e-6,  # a kernel's launch as PyTorch pays it
    levels=_eight(300e9, 50e9),  # 400 Gb/s a node, as where PyTorch announced FSDP
    memory=40 * 10**9,
)
A100_80 = replace(
    A100_40,
    name="A100-80",
    bandwidth=2.039e12,
    levels=_eight(300e9, 200e9),  # 8 x 200 Gb/s a node, as in NVIDIA's DGX A100
    memory=80 * 10**9,
)
H100 = replace(
    A100_40,
    name="H100",
    peak={
        "bfloat16": 989e12,
        "float16": 989e12,
        "float32": 67e12,
        "float64": 67e12,
    },
    efficiency=_HOPPER,
    attention=0.32,
    bandwidth=3.35e12,
    levels=_eight(450e9, 400e9),  # 8 x 400 Gb/s: NVIDIA's DGX H100 and H200
    memory=80 * 10**9,
)
H200 = replace(H100, name="H200", bandwidth=4.8e12, memory=141 * 10**9)
# What measure_hardware saw of two processes over gloo, one core each of a server
# processor (AVX-512, DDR5) in a virtual machine.
CPU = Hardware(
    name="CPU",
    peak={"float32": 1.1e11, "float64": 5.7e10, "bfloat16": 2.8e11, "float16": 5.7e9},
    efficiency=((32, 0.42), (64, 0.81), (128, 0.96), (256, 0.99), (512, 1.0)),
    attention=0.4,
    bandwidth=2.5e10,
    overhead=2e-6,
    levels=(Level(ranks=0, bandwidth=2e9, latency=1.5e-4),),
    memory=12 * 10**9,
    overlap=0.0,
    rates={
        "aten.tanh": 4e9,
        "aten.exp": 1.4e10,
        "aten.native_dropout": 1.4e9,
        "aten._log_softmax": 1.9e10,
        "all_gather": 1.3e9,
        "psum_scatter": 1.2e9,
        "psum": 1.8e9,
    },
    fresh=2.8e9,
)
GIVEN = (A100_40, A100_80, H100, H200, CPU)
