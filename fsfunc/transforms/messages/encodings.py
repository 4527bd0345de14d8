"""Messages in 8 bits: blocks of elements, each with a float32 scale.

Of each block is sent, as bytes::

    [ element / scale, rounded: int8 x block | scale: float32, 4 bytes ]

A gather dequantises what it receives; a reduction sends each rank its range of all
gradients (an all-to-all), and sums in float32 what arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.transforms.messages.wire import Gather, Reduction


def quantized(x: Tensor, block: int) -> Tensor:
    """Returns ``x`` in 8 bits an element and a float32 scale a block, as bytes.

    Each block of ``block`` elements is rounded to 255 even steps between plus and minus
    its largest magnitude. A block with an infinity or a NaN comes back as NaN.

    Args:
        x: [..., n], floating.

    Returns:
        uint8 [..., ceil(n / block) * (block + 4)].

    >>> quantized(torch.tensor([1.0, -2.0, 4.0]), 4).shape
    torch.Size([8])
    """
    if not x.shape[-1]:  # torch views no empty scales as bytes
        return x.to(torch.uint8)
    blocks = -(-x.shape[-1] // block)
    padding = blocks * block - x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, padding))
    rows = padded.unflatten(-1, (blocks, block))
    scale = rows.abs().amax(-1, keepdim=True) / 127
    steps = rows / torch.where(scale == 0, 1, scale)
    # NaN has no int8: the scale is NaN or infinite there, and makes all of it NaN.
    steps = steps.round_().nan_to_num_(0.0).clamp_(-127, 127).to(torch.int8)
    return torch.cat([steps.view(torch.uint8), scale.view(torch.uint8)], -1).flatten(-2)


def dequantized(sent: Tensor, count: int | None, block: int) -> Tensor:
    """Returns float32 [..., count] of what :func:`quantized` made.

    With ``count=None`` the padding is kept.

    >>> dequantized(quantized(torch.tensor([127.0, -3.2, 0.6]), 4), 3, 4)
    tensor([127.,  -3.,   1.])
    """
    if not sent.shape[-1]:
        return sent.float()
    rows = sent.unflatten(-1, (-1, block + 4))
    # Copied, as a view as float32 must begin at a multiple of 4 bytes.
    scale = rows[..., block:].contiguous().view(torch.float32)
    steps = rows[..., :block].view(torch.int8)
    return (steps * scale).flatten(-2)[..., :count]


class QuantizedGather(Gather):
    """Parameters gathered in 8 bits; the state keeps them in full.

    Args:
        block: how many elements share a scale.

    Cost: an all-gather of (1 + 4 / block) bytes an element, in place of 4 or 2; a unit
    computes on parameters that are off by up to 1/254 of the largest of their block.

    Source: Wang et al., ZeRO++, 2023, section 3.1 (qwZ).
    """

    exact = False

    def __init__(self, block: int = 256):
        self.block: int = _multiple_of_4(block)

    def encode(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        return quantized(part, self.block)

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int) -> Tensor:
        if not count:  # torch views nothing as [-1, 0]
            return arrived.to(dtype)
        sent = -(-count // self.block) * (self.block + 4)
        rows = dequantized(arrived.view(-1, sent), count, self.block)
        return rows.flatten().to(dtype)


class QuantizedReduction(Reduction):
    """Gradients summed in float32 of what each rank sends in 8 bits.

    Args:
        block: how many elements share a scale.

    Cost: an all-to-all of (1 + 4 / block) bytes an element, (n-1)/n of it sent, in
    place of a reduce-scatter of 4 or 2; a sum is off by up to n/254 of the largest of
    its blocks, which :func:`error_feedback` gives back in later steps.

    Raises:
        ValueError: at zero=0, where each rank needs the whole sum.

    Source: Wang et al., ZeRO++, 2023, section 3.3 (qgZ), in one level.
    """

    exact = False

    def __init__(self, block: int = 256):
        self.block: int = _multiple_of_4(block)

    def encode(self, buffer: Tensor, ranks: int) -> Tensor:
        return quantized(buffer.view(ranks, -1), self.block)

    def sent(self, encoded: Tensor, count: int) -> Tensor:
        return dequantized(encoded, count, self.block).flatten()

    def check(self, axes: tuple[str, ...], zero: int) -> None:
        if zero == 0:
            raise ValueError(
                "QuantizedReduction leaves each rank its own range of a sum, and at "
                "zero=0 a rank needs all of it: use zero=1, 2 or 3"
            )

    def move(self, sent: Tensor, where: RankGroup, whole: bool, what: str) -> Handle:
        if whole:
            self.check(where.axis, 0)
        return where.start("all_to_all", sent, name=what)

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int | None) -> Tensor:
        return dequantized(arrived, count, self.block).sum(0).to(dtype)


def _multiple_of_4(block: int) -> int:
    if not isinstance(block, int) or block < 4 or block % 4:
        raise ValueError(f"block={block!r}: it is a multiple of 4")
    return block
