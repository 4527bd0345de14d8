"""What lies beside the device trains to the same bits, in the memory that is promised.

On the CPU the device's memory and the host's are one: what counts as the device's is
told by the project's own accounts, and, of mapped files, by the system's.
"""

import ctypes
import errno
import gc
import itertools
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.runtime.memory_spaces import any_offloaded, space_of
from fsfunc.sharded.leaf import is_sharded
from fsfunc.testing import poison
from fsfunc.testing.drawn_models import rows
from fsfunc.testing.strategies import models
from tests import checks
from tests.checks import all_refused, held, refused, same, simulated, unchanged
from tests.models import chain, floats, layers, train_step

ADAM = ff.sharded_adam(0.01)
STACKS = {  # from the inside out; "offload" stands for what is drawn
    "outermost": ("accumulate", "remat", "shard", "offload", "donate"),
    "innermost": ("offload", "accumulate", "remat", "shard", "donate"),
    "within remat": ("shard", "offload", "remat"),
    "around donate": ("shard", "donate", "offload"),
    "microbatches reduced": ("precision", "shard", "accumulate", "offload"),
    "alone": ("offload",),
}


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """Nothing lies anywhere afterwards: whoever counts calls would count more."""
    yield
    gc.collect()
    assert not any_offloaded()


def stacked(step, names, mesh, zero, stores):
    """``step`` under these transforms."""
    for name in names:
        if name == "shard":
            step = ff.shard(step, mesh, "data", zero=zero)
        elif name == "accumulate":
            step = ff.accumulate(step, 2)
        elif name == "precision":
            step = ff.precision(step, torch.bfloat16, torch.float32)
        elif name == "offload":
            step = ff.offload(step, **stores) if stores else step
        else:
            step = getattr(ff, name)(step)
    return step


def buffers(t):
    """The memory of leaves that units take, and of what is like them."""
    found = {}
    for x in tree.leaves(t, is_leaf=is_sharded):
        if is_sharded(x) and x.packed is not None:
            if x.packed.flat.is_floating_point():
                found[id(x.packed)] = x.packed.flat
    return list(found.values())


def store_of(x):
    return getattr(space_of(x), "store", None)


def lie(t, where):
    """Whether all of it lies there."""
    found = [store_of(x) for x in buffers(t)]
    for x in tree.leaves(t, is_leaf=is_sharded):  # codes, factors: in none of these
        if is_sharded(x) and x.packed is None and x.local.ndim:
            found.append(store_of(x.local))
    return all((x and str(x)) == (where and str(where)) for x in found)


def trained(optimizer, loss, init, batch, mesh, names, zero=3, steps=2, **stores):
    """The state after some steps, whole, on each rank; what was sent; where it lay."""
    step = stacked(optimizer(ff.value_and_grad(loss)), names, mesh, zero, stores)
    return seen(step, init, optimizer, batch, mesh, steps, stores)


def seen(step, init, optimizer, batch, mesh, steps, stores):
    def look(state):
        lay = lie(state.params, stores.get("params"))
        return ff.unshard(state), lay and lie(state.opt_state, stores.get("moments"))

    torch.manual_seed(1)
    how = {"mesh": mesh, "steps": steps, "look": look}
    runs = checks.trained(step, init, optimizer, batch, **how)
    return [(r.seen[-1][0], r.logs[-1].table(), r.seen[-1][1]) for r in runs]


