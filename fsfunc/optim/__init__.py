"""Optimizers as pairs of functions; elementwise over shards, exact across them."""

from fsfunc.optim.adam import AdamState, sharded_adam
from fsfunc.optim.base import (
    Optimizer,
    add_decayed_weights,
    apply_updates,
    chain,
    scale,
)
from fsfunc.optim.clipping import clip_by_global_norm
from fsfunc.optim.descent import SgdState, sgd
from fsfunc.optim.elements import global_norm, tree_scale, tree_sum
from fsfunc.optim.foreign import TorchState, from_torch
from fsfunc.optim.masking import masked, partition
from fsfunc.optim.schedules import (
    Schedule,
    constant,
    cosine_decay,
    join,
    linear,
    warmup_cosine,
)

__all__ = [
    "AdamState",
    "Optimizer",
    "Schedule",
    "SgdState",
    "TorchState",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine_decay",
    "from_torch",
    "global_norm",
    "join",
    "linear",
    "masked",
    "partition",
    "scale",
    "sgd",
    "sharded_adam",
    "tree_scale",
    "tree_sum",
    "warmup_cosine",
]
