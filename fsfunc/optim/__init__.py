"""Optimizers as pairs of functions; elementwise over shards, exact across them.

optimizer.py element_rules.py   what one is; those that treat elements by themselves:
adam.py descent.py sign_descent.py   fused passes
transformations.py masking.py schedules.py   clipping, chain; by leaf; rates
trust.py layerwise.py   steps at the scale of each leaf: LAMB and LARS
factored.py square_sums.py   Adafactor: moments by row and column; of any part
averaging.py evaluation.py   ema and swa; which parameters to evaluate with
iterates.py finite.py   schedule_free; apply_if_finite
adaptive_scale.py   adascale: rates that grow with the batch
widening.py masters.py rounding.py   parameters of 16 bits seen in float32: by
                    copies that are kept, or rounded by chance
scaled_moments.py coded_moments.py   Adam's moments in float16; in 8 bits
code_groups.py coded_steps.py   how such codes lie; a step of them, by chunks
loss_scaling.py     loss_scale: what float16 needs, steps skipped by all or none
layerwise_scaling.py unit_scaling.py   layerwise_loss_scale; a unit's own scale
backward_steps.py   step_in_backward: no two units' gradients at once; of which
mirrored_state.py   pieces of an optimizer's state
torch_optimizers.py torch_classes.py   from_torch; the table of torch's own classes
function_answers.py what schedules and masks say, which ranks compare
reductions.py norms.py   tree_sum, tree_scale; global_norm, leaf_norms
leaves.py matching.py in_place.py   leaves as few flat tensors, updated in place
"""

from fsfunc.optim.adam import AdamState, sharded_adam
from fsfunc.optim.adaptive_scale import AdaScaleState, adascale
from fsfunc.optim.averaging import AverageState, ema, swa
from fsfunc.optim.backward_steps import step_in_backward
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
    "step_in_backward",
    "stochastic_rounding",
    "swa",
    "tree_scale",
    "tree_sum",
    "warmup_cosine",
]
