"""The interpreter: one rank's actions of a schedule, one after another.

A schedule's action ``F``, ``B``, ``I``, ``W`` is the method of :class:`Worker` of that
name. A forward runs the whole loss of one microbatch, within a `stages.StageRun`. In a
plan the rounds of a schedule that are like those before are not run (`ScheduleRounds`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import maps_run_by
from fsfunc.comm.groups import RankGroup
from fsfunc.core.frames import Counter, Frame, inside
from fsfunc.core.outcomes import GradientCall
from fsfunc.core.tracers import Carried, Round, Tracer
from fsfunc.pipelining.actions import BACKWARD, FORWARD, Action, stages_of
from fsfunc.pipelining.microbatches import Microbatch
from fsfunc.pipelining.sample_gradients import SampleGradients
from fsfunc.pipelining.stages import CAPTURED, Ended, StageRun, StageVjp, abstractly
from fsfunc.pipelining.timing import clocked
from fsfunc.runtime.generators import States, are_drawn, generators_restored, seed63
from fsfunc.runtime.memory import BufferPool
from fsfunc.runtime.scopes import running_eagerly
from fsfunc.tracing.programs import Value


@dataclass(eq=False)
class Worker:
    """One rank of one pipelined call.

    Args:
        read: ``(returned) -> (total, weight, aux)``; the last stage's.
        microbatches: all of them.
        owners: by stage, the index along ``where`` of the rank that runs it.
        where: the ranks of the pipeline.
        frame: that of the gradient call; ``depth``: the position of this loop in its
            ``micro``.
        values: the differentiated leaves; none if only the forward is run.
        pool: memory for their gradients.
        seed: the cotangent that a backward starts from, for the total of a loss.
        samples: is shown each backward's gradients, if not None.

    After ``run``, ``results`` has the results of ``read`` for each microbatch, on the
    rank of the last stage, and ``values`` have their gradients.
    """

    read: Callable[[Any], Any]
    microbatches: Sequence[Microbatch]
    owners: Sequence[int]
    where: RankGroup
    frame: Frame
    depth: int
    values: Sequence[Tensor]
    pool: BufferPool = field(default_factory=BufferPool)
    seed: Callable[[Tensor], Tensor] = torch.ones_like
    samples: SampleGradients | None = None

    def __post_init__(self) -> None:
        self.results: dict[int, Any] = {}
        # By direction, stage and microbatch: what came for an action from
        # here, what is being received for it, and what it made for other ranks.
        self.inbox: dict[Any, dict[Value, Tensor]] = defaultdict(dict)
        self.posted: dict[Any, list[tuple[Value, Any]]] = defaultdict(list)
        self.outbox: dict[Any, dict[Value, Tensor]] = {}
        self.kept: dict[Any, _Forwarded] = {}  # by FORWARD, stage and microbatch
        self.tables = self.inbox, self.posted, self.outbox, self.kept
        self.sends: list[Any] = []
        self.actions: Sequence[Action] = ()
        self.at = self.last = 0  # the action that is done now, and the last forward
        self.early: set[Action] = set()  # what was done before its turn
        self.clock: clocked  # of the action that is done now

    def run(self, actions: Sequence[Action]) -> None:
        """Does a rank's actions in their order.

        After an error the mesh is closed: another rank may be in this call still, and
        would take what the next one sends for what it waits for.
        """
        try:
            self._run(actions)
        except BaseException as error:
            if self.where.size > 1:
                self.where.link.close("a pipelined step", error)
            raise

    def _run(self, actions: Sequence[Action]) -> None:
        self.actions, self.early = actions, set[Action]()
        forwards = [i for i, a in enumerate(actions) if a.of_kind.is_forward]
        self.last = max(forwards, default=-1)
        draws = any(m.cut.program.draws for m in self.microbatches)
        several = len(stages_of(actions)) > 1
        tracer = self.frame.tracer or Tracer()
        rounds = tracer.rounds(_NAMED)
        rounds = None if rounds is None else ScheduleRounds(self, rounds)
        with generators_restored() as states:
            for self.at, action in enumerate(actions):
                if action in self.early:
                    continue
                kind = action.of_kind
                if draws and kind.is_forward:
                    seed = seed63(self.frame.seed or 0, action.stage, action.microbatch)
                    for generator, _ in states:
                        generator.manual_seed(seed)
                stage = action.stage if several else None
                if rounds is not None:
                    rounds.begin(self.at)
                tracer.turn(kind.carries or kind.letter, action.microbatch, stage)
                with clocked(self.where.index, action) as self.clock:
                    (kind.run or getattr(type(self), f"_{kind.letter}"))(self, action)
                self.sends = [work for work in self.sends if not work.done()]
                if rounds is not None:
                    self.early.update(rounds.after(self.at))
            if not draws and self.frame.seed is not None:
                _check_undrawn(states)
        for work in self.sends:
            work.wait()
        if rounds is not None:
            rounds.rounds.end()
        tracer.turn("", 0)

    # Forward

    def _F(self, a: Action) -> None:
        batch, key = self.microbatches[a.microbatch], (FORWARD, a.stage, a.microbatch)
        cut = batch.cut
        received = self._taken(FORWARD, a)
        if self.values:  # each a leaf of the stage's graph
            for value, x in received.items():
                x.requires_grad_(cut.spec(value).requires_grad)
        tied = bool(self.values) and bool(self.frame.runtimes)
        stage = StageRun(cut, cut.stages[a.stage], received, tied)
        ours, micro = (a.microbatch, len(self.microbatches)), self.frame.micro
        outer, inner = micro[: self.depth], micro[self.depth + 1 :]
        f = self.frame.replace(
            handlers=(stage, *self.frame.handlers),
            micro=(*outer, ours, *inner),
            # `accumulate` inside of a pipeline has cut its rows before this loop does.
            rows=(*outer, *inner, ours),
            counter=Counter(),
            in_loss=1,
        )
        with (
            torch.set_grad_enabled(bool(self.values)),
            maps_run_by(abstractly),
            running_eagerly(),  # it may be given placeholders
            inside(f),
        ):
            try:
                returned = self._returned(batch.call)
            except Ended:
                returned = None
        loss = None
        if stage.plan.makes_loss:
            loss = self._loss(stage, returned, a.microbatch)
        stage.check_made(tracked=bool(self.values))
        self._pass_on(FORWARD, a, stage.made, cut.consumers(a.stage))
        if not self.values:
            return
        given = [v for v, x in stage.made.items() if x.requires_grad]
        taken = [v for v, x in received.items() if x.requires_grad]
        outputs = [*(stage.made[v] for v in given), *stage.ends]
        seeds: list[Tensor | None] = []
        if loss is not None:
            outputs.insert(0, loss[0])
            seeds.append(loss[1])
        inputs = [received[v] for v in taken]
        vjp = StageVjp(outputs, inputs, [*self.values, *stage.starts], self.pool)
        ends = [torch.zeros_like(x) for x in stage.ends]
        self.kept[key] = _Forwarded(vjp, seeds, given, taken, ends)

    def _returned(self, call: GradientCall) -> Any:
        return call.fn(*call.args, **call.keywords)

    def _loss(
        self, stage: StageRun, returned: Any, microbatch: int
    ) -> tuple[Tensor, Tensor] | None:
        """Keeps what the loss returned; its total and cotangent, if there are any."""
        stage.check_loss(returned)
        total, weight, aux = self.results[microbatch] = self.read(returned)
        if not (isinstance(total, Tensor) and total.requires_grad):
            return None
        share = self.microbatches[microbatch].share if weight is None else 1.0
        self.results[microbatch] = total.detach(), weight, aux
        return total, self.seed(total).mul_(share)

    def _taken(self, way: str, a: Action) -> dict[Value, Tensor]:
        """Takes the activations or cotangents that came one way for an action."""
        key = way, a.stage, a.microbatch
        found = self.inbox.pop(key, {})
        for value, work in self.posted.pop(key, ()):
            _add(found, value, work.wait())
        self.clock.begins()
        return found

    def _pass_on(
        self,
        way: str,
        a: Action,
        made: Mapping[Value, Tensor],
        peers: Iterable[tuple[int, Sequence[Value]]],
    ) -> None:
        """Gives other stages what an action made for them, or keeps it to be sent."""
        for peer, values in peers:
            message = {value: made[value].detach() for value in values}
            if self.owners[peer] == self.owners[a.stage]:
                for value, x in message.items():
                    _add(self.inbox[way, peer, a.microbatch], value, x)
            else:
                self.outbox[way, a.stage, a.microbatch, peer] = message

    # Backward

    def _B(self, a: Action) -> None:
        kept = self.kept.pop((FORWARD, a.stage, a.microbatch))
        cut, own = self.microbatches[a.microbatch].cut, self.owners[a.stage]

        def give(grads: Sequence[Tensor | None]) -> None:
            self._hand_back(a, kept, grads)
            self._send_back(a)

        # Past the last forward, another rank has nothing else to do than to wait for
        # the gradients of its outputs; for those of the weights no rank waits. (Before
        # it, a weight's product is better done while its factors are in the cache.)
        waits = self.at > self.last and any(
            self.owners[p] != own for p, _ in cut.producers_of(a.stage)
        )
        cotangents = self._cotangents(a, kept)
        with self._sample(a):
            found = kept.vjp.backward(cotangents, give if waits else None)
        if not waits:
            self._hand_back(a, kept, found)

    def _I(self, a: Action) -> None:
        kept = self.kept[FORWARD, a.stage, a.microbatch]
        grads = kept.vjp.input_gradient(self._cotangents(a, kept))
        self._hand_back(a, kept, grads)

    def _W(self, a: Action) -> None:
        with self._sample(a):
            self.kept.pop((FORWARD, a.stage, a.microbatch)).vjp.weight_gradient()

    def _sample(self, a: Action) -> AbstractContextManager[None]:
        if self.samples is None:
            return nullcontext()
        return self.samples.of(a.stage, a.microbatch)

    def _cotangents(self, a: Action, kept: _Forwarded) -> list[Tensor | None]:
        """Those of the loss, of outputs that other stages use, and of thread ends."""
        found = self._taken(BACKWARD, a)
        return [*kept.seeds, *(found.get(v) for v in kept.given), *kept.ends]

    def _hand_back(
        self, a: Action, kept: _Forwarded, grads: Sequence[Tensor | None]
    ) -> None:
        """Passes the gradients of a stage's inputs to the stages that made them."""
        cut = self.microbatches[a.microbatch].cut
        found = {  # zeros where the stage made no use of the value
            v: cut.spec(v).zeros() if g is None else g
            for v, g in zip(kept.taken, grads, strict=True)
        }
        self._pass_on(BACKWARD, a, found, cut.producers_of(a.stage))

    def _send_back(self, a: Action) -> None:
        """Does the sends that come right after a backward before its end."""
        for action in self.actions[self.at + 1 :]:
            mine = (action.stage, action.microbatch) == (a.stage, a.microbatch)
            kind = action.of_kind
            if (kind.transfer, kind.carries) != (">", BACKWARD) or not mine:
                break
            with clocked(self.where.index, action):
                self._send(action)
            self.early.add(action)

    # Transfers

    def _send(self, a: Action) -> None:
        calls, peer = self.microbatches[a.microbatch].cut.program.calls, _peer(a)
        way = a.of_kind.carries
        phase = "forward" if way == FORWARD else "backward"
        message = self.outbox.pop((way, a.stage, a.microbatch, peer))
        for value, x in message.items():
            what = _named(value, calls, a)
            with label(calls[value.call].name, phase):
                self.sends.append(self.where.send(x, self.owners[peer], what))

    def _receive(self, a: Action) -> None:
        cut, peer = self.microbatches[a.microbatch].cut, _peer(a)
        way = a.of_kind.carries
        source, posted = self.owners[peer], self.posted[way, a.stage, a.microbatch]
        for value in (
            cut.messages[peer, a.stage]
            if way == FORWARD
            else cut.returned(a.stage, peer)
        ):
            spec, what = cut.spec(value), _named(value, cut.program.calls, a)
            look = spec.shape, spec.dtype, spec.device
            posted.append((value, self.where.receive(*look, source, what)))

    _SF = _SB = _send
    _RF = _RB = _receive


