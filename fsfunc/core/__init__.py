"""Units, gradient calls, and the context that both read.

A user's call of a `units.Unit`, or of the function that `autodiff.value_and_grad`
returned, takes the `frames.Frame` in which it is made. The frame names the transforms
around, outermost first; each is a `frames.Interpretation`, and decides how the call
runs. All come down to `units.Call.body`, the unit's function, and to
`autodiff.differentiate`, one forward and one backward pass of the loss.

units.py            unit: a call, and the function itself
autodiff.py         value_and_grad: the gradient call
gradient_checks.py  checks of a gradient call: its arguments, and that ranks agree
outcomes.py         GradientCall and Outcome, as interpretations pass them along; the
                    leaves that are differentiated
frames.py           the context of a call; Interpretation; transformed
tracers.py          hooks for recordings; the check of a call of new shapes
execution_context.py   state of the pass that runs
reduction_hooks.py  interfaces of transforms that take part in reductions
casts.py            the dtypes in which units compute
losses.py           the outputs of a loss, and how several become one
"""
