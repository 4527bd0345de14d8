"""The README's index: every public name with the first sentence of its docstring.

python -m tests.public_names     writes it anew
"""

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import fsfunc as ff

README = Path(__file__).parents[1] / "README.md"
HEAD, TAIL = "## Every public name\n", "\n## "
ROOMS = ("nn", "schedules", "hardware", "graphs", "show", "testing")
THINGS = {  # what has no docstring of its own
    "is_sharded": "Whether a leaf is Sharded: `is_leaf=ff.is_sharded`",
    "hardware.A100_40": "An A100 of 40 GB, eight to a node",
    "hardware.A100_80": "An A100 of 80 GB, eight to a node",
    "hardware.CPU": "A small machine of processors, for examples",
    "hardware.H100": "An H100 of 80 GB, eight to a node",
    "hardware.H200": "An H200 of 141 GB, eight to a node",
    "schedules.Schedule": "A tuple of actions for each rank",
}


def public() -> dict[str, Any]:
    """What a user reaches by ``ff.name``, or by ``ff.room.name``, by that name."""
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
    if name in THINGS:
        return THINGS[name]
    said = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    said = said.replace(":func:", "").replace(":class:", "").replace("``", "`")
    return " ".join(said.split()).rstrip(".")


def index() -> str:
    """The section, from its first line of text to its last."""
    rows = [f"- `{name}`: {sentence(name, x)}" for name, x in sorted(public().items())]
    return "\n".join(rows) + "\n"


def written() -> str:
    """The section as the README has it."""
    section = README.read_text().partition(HEAD)[2].partition(TAIL)[0]
    return section[section.index("- `") :] if "- `" in section else section


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(text.replace(written(), index()))
