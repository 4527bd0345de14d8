"""Optimizers as pairs of functions; elementwise over shards, exact across them."""

from fsfunc.optim.adam import AdamState, sharded_adam
from fsfunc.optim.adaptive_scale import AdaScaleState, adascale
from fsfunc.optim.descent import SgdState, sgd
from fsfunc.optim.loss_scaling import LossScaleState, loss_scale
from fsfunc.optim.masking import masked, partition
from fsfunc.optim.masters import MasterState, master_weights
from fsfunc.optim.optimizer import Optimizer, apply_updates
from fsfunc.optim.reductions import all_finite, global_norm, tree_scale, tree_sum
from fsfunc.optim.rounding import RoundingState, stochastic_rounding
from fsfunc.optim.schedules import (
    Schedule,
    constant,
    cosine_decay,
    join,
    linear,
    warmup_cosine,
)
from fsfunc.optim.torch_optimizers import TorchState, from_torch
from fsfunc.optim.transformations import (
    add_decayed_weights,
    chain,
    clip_by_global_norm,
    scale,
)

__all__ = [
    "AdaScaleState",
    "AdamState",
    "LossScaleState",
    "MasterState",
    "Optimizer",
    "RoundingState",
    "Schedule",
    "SgdState",
    "TorchState",
    "adascale",
    "add_decayed_weights",
    "all_finite",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine_decay",
    "from_torch",
    "global_norm",
    "join",
    "linear",
    "loss_scale",
    "masked",
    "master_weights",
    "partition",
    "scale",
    "sgd",
    "sharded_adam",
    "stochastic_rounding",
    "tree_scale",
    "tree_sum",
    "warmup_cosine",
]
