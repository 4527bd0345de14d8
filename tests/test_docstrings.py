"""What docstrings promise a reader: a verb first, and names that are there."""

import ast
import re
from pathlib import Path

import pytest

FSFUNC = Path(__file__).parent.parent / "fsfunc"
# As `Class.member` and `room.Class.member()`, in single backticks.
MEMBER = re.compile(r"(?<!`)`(?:\w+\.)*(\w+)\.(\w+)(?:\(\))?`(?!`)")
# How a function's docstring began where it named what it returns, or asked.
NO_VERBS = set("The A An True False What Whether Those That This How By Of In".split())


def sources() -> dict[str, str]:
    paths = sorted(FSFUNC.rglob("*.py"))
    return {path.relative_to(FSFUNC).as_posix(): path.read_text() for path in paths}


def docstrings_without_verbs(house: dict[str, str]) -> list[str]:
    faults = []
    for path, source in house.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            decorators = {ast.unparse(x).split("(")[0] for x in node.decorator_list}
            if decorators & {
                "property",
                "cached_property",
                "functools.cached_property",
            }:
                continue  # which name a thing
            words = (ast.get_docstring(node) or "Says nothing").split()
            if words[0].strip(",:") in NO_VERBS:
                faults.append(f"{path}:{node.lineno}: {' '.join(words[:6])}")
    return faults


def members(house: dict[str, str]) -> dict[str, set[str]]:
    """By class, the names of its methods and attributes, inherited ones too."""
    own, bases = {}, {}
    for source in house.values():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ClassDef):
                continue
            names = own.setdefault(node.name, set())
            bases[node.name] = [
                ast.unparse(x).split("[")[0].split(".")[-1] for x in node.bases
            ]
            for x in ast.walk(node):
                if isinstance(x, ast.FunctionDef | ast.ClassDef):
                    names.add(x.name)
                elif isinstance(x, ast.Name | ast.Attribute):
                    if isinstance(x.ctx, ast.Store):
                        names.add(x.id if isinstance(x, ast.Name) else x.attr)

    def inherited(name: str) -> set[str]:
        return own.get(name, set()).union(*map(inherited, bases.get(name, ())))

    return {name: inherited(name) for name in own}


def names_that_are_gone(house: dict[str, str]) -> list[str]:
    known, faults = members(house), []
    for path, source in house.items():
        for match in re.finditer(
            r"(?<!`)`(?:\w+\.)*(\w+)\.(\w+)(?:\(\))?`(?!`)", source
        ):
            kind, member = match.groups()
            if kind in known and member not in known[kind]:
                line = source[: match.start()].count("\n") + 1
                faults.append(f"{path}:{line}: {match[0]}")
    return faults


def test_docstrings_of_functions_begin_with_a_verb():
    assert docstrings_without_verbs(sources()) == []


def test_members_that_docstrings_name_are_there():
    assert names_that_are_gone(sources()) == []


@pytest.mark.parametrize(
    ("fault", "source"),
    [
        (docstrings_without_verbs, 'def f(x):\n    """The sum of x."""\n'),
        (docstrings_without_verbs, 'def f(x):\n    """True if x is."""\n'),
        (names_that_are_gone, "class A:\n    x = 1\n\n\n# See `A.y`.\n"),
        (
            names_that_are_gone,
            "class A:\n    x = 1\nclass B(A): ...\n# `a.B.z()`\n",
        ),
    ],
)
def test_a_house_that_breaks_a_rule_is_found(fault, source):
    (line,) = fault({"file.py": source})
    assert line.startswith("file.py:")


def test_a_house_that_keeps_them_passes():
    source = 'class A:\n    x = 1\n    def f(self):\n        """Returns `A.x`."""\n'
    assert docstrings_without_verbs({"file.py": source}) == []
    assert names_that_are_gone({"file.py": source}) == []
