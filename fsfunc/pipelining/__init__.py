"""Pipelines: a step in stages, its schedule as data, proven before it runs.

A schedule is a tuple of `actions` for each rank. `schedules` has the named ones;
`verification` and `timing` play them (`player`), each action after what it needs;
`transfers` writes sends and receives into them.

`pipelines` checks its arguments and the schedule. `handler` runs a gradient call: it
cuts the batch (`microbatches`), and the loss, which is traced once for each shape of
microbatch (`stage_plans`); then `runtime` executes this rank's actions in turn. A
forward action calls the user's own loss with a `stages.StageRun` outermost in the
frame. That runs the stage's own unit calls, returns what was received or a placeholder
for others, and ends the loss after the stage's last. `stages.StageVjp` keeps the graph,
and runs its backward whole or in halves (`backward_split`). With updates in between,
`stage_updates` takes the place of `handler`.

pipelines.py handler.py   pipeline; how it runs unit and gradient calls
stage_plans.py      programs cut into stages
actions.py          schedules as data, and the kinds of actions
schedules.py        those that have names, and a search
verification.py player.py   the check that one runs to its end
transfers.py timing.py   sends written into one; when each action runs
runtime.py          a rank's actions, one after another: the interpreter
stages.py           the user's own loss, of which one stage's unit calls run
backward_split.py fused_gradients.py   its backward, or halves
microbatches.py sample_gradients.py   a batch in parts, results joined; their gradients
stage_updates.py    stages that update in between
"""
