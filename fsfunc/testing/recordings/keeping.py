"""``recorded``: inside, each call of a step is kept, for a rank to run it again."""

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
from fsfunc.testing.recordings.json_values import ODD, as_json
from fsfunc.testing.recordings.tapes import MessageTape, RecordingLink
from fsfunc.testing.recordings.tree_writer import TreeWriter


@contextmanager
def recorded(
    folder: str | os.PathLike, *, calls: int = 2, most: int = 1 << 32
) -> Iterator[None]:
    """Keeps what each rank's last calls of a step inside began with and received.

    A rank that runs a call again by :func:`replay`, alone, computes the same bits and
    raises the same error. So a NaN that one of many ranks makes is found in one
    process, by a debugger or by `finite`.

    Kept are the arguments of a call, how the default generators of torch, Python and
    numpy stand, and every message that the rank receives, in a copy taken when it is
    handed over. Of a call that raises, that is all that came before. What ranks only
    compare is not kept. Errors that leave the block get a note that names the folder,
    and so does what the watchdog says of a rank that waits.

    A call is that of the outermost transformed function, or ``value_and_grad``. What a
    step does around it is no part of that, as a backward of your own: transform the
    step as a whole then, ``ff.transformed(step, ff.Interpretation())`` if by nothing.

    Not kept are what a function closes over, generators of your own, the place of a
    data loader, settings around the call, such as autocast or ``no_grad``, and that
    arguments share memory (a call that writes into one of them changes the other); nor
    calls within ``torch.func``, or on abstract and vmap meshes. Of blocks within each
    other the innermost keeps.

    Args:
        folder: where; each rank writes a file a call, in safetensors, with checksums,
            that appears whole or not at all. Recordings that are there count among the
            last.
        calls: how many calls of each rank are kept.
        most: how many bytes of each rank are kept. The last call is kept if it fits
            alone; one that does not is not kept, and warns.

    Raises:
        TypeError, ValueError: ``calls`` or ``most`` is no number of at least 1.

    Warns:
        RuntimeWarning: a call cannot be kept: too many bytes, or a full disk.

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
        with inside(frame().replace(around=recorder)):
            yield
    except Exception as error:
        recorder.note(error)
        raise


class CallRecorder:
    """Calls outermost functions, and keeps their calls; see `recorded`."""

    def __init__(self, folder: Path, calls: int, most: int):
        self.folder, self.calls, self.most = folder, calls, most
        self.next: dict[int, int] = {}  # the number of the next call, by rank
        self.last: dict[int, int] = {}  # that of the last one kept, by rank

    def __call__(self, run: Callable[..., Any], args: Any, keywords: Any) -> Any:
        with inside(frame().replace(around=None)):
            at = maybe_here()
            if recording() or not _has_values(at):
                return run(*args, **keywords)
            return self._kept(run, args, keywords, at)

    def _kept(
        self, run: Callable[..., Any], args: Any, keywords: Any, at: Here | None
    ) -> Any:
        rank, begun = 0 if at is None else at.rank, None
        number = self._number(rank)
        with _surviving(rank):
            begun = _CallStart(run, args, keywords, at, self.most)
            if begun.nbytes > self.most:
                begun = _refuse(rank, begun.nbytes, self.most)
        if begun is None:
            return run(*args, **keywords)
        tape = MessageTape(self.most - begun.nbytes)
        end = partial(self._end, begun, tape, rank, number)
        try:
            with ExitStack() as stack:
                stack.enter_context(ledger())  # so that what is silent is known
                if at is not None:
                    link = RecordingLink(at.link, tape)
                    stack.enter_context(set_here(replace(at, link=link)))
                    stack.enter_context(self._named(at))
                out = run(*args, **keywords)
        except BaseException as error:
            raised = text_of(error)
            if isinstance(error, Aborted):
                raised = "the error of another simulated rank"
            # Neither a warning that is an error, nor notes that are no list, hide it.
            with suppress(RuntimeWarning, TypeError):
                if end(lambda: {"raised": raised}):
                    error.add_note(_NOTE.format(number, rank, str(self.folder)))
            raise
        end(lambda: {"returned": sums_of(out)})
        return out

    def note(self, error: Exception) -> None:
        """Names the folder to an error that came between two calls."""
        folder, rank = str(self.folder), min(self.last, default=None)
        notes = getattr(error, "__notes__", ())
        if rank is not None and not any(folder in str(note) for note in notes):
            error.add_note(_LAST.format(self.last[rank], folder, rank))

    def _number(self, rank: int) -> int:
        """Returns that of a new call: beyond those of any block that writes here."""
        there = recorded_calls(self.folder, rank)
        number = max(self.next.get(rank, 0), there[-1].call + 1 if there else 0)
        self.next[rank] = number + 1
        return number

    @contextmanager
    def _named(self, at: Here) -> Iterator[None]:
        """Inside, the watchdog names the folder."""
        flight = getattr(at.link, "flight", None)
        if flight is not None:
            flight.recording_note = (
                f"; its call is recorded in {self.folder}, when it ends"
            )
        try:
            yield
        finally:
            if flight is not None:
                flight.recording_note = ""

    def _end(
        self,
        begun: _CallStart,
        tape: MessageTape,
        rank: int,
        number: int,
        outcome: Callable[[], Any],
    ) -> bool:
        """Writes the file of a call; returns whether it is kept."""
        messages = tape.taken()
        if tape.overflows:
            _refuse(rank, begun.nbytes + tape.nbytes, self.most)
            return False
        received = enumerate(message.received for message in messages)
        tensors = {f"message {i}": x for i, x in received if x is not None}
        with _surviving(rank):
            about = {"rank": rank, "call": number, "outcome": outcome()}
            said = {"messages": [message.as_json() for message in messages]}
            path = path_of(self.folder, rank, number)
            write_call(path, begun.said | about | said, begun.tensors | tensors)
            self.last[rank] = number
            self._forget(rank)
            return True
        return False

    def _forget(self, rank: int) -> None:
        """Removes recordings of a rank that are beyond the last, but for the newest."""
        there, nbytes = recorded_calls(self.folder, rank), 0
        for count, one in enumerate(reversed(there)):
            with suppress(OSError):
                nbytes += one.path.stat().st_size
                if count and (count >= self.calls or nbytes > self.most):
                    one.path.unlink()


class _CallStart:
    """What a call begins with: ``said`` in JSON, and copies of its tensors."""

    def __init__(
        self,
        run: Callable[..., Any],
        args: Any,
        keywords: Any,
        at: Here | None,
        most: int,
    ):
        writer = TreeWriter(most)
        given = [writer.add(args), writer.add(keywords)]
        self.tensors, self.nbytes = dict(writer.tensors), writer.nbytes
        for g, state in generator_states():
            self.tensors[f"generator {g.device.type}"] = state
        self.said: dict[str, Any] = {
            "step": title(run),
            "meshes": meshes_of(run),
            "axes": None if at is None else list(at.mesh.axes.items()),
            "given": given,
            "threads": torch.get_num_threads(),
            "generators": {
                g.__name__: as_json(_without_arrays(x)) for g, x in other_states()
            },
            **writer.said,
        }


def _without_arrays(state: Any) -> Any:
    """Returns how a generator stands, with lists in place of numpy's arrays."""
    if isinstance(state, dict):  # of numpy's, if it is another one than MT19937
        return {key: _without_arrays(x) for key, x in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_without_arrays, state))
    return state.tolist() if hasattr(state, "tolist") else state


