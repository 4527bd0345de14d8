"""Layers with collectives in them."""

from fsfunc.nn.context_parallel import all_to_all_attention, ring_attention
from fsfunc.nn.sequence_order import unzigzag, zigzag, zigzag_positions

__all__ = [
    "all_to_all_attention",
    "ring_attention",
    "unzigzag",
    "zigzag",
    "zigzag_positions",
]
