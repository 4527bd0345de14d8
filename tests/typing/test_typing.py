"""What a checker, and so an editor, makes of a user's program."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def diagnostics(tmp_path_factory):
    """By file, (line, severity, rule, message) of what pyright says about it.

    Read where a user's program lies: outside this repository, whose settings for its
    own sources allow more.
    """
    folder = tmp_path_factory.mktemp("user")
    files = [folder / name for name in ("program.py", "mistakes.py")]
    for file in files:
        shutil.copy(HERE / file.name, file)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    run = subprocess.run(
        [*command, "--outputjson", *map(str, files)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    by_file = {file.name: [] for file in files}
    for x in json.loads(run.stdout)["generalDiagnostics"]:
        line = x["range"]["start"]["line"]
        by_file[Path(x["file"]).name].append(
            (line, x["severity"], x.get("rule", ""), x["message"])
        )
    return by_file


def test_an_editor_shows_the_types_that_stand_in_the_program(diagnostics):
    revealed = {}
    for line, severity, _, message in diagnostics["program.py"]:
        assert severity == "information", (line + 1, message)
        revealed[line] = message.split('" is "', 1)[1].removesuffix('"')
    expected, comment = {}, []
    for line, text in enumerate((HERE / "program.py").read_text().splitlines()):
        if (text := text.strip()).startswith("reveal_type("):
            expected[line] = comment = []
        elif text.startswith("# "):
            comment.append(text.removeprefix("# "))
        else:
            comment = []  # what follows code is a comment on the program
    assert len(expected) > 20
    assert revealed == {line: " ".join(parts) for line, parts in expected.items()}


def test_a_checker_finds_the_mistakes_and_nothing_else(diagnostics):
    rules = {}  # by line
    for line, severity, rule, _ in diagnostics["mistakes.py"]:
        if severity == "error":
            rules.setdefault(line, set()).add(rule)
    source = (HERE / "mistakes.py").read_text().splitlines()
    marks = [re.search(r"# (report\w+)$", text) for text in source]
    expected = {line: mark[1] for line, mark in enumerate(marks) if mark}
    assert len(expected) == 10
    assert rules.keys() == expected.keys()
    assert all(expected[line] in rules[line] for line in rules)
