"""Output of the commands: printed reports, and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsfunc.cli.build_scripts import Refused
from fsfunc.printing.tables import Printed

__all__ = ["put", "write_json", "writing"]


def put(shown: Printed) -> None:
    """Print in colours on a terminal; elsewhere as text of any width."""
    if sys.stdout.isatty():
        import rich

        rich.print(shown)
    else:
        print(shown)
    print()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Refuses what cannot be written, and says what was."""
    try:
        yield
    except (OSError, ImportError) as error:
        raise Refused(f"cannot write {path}: {error}") from None
    print(f"{path} is written")


def write_json(path: Path, value: Any) -> None:
    """Writes what JSON can hold, and says that it did."""
    with writing(path):
        path.write_text(json.dumps(value, indent=1) + "\n")
