"""``ff.hardware``: known machines by name, and a `machines.Hardware` as JSON.

The numbers of a GPU come from data sheets and from published measurements of kernels.
One number for each family, the share of the peak that large products reach, is fitted
to published training runs; for B200 and GB200 there were no such runs. The machine at
hand is described by ``measure_hardware``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from fsfunc.planning.machines import Hardware, Level, refuse_unknown
from fsfunc.tree.structure import did_you_mean


def replace(hardware: Hardware, **fields: Any) -> Hardware:
    """Returns ``hardware`` with other values of the named fields.

    Raises:
        TypeError: a field that ``Hardware`` does not have.
        ValueError: what ``Hardware`` refuses.

    >>> replace(A100_40, memory=80 * 10**9).memory
    80000000000
    """
    refuse_unknown(Hardware, fields)
    return dataclasses.replace(hardware, **fields)


def to_json(hardware: Hardware) -> str:
    """Returns ``hardware`` as JSON, which :func:`from_json` reads back to an equal one.

    >>> from_json(to_json(H100)) == H100
    True
    """
    fields = {f.name: getattr(hardware, f.name) for f in dataclasses.fields(hardware)}
    fields["levels"] = [dataclasses.asdict(level) for level in hardware.levels]
    fields = {k: dict(v) if isinstance(v, Mapping) else v for k, v in fields.items()}
    return json.dumps(fields, indent=1)


def from_json(text: str) -> Hardware:
    """Returns the hardware that JSON describes, as :func:`to_json` writes it.

    Raises:
        TypeError: a field that ``Hardware`` or ``Level`` does not have, or lacks.
        ValueError: no JSON object, or what ``Hardware`` refuses.
    """
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError(f"hardware is a JSON object, got {type(fields).__name__}")
    levels = fields.get("levels", [])
    if not isinstance(levels, list) or not all(isinstance(x, dict) for x in levels):
        raise ValueError(f"levels is a list of JSON objects, got {levels!r}")
    return Hardware(**{**fields, "levels": [Level(**level) for level in levels]})


def named(name: str) -> Hardware:
    """Returns the known hardware of a name.

    The names are A100-40, A100-80, H100, H100-500W, H200, B200, GB200 and CPU. Case,
    dashes, underscores and blanks do not matter, nor does "GB" at the end.

    Raises:
        ValueError: no such hardware; with the names that there are.

    >>> named("a100_40gb") is A100_40, named("H 100") is H100
    (True, True)
    """
    known = {_plain(hardware.name): hardware for hardware in GIVEN}
    hardware = known.get(_plain(name))
    if hardware is None:
        names = [hardware.name for hardware in GIVEN]
        raise ValueError(
            f'no hardware is named "{name}"{did_you_mean(name.upper(), names)}; there '
            f"are: {', '.join(names)}; another is described by Hardware(...)"
        )
    return hardware


def _plain(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum()).removesuffix("gb")


# What an estimate knows of GPUs. Fitted, on the runs of benchmarks/literature/
# published_training.csv and published_parallel.csv whose part is "fit" (`python
# benchmarks/published.py --fit`): the share of the peak that large products reach, one
# for each family, which is what a card under load keeps of its clock. The others are
# taken over from the literature that is named; where it gives a range, the value in it
# at which runs that send much err like those that send little. None was measured again
# on a card here.

_PRODUCTS = {"ampere": 0.745, "hopper": 0.63, "blackwell": 0.63}
# Products lose the power that a limit takes, by about its 0.4th root: the clock falls
# with the cube root of power (P ~ f V^2), and memory's part is kept.
_POWER = 0.4
# Streaming kernels: BabelStream on A100 0.86 to 0.90 and H100 0.80 to 0.90 of the data
# sheet.
_STREAMING = 0.85
# What the host takes to launch a kernel, or a transfer: through PyTorch's dispatcher
# and autograd 5 to 10 us (torch's own instruction counts; the overhead benchmarks of
# CUDA graphs, 2021), in a forward written in Python 24: the 1,600 kernels of a token of
# Llama-7B took 39 ms of a host that was the bottleneck (pytorch.org, Accelerating
# Generative AI II, 2023). A step has two kernels backward for one forward.
_LAUNCH = 12e-6
# Of a link's rate, nccl-tests' bus bandwidth of large rings: 230 to 250 of 300 GB/s
# within a DGX A100, 360 of 450 within a DGX H100, 80% and more of InfiniBand's.
_LINKS = 0.8
# A ring's step and a message between nodes: NCCL's tuning.cc, hwLat, Simple.
_STEP, _HOP = 3.4e-6, 14e-6
# Share of computing's time that a transfer beside it takes: NCCL's channels hold 16
# to 24 of 108 to 132 processors, and take from the memory's rate (Rashidi et al. 2021).
# Beside transfers FSDP's computing is slower by 19 % in the mean, up to 40 % where they
# go on all the time (Lee et al. 2025, arXiv 2507.03114, on four A100 and H100).
_TAKES = 0.4
# A step waits for its slowest rank: what each doubling of the nodes delays it by.
# NVIDIA's H100 runs of 15B, 70B, 175B and 340B on 16 to 2,048 GPUs took 0.4, 0.3, 0.5
# and 1.2 % more for each doubling (dgxc-benchmarking, 24.11), transfers included.
_STRAGGLING = 0.005
# (forward, backward): Dao (2023), FlashAttention-2, fig. 5 to 7, causal, heads of 128,
# at 16,384; FlashAttention-1 there (the introduction says 0.30 to 0.50 forward, 0.25 to
# 0.35 backward) and on the H100; Shah et al. (2024), FlashAttention-3, fig. 5 and
# 6.
# The first is the default; `attention_kernels` has which torch ran in which year.
_ATTENTION: dict[str, dict[str, tuple[float, float]]] = {
    "ampere": {"fa2": (0.62, 0.53), "fa1": (0.45, 0.32)},
    "hopper": {"fa2": (0.37, 0.31), "fa3": (0.60, 0.48), "fa1": (0.20, 0.17)},
}
_ATTENTION["blackwell"] = {"fa3": (0.30, 0.24), "fa2": (0.17, 0.14)}
# 6ND: the geometric mean of the same published runs.
_UTILISATION = {"ampere": 0.48, "hopper": 0.378, "blackwell": 0.378}
# (copies, computing, bytes) of the host's memory: bytes/s a GPU when all of a node do
# so at once. PCIe 4.0 and 5.0 with 16 lanes, 32 and 64 GB/s, of which pinned copies
# reach _LINKS; two GPUs share a switch's lanes to the host (NVIDIA's guides of the DGX
# A100 and H100). 16 channels of DDR4-3200, DDR5-4800 and DDR5-5600 and 2 TB for 8 GPUs
# (1 TB with the A100-40). GB200: NVLink-C2C, 450 GB/s, and a Grace's 512 GB/s and
# 480 GB for two. Nothing published was held against these.
_HOSTS = {
    "ampere": (32e9 / 2, 409.6e9 / 8, 2e12 / 8),
    "small ampere": (32e9 / 2, 409.6e9 / 8, 1e12 / 8),
    "hopper": (64e9 / 2, 614.4e9 / 8, 2e12 / 8),
    "blackwell": (64e9 / 2, 716.8e9 / 8, 2e12 / 8),
    "grace": (450e9 / 2, 512e9 / 2, 480e9 / 2),
}
# GiB that are no tensors: CUDA's context and torch's own, 0.5; NCCL's buffers, over
# some communicators, 1.
TAKEN = int(1.5 * 2**30)
# Kept free of a card: the most, in whole per cent, at which each of 62 published runs
# of 80 GB is still judged to fit; the fullest need 96.3 % of it (`python
# benchmarks/published.py`).
MARGIN = 0.03
# Kept free of a host, where glibc's heap keeps freed tensors below 32 MiB between small
# objects: beyond the process, resident was at most 1 / (1 - this) of what was planned,
# of plans of 200 to 700 MB. Pinned by MALLOC_MMAP_THRESHOLD_=65536 malloc gives them
# back; then zero=0 held 15 % more than planned, the most of those that `python
# benchmarks/foresight.py --memory` runs.
PINNED_MARGIN, HOST_MARGIN = 0.15, 0.4
# What a process comes to that trains next to nothing: 241 MB are imports of torch, the
# rest comes with the first step. Measured on Linux with torch 2.13.
PROCESS = 330 * 10**6


def _gpu(
    name: str,
    family: str,
    tera: tuple[float, float, float],
    processors: int,
    gib: float,
    bandwidth: float,
    network: float,
    *,
    link: float,
    node: int = 8,
    host: str = "",
    power: float = 1.0,
    uncertain: float = 0.13,
) -> Hardware:
    """Describes a GPU by its data sheet, and by what was measured of its family.

    Args:
        tera: dense TFLOP/s in 16 bits, 8 bits (0: none) and float32.
        gib: the GiB of memory that CUDA reports.
        bandwidth: bytes/s of its memory.
        network: bytes/s that leave a node of ``node`` GPUs, in one direction.
        link: bytes/s of its links within the node, in one direction.
        host: the host's entry in ``_HOSTS``; by default that of its family.
        power: the share of its rated watts that it may draw.
    """
    half_peak, eight_peak, single_peak = (x * 1e12 for x in tera)
    eight_bit_peaks = (
        dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), eight_peak)
        if eight_peak
        else {}
    )
    power_factor = power**_POWER
    shares = _ATTENTION[family].items()
    copy_rate, compute_rate, host_bytes = _HOSTS[host or family]
    return Hardware(
        name=name,
        peak={
            "bfloat16": half_peak,
            "float16": half_peak,
            "float32": single_peak,
            "float64": single_peak,
            **eight_bit_peaks,
        },  # fmt: skip
        efficiency=((1.0, _PRODUCTS[family] * power_factor),),
        attention={
            name: (f * power_factor, b * power_factor) for name, (f, b) in shares
        },
        bandwidth=bandwidth * _STREAMING,
        overhead=_LAUNCH,
        levels=(
            Level(ranks=node, bandwidth=link * _LINKS, latency=_STEP),
            Level(ranks=0, bandwidth=network * _LINKS, latency=_HOP),
        ),
        memory=int(gib * 2**30) - TAKEN,
        device="cuda",
        overlap=1 - _TAKES,
        stores={"host": (copy_rate * _LINKS, compute_rate * _STREAMING, host_bytes)},
        processors=processors,
        straggling=_STRAGGLING,
        utilisation=_UTILISATION[family],
        uncertain=uncertain,
        margin=MARGIN,
    )


# NVIDIA's data sheets of the A100 (SXM4), H100 and H200 (SXM5), B200 and GB200: dense,
# not sparse; NVLink is half of what they state, which counts both directions. Memory
# as CUDA reports it. float32 runs on the plain cores, as torch does unless told.
A100_40 = _gpu(
    "A100-40", "ampere", (312, 0, 19.5), 108, 39.39, 1.555e12, 50e9, link=300e9,
    host="small ampere",
)  # fmt: skip  # 400 Gb/s a node, as where PyTorch announced FSDP
A100_80 = _gpu(
    "A100-80", "ampere", (312, 0, 19.5), 108, 79.15, 2.039e12, 200e9, link=300e9
)  # 8 x 200 Gb/s a node, as in NVIDIA's DGX A100
H100 = _gpu(
    "H100", "hopper", (989, 1979, 67), 132, 79.65, 3.35e12, 400e9, link=450e9
)  # 8 x 400 Gb/s: NVIDIA's DGX H100 and H200
H100_500W = _gpu(
    "H100-500W", "hopper", (989, 1979, 67), 132, 95.0, 2.4e12, 400e9, link=450e9,
    power=500 / 700,
)  # fmt: skip  # Meta's Grand Teton, HBM2e: torchtitan's docs/performance.md
H200 = _gpu("H200", "hopper", (989, 1979, 67), 132, 139.81, 4.8e12, 400e9, link=450e9)
# Nothing published was held against these two: their shares are Hopper's.
B200 = _gpu(
    "B200", "blackwell", (2250, 4500, 75), 148, 178.36, 7.7e12, 400e9, link=900e9,
    uncertain=0.3,
)  # fmt: skip
GB200 = _gpu(
    "GB200", "blackwell", (2450, 4900, 80), 152, 184.0, 8.0e12, 72 * 50e9, link=900e9,
    node=72, host="grace", uncertain=0.3,
)  # fmt: skip
# What the library's processes exchange directly over gloo.
PAIRWISE = ("all_gather", "psum_scatter", "psum", "all_to_all")
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
    pairwise=PAIRWISE,
    margin=HOST_MARGIN,
    process=PROCESS,
)
GIVEN = (A100_40, A100_80, H100, H100_500W, H200, B200, GB200, CPU)
