"""A train state, made and laid out.

`train_state.init_state` gives parameters, moments and extras to `placing.lay_out`,
which has the step recorded to see what lies together, and makes each leaf's part.
Where values come from is a `leaf_sources.GivenLeaves`: whole tensors in hand; or an
init function that ran on fake tensors (`init_tape`) and is run again, for this rank's
part alone (`replay`). A user reaches parts and wholes by `conversions` and `noise`.
"""