@settings(max_examples=6)
@given(
    models(frozen=False),
    st.sampled_from(sorted(STACKS)),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.sampled_from(["host", "disk", None]), min_size=3, max_size=3),
)
def test_any_step_is_the_one_that_offloads_nothing(
    tmp_path_factory, spec, stack, ranks, zero, where
):
    folder = str(tmp_path_factory.getbasetemp() / "offloaded")
    kinds = ("params", "moments", "activations")
    stores = {
        k: folder if w == "disk" else w for k, w in zip(kinds, where, strict=True)
    }
    if stack == "alone":
        stores["params"], ranks = None, 1
    stores = {k: w for k, w in stores.items() if w is not None} or {"moments": folder}
    loss = lambda params, batch: spec.loss(params, {}, batch)  # noqa: E731
    given = spec.params(3), rows(4 * ranks, 3), simulated(ranks), STACKS[stack]
    plain = trained(ADAM, loss, *given, zero)
    with poison():
        found = trained(ADAM, loss, *given, zero, **stores)
    for (state, sent, lay), (expected, before, _) in zip(found, plain, strict=True):
        same(state, expected)
        # A gather that is asked for too early, and made again, is what offload never
        # makes: units in a unit that is recomputed come back in another order.
        assert sent == before or spec.whole
        assert lay or stack == "alone"


OPTIMIZERS = {
    "clipped": ff.chain(ff.clip_by_global_norm(0.1), ADAM),
    "narrow moments": ff.sharded_adam(0.01, moment_dtype=torch.bfloat16),
    "some decay": ff.sharded_adam(0.01, mask=lambda path, leaf: leaf.ndim > 1),
    "sgd": ff.sgd(0.1, momentum=0.9),
    "torch's": ff.from_torch(torch.optim.RMSprop, lr=0.01),
    "scaled loss": ff.loss_scale(ADAM),
    "coded moments": ff.sharded_adam(0.01, moment_dtype=torch.uint8),
    "masters": ff.master_weights(ADAM),
    "factored": ff.adafactor(0.01),
    "averaged": ff.ema(ADAM, 0.9),
    "whole matrices": ff.partition(
        {"matrix": ff.muon(0.01), "other": ADAM},
        lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
    ),
}


def tied(params, x):
    """A loss that runs its units twice, there and back."""
    return chain()(params, x) + chain()(params[::-1], x)


SENT = {
    "as they are": {},
    "quantized": {"gather": ff.QuantizedGather(), "reduction": ff.QuantizedReduction()},
    "owed": {"reduction": ff.QuantizedReduction()},  # under error feedback
    "neighbours together": {"min_bytes": 200},
    "gathered once": {"reshard_after_forward": False},
    "each microbatch": {"reduce_each": True},
}
WITHIN = {  # from the inside out
    "nothing": (),
    "microbatches": ("accumulate",),
    "remat": ("remat",),
    "bf16": ("precision",),
    "all": ("precision", "accumulate", "remat"),
    "pipeline": ("pipeline",),
    "remat in a pipeline": ("remat", "pipeline"),
}


@settings(max_examples=4)
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(SENT)),
    st.sampled_from(sorted(WITHIN)),
    st.sampled_from([chain(), tied]),
    st.integers(2, 3),
    st.sampled_from(["params moments activations", "params", "moments", "activations"]),
    st.booleans(),
)
def test_whatever_else_a_step_is_made_of(
    tmp_path_factory, name, sent, within, loss, zero, kinds, donated
):
    """Messages, optimizers, pipelines: the bits are those of nothing offloaded."""
    folder = str(tmp_path_factory.getbasetemp() / "offloaded")
    axes = {"data": 2, "pipe": 2} if "pipeline" in WITHIN[within] else {"data": 2}
    loss = chain() if len(axes) > 1 else loss  # what stages share is refused
    mesh, x, optimizer = simulated(**axes), floats(8, 4), OPTIMIZERS[name]
    optimizer = ff.error_feedback(optimizer) if sent == "owed" else optimizer

    def found(where):
        step = optimizer(ff.value_and_grad(loss))
        for kind in WITHIN[within]:
            if kind == "pipeline":
                step = ff.pipeline(step, mesh, "pipe", n_microbatches=2)
            else:
                step = stacked(step, (kind,), mesh, 3, {})
        step = ff.shard(step, mesh, "data", zero=zero, **SENT[sent])
        step = ff.offload(step, **where) if where else step
        step = ff.donate(step) if donated else step
        return seen(step, layers(3, make=floats), optimizer, x, mesh, 2, where)

    pairs = zip(found(dict.fromkeys(kinds.split(), folder)), found({}), strict=True)
    for (state, _, lay), (expected, *_) in pairs:
        same(state, expected)
        assert lay


