"""Checks for users' own sharded steps."""

from fsfunc.testing.live_memory import Living, live_bytes
from fsfunc.testing.odd_batches import OddBatch, check_batch

__all__ = ["Living", "OddBatch", "check_batch", "live_bytes"]
