"""Checks for users' own sharded steps."""

from fsfunc.testing.live_memory import Living, live_bytes

__all__ = ["Living", "live_bytes"]
