"""How buffers travel: narrower, in levels, in few directions; and what is owed."""
