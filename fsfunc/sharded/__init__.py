"""Values that carry their sharding: layouts, placements, parts packed into buffers.

Nothing here sends anything. A `leaf.Sharded` is a rank's part of a tensor, with its
`layout.Layout`; those of one unit lie in one `leaf.FlatShard`, which is what is
gathered, reduced, updated and saved.

leaf.py             Sharded, the leaf; FlatShard, the buffer that leaves lie in
layout.py placements.py slices.py   where elements lie; ways to cut; a rank's own
plain_leaves.py     one value on all ranks, or each rank's own: leaves of no unit
packing.py          leaves packed into buffers, and again after a tree_map
inputs.py           what a step may be given
donated.py          memory that a step may write into, leaves that it took
"""
