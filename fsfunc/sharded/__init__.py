"""Values that carry their sharding: layouts, placements, parts packed into buffers."""
