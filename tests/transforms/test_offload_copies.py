"""Copies to and from a GPU that are under way, on a CPU that is as late as allowed.

Here memory that is offloaded counts as the host's, and all other as a device's. What a
copy brings to the device is there at once, as for the kernels of its stream. What it
writes on the host comes only when somebody waits for it: before that there are NaNs.
And what it reads there must not have changed by then.
"""

import weakref
from contextlib import contextmanager

import pytest
import torch

from fsfunc import _torch
from fsfunc.runtime import host_copies
from fsfunc.runtime.memory_spaces import space_of
from tests.checks import same, simulated
from tests.models import chain, floats, layers
from tests.transforms.test_offload import ADAM, OPTIMIZERS, tied, trained


class Stream:
    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name

    def wait_event(self, event):
        self.gpu.said.append(f"{self.name} waits for a copy in {event.stream.name}")

    def wait_stream(self, other):
        self.gpu.said.append(f"{self.name} waits for {other.name}")


class Event:
    def __init__(self, gpu, stream):
        self.gpu, self.stream, self.number = gpu, stream, gpu.number

    def synchronize(self):
        self.gpu.finish(self.number)

    def query(self):
        return False


class Late(host_copies.CUDA):
    """A GPU whose copies are over when somebody waits for them."""

    def __init__(self, pinned=True):
        self.pinned, self.number = pinned, 0
        # (number, storage, first byte, bytes, whether they are still to be written);
        # no reference, by which a pool would know memory as used.
        self.queue, self.said = [], []
        self.main, self.other = Stream(self, "main"), Stream(self, "side")
        self.current = self.main
        self.copies = self.raced = 0

    def crosses(self, out, x):
        if isinstance(out, _torch.FakeTensor) or isinstance(x, _torch.FakeTensor):
            return False
        return space_of(out).offloaded is not space_of(x).offloaded

    def here(self, out, x):
        return (out, x) if space_of(out).offloaded else (x, out)

    def stream(self, there):
        return self.current

    def side(self, there):
        return self.other

    @contextmanager
    def inside(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def keep(self, there, stream):
        pass

    def is_pinned(self, host):
        return self.pinned

    def end(self, stream):
        return Event(self, stream)

    @torch.no_grad()
    def copy(self, out, x):
        self.copies += 1
        self.number += 1
        to_host = space_of(out).offloaded
        host = out if to_host else x
        assert host.is_contiguous()
        first, count = host.storage_offset() * host.itemsize, host.nbytes
        storage = weakref.ref(_torch.storage(host))
        if to_host:
            # What was to be read there stands before it in the stream: looked at now.
            here = [one for one in self.queue if one[1]() is storage()]
            for one in here:
                if not one[4]:
                    self.queue.remove(one)
                    if not any(x[4] for x in here):
                        self.look(*one[1:4])
            made = x.to(out.dtype).contiguous().reshape(-1).view(torch.uint8).clone()
            out.reshape(-1).view(torch.uint8).fill_(255)
        else:
            made = host.detach().reshape(-1).view(torch.uint8).clone()
            for _, other, at, bytes_, due in self.queue:  # what is in the stream before
                low, high = max(at, first), min(at + len(bytes_), first + count)
                if due and other() is storage() and low < high:
                    made[low - first : high - first] = bytes_[low - at : high - at]
            out.copy_(made.view(x.dtype).view(x.shape))
        self.queue.append((self.number, storage, first, made, to_host))

    def copy_all(self, outs, xs):
        for out, x in zip(outs, xs, strict=True):
            self.copy(out, x)

    def finish(self, number):
        while self.queue and self.queue[0][0] <= number:
            _, storage, first, made, due = self.queue.pop(0)
            if not due:
                self.look(storage, first, made)
            elif storage() is not None:
                bytes_at(storage(), first, len(made)).copy_(made)

    def look(self, storage, first, made):
        """Counts memory that has changed since a copy was to read it."""
        if storage() is not None:
            lies = bytes_at(storage(), first, len(made))
            self.raced += not torch.equal(lies, made)


def bytes_at(storage, first, count):
    return torch.empty(0, dtype=torch.uint8).set_(storage, first, (count,))


@pytest.fixture
def late(monkeypatch):
    gpu = Late()
    monkeypatch.setattr(host_copies, "GPU", gpu)
    yield gpu
    assert not host_copies._OPEN and not gpu.raced


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("remat", "shard", "offload", "donate"), "params moments activations"),
        (("accumulate", "shard", "offload"), "params moments activations"),
        (("shard", "accumulate", "offload", "donate"), "params"),
        (("precision", "shard", "offload", "donate"), "params moments"),
        (("precision", "accumulate", "remat", "shard", "offload"), "moments"),
        (("shard", "offload"), "activations"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_nobody_reads_or_writes_what_a_copy_is_at(late, ranks, zero, names, kinds):
    given = layers(3, make=floats), floats(64 * ranks, 4), simulated(ranks), names, zero
    late.pinned = False  # nothing is late that nothing is offloaded of
    expected = trained(ADAM, chain(), *given)
    late.pinned = True
    assert not late.copies
    found = trained(ADAM, chain(), *given, **dict.fromkeys(kinds.split(), "host"))
    assert late.copies
    for (state, *_), (other, *_) in zip(found, expected, strict=True):
        same(state, other)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("kinds", ["params moments", "moments"])
def test_any_optimizer_waits(late, name, kinds):
    given = layers(3, make=floats), floats(4, 4), simulated(1)
    names = ("accumulate", "shard", "offload", "donate")
    optimizer = OPTIMIZERS[name]
    expected = trained(optimizer, tied, *given, names)
    found = trained(
        optimizer, tied, *given, names, **dict.fromkeys(kinds.split(), "host")
    )
    same(found[0][0], expected[0][0])
