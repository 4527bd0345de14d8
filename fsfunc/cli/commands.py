"""``python -m fsfunc checkpoint``, ``consolidate`` and ``hardware``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.cli.build_scripts import Refused, print_table, write_json
from fsfunc.cli.parsers import Commands
from fsfunc.comm.launch import make_mesh, spmd
from fsfunc.planning.calibration import measure_hardware
from fsfunc.planning.hardware import to_json
from fsfunc.planning.machines import Hardware
from fsfunc.printing.tables import of_bytes
from fsfunc.show.estimates import description
from fsfunc.show.shardings import checkpoint


def add_checkpoints(commands: Commands) -> None:
    """Adds ``checkpoint`` and ``consolidate`` to argparse's subparsers."""
    contents = "the contents of a checkpoint"
    whole_file = "one safetensors file with every tensor of a checkpoint whole"
    checkpoint_parser = commands.add_parser(
        "checkpoint",
        help=contents,
        description=f"Prints {contents}.",
        example=["checkpoint runs/step-200 --at params"],
    )
    consolidate_parser = commands.add_parser(
        "consolidate",
        help=whole_file,
        description=f"Writes {whole_file}.",
        example=["consolidate runs/step-200 model.safetensors --at params"],
    )
    checkpoint_parser.set_defaults(run=_run_checkpoint)
    consolidate_parser.set_defaults(run=_run_consolidate)
    for parser in (checkpoint_parser, consolidate_parser):
        parser.set_defaults(parser=parser, takes_script=False)
        path_help = "a checkpoint, of any mesh"
        parser.add_argument("path", type=Path, metavar="PATH", help=path_help)
        at_help = "the path of a subtree, such as params"
        parser.add_argument("--at", default="", metavar="PATH", help=at_help)
    consolidate_parser.add_argument(
        "file", type=Path, metavar="FILE", help="where the file will be"
    )
    prove_help = "read all of it and compare the checksums"
    checkpoint_parser.add_argument("--prove", action="store_true", help=prove_help)


def _run_checkpoint(options: argparse.Namespace) -> None:
    with _refusing_errors():
        stored = metadata(options.path)
        print_table(checkpoint(stored, at=options.at))
        if options.prove:
            from fsfunc.checkpoint.reading import prove

            print(f"{of_bytes(prove(stored))} read: every checksum is right")


def _run_consolidate(options: argparse.Namespace) -> None:
    # DCP takes half a second to import.
    from fsfunc.checkpoint.safetensors import consolidate

    with _refusing_errors():
        file = consolidate(options.path, options.file, at=options.at)
    print(f"{file} is written")


@contextmanager
def _refusing_errors() -> Iterator[None]:
    """Shows errors of a checkpoint without a traceback."""
    try:
        yield
    except (OSError, CheckpointError, LookupError) as error:
        # The text of a KeyError is the repr of its message.
        message = error.args[0] if isinstance(error, LookupError) else error
        raise Refused(str(message)) from None


def add_hardware(commands: Commands) -> None:
    """Adds ``hardware`` to argparse's subparsers."""
    about = "this machine, measured, as an estimate wants it described"
    parser = commands.add_parser(
        "hardware",
        help=about,
        description=f"Prints {about}. Under torchrun the links between its processes "
        "are measured too: torchrun --nproc-per-node 2 -m fsfunc hardware",
        example=["hardware --seconds 2 --json this.json"],
    )
    parser.set_defaults(run=_run_hardware, parser=parser, takes_script=False)
    add = parser.add_argument
    add("--name", default="this machine", help="what tables call it")
    add("--seconds", type=float, default=5.0, help="that it may take (default: 5)")
    add("--json", type=Path, metavar="PATH", help="write it for plan --hardware")


def _run_hardware(options: argparse.Namespace) -> None:
    if not options.seconds > 0:
        raise Refused(f"--seconds is above 0: {options.seconds:g}")

    def measure() -> Hardware:
        return measure_hardware(name=options.name, seconds=options.seconds)

    mesh = None
    if {"RANK", "WORLD_SIZE"} <= set(os.environ):  # under torchrun: with links
        mesh = make_mesh({"data": int(os.environ["WORLD_SIZE"])})
    machine = measure() if mesh is None else spmd(measure, mesh)()[0]
    if mesh is not None and mesh.rank != 0:
        return
    print_table(description(machine))
    if options.json:
        write_json(options.json, json.loads(to_json(machine)))
