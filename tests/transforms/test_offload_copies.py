"""Copies to and from a GPU that are under way, on a CPU that is as late as allowed.

Here memory that is offloaded counts as the host's, and all other as a device's. What a
copy brings to the device is there at once, as for the kernels of its stream. What it
writes on the host comes only when somebody waits for it: before that there are NaNs.
And what it reads there must not have changed by then.
"""

import os
import weakref
from contextlib import contextmanager

import pytest
import torch

import fsfunc as ff
from fsfunc import _torch
from fsfunc.core.outcomes import Leaves
from fsfunc.optim import in_place
from fsfunc.runtime import host_copies, memory_spaces, stores
from fsfunc.runtime.memory_spaces import Offloaded, space_of
from fsfunc.runtime.stores import Folder, HostMemory
from fsfunc.transforms import gathers, offloading
from tests.checks import same, simulated
from tests.covering import by_turns, pairs
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
        self.gpu.finish_till(self.number)

    def query(self):
        return not any(one[0] <= self.number for one in self.gpu.queue)


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
        self.sizes, self.unpinned = [], []  # of what was pinned; where it was unpinned
        self.kept = []  # streams

    def crosses(self, out, x):
        if isinstance(out, _torch.FakeTensor) or isinstance(x, _torch.FakeTensor):
            return False
        return space_of(out).offloaded is not space_of(x).offloaded

    def host_and_device(self, out, x):
        return (out, x) if space_of(out).offloaded else (x, out)

    def current_stream(self, there):
        return self.current

    def side_stream(self, there):
        return self.other

    @contextmanager
    def in_stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def record_stream(self, there, stream):
        self.kept.append(stream.name)

    def is_pinned(self, host):
        return self.pinned

    def pin(self, address, size, device):
        self.sizes.append(size)
        return self.pinned

    def unpin(self, address, device):
        self.synchronize(device)
        self.unpinned.append(address)

    def record_event(self, stream):
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

    def synchronize(self, device):
        self.finish_till(self.number)

    def finish_till(self, number):
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
    assert not host_copies._UNDER_WAY and not gpu.raced


STEPS = [
    (("remat", "shard", "offload", "donate"), "params moments activations"),
    (("accumulate", "shard", "offload"), "params moments activations"),
    (("shard", "accumulate", "offload", "donate"), "params"),
    (("precision", "shard", "offload", "donate"), "params moments"),
    (("precision", "accumulate", "remat", "shard", "offload"), "moments"),
    (("shard", "offload"), "activations"),
]


@pytest.mark.parametrize(
    ("step", "ranks", "zero"), pairs(STEPS, [1, 2], range(4)), ids=str
)
def test_nobody_reads_or_writes_what_a_copy_is_at(late, step, ranks, zero):
    names, kinds = step
    given = layers(3, make=floats), floats(64 * ranks, 4), simulated(ranks), names, zero
    late.pinned = False  # nothing is late that nothing is offloaded of
    expected = trained(ADAM, chain(), *given)
    late.pinned = True
    assert not late.copies
    found = trained(ADAM, chain(), *given, **dict.fromkeys(kinds.split(), "host"))
    assert late.copies
    for (state, *_), (other, *_) in zip(found, expected, strict=True):
        same(state, other)


KINDS = ["params moments", "moments"]


@pytest.mark.parametrize(("name", "kinds"), by_turns(sorted(OPTIMIZERS), KINDS))
def test_any_optimizer_waits(late, name, kinds):
    given = layers(3, make=floats), floats(4, 4), simulated(1)
    names = ("accumulate", "shard", "offload", "donate")
    optimizer = OPTIMIZERS[name]
    expected = trained(optimizer, tied, *given, names)
    found = trained(
        optimizer, tied, *given, names, **dict.fromkeys(kinds.split(), "host")
    )
    same(found[0][0], expected[0][0])


@pytest.mark.parametrize("kinds", ["moments", "moments activations"])
def test_a_step_that_is_not_sharded_waits_too(late, kinds):
    given = layers(3, make=floats), floats(64, 4), simulated(1), ("offload", "donate")
    step = OPTIMIZERS["clipped"], chain()
    expected = trained(*step, *given)
    found = trained(*step, *given, **dict.fromkeys(kinds.split(), "host"))
    assert late.copies
    same(found[0][0], expected[0][0])


