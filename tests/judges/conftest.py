"""Judges that nobody here wrote, run by `.ci/judges`, which installs them."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# Set by `.ci/judges`: what needs JAX is collected, and nothing skips.
ASKED = os.environ.get("FSFUNC_JUDGES") == "1"
collect_ignore = [] if ASKED else ["test_collectives.py", "test_optax.py"]
if not ASKED and find_spec("expecttest") is None:  # which torch's databases import
    collect_ignore.append("test_databases.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    if ASKED and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr}"
    return report
