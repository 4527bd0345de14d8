"""What a step does, seen by running it on tensors without data.

All runs begin alike (`runs.without_data`), and differ in what they look for, when:

- ``place`` and ``init_state`` have the step recorded: a `recorder.Recorder` notes
  which leaves units take (they are `leaves.Recorded`), and `groups` says which of them
  share a buffer.
- A sharded call is checked once for each set of shapes, at ``init_state`` or before it
  first runs, unless the record shows that no types are at stake: `type_check` has a
  `checker.Checker` hold each value between units against its type. The rules are
  `types` over the classes of `operators`, applied by `typed_operators` to what
  `knowledge` has; `refusals` are the messages. Where tensors without data cannot go on
  it runs on copies.
- A pipelined loss is traced for each shape of microbatch, as ``ff.program`` does by
  hand: a stage of `tracer` runs every unit call and notes it in a `programs.Program`,
  with what each input depends on and costs (`dataflow`), printed by `names`. Pipelines
  cut it.

Recorder and checker look on through one hook of the frame, a `tracers.Tracer`; the
third decides about unit calls, as a `frames.Stage` does. Who looks at operators enters
a mode (of `operators`, or one of torch functions). Two more rooms run things so: a plan
its step (``planning.observer``), and ``init_state`` an init function, whose operators
it keeps to run them again in part (``state.init_tape``).

runs.py operators.py   what such runs share: nothing is sent; what operators are
tracer.py programs.py   ff.program: a loss's unit calls, by which pipelines cut it
dataflow.py names.py   what depends on what, and its FLOPs; how it is called
recorder.py leaves.py groups.py   which leaves units take: place lays out by it
type_check.py checker.py typed_operators.py asked.py   has a sharded step one meaning?
types.py knowledge.py   the types, and of what they are known
provenance.py own_rows.py results.py   gradients of rows: means too early?
storages.py         facts about tensors, by storage, forgotten when it is freed
stand_ins.py steadiness.py   for who asks for values; does it do the same again?
refusals.py         the messages
"""
