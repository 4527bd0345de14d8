"""Parameters, gradients and moments of which some lie with the host: where they meet.

The device is "meta" here, which needs no GPU and computes nothing, and the host's
memory is real: a mode holds each operation to tensors of one of them, as a GPU does.
That the numbers are right is seen where the device is the CPU.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsfunc as ff
from fsfunc import tree
from fsfunc.optim.leaves import trainable_only
from fsfunc.optim.optimizer import apply_updates
from fsfunc.runtime.memory_spaces import Offloaded, moments_go_to, space_of
from fsfunc.sharded.leaf import is_sharded
from fsfunc.transforms.offloading import moved_to
from tests.checks import same, simulated
from tests.covering import by_turns
from tests.optim.optimizers import EVERY, TORCHS
from tests.optim.shards import layouts, mixed, placed, whole
from tests.optim.trees import donated

AXES = {"data": 1, "model": 1}  # what is on "meta" cannot be sent


class Host(ff.Store):
    """The host's memory, also for a device without any; its copies are its own."""

    kind, copying = "host", 0

    def copy(self, out, x, *, private=False):
        Host.copying += 1
        try:
            return out.copy_(x)
        finally:
            Host.copying -= 1

    def empty(self, count, dtype, device):
        x = torch.zeros(count, dtype=dtype)
        return Offloaded(self, torch.device(device)).mark(x)

    scratch = empty


class Apart(TorchDispatchMode):
    """Computes with tensors of the host, or of the device: with both it raises.

    As for a GPU, numbers without a dim may be the host's. What is copied from one to
    the other is by the store.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = {x.device.type for x in given if x.ndim or x.is_meta}
        if name in ("copy_", "_foreach_copy_"):
            if len(there) > 1 and not Host.copying:
                raise AssertionError(f"{name} from {sorted(there)}, not by the store")
            return args[0] if name == "copy_" else None
        if name == "_to_copy":
            how = {k: kwargs[k] for k in ("dtype", "device") if kwargs.get(k)}
            return torch.empty_like(args[0], **how)
        if len(there) > 1 and name != "_foreach_norm":  # takes each by itself then
            raise AssertionError(f"{name} of tensors on {sorted(there)}")
        if there == {"meta"}:  # what torch asks a real device
            if "_fused_" in name:
                return None
            if name == "_local_scalar_dense":
                return 1.0
            if name == "is_set_to":
                return args[0] is args[1]
        return func(*args, **kwargs)


def moved(values, to):
    """The tree over other memory: ``to(x, sharded)`` of each buffer."""
    shards = {}

    def one(leaf):
        if not is_sharded(leaf):
            return to(leaf, False) if isinstance(leaf, torch.Tensor) else leaf
        if (shard := leaf.packed) is None:
            return leaf.with_local(to(leaf.local, True))
        if id(shard) not in shards:
            made = shard.like(to(shard.flat, True)).leaves()
            shards[id(shard)] = dict(zip(map(id, shard.members), made, strict=True))
        return shards[id(shard)][id(leaf.layout)]

    return tree.map(one, values, is_leaf=is_sharded)


def laid(values, store, dtype, device):
    """The tree on the device, but for what is sharded, where a store is given."""

    def to(x, sharded):
        kind = dtype if x.is_floating_point() else x.dtype
        if store is None or not sharded:
            return x.to(device, kind, copy=True)
        return store.empty(x.numel(), kind, device).view(x.shape).copy_(x)

    return moved(values, to)


def places(values):
    """By leaf, its device, and whether it is offloaded."""

    def where(x):
        x = x.local if is_sharded(x) and x.packed is None else x
        x = x.packed.flat if is_sharded(x) else x
        return (x.device, space_of(x).offloaded) if isinstance(x, torch.Tensor) else x

    return [where(x) for x in tree.leaves(values, is_leaf=is_sharded)]


def given(matrices, dtype, seed):
    """What a rank holds: leaves of all layouts; or matrices alone."""
    values, plan = mixed(AXES) if matrices else (whole(seed), None)
    plan = layouts(values, AXES) if plan is None else plan
    return placed(values, {k: replace(x, dtype=dtype) for k, x in plan.items()})


MATRICES = ("muon", "shampoo")
NARROW = ("master_weights", "scaled masters", "stochastic_rounding")
ALONE = ("adascale", "step_in_backward", "powersgd")  # see gradients being taken
OF_TORCH = "RMSprop"  # for all classes
NAMES = [x for x in EVERY if x not in ALONE and (x not in TORCHS or x == OF_TORCH)]
KINDS = ["params", "moments", "params moments"]


def stepped(name, kinds, device):
    """Parameters and updates of four steps, and where the parameters lie after each.

    The first is made in new memory, the second in the old, the third of gradients on
    the device, and the last one by updates.
    """
    stores = {kind: Host() for kind in kinds.split()}
    params_in, moments_in = stores.get("params"), stores.get("moments")
    dtype = torch.bfloat16 if name in NARROW else torch.float32
    matrices, optimizer = name in MATRICES, EVERY[name]()
    of_params, of_grads = (given(matrices, dtype, seed) for seed in (0, 1))
    how = {"dtype": dtype, "device": device}
    with Apart() if device.type == "meta" else nullcontext():
        params = laid(of_params, params_in, **how)
        near, far = (
            trainable_only(laid(of_grads, x, **how)) for x in (None, params_in)
        )
        with moments_go_to(moments_in):
            state = optimizer.init(params)
        state = moved_to(moments_in, state) if moments_in else state
        lying, seen = [places(params)], []
        for grads, over in (far, False), (far, True), (near, False):
            with donated(params, state) if over else nullcontext():
                params, state = optimizer.apply(grads, state, params)
            lying.append(places(params))
            seen.append(moved(params, lambda x, _: x.clone()))
        updates, _ = optimizer.update(far, state, params)
        params = apply_updates(params, updates)
        lying.append(places(params))
    return (seen, updates, params), lying


def on_a_rank(name, kinds, device):
    return ff.spmd(stepped, simulated(**AXES))(name, kinds, device)[0]


@pytest.mark.parametrize(("name", "kinds"), by_turns(NAMES, KINDS, 2))
def test_what_is_computed_with_each_other_lies_together(name, kinds):
    """On the device, or with the host; and parameters stay where they lie."""
    _, (before, *after) = on_a_rank(name, kinds, torch.device("meta"))
    assert after == [before] * 4


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_nothing_offloaded(name):
    """What is brought to be computed with is put back."""
    expected, _ = on_a_rank(name, "", torch.device("cpu"))
    for kinds in KINDS:
        same(on_a_rank(name, kinds, torch.device("cpu"))[0], expected)


def test_a_number_of_the_device_scales_what_the_host_computed():
    """As an update that a function of one's own made of a gradient with the host."""
    gain, there = torch.ones((), device="meta"), torch.ones(2, device="meta")
    mine = Host().empty(2, torch.float32, "meta")
    with Apart():
        for updates in ([mine + 1], [mine + 1, there], [mine, there], [mine, mine + 1]):
            found = ff.tree_scale(updates, gain)
            assert [x.device for x in found] == [x.device for x in updates]
