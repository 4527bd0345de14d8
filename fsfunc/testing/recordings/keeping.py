"""``recorded``: each rank writes the calls of a step inside to files, to be replayed.

Around each outermost call, ``CallRecorder`` copies the arguments and the state of the
generators (``_CallStart``), puts a ``RecordingLink`` in the place of the rank's link,
and writes a file when the call has ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.backends.baton import Aborted
from fsfunc.comm.descriptions import checksums, has_values
from fsfunc.comm.mesh import Here, Mesh, maybe_here, set_here
from fsfunc.comm.traffic import ledger
from fsfunc.core.frames import frame, inside, recording, title
from fsfunc.runtime.generators import generator_states, other_states
from fsfunc.sharded.leaf import is_sharded
from fsfunc.testing.recordings.files import path_of, recorded_calls, write_call
from fsfunc.testing.recordings.json_values import UNSTORABLE, as_json
from fsfunc.testing.recordings.tapes import MessageTape, RecordingLink
from fsfunc.testing.recordings.tree_writer import TreeWriter
from fsfunc.tree.types import PyTree


@contextmanager
def recorded(
    folder: str | os.PathLike[str], *, calls: int = 2, most: int = 1 << 32
) -> Iterator[None]:
    """Records the last calls of a step inside: what each rank began with and received.

    A rank that runs a call again by :func:`replay`, alone, computes the same bits and
    raises the same error. So a NaN that one of many ranks makes is found in one
    process, by a debugger or by `finite`.

    A recording has the arguments of a call, the state of the default generators of
    torch, Python and numpy, and every message that the rank receives, copied when it is
    handed over. If the call raises, it has what came before. Descriptions that ranks
    only compare are not recorded. Errors that leave the block get a note that names the
    folder, and so does the watchdog's report on a rank that waits.

    A call is that of the outermost transformed function, or ``value_and_grad``. What a
    step does around it, such as a backward of your own, is not recorded: transform the
    step as a whole then, by ``ff.transformed(step, ff.Interpretation())`` if need be.

    Not recorded are what a function closes over, generators of your own, the place of a
    data loader, settings around the call, such as autocast or ``no_grad``, and that
    arguments share memory (a call that writes into one of them changes the other). Nor
    are calls within ``torch.func``, or on abstract and vmap meshes. Of blocks within
    each other the innermost records.

    Args:
        folder: where to write. Each rank writes a file for each call, in safetensors,
            with checksums, which appears whole or not at all. Recordings that are there
            already count among the last.
        calls: how many calls of each rank are kept in the folder.
        most: how many bytes of each rank are kept. The last call is kept if it fits
            alone; one that does not is not recorded, and warns.

    Raises:
        TypeError, ValueError: ``calls`` or ``most`` is no number of at least 1.

    Warns:
        RuntimeWarning: a call cannot be recorded: too many bytes, or a full disk.

    Cost: memory on the host, and a file, of the bytes of the arguments and of what the
    rank receives (of a gather its own part too); what it sends and returns is read once
    for checksums: some 5 ms a megabyte. No message is sent for it.

    >>> import tempfile, torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> layer = ff.unit(lambda w, x: (w * x).sqrt())
    >>> grad = ff.value_and_grad(lambda w, x: layer(w, x).mean())
    >>> step = ff.shard(grad, mesh, "data")
    >>> def main():
    ...     x = torch.tensor([[4.0], [-4.0]])[ff.axis_index("data")]
    ...     return step(ff.place(step, torch.ones(1), x), x)[0].item()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with recorded(folder):
    ...         losses = ff.spmd(main, mesh)()  # NaN, on each rank
    ...     ff.testing.replay(
    ...         folder, ff.testing.finite(step), rank=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    fsfunc.testing.nan_checks.NotFinite: unit '<lambda>' returns nan at (0,) of ...
    """
    for name, value in (("calls", calls), ("most", most)):
        if type(value) is not int:
            raise TypeError(f"recorded: {name}={value!r} is no number")
        if value < 1:
            raise ValueError(f"recorded: {name}={value} would keep nothing")
    recorder = CallRecorder(Path(folder).absolute(), calls, most)
    try:
        with inside(frame().replace(run_outermost=recorder)):
            yield
    except Exception as error:
        recorder.note(error)
        raise


class CallRecorder:
    """Calls outermost functions, and records their calls; see `recorded`."""

    folder: Path
    calls: int
    max_bytes: int

    def __init__(self, folder: Path, calls: int, max_bytes: int):
        self.folder, self.calls, self.max_bytes = folder, calls, max_bytes
        self.next_call: dict[int, int] = {}  # the number of the next call, by rank
        self.last_recorded: dict[int, int] = {}  # the last call written, by rank

    def __call__(
        self, run: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Records the call, unless there are no real values."""
        with inside(frame().replace(run_outermost=None)):
            here = maybe_here()
            if recording() or not _has_values(here):
                return run(*args, **keywords)
            return self._record_call(run, args, keywords, here)

    def _record_call(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        here: Here | None,
    ) -> Any:
        rank, start = 0 if here is None else here.rank, None
        number = self._new_number(rank)
        with _warning_of_errors(rank):
            start = _CallStart(run, args, keywords, here, self.max_bytes)
            if start.nbytes > self.max_bytes:
                start = _warn_too_large(rank, start.nbytes, self.max_bytes)
        if start is None:
            return run(*args, **keywords)
        tape = MessageTape(self.max_bytes - start.nbytes)
        finish = partial(self._write, start, tape, rank, number)
        try:
            with ExitStack() as stack:
                stack.enter_context(ledger())  # with none, all messages are silent
                if here is not None:
                    link = RecordingLink(here.link, tape)
                    stack.enter_context(set_here(replace(here, link=link)))
                    stack.enter_context(self._name_in_watchdog(here))
                out = run(*args, **keywords)
        except BaseException as error:
            raised = error_text(error)
            if isinstance(error, Aborted):
                raised = "the error of another simulated rank"
            # The user's error must come out: also if warnings are errors, or if the
            # error's notes are no list.
            with suppress(RuntimeWarning, TypeError):
                if finish(lambda: {"raised": raised}):
                    error.add_note(_NOTE.format(number, rank, str(self.folder)))
            raise
        finish(lambda: {"returned": leaf_checksums(out)})
        return out

    def note(self, error: Exception) -> None:
        """Adds a note that names the folder to an error from between two calls."""
        folder, rank = str(self.folder), min(self.last_recorded, default=None)
        notes = getattr(error, "__notes__", ())
        if rank is not None and not any(folder in str(note) for note in notes):
            error.add_note(_LAST_NOTE.format(self.last_recorded[rank], folder, rank))

    def _new_number(self, rank: int) -> int:
        """Returns the number of a new call, above all that are in the folder."""
        recordings = recorded_calls(self.folder, rank)
        number = max(
            self.next_call.get(rank, 0), recordings[-1].call + 1 if recordings else 0
        )
        self.next_call[rank] = number + 1
        return number

    @contextmanager
    def _name_in_watchdog(self, here: Here) -> Iterator[None]:
        """Makes the watchdog name the folder in its reports inside."""
        flight = getattr(here.link, "flight", None)
        if flight is not None:
            flight.recording_note = (
                f"; its call is recorded in {self.folder}, when it ends"
            )
        try:
            yield
        finally:
            if flight is not None:
                flight.recording_note = ""

    def _write(
        self,
        start: _CallStart,
        tape: MessageTape,
        rank: int,
        number: int,
        outcome: Callable[[], dict[str, Any]],
    ) -> bool:
        """Writes the file of a call; returns whether there is one.

        Args:
            outcome: makes the header's description of how the call ended.
        """
        messages = tape.finish()
        if tape.overflows:
            _warn_too_large(rank, start.nbytes + tape.nbytes, self.max_bytes)
            return False
        received = enumerate(message.received for message in messages)
        tensors = {f"message {i}": x for i, x in received if x is not None}
        with _warning_of_errors(rank):
            identity = {"rank": rank, "call": number, "outcome": outcome()}
            message_rows = {"messages": [message.as_json() for message in messages]}
            path = path_of(self.folder, rank, number)
            write_call(
                path, start.header | identity | message_rows, start.tensors | tensors
            )
            self.last_recorded[rank] = number
            self._remove_old(rank)
            return True
        return False

    def _remove_old(self, rank: int) -> None:
        """Removes a rank's oldest recordings, until the limits hold or one is left."""
        recordings, nbytes = recorded_calls(self.folder, rank), 0
        for count, file in enumerate(reversed(recordings)):
            with suppress(OSError):
                nbytes += file.path.stat().st_size
                if count and (count >= self.calls or nbytes > self.max_bytes):
                    file.path.unlink()


class _CallStart:
    """What a call begins with: ``header`` in JSON, and copies of its tensors."""

    def __init__(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        here: Here | None,
        max_bytes: int,
    ):
        writer = TreeWriter(max_bytes)
        argument_trees = [writer.add(args), writer.add(keywords)]
        self.tensors, self.nbytes = dict(writer.tensors), writer.nbytes
        for g, state in generator_states():
            self.tensors[f"generator {g.device.type}"] = state
        self.header: dict[str, Any] = {
            "step": title(run),
            "meshes": axes_of_meshes(run),
            "axes": None if here is None else list(here.mesh.axes.items()),
            "names": [] if here is None else list(here.mesh.names.items()),
            "given": argument_trees,
            "threads": torch.get_num_threads(),
            "generators": {
                g.__name__: as_json(_without_arrays(x)) for g, x in other_states()
            },
            **writer.tables,
        }


def _without_arrays(state: Any) -> Any:
    """Returns a generator's state with lists in the place of numpy's arrays."""
    if isinstance(state, dict):  # numpy's generators other than MT19937 have dicts
        return {key: _without_arrays(x) for key, x in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_without_arrays, state))
    return state.tolist() if hasattr(state, "tolist") else state


