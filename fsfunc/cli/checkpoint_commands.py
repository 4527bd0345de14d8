"""``python -m fsfunc checkpoint`` and ``consolidate``: what was saved."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.cli.build_scripts import Refused, put
from fsfunc.printing.tables import of_bytes
from fsfunc.show.shardings import checkpoint


def add_to(commands: Any) -> None:
    """Adds ``checkpoint`` and ``consolidate`` to argparse's subparsers."""
    lists = "the contents of a checkpoint"
    makes = "one safetensors file with every tensor of a checkpoint whole"
    look = commands.add_parser("checkpoint", help=lists, description=f"Prints {lists}.")
    join = commands.add_parser(
        "consolidate", help=makes, description=f"Writes {makes}."
    )
    look.set_defaults(run=_look)
    join.set_defaults(run=_consolidate)
    for one in (look, join):
        of = "a checkpoint, of any mesh"
        one.add_argument("path", type=Path, metavar="PATH", help=of)
        at = "the path of a subtree, such as params"
        one.add_argument("--at", default="", metavar="PATH", help=at)
    join.add_argument("file", type=Path, metavar="FILE", help="where the file will be")
    prove = "read all of it and compare the checksums"
    look.add_argument("--prove", action="store_true", help=prove)


def _look(options: argparse.Namespace) -> None:
    with _refusing():
        stored = metadata(options.path)
        put(checkpoint(stored, at=options.at))
        if options.prove:
            from fsfunc.checkpoint.blocks import prove

            print(f"{of_bytes(prove(stored))} read: every checksum is right")


def _consolidate(options: argparse.Namespace) -> None:
    # DCP takes half a second to import.
    from fsfunc.checkpoint.safetensors import consolidate

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
