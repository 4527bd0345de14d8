"""Transforms: a function in, a function out, the order of them the configuration.

Each gives `transforming.transformed` an interpretation, whose ``call`` runs the
function, whose ``unit`` and ``gradient`` say what becomes of the calls that it makes;
but ``precision`` and ``donate``, which change the frame alone.

Of ``shard``, a unit call: `sharding` finds which buffers it reads, `shard_runtime` has
`gathers` bring them by `wire` and send for the next, `boundary` lets the parameters in
and forgets them behind the outputs. In the backward pass `boundary` is entered from the
other side: `gathers` brings them again, `gradient_sums` collects the gradients of a
buffer, and reduces them by `wire`. A gradient call makes such a runtime, and
`gradients` hands out what it has summed.

transforming.py     how a transform reaches what it is around
sharding.py         shard: what it makes of unit calls and of gradient calls
unit_calls.py       which leaves a unit call gathers, and how
boundary.py         one sharded unit: gather, run, forget; gather again, reduce
shard_runtime.py routes.py   one call on a rank, what it hears; whom ranges go to
gathers.py          its buffers: in flight, arrived, held, dropped
gradient_sums.py    its gradients: collected, reduced, summed, kept
gathered_calls.py   what one unit call holds of a buffer
gradients.py        gradients by packed leaves, means of everything else, refusals
ownership.py        whose a tensor is: one value on all ranks, or a rank's own
rematerialization.py policies.py selecting.py   remat; what it keeps; remat_calls
microbatches.py     which arguments are a batch, and cutting them
accumulation.py     accumulate: its microbatches one by one, and what is joined
offloading.py offloaded_residuals.py   offload; of it, what units save
casting.py donation.py   precision; donate
"""
