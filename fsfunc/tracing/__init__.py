"""What a step does, seen by running it on tensors without data.

All runs begin alike (`runs`), are looked at through one hook of the frame
(``frames.Tracer``) and one dispatch mode (`operators`), and differ in what they look
for:

- `tracer` notes the unit calls of a loss as a `programs.Program`, with what each input
  depends on and costs (`dataflow`), printed by `names`: pipelines cut it.
- `recorder` notes which leaves units take, as `leaves` tell it; `groups` says which of
  them share a buffer: `place` lays out by it.
- `type_check` and `checker` hold each value between units against its type: the rules
  are `types` over the classes of `operators`, applied by `typed_operators` to what
  `knowledge` has; `refusals` are the messages. A sharded call is looked at before it
  first runs.

A plan runs its step so too, and remembers what each unit's body did (``foresight``);
an init function's operators are kept to be run again in part (``initializing``).
"""
