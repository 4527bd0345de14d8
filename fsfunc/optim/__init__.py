"""Optimizers as pairs of functions, over whole or sharded parameters.

Elementwise updates run over whatever a rank holds; norms and sums go over all ranks.
`optimizer.py` is the protocol: read it first.

optimizer.py        the protocol: init, update, apply
element_rules.py    an optimizer of one equation; what runs it, compiles it, stores it
adam.py descent.py  sharded_adam; sgd and lion
coded_moments.py    moments in 8 bits, in blocks that share a scale
transformations.py masking.py   clipping, chain; optimizers by leaf
schedules.py        learning rates; checks of arguments
layerwise.py        steps at the scale of each leaf: LAMB and LARS
factored.py         Adafactor: moments by row and column, of any part
averaging.py        ema, swa and eval_params; schedule_free
adaptive_scale.py   observe_gradients; adascale: rates for large batches
widening.py         master_weights, stochastic_rounding
loss_scaling.py     apply_if_finite; one scale of the loss, or one for each unit
backward_steps.py   step_in_backward
torch_optimizers.py from_torch; what torch's own classes store
reductions.py       tree_sum, tree_scale, global_norm, leaf_norms, all_finite
elements.py         elementwise: a learned rule of one element
matching.py         leaves of gradients and moments by those of parameters
leaves.py in_place.py   leaves as few flat tensors, updated in place
places.py           which device computes, under offload
matrix/             Muon and Shampoo: whole matrices, each on one rank
"""

from fsfunc.optim.optimizer import apply_updates
