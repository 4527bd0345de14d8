"""Optimizers of whole matrices: each is computed by one rank, its owner."""
