"""Values that carry their sharding: layouts, placements, parts packed into buffers.

Nothing here sends anything. A `leaf.Sharded` is a rank's part of a tensor, with its
`layout.Layout`; those of one unit lie in one `leaf.FlatShard`, which is what is
gathered, reduced, updated and saved.
"""
