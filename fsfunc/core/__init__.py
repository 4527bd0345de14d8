"""Units, gradients, and what a call knows of its surroundings.

A user's call of a `units.Unit`, or of what `autodiff.value_and_grad` returned, takes
the `frames.Frame` it is made in. The frame names the transforms around, outermost
first; each is a `frames.Interpretation`, and says what becomes of the call. What all
come down to is `units.Call.body`, the unit's function, and `autodiff.differentiate`,
one forward and one backward pass of the loss.
"""
