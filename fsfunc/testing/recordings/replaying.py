"""``replay``: runs one rank's recorded call again, without the other ranks.

The arguments and generators are those of the recording. A ``ReplayLink`` stands in the
place of the rank's link: it hands out the recorded messages in their order, and checks
that the program asks for these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
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
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import is_silent
from fsfunc.comm.mesh import Here, Mesh, set_here
from fsfunc.comm.traffic import ledger
from fsfunc.core.frames import frame, inside, title
from fsfunc.runtime.generators import (
    generators_restored,
    other_generators_restored,
    other_states,
)
from fsfunc.runtime.memory_spaces import Store
from fsfunc.testing.recordings.files import CallFile, read_call, recorded_calls
from fsfunc.testing.recordings.json_values import from_json
from fsfunc.testing.recordings.keeping import axes_of_meshes, error_text, leaf_checksums
from fsfunc.testing.recordings.tapes import SENDS, RecordedMessage
from fsfunc.testing.recordings.tree_reader import TreeReader
from fsfunc.transforms.offloading import stores_of
from fsfunc.tree.types import PyTree


class PartsFromRecording(RuntimeError):
    """Raised where a replayed program asks for other messages than the recorded one."""


def replay(
    folder: str | os.PathLike[str],
    step: Callable[..., Any],
    *like: Any,
    rank: int,
    call: int | None = None,
) -> Any:
    """Runs a call of one rank again, alone, and returns what it returned there.

    It computes the same bits, or raises the same error, in the calling thread: under a
    debugger, within `finite` or with your own prints. What the rank received comes from
    the recording, in the order in which it is asked for; what it sends goes nowhere.
    State, batch and generators are as they were when the call began, so nothing is
    initialised, and other ranks are not needed.

    Args:
        folder: where :func:`recorded` wrote.
        step: the function that was called: the step made anew for a mesh of the same
            axes, as by ``ff.shard(train_step, ff.make_mesh({"data": 4}, "simulated"),
            "data")``. Transforms that send nothing, such as `finite`, may be added.
        like: arguments of the step. They are needed only if the recorded ones have
            objects in them, which no file has without pickles, or nodes of classes that
            are not found by their names. Structure and objects are taken from them, no
            numbers or tensors; numpy's arrays count as objects.
        rank: the rank whose call it is.
        call: the number of the call; None: the last.

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

    Cost: that of the step on one rank, and memory for what the rank received.

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
    file = _find_recording(Path(folder), rank, call)
    try:
        # Not under modes such as ``exact``: the recording itself is read as it is.
        with _torch.beneath_all_modes():
            header, tensors = read_call(file.path)
            recording = RecordedCall(header, tensors, file)
            recording.check_meshes(step)
            stores = {
                store.kind or type(store).__name__: store
                for store in stores_of(step)
                if store is not None
            }
            args, keywords = recording.arguments(like, stores)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.path} is no recording: {error!r}") from error
    with ExitStack() as stack:
        stack.enter_context(recording.settings())
        stack.enter_context(ledger())  # with none, all messages are silent
        stack.enter_context(inside(frame().replace(run_outermost=None)))
        if recording.axes is not None:
            names = [(name, tuple(axes)) for name, axes in recording.names]
            axes = tuple(map(tuple, recording.axes))
            mesh = _mesh_of_replays(axes, tuple(names))
            stack.enter_context(set_here(Here(mesh, rank, recording.link)))
        try:
            out = step(*args, **keywords)
        except Exception as error:
            recording.explain(error, step)
            raise
        finally:
            recording.link.has_ended = True
    recording.compare(out, step)
    return out


@cache
def _mesh_of_replays(
    axes: tuple[tuple[str, int], ...], names: tuple[tuple[str, tuple[str, ...]], ...]
) -> Mesh:
    """Returns one mesh for all replays over the same axes.

    A step that is compiled whole has a graph for each mesh, and would compile anew.
    """
    return Mesh(dict(axes), "simulated", names=dict(names))


def _find_recording(folder: Path, rank: int, call: int | None) -> CallFile:
    """Returns the file of a call.

    Raises:
        CheckpointError: there is none; the message lists those that there are.
    """
    files = recorded_calls(folder)
    for file in reversed(files):
        if file.rank == rank and call in (None, file.call):
            return file
    calls: dict[int, list[int]] = {}
    for file in files:
        calls.setdefault(file.rank, []).append(file.call)
    available = "; ".join(
        f"calls {c} of rank {r}" for r, c in sorted(calls.items())[:8]
    )
    wanted_call = "call" if call is None else f"call {call}"
    raise CheckpointError(
        f"{folder} has no complete recording of a {wanted_call} of rank {rank}: it has "
        f"{available or 'none at all'}"
    )


