"""A checkpoint file read by several threads, each block proven by its checksum."""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fsfunc.checkpointing.manifest import BLOCK, CheckpointError, Stored
from fsfunc.checkpointing.memory import copy
from fsfunc.prefault import populate

__all__ = ["Blocks", "Threads", "check_files", "prove"]

# A thread waits for the disk, sums and copies in turn: with several of them disk and
# cores are both busy. A slab fits a core's cache, so that it comes from memory once.
SLAB = 2 * BLOCK  # bytes that a thread reads at once
THREADS = 6
_MANY = 1 << 16  # bytes from which pages are taken at once

_Wanted = list[tuple[int, memoryview]]  # (where in the file, what to fill)


class Threads:
    """Threads that read, each with a slab of memory of its own."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(THREADS, "read")
        self.local = threading.local()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.pool.shutdown(cancel_futures=error is not None)

    @property
    def slab(self) -> memoryview:
        if not hasattr(self.local, "slab"):
            self.local.slab = memoryview(bytearray(SLAB))
        return self.local.slab


class Blocks:
    """A file, read in ranges, of which every block is proven before it is copied.

    Ranges should come in order: those of one slab, one after the other, are read once.
    """

    def __init__(self, stored: Stored, name: str, threads: Threads):
        self.path = stored.path / name
        self.nbytes, self.sums, self.origin = stored.files[name]
        self.threads = threads
        self.file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.low = -1  # where the slab begins that `wanted` lies in
        self.wanted: _Wanted = []
        self.running: deque[Future[None]] = deque()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            try:
                for work in self.running:
                    if not work.cancel():
                        work.exception()  # waits: it reads from the file
            finally:
                os.close(self.file)

    def read(self, begin: int, into: memoryview) -> None:
        """Fills ``into`` with the bytes from ``begin`` on, by the next `settle`.

        Raises:
            CheckpointError: as `settle`; or the range goes past the end of the file.
        """
        at, end = begin, begin + len(into)
        if end > self.nbytes:
            raise self._truncated(self.nbytes, end)
        while at < end:
            low = self._floor(at, SLAB)
            if low != self.low:
                self._send()
                self.low = low
            stop = min(low + SLAB, end)
            self.wanted.append((at, into[at - begin : stop - begin]))
            at = stop

    def settle(self) -> None:
        """Waits until all that was asked for is there, and proven.

        Raises:
            CheckpointError: the file ends too soon, or a checksum is wrong.
        """
        self._send()
        while self.running:
            self._wait()

    def _wait(self) -> None:
        self.running[0].result()  # it stays there, in case this is interrupted
        self.running.popleft()

    def prove(self) -> None:
        """Reads the whole file for its checksums alone."""
        for low in range(self.origin, self.nbytes, SLAB):
            self._start(low, min(low + SLAB, self.nbytes), [])
        self.settle()

    def _send(self) -> None:
        if self.wanted:
            wanted, self.wanted, self.low = self.wanted, [], -1
            low = self._floor(min(at for at, _ in wanted), BLOCK)
            end = max(at + len(into) for at, into in wanted)
            end = self._floor(end + BLOCK - 1, BLOCK)
            self._start(low, min(end, self.nbytes), wanted)

    def _floor(self, at: int, size: int) -> int:
        """Where the piece of ``size`` begins that ``at`` lies in."""
        return at - (at - self.origin) % size

    def _start(self, low: int, end: int, wanted: _Wanted) -> None:
        self.running.append(self.threads.pool.submit(self._fill, low, end, wanted))
        if len(self.running) > 2 * THREADS:
            self._wait()

    def _fill(self, low: int, end: int, wanted: _Wanted) -> None:
        """What a thread does: reads the blocks of one slab, proves and copies them."""
        slab = self.threads.slab
        self._read(low, end - low, slab)
        self._prove(low, slab[: end - low])
        for at, into in wanted:
            if len(into) >= _MANY:
                populate(torch.frombuffer(into, dtype=torch.uint8))
            copy(into, slab[at - low :])

    def _read(self, low: int, size: int, slab: memoryview) -> None:
        done = 0
        while done < size:
            count = os.preadv(self.file, [slab[done:size]], low + done)
            if count == 0:
                raise self._truncated(low + done, self.nbytes)
            done += count

    def _truncated(self, end: int, expected: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} ends at byte {end}, and {expected} bytes were written: the "
            "file is truncated; go back to an earlier checkpoint"
        )

    def _prove(self, begin: int, blocks: memoryview) -> None:
        """Compares the checksums of blocks that lie from ``begin`` on."""
        if self.sums is None:
            return
        for low in range(begin, begin + len(blocks), BLOCK):
            block = blocks[low - begin :][:BLOCK]
            found, expected = zlib.crc32(block), self.sums[(low - self.origin) // BLOCK]
            if found != expected:
                raise CheckpointError(
                    f"{self.path} is damaged between bytes {low} and "
                    f"{low + len(block)}: their checksum is {found:08x}, and "
                    f"{expected:08x} was written; go back to an earlier checkpoint"
                )


def prove(stored: Stored) -> int:
    """Reads every file and compares its checksums; returns how many bytes that were.

    Raises:
        CheckpointError: a file is missing, too short, or damaged; or has no checksums.
    """
    check_files(stored, list(stored.files))
    with Threads() as threads:
        for name, file in stored.files.items():
            if file.sums is None:
                raise CheckpointError(
                    f"{stored.path / name} has no checksums to prove it by"
                )
            with Blocks(stored, name, threads) as blocks:
                blocks.prove()
    return sum(file.nbytes for file in stored.files.values())


def check_files(stored: Stored, names: Sequence[str]) -> None:
    """Raises where a file is missing, or not as long as it was written.

    Raises:
        CheckpointError: names the file and both lengths.
    """
    for name in names:
        path, expected = stored.path / name, stored.files[name].nbytes
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is missing: the checkpoint had a file of {expected} bytes "
                "there; go back to an earlier one"
            ) from error
        if found != expected:
            raise CheckpointError(
                f"{path} has {found} bytes, and {expected} were written: the file is "
                "damaged; go back to an earlier checkpoint"
            )
