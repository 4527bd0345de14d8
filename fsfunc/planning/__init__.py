"""What a step will do and what it will cost, before it runs.

``plan`` runs the step on fake tensors: a `planner.PlannedLink` in place of the rank's
notes what would be sent, `observer` every operator and all memory, and `unit_cache`,
the tracer of the frame, runs each distinct unit's body once (`unit_profiles`) and
replays it after. They write `events`, of which a `plans.Plan` is made. An estimate
plays these through (`simulation`) with what each takes (`cost_model`) on a machine
(`machines`); a search plans and estimates many stacks (`stacks`, `trials`).
"""
