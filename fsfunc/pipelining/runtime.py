"""The interpreter: runs one rank's actions of a schedule, one after another.

`handler.Pipelining` makes a `Worker` for each gradient call or forward pass, and gives
it this rank's row. An action ``F``, ``B``, ``I``, ``W`` is the `Worker` method ``_F``,
``_B``... What travels between actions lies in tables by (direction, stage, microbatch):

    _F of stage s:  inbox or posted[F, s, m] -> the loss's stage -> outbox[F, s, m, s+1]
    _SF, _RF:       send outbox[F, s, m, s+1];  post a receive for posted[F, s+1, m]
    _B of stage s:  inbox or posted[B, s, m] -> StageVjp -> outbox[B, s, m, s-1]

Between two stages of one rank values go from hand to hand, through ``inbox``. When a
step is planned, rounds of a schedule that repeat are not run, but noted as those before
(`ScheduleRounds`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.collective_ops import maps_run_by
from fsfunc.comm.groups import RankGroup
from fsfunc.core.frames import Counter, Frame, inside
from fsfunc.core.outcomes import GradientCall
from fsfunc.core.tracers import Carried, Round, Tracer
from fsfunc.pipelining.actions import BACKWARD, FORWARD, Action, stages_of
from fsfunc.pipelining.microbatches import Microbatch
from fsfunc.pipelining.sample_gradients import SampleGradients
from fsfunc.pipelining.stages import (
    CAPTURED,
    Ended,
    StageRun,
    StageVjp,
    apply_or_stand_in,
)
from fsfunc.pipelining.timing import ActionTimer
from fsfunc.runtime.generators import States, are_drawn, generators_restored, seed63
from fsfunc.runtime.memory import BufferPool
from fsfunc.runtime.scopes import running_eagerly
from fsfunc.tracing.programs import TracedCall, Value
from fsfunc.tree.types import Leaf, PyTree

# (direction, stage, microbatch), and in the outbox the peer's stage too.
_Key = tuple[str, int, int] | tuple[str, int, int, int]


@dataclass(eq=False)
class Worker:
    """One rank of one pipelined call.

    Args:
        read: ``(returned) -> (total, weight, aux)``, of what the loss returns.
        microbatches: all of the call's.
        owners: by stage, the index along ``rank_group`` of the rank that runs it.
        rank_group: the ranks of the pipeline.
        frame: the frame of the gradient call.
        depth: the position of the loop over microbatches in the frame's ``micro``.
        grad_leaves: the differentiated leaves; empty if only the forward is run.
        pool: memory for their gradients.
        seed: returns the cotangent that the backward of a loss's total starts from.
        samples: is shown each microbatch's gradients, if not None.

    After ``run``, ``results`` has the results of ``read`` for each microbatch, on the
    rank of the last stage, and ``grad_leaves`` have their ``.grad``.
    """

    read: Callable[[PyTree], tuple[PyTree, Tensor | None, PyTree]]
    microbatches: Sequence[Microbatch]
    owners: Sequence[int]
    rank_group: RankGroup
    frame: Frame
    depth: int
    grad_leaves: Sequence[Tensor]
    pool: BufferPool = field(default_factory=BufferPool)
    seed: Callable[[Tensor], Tensor] = torch.ones_like
    samples: SampleGradients | None = None

    def __post_init__(self) -> None:
        self.results: dict[int, tuple[PyTree, Tensor | None, PyTree]] = {}
        # By direction, stage and microbatch: values from this rank's other stages, and
        # receives that are under way; by the peer's stage too: values to send.
        self.inbox: dict[_Key, dict[Value, Tensor]] = defaultdict(dict)
        self.posted: dict[_Key, list[tuple[Value, Handle]]] = defaultdict(list)
        self.outbox: dict[_Key, dict[Value, Tensor]] = {}
        self.forwarded: dict[_Key, _Forwarded] = {}  # by FORWARD, stage and microbatch
        self.tables: tuple[dict[_Key, Any], ...] = (
            self.inbox, self.posted, self.outbox, self.forwarded,
        )  # fmt: skip
        self.sends: list[Handle] = []
        self.actions: Sequence[Action] = ()
        self.position: int = 0  # in `actions`, of the one that runs
        self.last_forward: int = 0  # in `actions`, of the last forward
        self.last_send: int = 0
        self.done_early: set[Action] = set()  # actions that ran before their turn
        self.clock: ActionTimer  # of the action that runs

    def run(self, actions: Sequence[Action]) -> None:
        """Runs this rank's actions in their order."""
        try:
            self._run(actions)
        except BaseException as error:
            # Another rank may still be in this call: it would take a message of the
            # next call for the one that it waits for. So the mesh takes no more calls.
            if self.rank_group.size > 1:
                self.rank_group.link.close("a pipelined step", error)
            raise

    def _run(self, actions: Sequence[Action]) -> None:
        self.actions, self.done_early = actions, set[Action]()
        forwards = [i for i, a in enumerate(actions) if a.traits.is_forward]
        self.last_forward = max(forwards, default=-1)
        sends = [i for i, a in enumerate(actions) if a.traits.transfer == ">"]
        self.last_send = max(sends, default=-1)
        draws_outside_units = any(m.cut.program.draws for m in self.microbatches)
        several_stages = len(stages_of(actions)) > 1
        tracer = self.frame.tracer or Tracer()
        rounds = tracer.observe_rounds(_MICROBATCH)
        rounds = None if rounds is None else ScheduleRounds(self, rounds)
        with generators_restored() as states:
            for self.position, action in enumerate(actions):
                if action in self.done_early:
                    continue
                kind = action.traits
                # Draws between units repeat for a microbatch and stage, wherever the
                # schedule puts them. Units seed their own.
                if draws_outside_units and kind.is_forward:
                    seed = seed63(self.frame.seed or 0, action.stage, action.microbatch)
                    for generator, _ in states:
                        generator.manual_seed(seed)
                stage = action.stage if several_stages else None
                if rounds is not None:
                    rounds.begin(self.position)
                # A plan's turns are named by work: a transfer by what it carries.
                tracer.begin_turn(kind.carries or kind.letter, action.microbatch, stage)
                if action.is_compute:
                    self._order_reductions(action)
                with ActionTimer(self.rank_group.index, action) as self.clock:
                    (kind.run or getattr(type(self), f"_{kind.letter}"))(self, action)
                # A send's handle keeps its tensor alive, so handles that are done go.
                self.sends = [work for work in self.sends if not work.done()]
                if rounds is not None:
                    self.done_early.update(rounds.after(self.position))
            if not draws_outside_units and self.frame.seed is not None:
                _check_undrawn(states)
        self._order_reductions(None)
        for work in self.sends:
            work.wait()
        if rounds is not None:
            rounds.rounds.end()
        tracer.begin_turn("", 0)

    def _order_reductions(self, action: Action | None) -> None:
        """Has derivatives go before the reductions of a ``shard`` around the pipeline.

        A derivative is what the rank of the stage before waits for, and all ranks
        before that one. So reductions of what an action computes begin when it has sent
        its derivative; until the rank's last send none of them is waited for.

        A ``shard`` inside the pipeline reduces the gradients of each microbatch, so
        that no rank has whole ones: there each reduction begins and ends in its turn.

        Args:
            action: the one that begins; None after the last one.
        """
        holds = others_wait = False
        if action is not None:
            others_wait = self.position < self.last_send
            producers = self.microbatches[action.microbatch].cut.producers_of
            holds = action.traits.outgoing == BACKWARD and any(
                self.owners[p] != self.owners[action.stage]
                for p, _ in producers(action.stage)
            )
        for _, runtime in self.frame.runtimes:
            if runtime.sums.depth <= self.depth:
                runtime.sums.order_reductions(holds, others_wait)

    # Forward

    def _F(self, a: Action) -> None:
        batch, key = self.microbatches[a.microbatch], (FORWARD, a.stage, a.microbatch)
        cut = batch.cut
        received = self._collect(FORWARD, a)
        if self.grad_leaves:  # what is received becomes a leaf of this stage's graph
            for value, x in received.items():
                x.requires_grad_(cut.spec(value).requires_grad)
        needs_tokens = bool(self.grad_leaves) and bool(self.frame.runtimes)
        stage = StageRun(cut, cut.stages[a.stage], received, needs_tokens)
        place, micro = (a.microbatch, len(self.microbatches)), self.frame.micro
        outer, inner = micro[: self.depth], micro[self.depth + 1 :]
        f = self.frame.replace(
            handlers=(stage, *self.frame.handlers),
            micro=(*outer, place, *inner),
            # `accumulate` inside of a pipeline has cut its rows before this loop does.
            rows=(*outer, *inner, place),
            counter=Counter(),
            in_loss=1,
        )
        with (
            torch.set_grad_enabled(bool(self.grad_leaves)),
            maps_run_by(apply_or_stand_in),
            # Compiled functions between units may be given placeholders.
            running_eagerly(),
            inside(f),
        ):
            try:
                returned = self._call_loss(batch.call)
            except Ended:
                returned = None
        loss = None
        if stage.plan.makes_loss:
            loss = self._record_loss(stage, returned, a.microbatch)
        stage.check_made(tracked=bool(self.grad_leaves))
        self._hand_over(FORWARD, a, stage.produced, cut.consumers(a.stage))
        if not self.grad_leaves:
            return
        output_values = [v for v, x in stage.produced.items() if x.requires_grad]
        input_values = [v for v, x in received.items() if x.requires_grad]
        outputs = [*(stage.produced[v] for v in output_values), *stage.end_tokens]
        seeds: list[Tensor | None] = []
        if loss is not None:
            outputs.insert(0, loss[0])
            seeds.append(loss[1])
        inputs = [received[v] for v in input_values]
        vjp = StageVjp(
            outputs, inputs, [*self.grad_leaves, *stage.start_tokens], self.pool
        )
        end_cotangents = [torch.zeros_like(x) for x in stage.end_tokens]
        self.forwarded[key] = _Forwarded(
            vjp, seeds, output_values, input_values, end_cotangents
        )

    def _call_loss(self, call: GradientCall) -> PyTree:
        """Calls the user's loss; `_UpdatingWorker` gives it parameters of its own."""
        return call.fn(*call.args, **call.keywords)

    def _record_loss(
        self, stage: StageRun, returned: PyTree, microbatch: int
    ) -> tuple[Tensor, Tensor] | None:
        """Records the loss's results; returns its total and the total's cotangent.

        None where there is nothing to differentiate.
        """
        stage.check_loss(returned)
        total, weight, aux = self.results[microbatch] = self.read(returned)
        if not (isinstance(total, Tensor) and total.requires_grad):
            return None
        # A `Weighted` loss is a sum and is divided by all weights at the end; a mean
        # counts by its share of the rows, now.
        share = self.microbatches[microbatch].share if weight is None else 1.0
        self.results[microbatch] = total.detach(), weight, aux
        return total, self.seed(total).mul_(share)

    def _collect(self, direction: str, a: Action) -> dict[Value, Tensor]:
        """Removes and returns the activations or cotangents that an action needs."""
        key = direction, a.stage, a.microbatch
        collected = self.inbox.pop(key, {})
        for value, work in self.posted.pop(key, ()):
            _add(collected, value, work.wait())
        self.clock.restart()  # the wait was no work of this action
        return collected

    def _hand_over(
        self,
        direction: str,
        a: Action,
        produced: Mapping[Value, Tensor],
        peers: Iterable[tuple[int, Sequence[Value]]],
    ) -> None:
        """Puts what an action made for other stages into their inbox, or the outbox."""
        for peer, values in peers:
            message = {value: produced[value].detach() for value in values}
            if self.owners[peer] == self.owners[a.stage]:
                for value, x in message.items():
                    _add(self.inbox[direction, peer, a.microbatch], value, x)
            else:
                self.outbox[direction, a.stage, a.microbatch, peer] = message

    # Backward

    def _B(self, a: Action) -> None:
        forwarded = self.forwarded.pop((FORWARD, a.stage, a.microbatch))
        cut, local_rank = self.microbatches[a.microbatch].cut, self.owners[a.stage]

        def give(input_grads: Sequence[Tensor | None]) -> None:
            self._return_gradients(a, forwarded, input_grads)
            self._send_gradients_early(a)

        # After the last forward the rank of the stage before has nothing to do but to
        # wait for the gradients of its outputs, and no rank waits for weight gradients:
        # so those come after the send. Before that point, a weight's product is better
        # computed at once, while its factors are in the cache.
        sends_early = self.position > self.last_forward and any(
            self.owners[p] != local_rank for p, _ in cut.producers_of(a.stage)
        )
        cotangents = self._cotangents(a, forwarded)
        with self._sample(a):
            input_grads = forwarded.vjp.backward(
                cotangents, give if sends_early else None
            )
        if not sends_early:
            self._return_gradients(a, forwarded, input_grads)

    def _I(self, a: Action) -> None:
        forwarded = self.forwarded[FORWARD, a.stage, a.microbatch]
        grads = forwarded.vjp.input_gradient(self._cotangents(a, forwarded))
        self._return_gradients(a, forwarded, grads)

    def _W(self, a: Action) -> None:
        with self._sample(a):
            self.forwarded.pop((FORWARD, a.stage, a.microbatch)).vjp.weight_gradient()

    def _sample(self, a: Action) -> AbstractContextManager[None]:
        if self.samples is None:
            return nullcontext()
        return self.samples.observing(a.stage, a.microbatch)

    def _cotangents(self, a: Action, forwarded: _Forwarded) -> list[Tensor | None]:
        """Returns the cotangents of the loss, of sent outputs, and of end tokens."""
        received = self._collect(BACKWARD, a)
        return [
            *forwarded.seeds,
            *(received.get(v) for v in forwarded.output_values),
            *forwarded.end_cotangents,
        ]

    def _return_gradients(
        self, a: Action, forwarded: _Forwarded, grads: Sequence[Tensor | None]
    ) -> None:
        """Passes the gradients of a stage's inputs to the stages that made them."""
        cut = self.microbatches[a.microbatch].cut
        # Zeros where this stage's loss did not use the value: the other rank's receive
        # is posted by the recorded program, and waits for a message.
        cotangents = {
            v: cut.spec(v).zeros() if g is None else g
            for v, g in zip(forwarded.input_values, grads, strict=True)
        }
        self._hand_over(BACKWARD, a, cotangents, cut.producers_of(a.stage))

    def _send_gradients_early(self, a: Action) -> None:
        """Runs the sends that follow a backward in the row, before that has ended."""
        for action in self.actions[self.position + 1 :]:
            is_same_work = (action.stage, action.microbatch) == (a.stage, a.microbatch)
            kind = action.traits
            if (kind.transfer, kind.carries) != (">", BACKWARD) or not is_same_work:
                break
            with ActionTimer(self.rank_group.index, action):
                self._send(action)
            self.done_early.add(action)

    # Transfers

    def _send(self, a: Action) -> None:
        calls, peer = self.microbatches[a.microbatch].cut.program.calls, _peer(a)
        direction = a.traits.carries
        phase = "forward" if direction == FORWARD else "backward"
        message = self.outbox.pop((direction, a.stage, a.microbatch, peer))
        for value, x in message.items():
            name = _name_message(value, calls, a)
            with label(calls[value.call].name, phase):
                self.sends.append(self.rank_group.send(x, self.owners[peer], name))

    def _receive(self, a: Action) -> None:
        cut, peer = self.microbatches[a.microbatch].cut, _peer(a)
        direction = a.traits.carries
        source, posted = (
            self.owners[peer],
            self.posted[direction, a.stage, a.microbatch],
        )
        for value in (
            cut.messages[peer, a.stage]
            if direction == FORWARD
            else cut.gradient_values(a.stage, peer)
        ):
            spec, name = cut.spec(value), _name_message(value, cut.program.calls, a)
            traits = spec.shape, spec.dtype, spec.device
            posted.append((value, self.rank_group.receive(*traits, source, name)))

    _SF = _SB = _send
    _RF = _RB = _receive


