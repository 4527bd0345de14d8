"""Layers with collectives in them, as functions of parameters and inputs."""

from fsfunc.nn.cross_entropy import vocab_cross_entropy
from fsfunc.nn.statistics import (
    Moments,
    RunningStatistics,
    batch_norm,
    commit_statistics,
    init_statistics,
)
from fsfunc.nn.tensor_parallel import column_linear, row_linear, vocab_embedding
from fsfunc.nn.tiled_cross_entropy import linear_cross_entropy

__all__ = [
    "Moments",
    "RunningStatistics",
    "batch_norm",
    "column_linear",
    "commit_statistics",
    "init_statistics",
    "linear_cross_entropy",
    "row_linear",
    "vocab_cross_entropy",
    "vocab_embedding",
]
