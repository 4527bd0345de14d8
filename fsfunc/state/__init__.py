"""A train state, made and laid out.

`train_state.init_state` gives parameters, moments and extras to `placing.lay_out`,
which has the step recorded to see what lies together, and makes each leaf's part.
Where values come from is a `leaf_sources.GivenLeaves`: whole tensors in hand; or an
init function that ran on fake tensors (`init_tape`) and is run again, for this rank's
part alone (`replay`). A user reaches parts and wholes by `conversions` and `noise`.

train_state.py      TrainState, init_state, abstract_state
placing.py lots.py   place; what lies together, and a rank's part of it
agreeing.py         one process cannot lay out: then all raise
leaf_sources.py     where the values come from
layout_rules.py     which leaves are split over axes of their own
mirroring.py        which leaves lie as parameters do: moments, averages
conversions.py noise.py   unshard, lay_like, reduce_like; randn_like
init_tape.py taped_ops.py replay.py   an init function, run for a rank's own part
                    alone
"""