def error_text(error: BaseException) -> str:
    """Returns the class of an error, and its message."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}".removesuffix(": ")
    except Exception:  # a user's class may raise in ``__str__``
        return kind


def axes_of_meshes(step: Callable[..., Any]) -> list[list[tuple[str, int]]]:
    """Returns the axes of the meshes that a function's transforms name."""
    meshes = []
    for handler in getattr(step, "interpretations", ()):
        mesh = getattr(handler, "mesh", None)
        if isinstance(mesh, Mesh) and (axes := [*mesh.axes.items()]) not in meshes:
            meshes.append(axes)
    return meshes


def leaf_checksums(value: PyTree) -> list[list[Any]]:
    """Returns [path, description, checksum] of each leaf of a tree.

    Leaves that lie in one buffer have one row, with the buffer's checksum. The
    description of a number or a text is its value.
    """
    paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
    leaf_rows: list[list[Any]] = []
    tensors: dict[int, Tensor] = {}
    for path, x in zip(paths, leaves, strict=True):
        if is_sharded(x):
            if x.why_unusable:
                continue
            x = x.local if x.packed is None else x.packed.flat
            if id(x) in tensors:
                continue
        if has_values(x):
            tensors[id(x)] = x
            leaf_rows.append([path, f"{x.dtype}{list(x.shape)}", id(x)])
        else:
            is_plain = as_json(x) is not UNSTORABLE
            leaf_rows.append([path, repr(x) if is_plain else type(x).__name__, None])
    checksums_by_id = dict(zip(tensors, checksums([*tensors.values()]), strict=True))
    return [
        [path, description, tensor_id and checksums_by_id[tensor_id] % 2**64]
        for path, description, tensor_id in leaf_rows
    ]


def _has_values(here: Here | None) -> bool:
    """Returns whether a call computes on real values of this rank alone."""
    if _torch.transforms_active() or _torch.fake_active():
        return False
    return here is None or here.link.moves_data and here.link.vmap_level is None


@contextmanager
def _warning_of_errors(rank: int) -> Iterator[None]:
    """Turns errors inside into warnings: recording must not stop a step."""
    try:
        with torch.no_grad():
            yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warn(f"a call of rank {rank} is not recorded: {reason}", RuntimeWarning)


def _warn_too_large(rank: int, nbytes: int, max_bytes: int) -> None:
    warn(
        f"a call of rank {rank} begins with and receives {nbytes:,} bytes or more, and "
        f"recorded(most={max_bytes:,}) keeps no more: it is not recorded",
        RuntimeWarning,
    )


_LAST_NOTE = (
    "the last call, {0}, is recorded: ff.testing.replay({1!r}, step, rank={2}) runs it "
    "again, alone"
)
_NOTE = (
    "call {0} of rank {1} is recorded: ff.testing.replay({2!r}, step, rank={1}) runs "
    "it again, alone"
)
