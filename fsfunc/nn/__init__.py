"""Layers with collectives in them."""