@dataclass
class _Forwarded:
    """What a forward saves for its backward.

    Args:
        vjp: the graph, as a function of cotangents. Its outputs are the loss (in the
            last stage), ``output_values`` and the end tokens, in this order.
        seeds: the loss's cotangent, in the last stage.
        output_values: the outputs whose gradients other stages give.
        input_values: the received values whose gradients this stage gives.
        end_cotangents: zeros, the cotangents of the end tokens.
    """

    vjp: StageVjp
    seeds: list[Tensor | None]
    output_values: list[Value]
    input_values: list[Value]
    end_cotangents: list[Tensor]


def _check_undrawn(states: States) -> None:
    """Raises if the loss drew numbers outside units, and its recording did not.

    Such draws were not seeded by stage and microbatch, as `Worker._run` does it.
    """
    if _torch.fake_active():
        return  # fake tensors draw nothing
    if are_drawn(states):
        raise RuntimeError(
            "the loss draws random numbers outside every unit, and drew none when it "
            f"was recorded: {CAPTURED}"
        )


def _name_message(value: Value, calls: Sequence[TracedCall], a: Action) -> str:
    """Returns the name of a message: an output of a unit call, or its gradient."""
    prefix = "" if a.traits.carries == FORWARD else "gradient of "
    name = calls[value.call].name
    return f"{prefix}{name} #{value.call}.{value.leaf}{_MICROBATCH}{a.microbatch}"


