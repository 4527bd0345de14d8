"""Memory is counted by the byte: nothing may go when a collector happens to come."""

import gc

import pytest


@pytest.fixture
def uncollected(collected):
    """Plans run without the garbage collector; so do the runs they are held against."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
