"""Optimizers as pairs of functions; elementwise over shards, exact across them."""

from fsfunc.optim.adam import AdamState, sharded_adam
from fsfunc.optim.adaptive_scale import AdaScaleState, adascale
from fsfunc.optim.averaging import AverageState, ema, swa
from fsfunc.optim.descent import SgdState, sgd
from fsfunc.optim.evaluation import eval_params
from fsfunc.optim.factored import AdafactorState, adafactor
from fsfunc.optim.finite import ApplyIfFiniteState, apply_if_finite
from fsfunc.optim.iterates import ScheduleFreeState, schedule_free
from fsfunc.optim.layerwise import lamb, lars
from fsfunc.optim.layerwise_scaling import (
    LayerwiseLossScaleState,
    layerwise_loss_scale,
)
from fsfunc.optim.loss_scaling import LossScaleState, loss_scale
from fsfunc.optim.masking import masked, partition
from fsfunc.optim.masters import MasterState, master_weights
from fsfunc.optim.matrix.orthogonal_momentum import MuonState, muon
from fsfunc.optim.matrix.preconditioners import Preconditioners
from fsfunc.optim.matrix.preconditioning import ShampooState, shampoo
from fsfunc.optim.norms import all_finite, global_norm, leaf_norms
from fsfunc.optim.optimizer import Optimizer, apply_updates
from fsfunc.optim.reductions import tree_scale, tree_sum
from fsfunc.optim.rounding import RoundingState, stochastic_rounding
from fsfunc.optim.schedules import (
    Schedule,
    constant,
    cosine_decay,
    join,
    linear,
    warmup_cosine,
)
from fsfunc.optim.sign_descent import LionState, lion
from fsfunc.optim.torch_optimizers import TorchState, from_torch
from fsfunc.optim.transformations import (
    add_decayed_weights,
    chain,
    clip_by_global_norm,
    clip_by_value,
    scale,
)
from fsfunc.optim.trust import scale_by_trust_ratio

__all__ = [
    "AdafactorState",
    "AdaScaleState",
    "AdamState",
    "ApplyIfFiniteState",
    "AverageState",
    "LayerwiseLossScaleState",
    "LionState",
    "LossScaleState",
    "MasterState",
    "Optimizer",
    "RoundingState",
    "MuonState",
    "Preconditioners",
    "Schedule",
    "ScheduleFreeState",
    "SgdState",
    "ShampooState",
    "TorchState",
    "adafactor",
    "adascale",
    "add_decayed_weights",
    "all_finite",
    "apply_if_finite",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "cosine_decay",
    "ema",
    "eval_params",
    "from_torch",
    "global_norm",
    "join",
    "lamb",
    "lars",
    "layerwise_loss_scale",
    "leaf_norms",
    "linear",
    "lion",
    "loss_scale",
    "masked",
    "master_weights",
    "muon",
    "partition",
    "scale",
    "scale_by_trust_ratio",
    "schedule_free",
    "sgd",
    "shampoo",
    "sharded_adam",
    "stochastic_rounding",
    "swa",
    "tree_scale",
    "tree_sum",
    "warmup_cosine",
]