class RecordedCall:
    """A recorded call, read from its file.

    Attributes:
        axes: the axes of the mesh; None: one device.
        outcome: how the call ended: checksums of what it returned, or its error.
        messages: what the rank sent and received, in order.
        link: the link that hands out the messages.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]
    file: CallFile
    axes: list[list[Any]] | None
    outcome: dict[str, Any]
    messages: list[RecordedMessage]
    link: ReplayLink

    def __init__(
        self, header: dict[str, Any], tensors: dict[str, Tensor], file: CallFile
    ):
        self.header, self.tensors, self.file = header, tensors, file
        self.axes, self.outcome = header["axes"], header["outcome"]
        self.names: list[tuple[str, list[str]]] = header.get("names", [])
        self.messages = [RecordedMessage.read(row) for row in header["messages"]]
        for i, message in enumerate(self.messages):
            message.received = tensors.get(f"message {i}")
        self.link = ReplayLink(self)

    @property
    def name(self) -> str:
        return (
            f"call {self.file.call} of rank {self.file.rank} in {self.file.path.parent}"
        )

    def check_meshes(self, step: Callable[..., Any]) -> None:
        """Raises ValueError if the step is made for other axes than the recorded one.

        Raises:
            ValueError: names both.
        """
        step_axes = [dict(axes) for axes in axes_of_meshes(step)]
        recorded_axes = [dict(axes) for axes in self.header["meshes"]]
        if step_axes and recorded_axes and step_axes != recorded_axes:
            raise ValueError(
                f"{self.name} is of a step over the axes {recorded_axes}, and replay "
                f"is given one over {step_axes}: make it on "
                f'ff.make_mesh({recorded_axes[0]}, "simulated")'
            )

    def arguments(
        self, like: tuple[PyTree, ...], stores: Mapping[str, Store]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Rebuilds the positional and the keyword arguments of the call."""
        args, keywords = self.header["given"]
        reader = TreeReader(self.header, self.tensors, stores)
        positional = reader.fill(args, like) if like else reader.tree(args)
        return positional, reader.tree(keywords)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Restores, inside, the states of the generators and the number of threads.

        Kernels on the CPU add in another order with another number of threads.
        """
        threads = torch.get_num_threads()
        with generators_restored() as states, other_generators_restored():
            for generator, _ in states:
                state = self.tensors.get(f"generator {generator.device.type}")
                if state is not None:
                    generator.set_state(state)
            for generator, _ in other_states():
                if (
                    recorded_state := self.header["generators"].get(generator.__name__)
                ) is not None:
                    generator.set_state(from_json(recorded_state))
            torch.set_num_threads(self.header["threads"])
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def explain(self, error: Exception, step: Callable[..., Any]) -> None:
        """Adds a note to an error that the recorded call did not raise."""
        raised = self.outcome.get("raised", "nothing")
        if raised != error_text(error):
            error.add_note(
                f"{self.name} raised {raised[:1000]}; called was "
                f"{self.header['step']}, and replay is given {title(step)}"
            )

    def compare(self, out: PyTree, step: Callable[..., Any]) -> None:
        """Compares the result with the recorded one; warns of the first leaf."""
        if (raised := self.outcome.get("raised")) is not None:
            raise PartsFromRecording(
                f"{self.name} was stopped from without, by another rank, a comparison "
                "of ranks or a signal, and alone it returns; unless this is another "
                f"program: {self.header['step']} was recorded, and this is "
                f"{title(step)}. It ended by {raised[:1000]}"
            )
        self.link.end()
        recorded, replayed = (
            {path: description for path, *description in rows}
            for rows in (self.outcome["returned"], leaf_checksums(out))
        )
        for path in recorded | replayed:
            recorded_leaf = recorded.get(path, ["nothing"])
            replayed_leaf = replayed.get(path, ["nothing"])
            if recorded_leaf != replayed_leaf:
                kinds = f": {recorded_leaf[0]}, and alone {replayed_leaf[0]}"
                text = f"{self.name} returned other bits in {path!r}"
                warn(
                    text + kinds * (recorded_leaf[0] != replayed_leaf[0]),
                    RuntimeWarning,
                )
                return


class ReplayLink(Link):
    """The link of a rank alone, which hands out what it received in a recorded call.

    Silent messages, by which ranks only compare descriptions, were not recorded. They
    are answered as if all ranks had sent the same.
    """

    recording: RecordedCall
    position: int
    has_warned: bool
    has_ended: bool
    echo: EchoLink

    def __init__(self, recording: RecordedCall):
        self.recording, self.rank = recording, recording.file.rank
        self.notes = {}  # what ranks compare: this one compares with itself
        self.position, self.has_warned = 0, False
        self.has_ended = False  # the caller's own backward may ask after the call
        self.echo = EchoLink(self.rank)

    def start(
        self,
        op: str,
        x: Tensor,
        where: RankGroup,
        *,
        out: Tensor | None = None,
        name: str = "",
        any_order: bool = False,
        read_only: bool = False,
        **options: Any,
    ) -> Handle:
        if is_silent() and not self.has_ended:
            return self.echo.start(op, x.detach(), where, out=out, name=name, **options)
        return _ReplayedHandle(
            self, self._next_message(op, x.detach(), where, name, options), x, out
        )

    def send(self, x: Tensor, where: RankGroup, to: int, name: str = "") -> Handle:
        self._next_message(SENDS, x, where, name, {"to": to})
        return Done(torch.empty(0, device="cpu"))

    def receive(
        self, like: Tensor, where: RankGroup, source: int, name: str = ""
    ) -> Handle:
        message = self._next_message("receive", like, where, name, {"source": source})
        return _ReplayedHandle(self, message, like, like)

    def after_others(self) -> None:
        """Does nothing: there are no others."""

    def end(self) -> None:
        """Raises PartsFromRecording if messages of the recording are left over."""
        if self.position < len(self.recording.messages):
            raise PartsFromRecording(
                f"{self._describe_position} has still "
                f"{self.recording.messages[self.position]}, and this program has ended"
            )

    @property
    def _describe_position(self) -> str:
        count = len(self.recording.messages)
        return f"message {self.position} of {count} in {self.recording.name}"

    def _next_message(
        self,
        op: str,
        x: Tensor,
        group: RankGroup,
        subject: str,
        options: Mapping[str, Any],
    ) -> RecordedMessage:
        """Returns the next recorded message, if it is the one that is asked for.

        Raises:
            PartsFromRecording: it is another one, or there is none.
        """
        asked = RecordedMessage.describe(op, x, group, subject, options)
        if self.has_ended:
            raise PartsFromRecording(
                f"{asked} is asked for after the end of {self.recording.name}, and "
                "nothing of that was kept: transform all of the step, and record it so"
            )
        if self.position >= len(self.recording.messages):
            outcome = self.recording.outcome
            ended = (
                f"ended by {outcome['raised'][:1000]}"
                if "raised" in outcome
                else "returned"
            )
            raise PartsFromRecording(
                f"this program asks for {asked}, and {self.recording.name} {ended} "
                f"after {self.position} messages"
            )
        message = self.recording.messages[self.position]
        if message.asked != asked.asked:
            raise PartsFromRecording(
                f"{self._describe_position} was {message}, and this program asks for "
                f"{asked}"
            )
        if message.sent != asked.sent and not self.has_warned:
            self.has_warned = True  # once: all messages that follow may differ too
            warn(
                f"{self._describe_position}, {message}: other bits are sent now",
                RuntimeWarning,
            )
        self.position += 1
        return message


class _ReplayedHandle(Handle):
    """A message of the recording, in the place of one under way."""

    def __init__(
        self,
        link: ReplayLink,
        message: RecordedMessage,
        like: Tensor,
        out: Tensor | None,
    ):
        self.link, self.message, self.device, self.out = link, message, like.device, out

    def wait(self) -> Tensor:
        if (received := self.message.received) is None:
            ending = self.link.recording.outcome.get("raised", "nobody waited for it")
            raise PartsFromRecording(
                f"{self.message} never came in {self.link.recording.name}: "
                f"{ending[:1000]}"
            )
        if self.out is not None:
            return self.out.copy_(received)
        return received.to(self.device, copy=True)

    def done(self) -> bool:
        return True
