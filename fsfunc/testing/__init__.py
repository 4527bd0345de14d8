"""Checks for users' own sharded steps."""
