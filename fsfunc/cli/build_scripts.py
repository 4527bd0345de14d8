"""Scripts that define build(mesh), and what commands print and write.

Whatever a user can mend at once is a :class:`Refused`, to be shown without a
traceback; errors of the script's own code come through as they are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from fsfunc.comm.mesh import Mesh
from fsfunc.planning.planner import plan
from fsfunc.planning.plans import Plan
from fsfunc.printing.tables import Printed


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


RETURNS = "(step, init, optimizer, batch), or with the layouts of parameters behind"
FSFUNC = Path(__file__).parents[1]


class Refused(Exception):
    """An error in the command line or its script, shown without a traceback."""


@contextlib.contextmanager
def started(script: Path, passed: Sequence[str]) -> Iterator[None]:
    """Inside, a script finds ``passed`` and its folder as if Python had started it."""
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        raise Refused(f"{script} {what}: name a Python file that defines build(mesh)")
    argv, path = sys.argv, sys.path
    sys.argv = [str(script), *passed]
    sys.path = [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def build_of(script: Path) -> Callable[[Mesh | None], Any]:
    """The ``build`` of a script, which is imported as a module of its file's name."""
    module = _imported(script)
    build = getattr(module, "build", None)
    if build is None:
        raise Refused(
            f"{script} defines no build: write `def build(mesh)`, which returns "
            f"{RETURNS}, and let the script itself start from it"
        )
    if not callable(build):
        raise Refused(f"build of {script} is no function, but {build!r:.60}")
    try:
        inspect.signature(build).bind(None)
    except TypeError as error:
        raise Refused(
            f"build of {script} is called as build(mesh), and is defined as "
            f"build{inspect.signature(build)}: {error}"
        ) from None
    return build


def _imported(script: Path) -> ModuleType:
    """The module of a file; the import runs it, but not as ``__main__``."""
    path = script.resolve()
    loader = SourceFileLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    if spec is None:
        raise Refused(f"{script} cannot be imported: name a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses and pickles look there
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


def plan_of(
    build: Callable[[Mesh], Any], mesh: Mesh, script: Path, device: str = "cpu"
) -> tuple[Plan, Callable[..., Any]]:
    """The plan of what ``build`` makes for a mesh, on a device; and its step.

    Raises:
        Refused: it makes something else; fsfunc refuses it on this mesh; the step has
            no use for an axis.
    """
    with refusing(script):
        made = build(mesh)
    step, init, optimizer, batch, layouts = checked(made, script)
    with refusing(script):
        how = {"mesh": mesh, "layouts": layouts, "device": device}
        found = plan(step, init, optimizer, batch, **how)
    used = set(found.asked)
    for own in found.ranks:
        used |= {axis for record in own.records for axis in record.axis}
    for axis, size in mesh.axes.items():
        if size > 1 and axis not in used:
            raise Refused(
                f"{script} has no use for the axis {axis} of {mesh.axes}: nothing goes "
                f"over it, and its {size} ranks would all do the same. Leave it out, "
                "or name it as the script does"
            )
    return found, step


def checked(made: Any, script: Path) -> tuple[Any, ...]:
    """The values that ``build`` returned, if a plan can be made of them."""
    start = f"build of {script} returns {RETURNS}"
    if not isinstance(made, tuple | list):
        raise Refused(f"{start}, and returned {_shown(made)}")
    if len(made) not in (4, 5):
        raise Refused(f"{start}, and returned {len(made)} values")
    step, init, optimizer, batch, layouts = (*made, None)[:5]
    if not callable(step):
        raise Refused(f"{start}: its step is no function, but {_shown(step)}")
    if not callable(init):
        raise Refused(
            f"{start}: its init is no function that returns the parameters, but "
            f"{_shown(init)}; of a function no parameter is ever made"
        )
    if not hasattr(optimizer, "init"):
        raise Refused(f"{start}: its optimizer is none, but {_shown(optimizer)}")
    return step, init, optimizer, batch, layouts


def _shown(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


@contextlib.contextmanager
def refusing(script: Path) -> Iterator[None]:
    """Turns what fsfunc itself refuses into :class:`Refused`, with the script's line.

    Its ``ValueError`` and ``RuntimeError`` say what to mend. Those that any other code
    raised, and all other errors, pass.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not Path(frames[-1].filename).is_relative_to(FSFUNC):
            raise
        said, where = str(error), _line_of(script, frames)
        raise Refused(said if where in said else f"{where}: {said}") from error


def _line_of(script: Path, frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of the script, or of a file in its folder."""
    for frame in reversed(frames):
        file = Path(frame.filename)
        theirs = file.is_relative_to(FSFUNC) or "site-packages" in file.parts
        if file.is_relative_to(script.resolve().parent) and not theirs:
            return f"{file}:{frame.lineno}"
    return str(script)
