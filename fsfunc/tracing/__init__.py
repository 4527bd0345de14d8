"""Analyses of a step that is run on tensors without data.

All runs begin alike (`runs.without_data`); each adds its own observer:

- ``place`` and ``init_state`` record the step: a `recorder.Recorder` notes which leaves
  units take (they are `groups.Recorded`), and `groups` derives which of them share a
  buffer.
- A sharded call is type checked once for each set of shapes, at ``init_state`` or
  before it first runs, unless the record shows that no rule can be broken: in the runs
  of `type_check` a `checker.Checker` gives each value between units a type. What it
  refuses is listed in `rules`, with its messages. `types` has the types of results, by
  the classes of `operators`; `typed_operators` applies them, with the facts in
  `knowledge`. Where tensors without data cannot go on, the runs are on copies.
- A pipelined loss is traced for each shape of microbatch, as ``ff.program`` does by
  hand: a stage of `tracer` runs every unit call and adds it to a `programs.Program`,
  with the dependencies and costs of its inputs (`dataflow`). Pipelines cut it.

Recorder and checker are the frame's tracer, a `tracers.Tracer`; the third decides about
unit calls, as a `frames.Stage` does. Operators are seen in an `_torch.OperatorMode`,
functions of torch in a mode of `torch_calls`. Two more rooms trace so: ``plan`` a step
(``planning.observer``), and ``init_state`` an init function, whose operators it records
to run them again in part (``state.init_tape``).

runs.py operators.py   shared: the harness; classes of operators, and their FLOPs
tracer.py programs.py   ff.program: the unit calls of a loss, which pipelines cut
dataflow.py         dependencies and FLOPs
recorder.py groups.py   leaves that units take, and their buffers
type_check.py checker.py typed_operators.py   the type check of a sharded step
torch_calls.py      torch functions that recorder and checker watch
replicas.py         comparison of what must be equal on ranks; batches that should not
types.py knowledge.py   the types, and the facts about tensors
split_work.py       values that are each rank's own along axes without a mean
provenance.py results.py   gradients of rows that are averaged too early
steadiness.py       placeholders for values, and for numbers that a step compares;
                    steps that differ from run to run
rules.py            what the first call refuses, and in which words
"""
