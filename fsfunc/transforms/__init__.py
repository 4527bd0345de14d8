"""Transforms: a function in, a function out; their order is the configuration.

Each passes an interpretation to `core.frames.transformed`: its ``call`` runs the
function, and its ``unit`` and ``gradient`` reinterpret the calls inside. ``precision``,
``donate`` and ``jit`` change the frame alone; ``donate`` marks the leaves of its state
as gone too, and ``jit(whole_step=True)`` runs a graph in place of the function.

How a unit call runs under ``shard``: `unit_calls` finds the buffers that it reads.
`shard_runtime` gathers them, through `gathers` and a message of `messages.wire`, and
prefetches the next ones. `unit_calls` passes the parameters to the unit; their memory
is free when the next unit takes its own. In the backward pass `gathers` first gathers
them again; then `gradient_sums` packs the gradients of a buffer and reduces them,
through another message. A gradient call has a runtime of its own, and `gradients` puts
its sums, as means, into the tree of gradients.

shard_options.py    options of shard; process groups of a packed buffer
sharding.py         shard, with the type check it is handed
sharded_calls.py    its interpretation: of unit calls and of gradient calls
unit_calls.py       a unit call, and the autograd.Functions around it: gather, free,
                    gather, reduce
shard_runtime.py    one call on a rank: its gathers and its gradients
gathers.py          gathered buffers: in flight, arrived, used by a unit call, dropped
gradient_sums.py    gradients of buffers: packed, reduced, summed
gradients.py        the tree of gradients: sums as means; checks of derivatives
ownership.py        whether a plain tensor is replicated or rank-local; assume
rematerialization.py policies.py   remat and remat_calls; their policies
repeated_calls.py   a unit call that is run a second time
microbatches.py     the arguments that are a batch, and cutting them
accumulation.py     accumulate: microbatches one by one, and their sums
offloading.py       offload: places of a state, residuals of units
casting.py donation.py compilation.py   precision; donate; jit
step_graphs.py step_traces.py graph_arguments.py graph_collectives.py   jit of a step
"""
