"""The commands of ``python -m fsfunc``.

Each command's file has a function ``add_...`` that gives `main` its parser; the parsed
options carry the function that runs it, ``options.run``.

plan_command.py     plan
prove_command.py    prove
commands.py         checkpoint, consolidate, hardware
names_command.py    names
build_scripts.py    scripts with build(mesh); what is printed, written
parsers.py          command lines, or the way out
hugging_face.py     the step of a model, of its config.json
model_tasks.py model_axes.py   what it is trained for; what axes of the mesh do
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

import fsfunc
from fsfunc.cli.build_scripts import Refused
from fsfunc.cli.commands import add_checkpoints, add_hardware
from fsfunc.cli.names_command import add_names
from fsfunc.cli.parsers import CommandParser, refuse_arguments
from fsfunc.cli.plan_command import add_plan
from fsfunc.cli.prove_command import add_prove
from fsfunc.printing.tables import visible_lines

COMMANDS = (add_plan, add_prove, add_hardware, add_checkpoints, add_names)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status: 0, or 2 if it makes no sense.

    Arguments after ``--`` are the script's own, which finds them in ``sys.argv``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, passed = arguments[:cut], arguments[cut + 1 :]
    parser = CommandParser(
        prog="python -m fsfunc",
        description="Answers what can be asked of fsfunc without a program of one's "
        "own.",
        example=["names gradient clip"],
    )
    versions = f"fsfunc {fsfunc.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    options, unknown = parser.parse_known_args(arguments)
    options.passed = passed
    if unknown or (passed and not options.takes_script):
        refuse_arguments(options, arguments, unknown)
    try:
        options.run(options)
    except Refused as error:
        message = f"python -m fsfunc {options.command}: {error}"
        print(visible_lines(message), file=sys.stderr)
        return 2
    return 0
