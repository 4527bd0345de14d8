"""The commands of ``python -m fsfunc``.

plan_command.py     plan
prove_command.py    prove
commands.py         checkpoint, consolidate, hardware
names_command.py    names
build_scripts.py    scripts with build(mesh); what is printed, written
parsers.py          command lines, or the way out
hugging_face.py     the step of a model, of its config.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

import fsfunc
from fsfunc.cli.build_scripts import Refused
from fsfunc.cli.commands import add_checkpoints, add_hardware
from fsfunc.cli.names_command import add_names
from fsfunc.cli.parsers import CommandParser, refuse_unknown
from fsfunc.cli.plan_command import add_plan
from fsfunc.cli.prove_command import add_prove
from fsfunc.printing.tables import visible_lines

COMMANDS = (add_plan, add_prove, add_hardware, add_checkpoints, add_names)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0, or 2 where it makes no sense.

    What follows ``--`` is the script's own, which finds it in ``sys.argv``.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    own, passed = given[:cut], given[cut + 1 :]
    top = CommandParser(
        prog="python -m fsfunc",
        description="Answers what can be asked of fsfunc without a program of one's "
        "own.",
        example=["names gradient clip"],
    )
    versions = f"fsfunc {fsfunc.__version__}, torch {torch.__version__}"
    top.add_argument("--version", action="version", version=versions)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    options, unknown = top.parse_known_args(own)
    options.passed = passed
    if unknown or (passed and not options.takes_script):
        refuse_unknown(options, own, unknown)
    try:
        options.run(options)
    except Refused as error:
        said = f"python -m fsfunc {options.command}: {error}"
        print(visible_lines(said), file=sys.stderr)
        return 2
    return 0
