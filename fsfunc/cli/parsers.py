"""Parses command lines, or refuses them with an example of one that works."""

from __future__ import annotations

import argparse
import difflib
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

# What argparse's ``add_subparsers`` returns: each command adds its parser to it.
Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors show a command line that works.

    Options must be given by their whole names. With abbreviations an option of the
    script's own, after ``--``, could be taken for one of these.

    Args:
        example: the arguments of a command line that works, one a printed line.
    """

    def __init__(
        self, *, description: str, example: Sequence[str] = (), **options: Any
    ):
        lines = " \\\n        ".join(example)
        super().__init__(
            allow_abbrev=False,
            description=textwrap.fill(description, 79),
            epilog=f"example:\n    python -m fsfunc {lines}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Ends the process with a message, an example, and where to read more."""
        lines = [f"{self.prog}: {message}"]
        if self.epilog:
            lines.append(self.epilog)
        lines.append(f"more: {self.prog} --help")
        self.exit(2, "\n".join(lines) + "\n")

    def nearest(self, argument: str) -> str | None:
        """Returns the option that an argument without one comes close to."""
        names = [name for name in self._option_string_actions if name[:2] == "--"]
        near = difflib.get_close_matches(argument.partition("=")[0], names, 1, 0.75)
        return near[0] if near else None


def refuse_arguments(
    options: argparse.Namespace, arguments: Sequence[str], unknown: Sequence[str]
) -> NoReturn:
    """Ends the process: a command was given arguments that it does not have.

    Args:
        options: what was parsed; ``options.passed`` followed ``--``.
        arguments: those before ``--``.
        unknown: those of them that the command does not have.
    """
    command: CommandParser = options.parser
    if not unknown:
        command.error(
            f"nothing may follow -- here, where no script is started that would take "
            f"it: {shlex.join(options.passed)}"
        )
    message = f"no such argument: {shlex.join(unknown)}"
    if near := next(filter(None, map(command.nearest, unknown)), None):
        message += f". Did you mean {near}?"
    if options.takes_script:
        config, script = getattr(options, "hf", None), options.script
        # Beside --hf a SCRIPT is the value of an option that the command does not have:
        # both are to follow ``--``.
        if config and script:
            unknown = [a for a in arguments if a in (*unknown, str(script))]
        path = config or script
        if path is not None and path.exists():
            line = [*_without(arguments, unknown), "--", *unknown, *options.passed]
            message += f"\noptions of {path} itself follow --:"
            message += f"\n    python -m fsfunc {shlex.join(line)}"
        else:
            message += "\noptions of the script itself follow --:"
            message += (
                f"\n    python -m fsfunc {options.command} SCRIPT --mesh AXES -- "
            )
            message += "OPTIONS OF SCRIPT"
    command.error(message)


def _without(arguments: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Returns the arguments but for some, which are among them in this order."""
    known, remaining = [], list(unknown)
    for argument in arguments:
        if remaining and argument == remaining[0]:
            del remaining[0]
        else:
            known.append(argument)
    return known
