"""What the suites of our peers test, row by row: has it, differs, or does not.

A row: `has | what | a test of ours`, `differs | what | how | a test of ours` or
`not | what | why`, below the file of the peer that tests it. As read or known of the
suites in 2026; a test is named from the folder `tests/` on.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
PEERS = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("test_"))
FIELDS = {"has": ("what", "test"), "differs": ("what", "how", "test")}
FIELDS["not"] = ("what", "how")


class Row(NamedTuple):
    where: str
    verdict: str
    what: str
    how: str = ""
    test: str = ""


def rows(text: str) -> list[Row]:
    found, where = [], ""
    for line in filter(None, text.splitlines()):
        if not line.startswith(" "):
            where = line
            continue
        verdict, *fields = [field.strip() for field in line.split("|")]
        named = dict(zip(FIELDS[verdict], fields, strict=True))
        found.append(Row(where, verdict, **named))
    return found


def of(peer: str) -> list[Row]:
    return rows(import_module(f"tests.behaviours.{peer}").ROWS)


@cache
def names_in(path: Path) -> set[str]:
    """Of functions, and of tables of refusals, which are tests."""
    found = set()
    for x in ast.parse(path.read_text()).body:
        found |= {x.name} if isinstance(x, ast.FunctionDef) else set()
        if isinstance(x, ast.Assign) and "all_refused" in ast.unparse(x.value):
            found |= {t.id for t in x.targets if isinstance(t, ast.Name)}
    return found


def faults(row: Row) -> list[str]:
    found = [f"{row}: nothing is said" for part in (row.where, row.what) if not part]
    if row.verdict != "has" and not row.how:
        found.append(f"{row}: it does not say how, or why")
    if row.verdict != "not":
        file, _, name = row.test.partition("::")
        path = HERE.parent / file
        if not (path.is_file() and name in names_in(path) and name[:5] == "test_"):
            found.append(f"{row}: there is no such test")
    return found


@pytest.mark.parametrize("peer", PEERS)
def test_a_row_names_a_test_that_is_there(peer):
    assert [fault for row in of(peer) for fault in faults(row)] == []
    assert len({(row.where, row.what) for row in of(peer)}) == len(of(peer))


def test_there_are_as_many_as_were_asked_for():
    assert sum(len(of(peer)) for peer in PEERS) >= 170


def test_a_row_that_is_wrong_is_seen():
    here = "behaviours/test_behaviours.py"
    (good,) = rows(f"a.py\n  has | all | {here}::test_a_row_that_is_wrong_is_seen")
    assert faults(good) == []
    for wrong in (f"{here}::test_gone", f"{here}::rows", "gone.py::test_a", ""):
        assert faults(good._replace(test=wrong))
    assert faults(Row("a.py", "not", "all")) and faults(good._replace(what=""))
    with pytest.raises((KeyError, ValueError)):
        rows("a.py\n  has | all | how | test")
