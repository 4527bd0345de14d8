"""The README's code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_s_example_runs(capsys):
    code, later = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    names = {}
    exec(compile(code, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "psum_scatter" in printed and "all_gather" in printed
    exec(compile(later, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("5 ") and "on H100" in printed
