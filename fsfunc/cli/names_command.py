"""``python -m fsfunc names``: every public name, with a sentence on each."""

from __future__ import annotations

import argparse
import inspect
from types import ModuleType
from typing import Any

import fsfunc as ff
from fsfunc.cli.build_scripts import Refused

ROOMS = ("nn", "schedules", "hardware", "graphs", "show", "testing")
THINGS = {  # objects without a docstring of their own
    "is_sharded": "True for a Sharded leaf: `is_leaf=ff.is_sharded`",
    "hardware.A100_40": "An A100 of 40 GB, eight to a node",
    "hardware.A100_80": "An A100 of 80 GB, eight to a node",
    "hardware.CPU": "A small machine of processors, for examples",
    "hardware.H100": "An H100 of 80 GB, eight to a node",
    "hardware.H200": "An H200 of 141 GB, eight to a node",
    "schedules.Schedule": "A tuple of actions for each rank",
}


def add_to(commands: Any) -> None:
    """Adds ``names`` to argparse's subparsers."""
    about = "every public name, with a sentence on each"
    one = commands.add_parser("names", help=about, description=f"Prints {about}.")
    one.set_defaults(run=_run)
    only = "only names and sentences that contain this"
    one.add_argument("word", nargs="?", default="", metavar="WORD", help=only)


def _run(options: argparse.Namespace) -> None:
    lines = [f"ff.{name}: {sentence(name, x)}" for name, x in sorted(public().items())]
    shown = [line for line in lines if options.word.lower() in line.lower()]
    if not shown:
        raise Refused(f"no public name, and no sentence on one, has {options.word!r}")
    print("\n".join(shown))


def public() -> dict[str, Any]:
    """The objects that users reach as ``ff.name`` or ``ff.room.name``, by that name."""
    from fsfunc import nn  # noqa: F401  # a room that is imported by its name

    found = {}
    for name in dir(ff):
        thing = getattr(ff, name)
        if name in ROOMS:
            found |= {f"{name}.{n}": getattr(thing, n) for n in thing.__all__}
        elif not isinstance(thing, ModuleType) and name[0] != "_":
            home = str(getattr(thing, "__module__", ""))
            if name == "is_sharded" or home.startswith("fsfunc"):
                found[name] = thing
    again = [n for n in found if n.partition(".")[2] in found]  # under a shorter name
    return {n: thing for n, thing in found.items() if n not in again}


def sentence(name: str, thing: Any) -> str:
    """The first sentence of an object's docstring, as plain text."""
    if name in THINGS:
        return THINGS[name]
    said = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    said = said.replace(":func:", "").replace(":class:", "").replace("``", "`")
    return " ".join(said.split()).rstrip(".")
