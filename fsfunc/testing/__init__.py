"""Checks for users' own sharded steps."""

from fsfunc.planning.live_memory import Living, live_bytes

__all__ = ["Living", "live_bytes"]
