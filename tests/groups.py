"""Which tests one worker runs, as a plugin of pytest and pytest-xdist.

Under `--dist loadgroup` pytest-xdist writes a test's group into its id, and pytest 9.2
keeps ids where it cannot: each test would go to any worker, and what a file's tests
share would be made on each. So the workers write their groups down, and the controller
reads them.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_FOLDER = "groups of tests"
_folder = pytest.StashKey[tempfile.TemporaryDirectory]()


class Groups(LoadScopeScheduling):
    """Gives all tests of a group to one worker."""

    def __init__(self, config: pytest.Config, log: Any, folder: Path):
        super().__init__(config, log)
        self.folder, self.of = folder, dict[str, str]()

    def _split_scope(self, nodeid: str) -> str:
        if not self.of:  # all have collected the same
            self.of = json.loads(next(self.folder.iterdir()).read_text())
        return self.of[nodeid]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    stash = node.config.stash
    if _folder not in stash:
        stash[_folder] = tempfile.TemporaryDirectory()
    node.workerinput[_FOLDER] = stash[_folder].name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    if config.getoption("dist") != "loadgroup":
        return None
    return Groups(config, log, Path(config.stash[_folder].name))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _folder in config.stash:
        config.stash[_folder].cleanup()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist tells of the ids
def pytest_collection_finish(session: pytest.Session) -> None:
    given = getattr(session.config, "workerinput", {})
    if _FOLDER not in given:
        return
    path = Path(given[_FOLDER]) / given["workerid"]
    path.write_text(json.dumps({item.nodeid: group(item) for item in session.items}))


def group(item: pytest.Item) -> str:
    """Return the names of its marks; a test without one is a group of its own."""
    marks = item.iter_markers("xdist_group")
    return "_".join(sorted({mark.args[0] for mark in marks})) or item.nodeid
