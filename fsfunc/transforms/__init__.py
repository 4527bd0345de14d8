"""Transforms: a function in, a function out, the order of them the configuration.

Each gives `transforming.transformed` an interpretation, whose ``call`` runs the
function, whose ``unit`` and ``gradient`` say what becomes of the calls that it makes;
but ``precision`` and ``donate``, which change the frame alone.

Of ``shard``, a unit call: `sharding` finds which buffers it reads, `shard_runtime`
gathers them by `wire` and sends for the next, `boundary` lets the parameters in and
forgets them behind the outputs. In the backward pass `boundary` is entered from the
other side: `shard_runtime` gathers again, collects the gradients of a buffer, and
reduces them by `wire`. A gradient call makes such a runtime, and `gradients` hands out
what it has summed.
"""
