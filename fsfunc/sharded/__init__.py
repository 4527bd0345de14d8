"""Sharded leaves, their layouts, and the packed buffers that hold their parts.

Nothing here communicates. A `leaf.Sharded` is one rank's part of a tensor, with its
`layout.Layout`. The parts of one unit's leaves lie in one `leaf.FlatShard`, and that
buffer is what is gathered, reduced, updated and saved.

placements.py layout.py   how a tensor is spread over an axis, and over a mesh
leaf.py             Sharded, the leaf; FlatShard, a rank's range of a packed buffer
packing.py          leaves packed into buffers, and again after a tree_map
plain_leaves.py     replicated and rank-local leaves: plain tensors with a layout
inputs.py           checks of a step's arguments
spent.py            leaves whose memory was given away
donated.py          memory that a donated step may write into
complex_numbers.py  complex numbers as pairs of real ones
slices.py           a rank's part of a whole tensor, and back
transfers.py        what ranks send each other between two layouts
leaf_tables.py      layouts in words, and the leaves of a state as tables
resized_layouts.py  layouts on axes of other sizes
packed_layouts.py   layouts of leaves in one buffer; of stacks of ranks' own values
"""