def text_of(error: BaseException) -> str:
    """Returns the kind of an error, and what it says."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}".removesuffix(": ")
    except Exception:  # of one that cannot say it
        return kind


def meshes_of(step: Any) -> list[list[tuple[str, int]]]:
    """Returns the axes of the meshes that a function's transforms name."""
    meshes = []
    for handler in getattr(step, "interpretations", ()):
        mesh = getattr(handler, "mesh", None)
        if isinstance(mesh, Mesh) and (axes := [*mesh.axes.items()]) not in meshes:
            meshes.append(axes)
    return meshes


def sums_of(value: Any) -> list[list[Any]]:
    """Returns the path, kind and checksum of each leaf of a tree.

    Of leaves in one buffer that of the buffer, once. The kind of a number or a text is
    that itself.
    """
    paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
    rows: list[list[Any]] = []
    tensors: dict[int, Tensor] = {}
    for path, x in zip(paths, leaves, strict=True):
        if is_sharded(x):
            if x.spent:
                continue
            x = x.local if x.packed is None else x.packed.flat
            if id(x) in tensors:
                continue
        if has_values(x):
            tensors[id(x)] = x
            rows.append([path, f"{x.dtype}{list(x.shape)}", id(x)])
        else:
            plain = as_json(x) is not ODD
            rows.append([path, repr(x) if plain else type(x).__name__, None])
    sums = dict(zip(tensors, checksums([*tensors.values()]), strict=True))
    return [[path, kind, n and sums[n] % 2**64] for path, kind, n in rows]


def _has_values(at: Here | None) -> bool:
    """True where a call computes with numbers of this rank alone."""
    if _torch.transforms_active() or _torch.fake_active():
        return False
    return at is None or at.link.moves_data and at.link.vmap_level is None


@contextmanager
def _surviving(rank: int) -> Iterator[None]:
    """Inside, what goes wrong is warned of: the step itself is as it was."""
    try:
        with torch.no_grad():
            yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        warn(f"a call of rank {rank} is not recorded: {why}", RuntimeWarning)


def _refuse(rank: int, nbytes: int, most: int) -> None:
    warn(
        f"a call of rank {rank} begins with and receives {nbytes:,} bytes or more, and "
        f"recorded(most={most:,}) keeps no more: it is not recorded",
        RuntimeWarning,
    )


_LAST = (
    "the last call, {0}, is recorded: ff.testing.replay({1!r}, step, rank={2}) runs it "
    "again, alone"
)
_NOTE = (
    "call {0} of rank {1} is recorded: ff.testing.replay({2!r}, step, rank={1}) runs "
    "it again, alone"
)
