"""Which kernel a GPU runs for an attention, and of which generation it is.

``torch.nn.functional.scaled_dot_product_attention`` picks one of these on CUDA:

    flash        heads of one size, of 256 at most; 16 bits; no mask but a causal one
    efficient    any mask, and heads of unlike sizes that are multiples of 16 bytes
    math         all scores in memory: what neither of both takes, such as heads whose
                 features do not lie beside each other

cuDNN's kernels stand before these on Hopper and Blackwell from torch 2.11 on. They keep
for the backward what flash keeps, and are as fast as FlashAttention-3.

Source: torch's ATen, ``native/transformers/cuda/sdp_utils.cpp`` (`select_sdp_backend`
and the checks that it makes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fsfunc.planning.machines import Hardware
from fsfunc.tree.structure import did_you_mean

Kernel = Literal["flash", "efficient", "math"]

_LARGEST_FLASH_HEAD = 256
_HALVES = (torch.float16, torch.bfloat16)


def pick_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
) -> Kernel:
    """Returns the kernel that CUDA picks for an attention, on A100 and later cards.

    Args:
        q, k, v: [..., heads, length, head size].
        mask: of the scores; None: none, or the causal one.

    Source: `can_use_flash_attention` and `can_use_mem_efficient_attention` there.

    >>> q = torch.empty(1, 16, 8, 192, dtype=torch.bfloat16)
    >>> v = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16)
    >>> pick_kernel(q, q, v, None, True), pick_kernel(q, q, q, None, True)
    ('efficient', 'flash')
    """
    if not 4 == q.ndim == k.ndim == v.ndim or not q.numel() or not k.numel():
        return "math"
    if q.shape[-1] > 1 and any(x.stride(-1) != 1 for x in (q, k, v)):
        return "math"
    if mask is not None and mask.stride(-1) != 1:
        return "math"
    sizes = q.shape[-1], k.shape[-1], v.shape[-1]
    # A causal mask of flash begins at the last key, and that of others at the first.
    is_square = q.shape[-2] == k.shape[-2] or not is_causal
    if (
        mask is None
        and is_square
        and q.dtype in _HALVES
        and len(set(sizes)) == 1
        and sizes[0] <= _LARGEST_FLASH_HEAD
    ):
        return "flash"
    aligned = 16 // q.element_size()  # of tensor cores, whose loads are 16 bytes
    if (
        q.dtype in (*_HALVES, torch.float32)
        and sizes[0] == sizes[1]
        and not any(size % aligned for size in sizes)
    ):
        return "efficient"
    return "math"


class _Release(NamedTuple):
    """From when on torch's own attention is of a generation, on some cards.

    Args:
        torch: the first version, as (major, minor).
        year: in which that came out.
        generation: of the kernels.
    """

    torch: tuple[int, int]
    year: int
    generation: str


# FlashAttention came to torch with 2.0 (March 2023), FlashAttention-2 with 2.2 (January
# 2024): the release notes. Before, and outside of torch, that was Dao et al. (2022) and
# Dao (2023). cuDNN's kernels are the first choice on sm 9.0 and 10.0 where cuDNN is
# later than 9.15.0 (`check_prefer_cudnn_attention`), which the wheels of torch 2.11
# (2026) were the first to bring (transformers, pull request 48163). They are of
# FlashAttention-3's speed: 631 TFLOP/s both, and torch's FlashAttention-2 329, on one
# H100 at 4,608 tokens (pytorch, issue 142132).
_RELEASES = (
    _Release((2, 0), 2022, "fa1"),
    _Release((2, 2), 2024, "fa2"),
    _Release((2, 11), 2026, "fa3"),
)
_FIRST_YEAR = 2022


def find_generation(word: str, hardware: Hardware) -> str:
    """Returns the generation of attention's kernels that a word names.

    Args:
        word: a generation ("2", "fa2"); or a version of torch ("2.4") or a year
            ("2024"): then it is that of torch's own attention at that time, on this
            hardware.
        hardware: whose ``attention`` has the generations that it runs.

    Raises:
        ValueError: none of these; a generation that the hardware does not know.

    >>> from fsfunc.planning.hardware import A100_80, H100
    >>> [find_generation(word, H100) for word in ("3", "fa1", "2.1", "2.4", "2026")]
    ['fa3', 'fa1', 'fa1', 'fa2', 'fa3']
    >>> find_generation("2026", A100_80)
    'fa2'
    """
    known = hardware.attention
    if not isinstance(known, Mapping):
        raise ValueError(
            f"{hardware.name} has one rate for all attention, {known:g} of the peak: "
            "leave the generation out"
        )
    if word in known:
        return word
    if f"fa{word}" in known:
        return f"fa{word}"
    number, dot, minor = word.removeprefix("torch").strip(" =-").partition(".")
    releases = [r for r in _RELEASES if r.generation in known]
    if number.isdecimal() and minor.split(".")[0].isdecimal():
        version = int(number), int(minor.split(".")[0])
        releases = [r for r in releases if r.torch <= version]
    elif number.isdecimal() and not dot and int(number) >= _FIRST_YEAR:
        releases = [r for r in releases if r.year <= int(number)]
    else:
        raise ValueError(
            f'{hardware.name} knows no attention "{word}"{did_you_mean(word, known)}; '
            f"it knows: {', '.join(known)}; or say a version of torch, or a year"
        )
    if not releases:
        raise ValueError(f"torch {word} has no fused attention of {', '.join(known)}")
    return releases[-1].generation
