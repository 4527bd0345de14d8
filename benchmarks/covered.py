"""Which lines and branches of fsfunc the tests run.

    pip install pytest-cov && python benchmarks/covered.py [--quick] [PATH ...]

Runs the whole suite (``--quick``: without slow tests) under coverage.py, threads and
forked ranks too, prints each file that is not wholly run with its missing lines, and
the share of lines and branches. Lines that only a GPU runs, abstract methods and what
only a type checker reads are left out of both sides, and counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

SETTINGS = """
[run]
branch = True
source = fsfunc
parallel = True
patch =
    fork
    _exit
    subprocess
data_file = {folder}/data

[report]
ignore_errors = True
exclude_also =
    if TYPE_CHECKING:
    raise NotImplementedError
    {gpu}
"""
GPU = r"if .*(is_cuda|cuda\.is_available\(\)|\.type == .cuda.)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="without slow tests")
    parser.add_argument("paths", nargs="*", default=["tests", "fsfunc"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings"
        settings.write_text(SETTINGS.format(folder=folder, gpu=GPU))
        marks = "not slow" if asked.quick else "slow or not slow"
        workers = ["-n", "2", "--dist", "loadgroup", "-q", "-m", marks]
        cover = ["--cov", "--cov-config", str(settings), "--cov-report", ""]
        tests = [sys.executable, "-m", "pytest", *workers, *cover, *asked.paths]
        status = subprocess.run(tests, cwd=ROOT, env={**os.environ, "CI": "1"})
        report = [sys.executable, "-m", "coverage"]
        rc = ["--rcfile", str(settings)]
        show = [*report, "report", *rc, "--skip-covered", "--show-missing"]
        subprocess.run(show, cwd=ROOT, check=True)
        out = f"{folder}/all.json"
        subprocess.run([*report, "json", *rc, "-q", "-o", out], cwd=ROOT, check=True)
        totals = json.loads(Path(out).read_text())["totals"]
    lines = totals["covered_lines"] / totals["num_statements"]
    branches = totals["covered_branches"] / totals["num_branches"]
    print(
        f"lines {lines:.1%} of {totals['num_statements']}, branches {branches:.1%} "
        f"of {totals['num_branches']}; left out {totals['excluded_lines']} lines"
    )
    sys.exit(status.returncode)


if __name__ == "__main__":
    main()
