"""A train state, made and laid out.

`initialization.init_state` gives parameters and extras to `placing.lay_out`, which has
the step recorded to see which leaves belong together, and makes each leaf's part (the
docstring of `init_state` says how often each function runs meanwhile); the
optimizer's state is then made of these parts. Where values come from is a
`leaf_sources.GivenLeaves`: whole tensors in hand; or an init function that ran on fake
tensors and is run again, for this rank's part alone (`init_tape`).
`unsharding` and `laid_like` are used inside of a step.

train_state.py      TrainState
initialization.py   init_state, abstract_state
placing.py leaf_groups.py   place; groups of leaves, and a rank's part of each
moving.py           a tree that is laid out, moved to another layout
remeshing.py        remesh: a state goes on with more ranks, or with fewer
leaf_moves.py       leaves on their way between layouts
shared_records.py   records of steps that several plans share
agreeing.py         comparison of ranks that lay out; errors raised on all
leaf_sources.py     the values of leaves: given, deferred, or shapes alone
layout_rules.py     leaves that are split over axes of their own
unsharding.py laid_like.py   unshard; lay_like, reduce_like, randn_like
leaf_by_leaf.py whole_tensors.py   whole_leaves; a leaf put together of its parts
values.py           meshes and tensors without values, refused
init_tape.py        an init function recorded, and replayed for this rank's part
"""
