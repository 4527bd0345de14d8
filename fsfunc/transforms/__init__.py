"""Transforms: a function in, a function out; their order is the configuration.

Each gives `core.frames.transformed` an interpretation, whose ``call`` runs the
function and whose ``unit`` and ``gradient`` reinterpret the calls that it makes; but
``precision``, ``donate`` and ``jit``, which change the frame alone.

A unit call under ``shard``: `unit_calls` finds the buffers that it reads,
`shard_runtime` has `gathers` gather them by `wire` and prefetch the next, `boundary`
passes the parameters in and drops them behind the outputs. In the backward pass
`boundary` is entered from the other side: `gathers` gathers again, `gradient_sums`
collects the gradients of a buffer and reduces them by `wire`. A gradient call makes
such a runtime, and `gradients` returns its sums.

shard_options.py    options of shard; process groups of a packed buffer
sharding.py         shard, with the type check it is handed
sharded_calls.py    its interpretation: of unit calls and of gradient calls
unit_calls.py       a unit call: the leaves that it gathers, and the two ways in
boundary.py         one sharded unit: gather, run, forget; gather again, reduce
shard_runtime.py    one call on a rank: its gathers and its gradients
gathers.py          gathered buffers: in flight, arrived, held by a unit call, dropped
gradient_sums.py    gradients: collected, reduced, summed, kept
gradients.py        gradients by packed leaves, means of everything else, refusals
ownership.py        replicated or rank-local: the kind of a plain tensor
rematerialization.py policies.py   remat and remat_calls; their policies
repeated_calls.py   a unit call that is run twice
unread_tail.py      the end of a recompute that its backward does not read
microbatches.py     the arguments that are a batch, and cutting them
accumulation.py     accumulate: microbatches one by one, and their sums
offloading.py offloaded_residuals.py   offload; residuals of units
casting.py donation.py compilation.py   precision; donate; jit
"""
