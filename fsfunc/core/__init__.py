"""Units, gradients, and what a call knows of its surroundings.

A user's call of a `units.Unit`, or of what `autodiff.value_and_grad` returned, takes
the `frames.Frame` it is made in. The frame names the transforms around, outermost
first; each is a `frames.Interpretation`, and says what becomes of the call. What all
come down to is `units.Call.body`, the unit's function, and `autodiff.differentiate`,
one forward and one backward pass of the loss.

units.py            unit: a call, and the function itself
autodiff.py         value_and_grad: the gradient call
gradient_inputs.py  checks of what it is given
outcomes.py         what it passes along, and what it gave: sums, means
gradient_agreement.py   a check that ranks which share a loss agree on gradients
frames.py           what a call knows of its surroundings; Interpretation
passes.py           what holds while a pass runs;  tracers.py   who looks on meanwhile
observation.py      observe_gradients: a rank's own, before they are reduced
casts.py            in which dtypes units compute
losses.py           what a loss returns, beside its value too, and several as one
differentiated.py   the leaves that a gradient call differentiates
"""
