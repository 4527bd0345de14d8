"""Layers with collectives in them, as functions of parameters and inputs."""

from fsfunc.nn.draws import dropout, own_draws
from fsfunc.nn.normalization import group_norm, layer_norm, rms_norm
from fsfunc.nn.statistics import (
    Moments,
    RunningStatistics,
    batch_norm,
    commit_statistics,
    init_statistics,
)
from fsfunc.nn.synchronized import sync_batch_norm
from fsfunc.nn.tensor_parallel import column_linear, row_linear, vocab_embedding

__all__ = [
    "Moments",
    "RunningStatistics",
    "batch_norm",
    "column_linear",
    "commit_statistics",
    "dropout",
    "group_norm",
    "init_statistics",
    "layer_norm",
    "own_draws",
    "rms_norm",
    "row_linear",
    "sync_batch_norm",
    "vocab_embedding",
]
