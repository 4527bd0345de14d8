"""Layers with collectives in them, as functions of parameters and inputs."""

from fsfunc.nn.experts import combine, dispatch, expert_layer
from fsfunc.nn.gating import (
    Routing,
    route,
    top_1_gating,
    top_2_gating,
    top_k_gating,
)
from fsfunc.nn.statistics import (
    Moments,
    RunningStatistics,
    batch_norm,
    commit_statistics,
    init_statistics,
)

__all__ = [
    "Moments",
    "Routing",
    "RunningStatistics",
    "batch_norm",
    "combine",
    "commit_statistics",
    "dispatch",
    "expert_layer",
    "init_statistics",
    "route",
    "top_1_gating",
    "top_2_gating",
    "top_k_gating",
]
