"""Tables and pictures for people."""

from fsfunc.show.timelines import Timeline, timeline
from fsfunc.show.traces import trace

__all__ = ["Timeline", "timeline", "trace"]
