"""What lets a run outlive its processes: checkpoints on the way, and SIGTERM.

A checkpoint holds all that the rest of a run follows from: the state, how far the data
are read, the random numbers (`ff.save` sees to those) and the losses so far.
"""

import signal
import traceback
import zlib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
from report import Results

import fsfunc as ff

# With another value of one of these it is another run. The options of sharding change
# losses by rounding alone: a run may go on with others, and on more ranks or fewer.
OF_THE_RUN = "steps batch seq dim layers heads lr seed".split()


@contextmanager
def asked_to_leave() -> Iterator[Event]:
    """Inside, SIGTERM sets the event: the machine is wanted back.

    torchrun sends it on to its workers, and kills what is left 30 seconds later.
    """
    asked = Event()
    # However often: some schedulers send it to torchrun and to its workers too.
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    except BaseException:
        # A rank that ends by an error waits for the others' part of what is being
        # saved, and they may be dead: that is when torchrun sends it too.
        signal.signal(signal.SIGTERM, before)
        if asked.is_set():
            traceback.print_exc()
            signal.raise_signal(signal.SIGTERM)
        raise


class Checkpoints:
    """The checkpoints of one run in the folder that its options name, if they do."""

    def __init__(self, args: Namespace, mesh: ff.Mesh, text: torch.Tensor):
        self.folder, self.every, self.keep = args.checkpoints, args.every, args.keep
        self.steps, self.leaving, self.mesh = args.steps, args.leaving, mesh
        self.run = {name: getattr(args, name) for name in OF_THE_RUN}
        self.run["text"] = zlib.crc32(text.numpy()) if self.folder else None
        self.saving: Any = None  # what ff.save_async returned last

    def newest(self) -> Path | None:
        """The newest complete checkpoint; None where a run begins.

        Raises: SystemExit where it is of another run.
        """
        path = ff.latest(self.folder, "step-*") if self.folder else None
        theirs = ff.metadata(path).metadata["run"] if path else self.run
        for name, mine in self.run.items():
            if theirs[name] != mine:
                raise SystemExit(
                    f"{path} is of another run: its --{name} is {theirs[name]}, and "
                    f"here it is {mine}; name another folder by --checkpoints"
                )
        return path

    def after(
        self, done: int, tree: Any, results: Results, device: torch.device
    ) -> bool:
        """Saves what is due after `done` steps; True where the run is to leave now.

        Cost: one number is reduced, so that all ranks leave after the same step.
        """
        if not self.folder:
            return False
        asked = torch.tensor(float(self.leaving.is_set()), device=device)
        leaving = bool(ff.pmax(asked, tuple(self.mesh.axes)))
        if leaving or done == self.steps or done % self.every == 0:
            self.wait()
            # The run will append to these lists while they are being saved.
            so_far = {name: list(rows) for name, rows in results._asdict().items()}
            self.saving = ff.save_async(
                self.folder / f"step-{done:06}",
                tree,
                metadata={"run": self.run, "results": so_far},
                keep=self.keep,
            )
        if leaving:
            self.wait()
        return leaving

    def wait(self) -> None:
        """Returns once what was to be saved is, or raises what went wrong with it."""
        if self.saving:
            self.saving.wait()


def results_of(path: Path) -> Results:
    """The results so far, as a checkpoint has them."""
    found = Results(**ff.metadata(path).metadata["results"])
    # JSON knows no tuples
    return found._replace(validation=[(at, loss) for at, loss in found.validation])
