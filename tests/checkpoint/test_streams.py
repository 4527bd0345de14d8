"""Checkpoints of what a GPU's stream has not finished, with streams that stand in.

A stand-in stream keeps what it is given till somebody waits for it. Each thread has a
current stream of its own, at first the default one, as on a GPU.
"""

import threading

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint.reading import Request
from fsfunc.runtime import host_copies


class Stream:
    def __init__(self):
        self.due, self.waited = [], []

    def synchronize(self):
        self.waited.append(threading.current_thread())
        while self.due:
            self.due.pop(0)()


class Streams(host_copies.CUDA):
    """A GPU that all tensors lie on."""

    def __init__(self):
        self.default, self.threads = Stream(), threading.local()

    @property
    def current(self):
        return getattr(self.threads, "current", self.default)

    def is_on_gpu(self, x):
        return True

    def crosses(self, out, x):
        return False

    def current_stream(self, there):
        return self.current

    def record_event(self, stream):
        return stream

    def set_stream(self, stream):
        self.threads.current = stream


@pytest.fixture
def side(monkeypatch):
    """The stream that this test's thread is in."""
    gpu, stream = Streams(), Stream()
    monkeypatch.setattr(host_copies, "GPU", gpu)
    gpu.set_stream(stream)
    stream.gpu = gpu
    return stream


def test_a_save_in_the_background_writes_what_the_callers_stream_makes(tmp_path, side):
    """The thread waits for the kernels behind the state, and the caller does not."""
    x = torch.zeros(5)
    late = x.numpy()  # written so, no version counts it, as a kernel's end counts none
    side.due.append(lambda: late.fill(7))
    task = ff.save_async(tmp_path / "a", {"x": x})
    task.wait()
    assert threading.current_thread() not in side.waited
    assert torch.equal(
        ff.load(tmp_path / "a", {"x": torch.zeros(5)})["x"], torch.full((5,), 7.0)
    )
    assert not task._stream_ends  # a kept task keeps no events


@pytest.mark.parametrize("donate", [False, True])
def test_a_load_writes_in_the_callers_stream(tmp_path, side, monkeypatch, donate):
    """Behind the zeros that were put there, and ahead of what reads the state."""
    state = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2).double()}
    ff.save(tmp_path / "a", state)
    take, seen = Request.take, []

    def taken(self, *given):
        seen.append((side.gpu.current, threading.current_thread()))
        take(self, *given)

    monkeypatch.setattr(Request, "take", taken)
    target = ff.tree.map(torch.zeros_like, state)
    loaded = ff.load(tmp_path / "a", target, donate=donate)
    assert len(seen) == 2
    assert {stream for stream, _ in seen} == {side}
    assert threading.current_thread() not in {thread for _, thread in seen}
    assert torch.equal(loaded["w"], state["w"])


def test_streams_of_the_host_are_none():
    assert host_copies.current_streams([torch.zeros(2)]) == []
    assert host_copies.record_ends([torch.zeros(2)]) == []


def test_each_device_has_one_stream_of_many_tensors(side):
    tensors = [torch.zeros(2), torch.ones(3), torch.zeros(2, device="meta")]
    assert host_copies.current_streams(tensors) == [side, side]  # the CPU's, and meta's
