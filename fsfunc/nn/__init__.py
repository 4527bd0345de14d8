"""Layers with collectives in them, as functions of parameters and inputs.

tensor_parallel.py  products and tables whose weights are split
token_losses.py cross_entropy.py   a token's loss of sums over its logits; of them
logit_tiles.py tiled_cross_entropy.py   the last layer too, which never holds them
gating.py           which experts a token goes to: top-1, top-2, top-k
routing.py          its place in their queues: capacity, dropped choices, padding
experts.py expert_buffers.py   experts on many ranks, and the way there and back
context_parallel.py ring.py   attention over a cut sequence; who sends what to whom
sequence_order.py attention_blocks.py   zig-zag; a block of it, and how they join
statistics.py       batch normalisation and its running statistics
synchronized.py     batch normalisation by the statistics of all ranks' batches
normalization.py    layer, root-mean-square and group norms of split features
moments.py          mean and variance of values that are spread over ranks
draws.py            random numbers of each rank's own; dropout
"""

from fsfunc.nn.context_parallel import all_to_all_attention, ring_attention
from fsfunc.nn.cross_entropy import vocab_cross_entropy
from fsfunc.nn.draws import dropout, own_draws
from fsfunc.nn.experts import combine, dispatch, expert_layer
from fsfunc.nn.gating import top_1_gating, top_2_gating, top_k_gating
from fsfunc.nn.normalization import group_norm, layer_norm, rms_norm
from fsfunc.nn.routing import Routing, route
from fsfunc.nn.sequence_order import unzigzag, zigzag, zigzag_positions
from fsfunc.nn.statistics import (
    Moments,
    RunningStatistics,
    batch_norm,
    commit_statistics,
    init_statistics,
)
from fsfunc.nn.synchronized import sync_batch_norm
from fsfunc.nn.tensor_parallel import column_linear, row_linear, vocab_embedding
from fsfunc.nn.tiled_cross_entropy import linear_cross_entropy

__all__ = [
    "Moments",
    "Routing",
    "RunningStatistics",
    "all_to_all_attention",
    "batch_norm",
    "column_linear",
    "combine",
    "commit_statistics",
    "dispatch",
    "dropout",
    "expert_layer",
    "group_norm",
    "init_statistics",
    "layer_norm",
    "linear_cross_entropy",
    "own_draws",
    "ring_attention",
    "rms_norm",
    "route",
    "row_linear",
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