# Planning finds a message's microbatch after this text, to name those of noted rounds.
_MICROBATCH = ", microbatch "


def _add(sums: dict[Value, Tensor], value: Value, g: Tensor) -> None:
    sums[value] = sums[value] + g if value in sums else g


def _peer(a: Action) -> int:
    if a.peer is None:
        raise ValueError(f"{a} names no other stage")
    return a.peer


class RoundNoter(Protocol):
    """What a tracer gives for a loop over microbatches (`Tracer.observe_rounds`).

    A plan's is `planning.rounds.Rounds`.
    """

    def begin(self, kind: Hashable, microbatch: int) -> object: ...
    def anew(self) -> None: ...
    def after(self, done: Round) -> int: ...
    def end(self) -> None: ...
    def stand_in(self, x: Tensor, by: int) -> Tensor: ...


class ScheduleRounds:
    """The repeated rounds of one rank's actions, of which a plan runs only a few.

    Between its first forwards and its last backwards a rank comes to the same actions
    again and again, each time with later microbatches. A plan of 16 microbatches would
    run each of these rounds on fake tensors, and find the same. So the tracer says,
    after a round, how many of the next ones it notes without running them; this class
    then renames what is in flight, as if those rounds had run.

    Args:
        worker: runs the actions, and calls `begin` and `after` around each.
        rounds: what the tracer gave; it hears of rounds and decides.
    """

    worker: Worker
    rounds: RoundNoter
    actions: Sequence[Action]
    repeats: dict[int, tuple[int, int, int]]
    repeat_start: int
    repeat_end: int
    round_size: int
    shift: int

    def __init__(self, worker: Worker, rounds: RoundNoter):
        self.worker, self.rounds, self.actions = worker, rounds, worker.actions
        kinds_of_microbatch = {(id(m.cut), m.share) for m in worker.microbatches}
        # An observer of gradients is to see each microbatch's.
        observed = any(h.observes for h in worker.frame.handlers)
        alike = len(kinds_of_microbatch) == 1 and not observed
        # After an update a round finds other parameters than the round before it.
        alike = alike and not any(a.traits.updates for a in self.actions)
        self.repeats = find_repeats(tuple(self.actions)) if alike else {}
        # Of the stretch of repeated rounds that runs: positions in the row, actions in
        # a round, and by how much microbatches grow from round to round.
        self.repeat_start = self.repeat_end = self.round_size = self.shift = 0

    def begin(self, position: int) -> None:
        """Tells the tracer that the action at this position of the row begins."""
        if position in self.repeats:
            self.round_size, self.shift, more_rounds = self.repeats[position]
            self.repeat_start, self.repeat_end = (
                position,
                position + self.round_size * (1 + more_rounds),
            )
            self.rounds.anew()
        action = self.actions[position]
        self.rounds.begin((action.kind, action.stage, action.peer), action.microbatch)

    def after(self, position: int) -> Sequence[Action]:
        """Ends the action at this position; returns the next ones, which are noted."""
        next_position = position + 1
        if (
            not self.repeat_start < next_position < self.repeat_end
            or (next_position - self.repeat_start) % self.round_size
        ):
            return ()
        ran = self.actions[next_position - self.round_size : next_position]
        worker, first = self.worker, ran[0].microbatch
        in_flight = {key[2] for table in worker.tables for key in table}
        # What is in flight, with microbatches counted from the round's first: two
        # rounds that begin alike have equal tables.
        tables = [
            sorted((str(k[0]), k[1], k[2] - first, *k[3:]) for k in table)
            for table in worker.tables
        ]
        noted = self.rounds.after(
            Round(
                carriers=[
                    self,
                    *(runtime.sums for _, runtime in worker.frame.runtimes),
                ],
                state=tables,
                remaining=(self.repeat_end - next_position) // self.round_size,
                microbatch=first,
                stride=self.shift,
                in_flight=in_flight | {a.microbatch for a in ran},
                lasting=[
                    x for x in tree.leaves(worker.results) if isinstance(x, Tensor)
                ],
            )
        )
        if noted:
            self._rename(noted, {a.microbatch for a in ran if a.traits.is_forward})
        return self.actions[next_position : next_position + noted * self.round_size]

    def carried(self) -> Carried:
        """Returns the gradients so far, which the next round adds to."""
        grads = [x.grad for x in self.worker.grad_leaves if x.grad is not None]
        return Carried(grads, {})

    def _rename(self, noted: int, forwards: set[int]) -> None:
        """Renames what is in flight to what the last noted round would leave.

        Args:
            noted: how many rounds were noted.
            forwards: microbatches whose forward was in the round that ran last.
        """
        worker, total_shift = self.worker, noted * self.shift
        results = {m: worker.results[m] for m in forwards if m in worker.results}
        for shift in range(self.shift, total_shift + 1, self.shift):
            stand_in = partial(self._stand_in, shift)
            worker.results |= {
                m + shift: tree.map(stand_in, x) for m, x in results.items()
            }
        for table in worker.tables:
            shifted: dict[Any, Any] = {
                (*k[:2], k[2] + total_shift, *k[3:]): x for k, x in table.items()
            }
            table.clear()
            table.update(shifted)

    def _stand_in(self, shift: int, x: Leaf) -> Leaf:
        return self.rounds.stand_in(x, shift) if isinstance(x, Tensor) else x


