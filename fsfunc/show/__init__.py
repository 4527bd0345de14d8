"""Tables and pictures for people.

shardings.py        tables of states, of checkpoints
plans.py estimates.py layouts.py   tables
charts.py           the model of charts: bars in rows, ticks, one set of colours
lanes.py            charts over time: rows of spans; as text
timelines.py stream_charts.py   schedules, and estimates, as lanes
memory_curves.py memory_plot.py   memory over a step, and its peak; its chart
figures.py          charts by matplotlib
chart_svg.py        charts as SVG
traces.py           JSON for trace viewers
chart_markup.py     charts as HTML
pages.py            all of a plan as one HTML file
"""

from fsfunc.printing.tables import Report
from fsfunc.show.memory_plot import MemoryChart, memory
from fsfunc.show.pages import html
from fsfunc.show.plans import plan
from fsfunc.show.shardings import LeafPicture, checkpoint, sharding
from fsfunc.show.stream_charts import StreamChart, streams
from fsfunc.show.timelines import Timeline, timeline
from fsfunc.show.traces import trace