def test_factors_that_lie_beside_the_device_are_one_value_still():
    """They are plain tensors, whose layout is noted for the memory that they leave."""
    factored, given = ff.adafactor(0.01), (layers(3, make=floats), floats(8, 4))
    how = chain(), *given, simulated(), ("shard", "offload")
    plain = trained(factored, *how)
    for (state, sent, lay), (expected, before, _) in zip(
        trained(factored, *how, moments="host"), plain, strict=True
    ):
        same(state, expected)
        assert sent == before and lay


# Memory


def anonymous():
    """Bytes of memory that this process uses and that are no file's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is given back (glibc)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("not on Linux")


UNITS, WIDE = 48, 384
UNIT_BYTES = 4 * WIDE * WIDE


def test_a_state_of_48_units_trains_in_the_memory_of_two(tmp_path):
    """And none of the rest is anonymous memory, of which there may be little."""
    loss, x, mesh = chain(), floats(4, WIDE), simulated(1)
    names, draw = ("remat", "shard", "offload", "donate"), torch.Generator()

    def main(where, units=UNITS):
        def init():
            draw.manual_seed(0)
            make = lambda: torch.empty(WIDE, WIDE).uniform_(-0.1, 0.1, generator=draw)  # noqa: E731
            return [{"w": make()} for _ in range(units)]

        step = stacked(ADAM(ff.value_and_grad(loss)), names, mesh, 3, where)
        before = anonymous()
        state = ff.init_state(step, init, ADAM, x)
        size = sum(b.nbytes for b in buffers(state))
        state, _ = step(state, x)
        resident = anonymous() - before
        with ff.testing.live_bytes(state, x) as seen:
            state, _ = step(state, x)
        if where:
            planned = ff.plan(step, init, ADAM, x, mesh=mesh)
            assert planned.peak_bytes == seen.peak_bytes
        return size, seen.peak_bytes, resident, buffers(state)

    where = {"params": tmp_path, "moments": tmp_path}
    ff.spmd(lambda: main(where, 2), mesh)()  # the memory of Python and torch grows
    ((size, peak, resident, state),) = ff.spmd(lambda: main(where), mesh)()
    activations = (UNITS + 8) * x.nbytes  # their inputs, and one unit's inside
    assert size == 3 * UNITS * UNIT_BYTES
    assert peak <= 2 * UNIT_BYTES + activations
    assert size > 10 * peak
    assert size > 10 * resident, f"{resident} bytes of anonymous memory"
    ((_, most, _, expected),) = ff.spmd(lambda: main({}), mesh)()
    assert most > size
    same(state, expected)


@pytest.mark.parametrize(
    ("ranks", "kinds", "names", "zero"),
    [
        (2, "params moments", ("remat", "shard", "offload", "donate"), 3),
        (3, "params moments activations", ("accumulate", "shard", "offload"), 3),
        (2, "params moments", ("shard", "accumulate", "offload"), 3),
        (1, "params moments", ("accumulate", "remat", "shard", "offload"), 3),
        (2, "params moments", ("precision", "shard", "offload", "donate"), 2),
        (2, "params moments", ("remat", "shard", "accumulate", "offload"), 1),
        (1, "params moments", ("accumulate", "shard", "offload", "donate"), 2),
    ],
)
def test_a_step_has_the_room_of_two_units_as_planned(
    tmp_path, ranks, kinds, names, zero
):
    """No third for what is in flight: neither the next unit nor the last reduction.

    At zero 1 and 2 whole parameters beside it, in the dtype of the arithmetic.
    """
    units, wide, mesh = 6, 64, simulated(ranks)
    x = torch.zeros(4, wide)
    stores = dict.fromkeys(kinds.split(), tmp_path)
    step = stacked(ADAM(ff.value_and_grad(chain())), names, mesh, zero, stores)

    def main():
        params = [{"w": torch.eye(wide)} for _ in range(units)]
        state, _ = step(ff.init_state(step, params, ADAM, x), x)
        planned = ff.plan(step, state, x)
        with ff.testing.live_bytes(state, x) as seen, ff.ledger() as log:
            step(state, x)
        sent = log.count("all_gather", rank=mesh.rank)
        assert sent == planned.count("all_gather")
        return seen.peak_bytes, planned.peak_bytes, sent

    two = 2 * (4 * wide * wide + 4 * ranks)  # padded
    whole = units // (2 if "precision" in names else 1) * two // 2 if zero < 3 else 0
    for peak, planned, sent in ff.spmd(main, mesh)():
        assert peak == planned
        assert peak <= whole + two + (units + 8) * x.nbytes  # and activations
        assert zero == 3 or sent == (units if ranks > 1 else 0)


UNSHARDED = ["remat offload", "offload"]  # there is no ``zero``
SHARDED = ["remat offload shard", "offload remat shard"]


@pytest.mark.parametrize(
    ("order", "zero"),
    [*((order, 0) for order in UNSHARDED), *itertools.product(SHARDED, (0, 3))],
)
def test_what_units_save_is_not_held_on_the_device(tmp_path, order, zero):
    """The inputs that remat keeps too, whichever comes first, with what it gathers."""
    whole, x, sharded = layers(12, make=floats), floats(4096, 4), "shard" in order
    mesh = simulated(2) if sharded else None

    def peak(where):
        def main():
            step = ff.value_and_grad(chain())
            step = stacked(step, order.split(), mesh, zero, where)
            params = ff.place(step, whole, x) if sharded else whole
            step(params, x)
            with ff.testing.live_bytes(params, x) as seen:
                value, grads = step(params, x)
            if sharded:
                assert ff.plan(step, params, x).peak_bytes == seen.peak_bytes
            return seen.peak_bytes, (value, ff.unshard(grads) if sharded else grads)

        return ff.spmd(main, mesh)()[0] if sharded else main()

    (most, expected), (found, result) = peak({}), peak({"activations": tmp_path})
    same(result, expected)
    assert most > 12 * x.nbytes and found < 8 * x.nbytes


# What goes wrong


def placed_step(folder, donate=False):
    step = ff.shard(train_step(chain(), ADAM), simulated(1), "data")
    step = ff.offload(step, params=folder, moments=folder, activations=folder)
    return ff.donate(step) if donate else step


@pytest.mark.parametrize(
    ("how", "donate"), [("full", True), ("limit", False), ("gone", True)]
)
def test_a_disk_that_is_full_or_gone_leaves_the_state(
    tmp_path, monkeypatch, how, donate
):
    folder, x = tmp_path / "disk", floats(4, 4)
    calls = []

    def full(file, start, size):
        calls.append(size)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(file, size)

    def main():
        step = placed_step(folder, donate)
        make = lambda step: ff.init_state(step, layers(3, make=floats), ADAM, x)  # noqa: E731
        other = placed_step(tmp_path)
        state, expected = make(step), ff.unshard(other(make(other), x)[0])
        with monkeypatch.context() as patched, unchanged(state):
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            if how == "full":
                patched.setattr(os, "posix_fallocate", full)
            elif how == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (16, limit[1]))
            else:
                shutil.rmtree(folder)
            words = {"full": "No space left", "limit": "too large", "gone": "No such"}
            words = words[how]
            try:
                with pytest.raises(OSError, match=f"disk.*{words}.*room") as caught:
                    step(state, x)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            assert str(folder) in str(caught.value)
        folder.mkdir(exist_ok=True)
        assert not os.listdir(folder)
        same(ff.unshard(step(state, x)[0]), expected)

    ff.spmd(main, simulated(1))()


def test_a_saved_state_goes_back_to_where_its_target_lies(tmp_path):
    mesh, params, rows = simulated(), layers(2, make=floats), floats(4, 4)
    where = dict.fromkeys(("params", "moments"), tmp_path / "disk")
    plain = ff.shard(train_step(chain(), ADAM), mesh, "data")
    step = ff.offload(plain, **where)

    def main():
        x = ff.local_batch(rows, mesh, "data")
        state = step(ff.init_state(step, params, ADAM, x), x)[0]
        ff.save(tmp_path / "saved", state)
        expected = ff.unshard(state)
        target = ff.init_state(step, params, ADAM, x)
        abstract = ff.abstract_state(step, params, ADAM, x)
        for one, donate in ((target, False), (target, True), (abstract, False)):
            found = ff.load(tmp_path / "saved", one, donate=donate)
            same(ff.unshard(found), expected)
            assert lie(found, where["params"])
            after = step(found, x)[0]
            assert lie(after, where["params"])
        same(ff.unshard(after), ff.unshard(step(state, x)[0]))
        elsewhere = ff.load(tmp_path / "saved", ff.init_state(plain, params, ADAM, x))
        same(ff.unshard(elsewhere), expected)
        with pytest.raises(ValueError, match="init_state.*of the offloaded step"):
            step(elsewhere, x)
        return held(state)

    ff.spmd(main, mesh)()


def laid_out(zero=None, **stores):
    """A state of a step that offloads so."""
    mesh, step = simulated(1), train_step(chain(), ADAM)
    step = step if zero is None else ff.shard(step, mesh, "data", zero=zero)
    step = ff.offload(step, **stores)
    main = lambda: ff.init_state(step, layers(), ADAM, floats(4, 4))  # noqa: E731
    return ff.spmd(main, mesh)()


FILE = __file__


test_bad_input_is_refused = all_refused(
    {
        "nothing": (lambda: ff.offload(len), ValueError, "params=, moments= or"),
        "no path": (lambda: ff.offload(len, params=3), TypeError, "a folder's path"),
        "empty path": (lambda: ff.offload(len, params=""), TypeError, "folder's path"),
        "a file": (
            lambda: ff.offload(len, moments=FILE), OSError, "File exists.*or \"host\"",
        ),
        "in a file": (
            lambda: ff.offload(len, moments=f"{FILE}/x"), OSError, "test_offload.py/x",
        ),
        "no folders there": (
            lambda: ff.offload(len, params="/proc/nobody"), OSError, "/proc/nobody",
        ),
        "twice": (
            lambda: ff.offload(ff.offload(len, params="host"), params="host"),
            ValueError, "say it once",
        ),
        "no shard": (lambda: laid_out(params="host"), ValueError, "ff.shard.step"),
    }
)  # fmt: skip


def test_what_was_changed_in_place_is_still_refused(tmp_path):
    unit = ff.unit(lambda w, x: torch.exp(x @ w).add_(1))  # autograd needs what it was
    grad, w = ff.value_and_grad(lambda w, x: unit(w, x).sum()), floats(16, 16)
    step = ff.offload(grad, activations=tmp_path)
    refused(lambda: step(w, w), RuntimeError, "modified by an inplace operation")


@pytest.mark.parametrize("how", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}])
@pytest.mark.parametrize("inside", [True, False])
def test_kernels_that_are_replayed_are_refused(inside, how):
    jit = lambda f: ff.jit(f, **how)  # noqa: E731
    offload = lambda f: ff.offload(f, activations="host")  # noqa: E731
    grad = ff.value_and_grad(chain())
    grad = offload(jit(grad)) if inside else jit(offload(grad))
    with pytest.raises(ValueError, match="max-autotune-no-cudagraphs"):
        grad(layers(1), floats(4, 4))
