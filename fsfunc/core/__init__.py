"""Units, gradient calls, and the context that both read.

A call of a `units.Unit`, or of the function that `autodiff.value_and_grad` returned,
binds the `frames.Frame` in force. The frame holds the transforms around the call,
outermost first, each as a `frames.Interpretation`. Each wraps the next one inward; the
innermost runs `units.Call.body`, which calls the unit's function, or
`autodiff.differentiate`, which runs one forward and one backward pass of the loss.

units.py            unit; a call of one
frames.py           Interpretation, the interface of transforms; Frame; transformed
autodiff.py         value_and_grad; value, the loss without gradients
outcomes.py         GradientCall and Outcome, which interpretations pass along
execution_context.py   the pass that runs now: forward, backward or recompute
losses.py           the outputs of a loss, added up over microbatches: Weighted, Summed,
                    Max
gradient_checks.py  checks of a gradient call: its arguments, and that ranks agree
casts.py            the dtypes of `precision`, and which dtypes have a derivative
tracers.py          hooks for recordings; the check of a call of new shapes
reduction_hooks.py  interfaces of transforms that take part in reductions
"""
