"""Predicting what a step will do and cost, before it runs.

``plan`` runs the step on fake tensors. A `planner.PlannedLink` in place of the rank's
link records what would be sent; an `observer.Observer`, the tracer of the frame,
records every operator and all memory. Both write `events`, from which a `plans.Plan` is
made. An estimate plays the events through (`simulation`) with what each takes
(`cost_model`) on a machine (`machines`). A search plans and estimates many stacks
(`stacks`, `trials`).

planner.py          plan: a step run where nothing is sent or computed; its transfers
observer.py         records operators and memory
events.py plans.py  what a plan is made of, and what it answers
device_kernels.py attention_kernels.py   kernels of a GPU, and those that jit makes
equal_calls.py      equal unit calls, of which one is run to lay out a state
left_out_calls.py call_copies.py   equal layers, of which a few are run for many
parted_units.py     what a compiled unit saves for its backward
rounds.py           equal microbatches, of which a few are run for many
estimation.py simulation.py cost_model.py   how long it takes
machines.py hardware.py   what a device and its links can do
allocation.py       whether a plan fits: what an allocator reserves for it
calibration.py timed_calls.py   the machine at hand, measured
stack_search.py stacks.py candidates.py outlines.py trials.py   search
search_results.py   what it found
recomputation.py    what to recompute under a bound
"""
