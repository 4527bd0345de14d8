"""Runs scripts that define build(mesh), and prints and writes what commands find.

`plan` and `prove` import such a script and call its ``build``. An error that a user can
mend at once is a :class:`Refused`, which is shown without a traceback; errors of the
script's own code come through as they are.
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


def print_table(table: Printed) -> None:
    """Prints in colours on a terminal; elsewhere as text of any width."""
    if sys.stdout.isatty():
        import rich

        rich.print(table)
    else:
        print(table)
    print()


@contextmanager
def reporting_write(path: Path) -> Iterator[None]:
    """Turns errors of a write into :class:`Refused`; prints what was written."""
    try:
        yield
    except (OSError, ImportError) as error:
        raise Refused(f"cannot write {path}: {error}") from None
    print(f"{path} is written")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a value that JSON can hold, and prints that it did."""
    with reporting_write(path):
        path.write_text(json.dumps(value, indent=1) + "\n")


RETURNS = "(step, init, optimizer, batch), or with the layouts of parameters behind"
FSFUNC = Path(__file__).parents[1]  # the package's folder


class Refused(Exception):
    """An error in the command line or its script, shown without a traceback."""


@contextlib.contextmanager
def script_arguments(script: Path, passed: Sequence[str]) -> Iterator[None]:
    """Inside, a script finds its arguments and folder as if Python had started it."""
    if not script.is_file():
        fault = "is a folder" if script.is_dir() else "does not exist"
        raise Refused(f"{script} {fault}: name a Python file that defines build(mesh)")
    argv, path = sys.argv, sys.path
    sys.argv = [str(script), *passed]
    sys.path = [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def load_build(script: Path) -> Callable[[Mesh | None], Any]:
    """Imports a script as a module of its file's name; returns its ``build``."""
    module = _import_script(script)
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


def _import_script(script: Path) -> ModuleType:
    """Imports a file as a module: it runs, but not as ``__main__``."""
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


def plan_build(
    build: Callable[[Mesh], Any], mesh: Mesh, script: Path, device: str = "cpu"
) -> tuple[Plan, Callable[..., Any]]:
    """Plans what ``build`` returns for a mesh, on a device; returns its step too.

    Raises:
        Refused: ``build`` returns something else; fsfunc refuses it on this mesh; the
            step has no use for an axis.
    """
    with refusing_errors(script):
        values = build(mesh)
    step, init, optimizer, batch, layouts = check_build_values(values, script)
    with refusing_errors(script):
        options = {"mesh": mesh, "layouts": layouts, "device": device}
        step_plan = plan(step, init, optimizer, batch, **options)
    used_axes = set(step_plan.differing_axes)
    for rank_plan in step_plan.ranks:
        used_axes |= {axis for record in rank_plan.records for axis in record.axis}
    for axis, size in mesh.axes.items():
        if size > 1 and axis not in used_axes:
            raise Refused(
                f"{script} has no use for the axis {axis} of {mesh.axes}: nothing goes "
                f"over it, and its {size} ranks would all do the same. Leave it out, "
                "or name it as the script does"
            )
    return step_plan, step


def check_build_values(values: Any, script: Path) -> tuple[Any, Any, Any, Any, Any]:
    """Checks what ``build`` returned.

    Returns:
        (step, init, optimizer, batch, layouts or None).
    """
    start = f"build of {script} returns {RETURNS}"
    if not isinstance(values, tuple | list):
        raise Refused(f"{start}, and returned {_describe_type(values)}")
    if len(values) not in (4, 5):
        raise Refused(f"{start}, and returned {len(values)} values")
    step, init, optimizer, batch, layouts = (*values, None)[:5]
    if not callable(step):
        raise Refused(f"{start}: its step is no function, but {_describe_type(step)}")
    if not callable(init):
        raise Refused(
            f"{start}: its init is no function that returns the parameters, but "
            f"{_describe_type(init)}; of a function no parameter is ever made"
        )
    if not hasattr(optimizer, "init"):
        raise Refused(
            f"{start}: its optimizer is none, but {_describe_type(optimizer)}"
        )
    return step, init, optimizer, batch, layouts


def _describe_type(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


@contextlib.contextmanager
def refusing_errors(script: Path) -> Iterator[None]:
    """Turns errors of fsfunc's own into :class:`Refused`, with the script's line.

    A ``ValueError`` or ``RuntimeError`` of fsfunc says what to mend. Those of any other
    code, and all other errors, pass.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not Path(frames[-1].filename).is_relative_to(FSFUNC):
            raise
        message, line = str(error), _script_line(script, frames)
        raise Refused(message if line in message else f"{line}: {message}") from error


def _script_line(script: Path, frames: Sequence[traceback.FrameSummary]) -> str:
    """Returns the innermost line of the script, or of a file in its folder."""
    for frame in reversed(frames):
        file = Path(frame.filename)
        # Both may lie below the script's folder: in a checkout, in a virtualenv.
        is_library = file.is_relative_to(FSFUNC) or "site-packages" in file.parts
        if file.is_relative_to(script.resolve().parent) and not is_library:
            return f"{file}:{frame.lineno}"
    return str(script)