def test_an_update_of_what_is_not_offloaded_is_one_kernel(late, monkeypatch):
    """Though activations lie elsewhere, and what a pool keeps for the next ones."""
    monkeypatch.setattr(in_place, "_write_row", None)
    given = layers(3, make=floats), floats(64, 4), simulated(1), ("shard", "offload")
    trained(ADAM, chain(), *given, activations="host")
    assert late.copies
    with pytest.raises(TypeError):
        trained(ADAM, chain(), *given, moments="host")
    host_copies.wait_for_copies()


@pytest.mark.parametrize("how", ["new", "like", "put"])
def test_memory_of_a_pool_is_written_when_copies_of_it_are_over(late, how):
    home, x = Offloaded(HostMemory(), torch.device("cpu")), torch.arange(4.0)
    there = home.put(x, waits=False)
    back = home.fetch(there, waits=False)
    assert there.isnan().all() and torch.equal(back, x)
    at = there.data_ptr()
    del there
    y = x + 1
    beside = home.copied(y.double())
    if how == "put":
        room = home.put(beside, torch.float32)
    else:
        room = home.new_empty(x, [4]) if how == "new" else home.empty_like(x, True)
        room.copy_(y)
    assert room.data_ptr() == at
    host_copies.wait_for_copies()
    assert torch.equal(room, y)


def test_memory_of_a_pool_stays_with_its_device():
    """Where to it is fetched stands by the memory, and it may be pinned for that."""
    store = Folder(".")
    store.allocate = lambda count, dtype, device: torch.empty(count, dtype=dtype)
    for name in "cpu", "cuda:0", "cuda:1", "cuda:0":
        room = store.scratch(4, torch.float32, name)
        assert space_of(room).device == torch.device(name)
        del room


@pytest.mark.parametrize("whole", [True, False])
def test_the_order_of_units_is_kept_on_the_device(whole):
    """A collective there waits for the gradients that it sends, by their token."""
    loss, mesh = chain(), simulated(1)
    step = ff.shard(lambda p, x: ff.value_and_grad(loss)(p, x), mesh, "data")

    def main():
        params = ff.place(step, layers(2, make=floats), floats(4, 4))
        flat = params[0]["w"].packed.flat
        Offloaded(HostMemory(), torch.device("meta")).mark(flat)
        packed = {id(params[0]["w"].packed): params[0]["w"].packed} if whole else None
        return Leaves([params[0]], [0], packed).device

    assert ff.spmd(main, mesh)() == [torch.device("meta")]


def test_a_pool_of_many_sizes_does_not_grow():
    """Lengths of sequences vary; and one size after the other is used all the time."""
    store, made = Folder("."), []
    store.allocate = lambda count, dtype, device: (
        made.append(count) or torch.empty(count, dtype=dtype)
    )

    def use(*counts):
        rooms = [store.scratch(n, torch.float32, "cpu") for n in counts]
        assert all(room.shape == (n,) for room, n in zip(rooms, counts, strict=True))
        assert len({room.data_ptr() for room in rooms}) == len(rooms)

    for i in range(900):
        use(*[100 + i * 577 % 900] * 4)
        assert sum(x[1] for x in store._pool) <= 2 * 4 * 4 * 1_000
    assert len(made) < 900 * 4 / 8
    for _ in range(3):
        use(*[100] * 40)
        use(4_000)
        seen, made = made, []
    assert not seen


def test_what_waits_is_read_and_written_at_once(late):
    home, x = Offloaded(HostMemory(), torch.device("cpu")), torch.arange(4.0)
    there = home.put(x.double(), torch.float32)
    assert torch.equal(there, x)
    back = home.fetch(there, torch.bfloat16)
    there.zero_()
    host_copies.wait_for_copies()
    assert back.dtype == torch.bfloat16 and torch.equal(back.float(), x)


def test_a_mapped_file_is_kept_till_its_copy_is_over(late, tmp_path):
    late.pinned, home = False, Offloaded(Folder(tmp_path), torch.device("cpu"))
    there = home.put(torch.arange(4.0), waits=False)
    assert torch.equal(there, torch.arange(4.0))  # the driver has waited
    alive = weakref.ref(_torch.storage(there))
    home.fetch(there, waits=False)
    del there
    home.store._twin = home.store._pool = None
    assert alive() is not None
    host_copies.wait_for_copies()
    assert alive() is None


