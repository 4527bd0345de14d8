"""Layers with collectives in them, as functions of parameters and inputs."""

from fsfunc.nn.context_parallel import all_to_all_attention, ring_attention
from fsfunc.nn.sequence_order import unzigzag, zigzag, zigzag_positions
from fsfunc.nn.statistics import (
    Moments,
    RunningStatistics,
    batch_norm,
    commit_statistics,
    init_statistics,
)
from fsfunc.nn.tensor_parallel import column_linear, row_linear, vocab_embedding

__all__ = [
    "Moments",
    "RunningStatistics",
    "all_to_all_attention",
    "batch_norm",
    "column_linear",
    "commit_statistics",
    "init_statistics",
    "ring_attention",
    "row_linear",
    "unzigzag",
    "vocab_embedding",
    "zigzag",
    "zigzag_positions",
]
