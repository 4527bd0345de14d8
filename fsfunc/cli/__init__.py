"""The commands of ``python -m fsfunc``.

plan_command.py hardware_command.py checkpoint_commands.py names_command.py
build_scripts.py    scripts with build(mesh); what is printed, written
hugging_face.py     the step of a model, of its config.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fsfunc.cli import (
    checkpoint_commands,
    hardware_command,
    names_command,
    plan_command,
)
from fsfunc.cli.build_scripts import Refused
from fsfunc.printing.tables import visible_lines

__all__ = ["main"]

COMMANDS = (plan_command, hardware_command, checkpoint_commands, names_command)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0, or 2 where it makes no sense.

    What follows ``--`` is the script's own, which finds it in ``sys.argv``.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    top = argparse.ArgumentParser(prog="python -m fsfunc")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    options = top.parse_args(given[:cut])
    options.passed = given[cut + 1 :]
    try:
        options.run(options)
    except Refused as error:
        said = f"python -m fsfunc {options.command}: {error}"
        print(visible_lines(said), file=sys.stderr)
        return 2
    return 0
