"""Layers with collectives in them, as functions of parameters and inputs.

tensor_parallel.py  linear layers and embeddings whose weights are split
token_losses.py cross_entropy.py   cross-entropy over a split vocabulary
tiled_cross_entropy.py   the last layer and its loss, tile by tile
gating.py           top-1, top-2, top-k gates: experts of a token; even loads
routing.py          queues of experts: capacity, dropped choices, padding
experts.py          experts spread over ranks, and the all-to-alls to them
context_parallel.py attention over a split sequence, in two forms
ring.py             ring attention, step by step
attention_blocks.py attention_masks.py   a block of attention; which keys are seen
sequence_order.py   zig-zag order; which rank computes which block when
statistics.py       batch norms of one rank's batch or of all ranks'; statistics
normalization.py    layer norm and RMS norm of split features
numerics.py         dtypes of sums, autocast; random numbers of each rank, dropout
"""

from typing import TYPE_CHECKING

from fsfunc.nn.context_parallel import all_to_all_attention, ring_attention
from fsfunc.nn.cross_entropy import vocab_cross_entropy
from fsfunc.nn.experts import combine, dispatch, expert_layer
from fsfunc.nn.gating import balance_bias, top_1_gating, top_2_gating, top_k_gating
from fsfunc.nn.normalization import layer_norm, rms_norm
from fsfunc.nn.numerics import dropout, own_draws
from fsfunc.nn.routing import Routing, route
from fsfunc.nn.sequence_order import unzigzag, zigzag, zigzag_positions
from fsfunc.nn.statistics import (
    Moments,
    RunningStatistics,
    batch_norm,
    commit_statistics,
    init_statistics,
    sync_batch_norm,
)
from fsfunc.nn.tensor_parallel import column_linear, row_linear, vocab_embedding
from fsfunc.nn.tiled_cross_entropy import linear_cross_entropy

# What a checker takes for public; at run time `help` and `*` go by the names there are.
if TYPE_CHECKING:
    __all__ = [
        "all_to_all_attention",
        "balance_bias",
        "batch_norm",
        "column_linear",
        "combine",
        "commit_statistics",
        "dispatch",
        "dropout",
        "expert_layer",
        "init_statistics",
        "layer_norm",
        "linear_cross_entropy",
        "Moments",
        "own_draws",
        "ring_attention",
        "rms_norm",
        "route",
        "Routing",
        "row_linear",
        "RunningStatistics",
        "sync_batch_norm",
        "top_1_gating",
        "top_2_gating",
        "top_k_gating",
        "unzigzag",
        "vocab_cross_entropy",
        "vocab_embedding",
        "zigzag",
        "zigzag_positions",
    ]
