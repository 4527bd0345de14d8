"""A train state, made and laid out."""
