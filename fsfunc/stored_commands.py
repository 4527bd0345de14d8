"""The commands of ``python -m fsfunc`` on what was saved: look, prove, consolidate."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsfunc.checkpointing.finding import find
from fsfunc.checkpointing.manifest import CheckpointError
from fsfunc.foresight.building import Refused
from fsfunc.show.amounts import of_bytes
from fsfunc.show.checkpoints import checkpoint
from fsfunc.show.tables import Printed

__all__ = ["add_commands"]


def add_commands(commands: Any, show: Any) -> None:
    """Adds ``checkpoint`` and ``consolidate`` to a command line.

    Args:
        commands: argparse's subparsers.
        show: prints a table.
    """
    about = "what lies in a checkpoint"
    one = commands.add_parser("checkpoint", help=about, description=f"Prints {about}.")
    one.set_defaults(run=lambda options: _look(options, show))
    one.add_argument(
        "path", type=Path, metavar="PATH", help="a checkpoint, of any mesh"
    )
    at = "the path of a subtree, such as params"
    one.add_argument("--at", default="", metavar="PATH", help=at)
    prove_it = "read all of it and compare the checksums"
    one.add_argument("--prove", action="store_true", help=prove_it)

    about = "one safetensors file with every tensor of a checkpoint whole"
    one = commands.add_parser("consolidate", help=about, description=f"Writes {about}.")
    one.set_defaults(run=_consolidate)
    one.add_argument(
        "path", type=Path, metavar="PATH", help="a checkpoint, of any mesh"
    )
    one.add_argument("file", type=Path, metavar="FILE", help="where the file will be")
    one.add_argument("--at", default="", metavar="PATH", help=at)


def _look(options: argparse.Namespace, show: Any) -> None:
    with _refusing():
        stored = find(options.path)
        shown: Printed = checkpoint(stored, at=options.at)
        show(shown)
        if options.prove:
            from fsfunc.checkpointing.blocks import prove

            print(f"{of_bytes(prove(stored))} read: every checksum is right")


def _consolidate(options: argparse.Namespace) -> None:
    from fsfunc.checkpointing.consolidation import consolidate

    with _refusing():
        file = consolidate(options.path, options.file, at=options.at)
    print(f"{file} is written")


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointError, LookupError) as error:
        said = error.args[0] if isinstance(error, LookupError) else error
        raise Refused(str(said)) from None
