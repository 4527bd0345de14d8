"""Optimizers as pairs of functions; elementwise over shards, exact across them.

optimizer.py        the interface, and the mark `elementwise`
element_rules.py    an optimizer of one equation; codecs: a dtype, float16 with a scale
compiled_rules.py   updates of such rules as compiled kernels, under jit
adam.py descent.py  sharded_adam; sgd and lion
block_codes.py      numbers in 8 bits, in blocks that share a scale
coded_moments.py coded_steps.py   a codec of 8 bits; its layout, a step by chunks
transformations.py masking.py   clipping, chain; optimizers by leaf
schedules.py        learning rates; checks of arguments
layerwise.py        steps at the scale of each leaf: LAMB and LARS
factored.py         Adafactor: moments by row and column, of any part
averaging.py iterates.py   ema, swa and eval_params; schedule_free
adaptive_scale.py   observe_gradients; adascale: rates for large batches
widening.py         master_weights, stochastic_rounding
loss_scaling.py     apply_if_finite; one scale of the loss
layerwise_scaling.py   a loss scale for each unit
matching.py kinds.py   leaves of a state by those of parameters; what they share
backward_steps.py   step_in_backward
torch_optimizers.py torch_classes.py   from_torch; what torch's own classes keep
reductions.py norms.py   tree_sum, tree_scale; global_norm, leaf_norms
leaves.py in_place.py   leaves as few flat tensors, updated in place
places.py           where tensors of the host meet those of the device
matrix/             Muon and Shampoo: whole matrices, each on one rank
"""

from fsfunc.optim.optimizer import apply_updates
