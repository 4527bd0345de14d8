"""The README's code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_s_example_runs(capsys):
    codes = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    names = {}

    def printed(code):
        exec(compile(code, str(README), "exec"), names)
        return capsys.readouterr().out

    step, plan, outlives, module = map(printed, codes)
    assert "psum_scatter" in step and "all_gather" in step
    assert plan.startswith("5 ") and "on H100" in plan
    assert outlives == "[3, 3, 3, 3] [5, 5, 5, 5]\n"
    assert not module
    x = names["torch"].randn(2, 3, 8)
    trained = names["trained"](x).square().mean()
    assert abs(names["module_loss"](names["params"], x) - trained) < 1e-6