@dataclass
class _Forwarded:
    """The state that a forward keeps for its backward."""

    vjp: StageVjp
    seeds: list[Tensor | None]  # the loss's cotangent, where there is a loss
    given: list[Value]
    taken: list[Value]
    ends: list[Tensor]


def _check_undrawn(states: States) -> None:
    """Raises where the loss drew numbers outside units that its program has not."""
    if _torch.fake_active():
        return  # fake tensors draw nothing
    if are_drawn(states):
        raise RuntimeError(
            "the loss draws random numbers outside every unit, and drew none when it "
            f"was recorded: {CAPTURED}"
        )


def _named(value: Value, calls: Sequence[Any], a: Action) -> str:
    """The name of a message: an output of a unit call, or its gradient."""
    what = "" if a.of_kind.carries == FORWARD else "gradient of "
    name = calls[value.call].name
    return f"{what}{name} #{value.call}.{value.leaf}{_NAMED}{a.microbatch}"


_NAMED = ", microbatch "


def _add(sums: dict[Value, Tensor], value: Value, g: Tensor) -> None:
    sums[value] = sums[value] + g if value in sums else g


def _peer(a: Action) -> int:
    if a.peer is None:
        raise ValueError(f"{a} names no other stage")
    return a.peer


class ScheduleRounds:
    """The rounds of one rank's actions, of which a plan runs a few and notes the rest.

    Between its first forwards and its last backwards a rank comes to the same actions
    again and again, each time of later microbatches. What was in flight is then
    renamed, as if the rounds that were noted had run.

    Args:
        worker: runs them; ``rounds``: of the tracer: `begin` and `after` are called.
    """

    def __init__(self, worker: Worker, rounds: Any):
        self.worker, self.rounds, self.actions = worker, rounds, worker.actions
        of = {(id(m.cut), m.share) for m in worker.microbatches}
        observed = any(h.observes for h in worker.frame.handlers)
        alike = len(of) == 1 and not observed
        # Parameters that change are no longer those that the round before has found.
        alike = alike and not any(a.of_kind.updates for a in self.actions)
        self.stretches = stretches(tuple(self.actions)) if alike else {}
        self.start = self.stop = self.size = self.by = 0  # of the stretch that runs

    def begin(self, at: int) -> None:
        """Hears that action ``at`` begins."""
        if at in self.stretches:
            self.size, self.by, more = self.stretches[at]
            self.start, self.stop = at, at + self.size * (1 + more)
            self.rounds.anew()
        a = self.actions[at]
        self.rounds.begin((a.kind, a.stage, a.peer), a.microbatch)

    def after(self, at: int) -> Sequence[Action]:
        """Hears that action ``at`` is over; returns the next ones that are noted."""
        here = at + 1
        if not self.start < here < self.stop or (here - self.start) % self.size:
            return ()
        ran = self.actions[here - self.size : here]
        worker, first = self.worker, ran[0].microbatch
        in_flight = {key[2] for table in worker.tables for key in table}
        # The values in flight, by microbatches after the first of the round.
        tables = [
            sorted((str(k[0]), k[1], k[2] - first, *k[3:]) for k in table)
            for table in worker.tables
        ]
        noted = self.rounds.after(
            Round(
                handed=[self, *(runtime.sums for _, runtime in worker.frame.runtimes)],
                state=tables,
                left=(self.stop - here) // self.size,
                microbatch=first,
                by=self.by,
                flying=in_flight | {a.microbatch for a in ran},
                stays=[x for x in tree.leaves(worker.results) if isinstance(x, Tensor)],
            )
        )
        if noted:
            self._rename(noted, {a.microbatch for a in ran if a.of_kind.is_forward})
        return self.actions[here : here + noted * self.size]

    def carried(self) -> Carried:
        """The gradients so far."""
        grads = [x.grad for x in self.worker.values if x.grad is not None]
        return Carried(grads, {})

    def _rename(self, noted: int, forwards: set[int]) -> None:
        """Takes what is in flight for what the last round that is noted would leave."""
        worker, last = self.worker, noted * self.by
        made = {m: worker.results[m] for m in forwards if m in worker.results}
        for by in range(self.by, last + 1, self.by):
            stand_in = partial(self._stand_in, by)
            worker.results |= {m + by: tree.map(stand_in, x) for m, x in made.items()}
        for table in worker.tables:
            moved = {(*k[:2], k[2] + last, *k[3:]): x for k, x in table.items()}
            table.clear()
            table.update(moved)

    def _stand_in(self, by: int, x: Any) -> Any:
        return self.rounds.stand_in(x, by) if isinstance(x, Tensor) else x


