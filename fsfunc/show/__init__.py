"""Tables and pictures for people.

plans.py estimates.py shardings.py layouts.py checkpoints.py   tables
timelines.py timeline_text.py stream_plot.py lanes.py   what runs when
memory_plot.py memory_curve.py   what is held when
figures.py palette.py traces.py   drawn, in one set of colours; for trace viewers
"""

from fsfunc.printing.tables import Report
from fsfunc.show.checkpoints import checkpoint
from fsfunc.show.memory_plot import MemoryChart, memory
from fsfunc.show.plans import plan
from fsfunc.show.shardings import LeafPicture, sharding
from fsfunc.show.stream_plot import StreamChart, streams
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
