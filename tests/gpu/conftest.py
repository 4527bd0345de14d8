"""What the tests of a card run under."""

from pathlib import Path

import pytest
import torch

from fsfunc.runtime import stores

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Elsewhere a warning is an error. On a card torch warns of what nobody here has
    # seen (of a driver, a workspace, a kernel that it takes another way), and the
    # minutes on a card are few: a warning is printed there, and the numbers decide.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def pinned_as_it_is(monkeypatch):
    """Small memory too is pinned by `stores`, and not by torch's allocator."""
    monkeypatch.setattr(stores, "_WASTE", 0)


@pytest.fixture(autouse=True)
def full_precision():
    """Products are computed in float32, so that they can be held to the CPU's."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
