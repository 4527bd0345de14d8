"""Layers with collectives in them, as functions of parameters and inputs."""

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
    "batch_norm",
    "column_linear",
    "commit_statistics",
    "init_statistics",
    "row_linear",
    "vocab_embedding",
]
