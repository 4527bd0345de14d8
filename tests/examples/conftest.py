"""The modules of the example, for tests of its parts."""

import sys
from types import ModuleType

import pytest

from tests.examples.programs import SCRIPT


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules beside the script, as the script imports them."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    names = ("gpt", "options", "stages", "text")
    found = {name: __import__(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found
