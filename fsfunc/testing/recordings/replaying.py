"""``replay``: one rank's call, run again without the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.comm.attribution import warn
from fsfunc.comm.backends.abstract import EchoLink
from fsfunc.comm.backends.link import Done, Handle, Link
from fsfunc.comm.ledgers import is_silent
from fsfunc.comm.mesh import Here, Mesh, set_here
from fsfunc.comm.traffic import ledger
from fsfunc.core.frames import frame, inside, title
from fsfunc.runtime.generators import (
    generators_restored,
    other_generators_restored,
    other_states,
)
from fsfunc.testing.recordings.files import CallFile, read_call, recorded_calls
from fsfunc.testing.recordings.json_values import from_json
from fsfunc.testing.recordings.keeping import meshes_of, sums_of, text_of
from fsfunc.testing.recordings.tapes import SENDS, KeptMessage
from fsfunc.testing.recordings.tree_reader import TreeReader
from fsfunc.transforms.offloading import stores_of


class PartsFromRecording(RuntimeError):
    """A program that is replayed asks for other messages than the recorded one."""


def replay(
    folder: str | os.PathLike,
    step: Callable[..., Any],
    *like: Any,
    rank: int,
    call: int | None = None,
) -> Any:
    """Runs a call of one rank again, alone, and returns what it returned there.

    It computes the same bits, or raises the same error, in the thread that calls: under
    a debugger, within `finite` or with prints of yours. What the rank received comes
    from the recording, in the order in which it is asked for; what it sends goes
    nowhere. State, batch and generators are those of the call's begin, so nothing is
    initialised, and other ranks are not needed.

    Args:
        folder: where :func:`recorded` wrote.
        step: the function that was called: the step made anew for a mesh of the same
            axes, as by ``ff.shard(train_step, ff.make_mesh({"data": 4}, "simulated"),
            "data")``. Transforms that send nothing, such as `finite`, may be added.
        like: arguments of the step, needed only where the recorded ones hold what no
            file has without pickles: objects, and nodes of classes that are not found
            by their names. Their structure and objects are taken, no numbers or
            tensors; arrays of numpy are objects here.
        rank: whose call.
        call: its number; None: the last.

    Raises:
        PartsFromRecording: the step asks for another message than was recorded; says
            which one and where. Or it returns, where the recorded one was stopped from
            outside: by another rank's error, or a comparison of ranks.
        ValueError: the step is made for a mesh of other axes.
        CheckpointError: there is no complete recording of that call, or it is damaged.
        Exception: what the step raises.

    Warns:
        RuntimeWarning: the rank sends, or the step returns, other bits than it did, or
            other numbers, shapes, dtypes or paths: it is another program, or runs other
            kernels (of another machine, version or device; or a step that is compiled
            whole runs for the first time, when it has no graph yet). The first such
            message, or path, is named.

    Cost: that of the step on one rank, and memory for what it received.

    >>> import tempfile, torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> step = ff.shard(lambda w, x: ff.psum(w + x, "data"), mesh, "data")
    >>> def main():
    ...     x = torch.ones(1) * ff.axis_index("data")
    ...     return step(ff.place(step, torch.ones(1), x), x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ff.testing.recorded(folder):
    ...         sums = ff.spmd(main, mesh)()
    ...     print(sums, replay(folder, step, rank=1))
    [tensor([3.]), tensor([3.])] tensor([3.])
    """
    chosen = _chosen(Path(folder), rank, call)
    try:
        with _torch.beneath_all_modes():  # which compute with it from the call on
            said, tensors = read_call(chosen.path)
            kept = RecordedCall(said, tensors, chosen)
            kept.check_meshes(step)
            stores = {
                store.kind or type(store).__name__: store
                for store in stores_of(step)
                if store is not None
            }
            args, keywords = kept.arguments(like, stores)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{chosen.path} is no recording: {error!r}") from error
    with ExitStack() as stack:
        stack.enter_context(kept.settings())
        stack.enter_context(ledger())  # so that what is silent is known
        stack.enter_context(inside(frame().replace(around=None)))
        if kept.axes is not None:
            mesh = _mesh(tuple(map(tuple, kept.axes)))
            stack.enter_context(set_here(Here(mesh, rank, kept.link)))
        try:
            out = step(*args, **keywords)
        except Exception as error:
            kept.explain(error, step)
            raise
        finally:
            kept.link.over = True
    kept.compare(out, step)
    return out


@cache
def _mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    """One for all replays, as steps that are compiled whole have graphs for a mesh."""
    return Mesh(dict(axes), "simulated")


def _chosen(folder: Path, rank: int, call: int | None) -> CallFile:
    """The file of a call.

    Raises:
        CheckpointError: there is none; says what there is.
    """
    every = recorded_calls(folder)
    for one in reversed(every):
        if one.rank == rank and call in (None, one.call):
            return one
    calls: dict[int, list[int]] = {}
    for one in every:
        calls.setdefault(one.rank, []).append(one.call)
    there = "; ".join(f"calls {c} of rank {r}" for r, c in sorted(calls.items())[:8])
    which = "call" if call is None else f"call {call}"
    raise CheckpointError(
        f"{folder} has no complete recording of a {which} of rank {rank}: it has "
        f"{there or 'none at all'}"
    )


class RecordedCall:
    """A recorded call, as it was read."""

    def __init__(self, said: dict[str, Any], tensors: dict[str, Tensor], of: CallFile):
        self.said, self.tensors, self.of = said, tensors, of
        self.axes, self.outcome = said["axes"], said["outcome"]
        self.messages = [KeptMessage.read(row) for row in said["messages"]]
        for i, message in enumerate(self.messages):
            message.received = tensors.get(f"message {i}")
        self.link = ReplayLink(self)

    @property
    def name(self) -> str:
        return f"call {self.of.call} of rank {self.of.rank} in {self.of.path.parent}"

    def check_meshes(self, step: Any) -> None:
        """Raises if the step is made for other axes than the recorded one.

        Raises:
            ValueError: names both.
        """
        mine = [dict(axes) for axes in meshes_of(step)]
        theirs = [dict(axes) for axes in self.said["meshes"]]
        if mine and theirs and mine != theirs:
            raise ValueError(
                f"{self.name} is of a step over the axes {theirs}, and replay is given "
                f'one over {mine}: make it on ff.make_mesh({theirs[0]}, "simulated")'
            )

    def arguments(self, like: tuple[Any, ...], stores: Any) -> tuple[Any, Any]:
        """The positional and the keyword arguments of the call."""
        args, keywords = self.said["given"]
        reader = TreeReader(self.said, self.tensors, stores)
        positional = reader.filled(args, like) if like else reader.tree(args)
        return positional, reader.tree(keywords)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Inside, generators stand as they did, and kernels take as many threads."""
        threads = torch.get_num_threads()
        with generators_restored() as states, other_generators_restored():
            for g, _ in states:
                state = self.tensors.get(f"generator {g.device.type}")
                if state is not None:
                    g.set_state(state)
            for g, _ in other_states():
                if (told := self.said["generators"].get(g.__name__)) is not None:
                    g.set_state(from_json(told))
            torch.set_num_threads(self.said["threads"])
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def explain(self, error: Exception, step: Any) -> None:
        """Notes an error that the recorded call did not raise."""
        raised = self.outcome.get("raised", "nothing")
        if raised != text_of(error):
            error.add_note(
                f"{self.name} raised {raised[:1000]}; called was "
                f"{self.said['step']}, and replay is given {title(step)}"
            )

    def compare(self, out: Any, step: Any) -> None:
        """Compares the end of the call with the recorded one."""
        if (raised := self.outcome.get("raised")) is not None:
            raise PartsFromRecording(
                f"{self.name} was stopped from without, by another rank, a comparison "
                "of ranks or a signal, and alone it returns; unless this is another "
                f"program: {self.said['step']} was recorded, and this is {title(step)}."
                f" It ended by {raised[:1000]}"
            )
        self.link.end()
        before, now = (
            {path: said for path, *said in rows}
            for rows in (self.outcome["returned"], sums_of(out))
        )
        for path in before | now:
            theirs, mine = before.get(path, ["nothing"]), now.get(path, ["nothing"])
            if theirs != mine:
                kinds = f": {theirs[0]}, and alone {mine[0]}"
                text = f"{self.name} returned other bits in {path!r}"
                warn(text + kinds * (theirs[0] != mine[0]), RuntimeWarning)
                return


class ReplayLink(Link):
    """The link of a rank alone: it is handed what it received in a recorded call.

    What ranks only compare, which no ledger has, is answered as if all had the same.
    """

    def __init__(self, kept: RecordedCall):
        self.kept, self.rank = kept, kept.of.rank
        self.notes = {}  # with whom it compares: itself
        self.next, self.differs = 0, False
        self.over = False  # a backward of the caller's may come later
        self.echo = EchoLink(self.rank)

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        name: str = "",
        any_order: bool = False,
        read_only: bool = False,
        **how: Any,
    ) -> Handle:
        if is_silent() and not self.over:
            return self.echo.start(op, x.detach(), where, out=out, name=name, **how)
        return _Replayed(self, self._next(op, x.detach(), where, name, how), x, out)

    def send(self, x: Tensor, where: Any, to: int, name: str = "") -> Handle:
        self._next(SENDS, x, where, name, {"to": to})
        return Done(torch.empty(0, device="cpu"))

    def receive(self, like: Tensor, where: Any, source: int, name: str = "") -> Handle:
        message = self._next("receive", like, where, name, {"source": source})
        return _Replayed(self, message, like, like)

    def after_others(self) -> None:
        """There are none."""

    def end(self) -> None:
        """Raises if the program has left out messages at the end."""
        if self.next < len(self.kept.messages):
            raise PartsFromRecording(
                f"{self._place} has still {self.kept.messages[self.next]}, and this "
                "program has ended"
            )

    @property
    def _place(self) -> str:
        count = len(self.kept.messages)
        return f"message {self.next} of {count} in {self.kept.name}"

    def _next(self, op: str, x: Tensor, where: Any, what: str, how: Any) -> KeptMessage:
        """The recorded message that the program asks for.

        Raises:
            PartsFromRecording: it is another one, or there is none.
        """
        asked = KeptMessage.of(op, x, where, what, how)
        if self.over:
            raise PartsFromRecording(
                f"{asked} is asked for after the end of {self.kept.name}, and nothing "
                "of that was kept: transform all of the step, and record it so"
            )
        if self.next >= len(self.kept.messages):
            outcome = self.kept.outcome
            ended = (
                f"ended by {outcome['raised'][:1000]}"
                if "raised" in outcome
                else "returned"
            )
            raise PartsFromRecording(
                f"this program asks for {asked}, and {self.kept.name} {ended} after "
                f"{self.next} messages"
            )
        message = self.kept.messages[self.next]
        if message.asked != asked.asked:
            raise PartsFromRecording(
                f"{self._place} was {message}, and this program asks for {asked}"
            )
        if message.sent != asked.sent and not self.differs:
            self.differs = True  # said once: all that follows may differ
            warn(f"{self._place}, {message}: other bits are sent now", RuntimeWarning)
        self.next += 1
        return message


class _Replayed(Handle):
    """A message that was received when it was recorded."""

    def __init__(
        self, link: ReplayLink, message: KeptMessage, like: Tensor, out: Tensor | None
    ):
        self.link, self.message, self.device, self.out = link, message, like.device, out

    def wait(self) -> Tensor:
        if (kept := self.message.received) is None:
            said = self.link.kept.outcome.get("raised", "nobody waited for it")
            raise PartsFromRecording(
                f"{self.message} never came in {self.link.kept.name}: {said[:1000]}"
            )
        if self.out is not None:
            return self.out.copy_(kept)
        return kept.to(self.device, copy=True)

    def done(self) -> bool:
        return True
