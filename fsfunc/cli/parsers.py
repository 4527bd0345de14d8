"""Command lines: parsed, or refused with the way out."""

from __future__ import annotations

import argparse
import difflib
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors show a command line that works.

    Options are given by their whole names: a script's own, which follow ``--``, may
    begin as one of them does.

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


def refuse_unknown(
    options: argparse.Namespace, given: Sequence[str], unknown: Sequence[str]
) -> NoReturn:
    """Ends the process: a command was given arguments that it does not have.

    Args:
        options: what was parsed; ``options.passed`` followed ``--``.
        given: the arguments before ``--``; ``unknown``: those that are no command's.
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
        hf, script = getattr(options, "hf", None), options.script
        if hf and script:  # the value of an option that the command does not have
            unknown = [a for a in given if a in (*unknown, str(script))]
        path = hf or script
        if path is not None and path.exists():
            line = [*_without(given, unknown), "--", *unknown, *options.passed]
            message += f"\noptions of {path} itself follow --:"
            message += f"\n    python -m fsfunc {shlex.join(line)}"
        else:
            message += "\noptions of the script itself follow --:"
            message += (
                f"\n    python -m fsfunc {options.command} SCRIPT --mesh AXES -- "
            )
            message += "OPTIONS OF SCRIPT"
    command.error(message)


def _without(given: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Returns the arguments but for some, which are among them in this order."""
    left, rest = [], list(unknown)
    for argument in given:
        if rest and argument == rest[0]:
            del rest[0]
        else:
            left.append(argument)
    return left
