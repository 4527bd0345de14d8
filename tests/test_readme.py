"""The README's code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_s_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    exec(compile(code, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "psum_scatter" in printed and "all_gather" in printed