@lru_cache(maxsize=256)
def find_repeats(row: tuple[Action, ...]) -> dict[int, tuple[int, int, int]]:
    """Returns where a row comes to the same actions again, with later microbatches.

    Returns:
        by the position where the first of some equal rounds begins: how many actions a
        round has, by how much its microbatches are later than those of the round
        before, and how many rounds follow the first. The last action of each kind, and
        those of the last microbatch, are in no such round: they may end something.

    >>> from fsfunc.pipelining.actions import parse
    >>> find_repeats(parse(["F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"])[0])
    {1: (2, 1, 3)}
    """
    kinds = [(a.kind, a.stage, a.peer) for a in row]
    microbatches = [a.microbatch for a in row]
    last_of_kind = {kind: i for i, kind in enumerate(kinds)}
    last_microbatch = max(microbatches, default=0)
    special = [
        i
        for i in range(len(row))
        if last_of_kind[kinds[i]] == i or microbatches[i] == last_microbatch
    ]
    repeats, i = dict[int, tuple[int, int, int]](), 0
    while i < len(row):
        end = next((j for j in special if j >= i), len(row))
        for size in range(1, (end - i) // 3 + 1):
            shift, j = microbatches[i + size] - microbatches[i], i
            while j + size < end and shift > 0:
                is_same = (
                    kinds[j + size] == kinds[j]
                    and microbatches[j + size] - microbatches[j] == shift
                )
                if not is_same:
                    break
                j += 1
            if j - i >= 2 * size:
                repeats[i] = size, shift, (j - i) // size
                i = j + size - 1
                break
        i += 1
    return repeats