def test_a_cast_has_little_of_both_dtypes_on_the_device(late, monkeypatch):
    monkeypatch.setattr(host_copies, "_PIECE", 3)
    home, x = Offloaded(HostMemory(), torch.device("cpu")), torch.arange(8.0)
    there = home.copied(x)
    late.copies = 0
    assert torch.equal(home.fetch(there, torch.float64), x.double())
    assert late.copies == 3


def test_a_copy_waits_for_one_of_the_same_memory_in_another_stream(late):
    home = Offloaded(HostMemory(), torch.device("cpu"))
    there = home.put(torch.arange(4.0), waits=False)
    assert late.said == []
    with late.in_stream(late.other):
        home.fetch(there, waits=False)
    assert late.said == ["side waits for a copy in main"]
    home.fetch(there, waits=False)
    assert late.said[1:] == ["main waits for a copy in side"]
    host_copies.wait_for_copies()


def test_what_copies_are_over_is_forgotten(late):
    home = Offloaded(HostMemory(), torch.device("cpu"))
    kept = [home.put(torch.arange(4.0), waits=False) for _ in range(3)]
    assert len(host_copies._UNDER_WAY) == 3
    host_copies.wait_for(kept[1])
    kept.append(home.put(torch.arange(4.0), waits=False))
    assert len(host_copies._UNDER_WAY) == 2
    host_copies.wait_for_copies()


def test_residuals_are_read_in_other_streams_when_they_are_there(late):
    """A node in a stream of its own may be given what another one has fetched."""
    store = HostMemory()
    store.scratch(64, torch.uint8, "cpu")
    storage = offloading._StoredStorage(torch.arange(64.0), store)
    first = storage.fetch()
    assert late.said == []
    with late.in_stream(late.other):
        assert storage.fetch() is first
    assert late.said == ["side waits for a copy in main"] and late.kept[-1] == "side"


@pytest.mark.parametrize("how", ["one", "all", "ahead"])
def test_a_copy_that_fails_midway_is_waited_for(late, monkeypatch, how):
    """Of a cast there may be no room for the second piece, and the first is on its way.

    A GPU that has failed says so in each wait, and the first error is what is raised.
    """
    monkeypatch.setattr(host_copies, "_PIECE", 3)
    home, copy = Offloaded(HostMemory(), torch.device("cpu")), late.copy
    x = torch.arange(8.0)
    there = home.empty_like(x).copy_(x)  # not by a stream

    def fails(out, x):
        if late.copies:
            raise torch.OutOfMemoryError("no room")
        copy(out, x)

    monkeypatch.setattr(late, "copy", fails)
    with pytest.raises(torch.OutOfMemoryError):
        if how == "one":
            home.put(x, torch.float64, waits=False)
        elif how == "all":
            host_copies.send_all(there.split(4), x.split(4), there)
        else:
            host_copies.send_ahead(x.double(), there)
            host_copies.wait_for_copies()
    assert len(host_copies._UNDER_WAY) == 1
    assert how != "ahead" or late.said[1:] == ["main waits for side"]

    def lost(number):
        late.queue.clear()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(late, "finish_till", lost)
    with pytest.raises(RuntimeError, match="illegal"):
        host_copies.wait_for_copies()
    host_copies.wait_for_copies(failed=True)


def test_the_next_unit_comes_beside_this_one(late, monkeypatch):
    """Not into memory that kernels may be at, and nobody reads it too early."""
    given = layers(4, make=floats), floats(4, 4), simulated(1), ("shard", "offload")
    expected = trained(ADAM, chain(), *given)
    monkeypatch.setattr(host_copies, "can_copy_beside", lambda host, there: True)
    found = trained(ADAM, chain(), *given, params="host")
    same(found[0][0], expected[0][0])
    sent, arrived = "side waits for main", "main waits for a copy in side"
    said = [x for x in late.said if x in (sent, arrived)]
    after = [said[i + 1] for i, x in enumerate(said) if x == sent]
    assert after == [arrived] * 2 * 3  # in two steps
    assert set(late.kept) == {"main"}  # there it is used again in the stream's order


