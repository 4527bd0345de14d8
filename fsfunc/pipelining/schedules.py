"""The schedules of a pipeline, and what reads and writes them: `ff.schedules`.

A schedule is made by a pure function `(n_stages, n_microbatches, **options)` and is a
tuple of actions for each rank; a list of rows of text, read by `parse`, is one too.
"""

from fsfunc.pipelining.actions import (  # noqa: F401
    Action,
    Schedule,
    ScheduleError,
    forward_only,
    from_json,
    listing,
    owners,
    parse,
    to_json,
)
from fsfunc.pipelining.delayed import asynchronous, staleness  # noqa: F401
from fsfunc.pipelining.list_scheduling import greedy  # noqa: F401
from fsfunc.pipelining.synchronous import (  # noqa: F401
    forwards,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_v,
)
