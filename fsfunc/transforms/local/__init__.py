"""Ranks that train copies of their own, and meet now and then."""
