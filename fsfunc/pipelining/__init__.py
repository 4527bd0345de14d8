"""Pipelines: a step in stages, its schedule as data, proven before it runs.

`pipelines` checks what it is asked, and has the schedule proven. A gradient call comes
to `handler`: the loss is seen once for each shape of microbatch and cut
(`cut_programs`, `stage_plans`), and `runtime` does this rank's actions in turn. A
forward action calls the user's own loss with a `stages.StageRun` outermost in the
frame, which lets the stage's own unit calls run, answers others by what was received
or a stand-in, and ends the loss after the last. `stage_vjp` keeps the graph, and pulls
back.
"""
