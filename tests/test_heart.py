"""The heart stands by itself, and what is around it has the size that the READMEs say.

The heart is what each step of shard, remat and accumulate runs. Around it is what lays
a state out, and records and checks a step before its first call.
"""

import ast
from pathlib import Path

import pytest

import fsfunc

ROOT = Path(fsfunc.__file__).parent
ROOMS = {"_torch", "tree", "comm", "sharded", "runtime", "core", "transforms"}
TRANSFORMS = ("sharded_calls", "rematerialization", "accumulation")
PUBLIC = ("sharding", "rematerialization", "accumulation")
STEP = ("state.initialization", "comm.launch", "optim.adam")


def module(name):
    """The file of a module of fsfunc, or None."""
    path = ROOT.joinpath(*name.split(".")[1:])
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((p for p in found if p.exists()), None)


def imports(path):
    """The modules of fsfunc that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "fsfunc"
        ):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if module(inner) else node.module


def heart():
    """Every module that a step of the three transforms needs, by name."""
    return needed(f"transforms.{name}" for name in TRANSFORMS)


def needed(modules):
    """Every module of fsfunc that these need, by name."""
    found, todo = {}, [f"fsfunc.{name}" for name in modules]
    while todo:
        if (name := todo.pop()) not in found and name != "fsfunc":
            found[name] = module(name)
            todo += imports(found[name])
    return found


def test_the_heart_needs_no_other_room():
    assert {name.split(".")[1] for name in heart()} == ROOMS


def code(path):
    """The lines of a file that are not blank, no comment, and in no docstring."""
    text = path.read_text()
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    said = {
        line
        for node in nodes
        if ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = [x.strip() for i, x in enumerate(text.splitlines(), 1) if i not in said]
    return sum(bool(x) and not x.startswith("#") for x in lines)


def test_the_heart_is_small():
    found = heart()
    assert len(found) <= 57
    assert sum(map(code, found.values())) <= 8760


@pytest.mark.parametrize(
    ("more", "files", "lines"), [((), 88, 15_040), (STEP, 134, 23_960)]
)
def test_what_is_around_it_is_as_large_as_the_readmes_say(more, files, lines):
    found = needed([*(f"transforms.{name}" for name in PUBLIC), *more])
    assert len(found) == files
    assert lines - 150 <= sum(map(code, found.values())) <= lines
