"""Tables and pictures for people.

plan        the tables of a plan: units, collectives, parameters, state, and memory
memory      the memory that a rank holds over a step, split by what it is for
streams     the chart of an estimate: each stream of the planned ranks over time
timeline    the chart of a schedule, whose actions take what their costs say
sharding    the elements that each rank holds: of a leaf a picture, of a tree a table
checkpoint  the tensors, values and files of a checkpoint
html        all of a plan as one page: its times, memory, layouts and tables
trace       a run that was clocked, or an estimate, for a trace viewer

``print(ff.show.plan(...))`` prints one, ``rich.print`` in colours; with ``path=`` those
of time and memory are drawn (needs matplotlib). By file:

shardings.py        tables of states, of checkpoints
plans.py estimates.py layouts.py   tables
charts.py           the model of charts: bars in rows, ticks, one set of colours
lanes.py            charts over time: rows of spans; as text
timelines.py stream_charts.py   schedules, and estimates, as lanes
memory_curves.py memory_plot.py   memory over a step, and its peak; its chart
figures.py          charts by matplotlib
chart_svg.py        charts as SVG
traces.py           JSON for trace viewers
pages.py            charts as HTML, and all of a plan as one file
"""

from fsfunc.printing.tables import Report
from fsfunc.show.memory_plot import MemoryChart, memory
from fsfunc.show.pages import html
from fsfunc.show.plans import plan
from fsfunc.show.shardings import LeafPicture, checkpoint, sharding
from fsfunc.show.stream_charts import StreamChart, streams
from fsfunc.show.timelines import Timeline, timeline
from fsfunc.show.traces import trace

# Those that `help` lists; what they return has classes of its own.
__all__ = [
    "plan",
    "memory",
    "streams",
    "timeline",
    "sharding",
    "checkpoint",
    "html",
    "trace",
]