def test_what_was_sent_ahead_and_is_not_read(late):
    """Its memory is free when the copy is over, for the stream that it was made in."""
    home, room = Offloaded(HostMemory(), torch.device("cpu")), torch.empty(4)
    there = home.zeros(torch.arange(4.0), (4,))  # not copied by a stream
    coming = gathers._FetchAhead(room, host_copies.send_ahead(room, there))
    with late.in_stream(late.other):
        assert late.said == ["side waits for main"]
        del coming
    assert late.said[1:] == ["main waits for a copy in side"]
    coming = gathers._FetchAhead(room, host_copies.send_ahead(room, there))
    coming.wait()
    seen = len(late.said)
    del coming
    assert len(late.said) == seen and set(late.kept) == {"main"}
    host_copies.wait_for_copies()


@pytest.fixture
def pinned(late, monkeypatch):
    """The bytes that were pinned here, as on a machine with a GPU."""
    monkeypatch.setattr(stores, "_PINNED", stores._Pinned())
    monkeypatch.setattr(stores, "_WASTE", 1 << 10)
    return late.sizes


def test_large_memory_is_pinned_as_it_is_and_used_again(late, pinned):
    """torch would take half as much again or more, and to pin anew takes long."""
    store, cuda = HostMemory(), torch.device("cuda")
    x = store.empty(5_000, torch.float32, cuda)
    y = store.empty(5_000, torch.float32, cuda)
    assert pinned == [20_000] * 2 and x.data_ptr() != y.data_ptr()
    host_copies.send(x, torch.ones(5_000))
    at = x.data_ptr()
    del x
    assert late.queue
    z = HostMemory().empty(9_000, torch.bfloat16, cuda)
    assert len(pinned) == 2 and z.data_ptr() == at and space_of(z).offloaded
    assert not late.queue  # who had it before is through with it
    assert z.untyped_storage().nbytes() == 18_000
    store.empty(5_000, torch.float32, torch.device("cuda:1"))
    assert len(pinned) == 3  # that one is another's
    host_copies.wait_for_copies()


def test_no_more_pinned_memory_is_kept_than_is_used(late, pinned):
    store, cuda = HostMemory(), torch.device("cuda")
    kept = [store.empty(5_000 + 500 * i, torch.float32, cuda) for i in range(4)]
    at = [x.data_ptr() for x in kept]
    host_copies.send(kept[0], torch.ones(5_000))
    del kept[:2]
    assert not late.unpinned and late.queue
    del kept[:1]
    assert sorted(late.unpinned) == sorted(at[:2]) and not late.queue
    spaces = len(memory_spaces._SPACES.facts)
    del kept[:]
    assert sorted(late.unpinned) == sorted(at)
    assert len(memory_spaces._SPACES.facts) == spaces - 1
    host_copies.wait_for_copies()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_part_pinned_memory_from_its_pages(pinned):
    x = HostMemory().empty(5_000, torch.float32, torch.device("cuda"))
    read, write = os.pipe()
    if not (child := os.fork()):
        os.read(read, 1)
        x.fill_(2.0)  # as the GPU does, which has the pages of before
        os._exit(0)
    x.fill_(1.0)
    os.write(write, b"x")
    os.waitpid(child, 0)
    os.close(read), os.close(write)
    assert x.eq(2.0).all()


@pytest.mark.parametrize("refused", [False, True])
def test_memory_that_torch_pins_as_well(monkeypatch, late, pinned, refused):
    """What is near a power of two, and what the system does not let us pin."""
    asked, empty = [], torch.empty

    def noted(*size, pin_memory=False, **how):
        asked.append(pin_memory)
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", noted)
    late.pinned = not refused
    count = 5_000 if refused else 4_096
    HostMemory().allocate(count, torch.float32, torch.device("cuda"))
    assert asked[-1] and bool(pinned) is refused
    HostMemory().allocate(count, torch.float32, torch.device("cpu"))
    assert not asked[-1]


@pytest.mark.parametrize("code", [0, 1])
def test_pinning_that_is_refused_leaves_no_error(monkeypatch, code):
    """CUDA would raise it in the next kernel's launch, whosever that is."""
    said, device = [], torch.device("cuda", 1)

    class Runtime:
        def cudaHostRegister(self, address, size, flags):
            said.append((address, size, flags))
            return code

    def launched(*size, device):
        said.append(device)
        raise RuntimeError("CUDA error: invalid argument")

    @contextmanager
    def entered(device):
        said.append("in")
        yield
        said.append("out")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch, "ones", launched)
    assert host_copies.CUDA().pin(64, 128, device) is (code == 0)
    assert said == ["in", (64, 128, 0), *[device] * code, "out"]
