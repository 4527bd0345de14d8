"""Optimizers as pairs of functions; elementwise over shards, exact across them.

optimizer.py        the interface, and the mark `elementwise`
element_rules.py    an optimizer of one equation; codecs: a dtype, float16 with a scale
adam.py descent.py  sharded_adam; sgd and lion
coded_moments.py coded_steps.py   a codec of 8 bits; its layout, a step by chunks
transformations.py masking.py   clipping, chain; optimizers by leaf
schedules.py        learning rates; checks of arguments
layerwise.py        steps at the scale of each leaf: LAMB and LARS
factored.py         Adafactor: moments by row and column, of any part
averaging.py iterates.py   ema, swa and eval_params; schedule_free
adaptive_scale.py   adascale: rates that grow with the batch
widening.py         master_weights, stochastic_rounding
loss_scaling.py     apply_if_finite; one scale of the loss
layerwise_scaling.py   a loss scale for each unit
matching.py         leaves of a state by those of parameters
backward_steps.py   step_in_backward
torch_optimizers.py torch_classes.py   from_torch; the table of torch's own classes
reductions.py norms.py   tree_sum, tree_scale; global_norm, leaf_norms
leaves.py in_place.py   leaves as few flat tensors, updated in place
matrix/             Muon and Shampoo: whole matrices, each on one rank
"""

from fsfunc.optim.adam import AdamState, sharded_adam
from fsfunc.optim.adaptive_scale import AdaScaleState, adascale
from fsfunc.optim.averaging import AverageState, ema, eval_params, swa
from fsfunc.optim.backward_steps import step_in_backward
from fsfunc.optim.descent import LionState, SgdState, lion, sgd
from fsfunc.optim.factored import AdafactorState, adafactor
from fsfunc.optim.iterates import ScheduleFreeState, schedule_free
from fsfunc.optim.layerwise import lamb, lars, scale_by_trust_ratio
from fsfunc.optim.layerwise_scaling import LayerwiseLossScaleState, layerwise_loss_scale
from fsfunc.optim.loss_scaling import (
    ApplyIfFiniteState,
    LossScaleState,
    apply_if_finite,
    loss_scale,
)
from fsfunc.optim.masking import masked, partition
from fsfunc.optim.matrix.orthogonal_momentum import MuonState, muon
from fsfunc.optim.matrix.preconditioning import Preconditioners, ShampooState, shampoo
from fsfunc.optim.norms import all_finite, global_norm, leaf_norms
from fsfunc.optim.optimizer import Optimizer, apply_updates
from fsfunc.optim.reductions import tree_scale, tree_sum
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
    clip_by_value,
    scale,
)
from fsfunc.optim.widening import (
    MasterState,
    RoundingState,
    master_weights,
    stochastic_rounding,
)
