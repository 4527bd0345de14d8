"""The interpreter: one rank's actions of a schedule, one after another.

A schedule's action ``F``, ``B``, ``I``, ``W`` is the method of :class:`Worker` of that
name. A forward runs the whole loss of one microbatch, within a `stages.StageRun`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import run_by
from fsfunc.comm.groups import RankGroup
from fsfunc.core.frames import Counter, Frame, inside
from fsfunc.core.outcomes import GradientCall
from fsfunc.core.tracers import Tracer
from fsfunc.pipelining.actions import BACKWARD, FORWARD, Action, stages_of
from fsfunc.pipelining.microbatches import Microbatch
from fsfunc.pipelining.sample_gradients import SampleGradients
from fsfunc.pipelining.schedule_rounds import ScheduleRounds
from fsfunc.pipelining.stages import CAPTURED, Ended, StageRun, StageVjp, abstractly
from fsfunc.pipelining.timing import clocked
from fsfunc.runtime.generators import States, are_drawn, generators_kept, mix
from fsfunc.runtime.memory import BufferPool
from fsfunc.runtime.scopes import plainly
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
        with generators_kept() as states:
            for self.at, action in enumerate(actions):
                if action in self.early:
                    continue
                kind = action.of_kind
                if draws and kind.is_forward:
                    seed = mix(self.frame.seed or 0, action.stage, action.microbatch)
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
            run_by(abstractly),
            plainly(),  # it may be given placeholders
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
