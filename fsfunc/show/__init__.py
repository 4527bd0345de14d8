"""Tables and pictures for people."""

from fsfunc.show.checkpoints import checkpoint
from fsfunc.show.memories import MemoryChart, memory
from fsfunc.show.plans import plan
from fsfunc.show.shardings import LeafPicture, sharding
from fsfunc.show.streaming import StreamChart, streams
from fsfunc.show.tables import Report
from fsfunc.show.timelines import Timeline, timeline
from fsfunc.show.traces import trace

__all__ = [
    "LeafPicture",
    "MemoryChart",
    "Report",
    "StreamChart",
    "Timeline",
    "checkpoint",
    "memory",
    "plan",
    "sharding",
    "streams",
    "timeline",
    "trace",
]
