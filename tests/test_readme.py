"""The programs of README and its like run by themselves; links lead somewhere."""

import re
from contextlib import redirect_stdout
from io import StringIO

import pytest

from tests.programs import ROOT

PAGES = "README.md", "examples/README.md", "benchmarks/README.md"
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
# A program, and what stands under it as its output.
BLOCKS = re.compile(r"```python\n(.*?)```\n\n(?:```text\n(.*?)```)?", re.S)
PROGRAMS = {
    f"{page}, {i}": program
    for page, text in TEXTS.items()
    for i, program in enumerate(BLOCKS.findall(text), 1)
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_by_itself_and_prints_what_is_under_it(
    name, tmp_path, monkeypatch
):
    code, printed = PROGRAMS[name]
    monkeypatch.chdir(tmp_path)
    with redirect_stdout(StringIO()) as out:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    assert out.getvalue() == printed
    if "plan.svg" in code:
        drawn = (tmp_path / "plan.svg").read_text()
        shown = (ROOT / "examples" / "plan.svg").read_text()
        assert drawn.count("<rect") == shown.count("<rect")


def test_the_loop_that_is_moved_is_that_of_the_two_scripts():
    (moved,) = re.findall(r"```diff\n(.*?)```", TEXTS["README.md"], re.S)
    scripts = {
        sign: (ROOT / "examples/convert" / f"{name}.py").read_text().splitlines()
        for sign, name in (("-", "ordinary"), ("+", "sharded"))
    }
    for line in moved.splitlines():
        for sign in line[0].strip() or "-+":
            assert line[1:] in scripts[sign], line


def test_readme_is_read_in_some_minutes_and_its_links_lead_somewhere():
    assert len(TEXTS["README.md"].splitlines()) <= 250
    for page, text in TEXTS.items():
        for file, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            at = (ROOT / page).parent / file if file else ROOT / page
            assert at.exists(), (page, file)
            titles = re.findall(r"^#+ (.*)$", at.read_text(), re.M) if anchor else []
            anchors = [
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
            ]
            assert not anchor or anchor in anchors, (page, anchor)
