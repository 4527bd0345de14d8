"""Pipelines: a step in stages, its schedule as data, proven before it runs.

A schedule is a tuple of `actions` for each rank. `synchronous`, `delayed` and
`list_scheduling` make some; `verification` and `timing` play them (`player`) on what
each action needs (`dependencies`), and `transfers` writes sends and receives in.

`pipelines` checks what it is asked, and has the schedule proven. A gradient call comes
to `handler`: the batch is cut (`microbatches`), the loss is seen once for each shape of
microbatch and cut too (`cut_programs`, `stage_plans`), and `runtime` does this rank's
actions in turn. A forward action calls the user's own loss with a `stages.StageRun`
outermost in the frame, which lets the stage's own unit calls run, answers others by
what was received or a stand-in, and ends the loss after the last. `stage_vjp` keeps the
graph, and pulls back whole or in halves (`backward_split`). With updates in between it
is `stage_updates` in place of `handler`.
"""