@lru_cache(maxsize=256)
def stretches(row: tuple[Action, ...]) -> dict[int, tuple[int, int, int]]:
    """Return where a row comes to the same actions again, of later microbatches.

    By the place where such a stretch begins: how many actions a round has, by how much
    its microbatches come later than those of the round before, and how many more rounds
    there may be after the first. The last actions of a kind, and the last microbatch's,
    are in none of those.

    >>> from fsfunc.pipelining.actions import parse
    >>> stretches(parse(["F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"])[0])
    {1: (2, 1, 3)}
    """
    what = [(a.kind, a.stage, a.peer) for a in row]
    number = [a.microbatch for a in row]
    last = {kind: i for i, kind in enumerate(what)}
    most = max(number, default=0)
    special = [i for i in range(len(row)) if last[what[i]] == i or number[i] == most]
    found, i = dict[int, tuple[int, int, int]](), 0
    while i < len(row):
        end = next((j for j in special if j >= i), len(row))
        for size in range(1, (end - i) // 3 + 1):
            by, j = number[i + size] - number[i], i
            while j + size < end and by > 0:
                same = what[j + size] == what[j] and number[j + size] - number[j] == by
                if not same:
                    break
                j += 1
            if j - i >= 2 * size:
                found[i] = size, by, (j - i) // size
                i = j + size - 1
                break
        i += 1
    return found
