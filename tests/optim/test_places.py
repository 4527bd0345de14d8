"""Parameters, gradients and moments of which some lie with the host: where they meet.

The device is "meta" here, which needs no GPU and computes nothing, and the host's
memory is real: a mode holds each operation to tensors of one of them, as a GPU does.
That the numbers are right is seen where the device is the CPU, and on a card.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsfunc as ff
from fsfunc import tree
from fsfunc.optim.leaves import floating
from fsfunc.optim.optimizer import apply_updates
from fsfunc.runtime.memory_spaces import Offloaded, moments_go_to, space_of
from fsfunc.sharded.leaf import is_sharded
from fsfunc.transforms.offloading import settled_in
from tests.checks import simulated
from tests.optim.optimizers import EVERY, TORCHS
from tests.optim.shards import layouts, mixed, placed, whole
from tests.optim.trees import donated

DEVICE = torch.device("meta")
AXES = {"data": 1, "model": 1}  # what is on "meta" cannot be sent


class Host(ff.Store):
    """The host's memory, also for a device without any."""

    kind = "host"

    def empty(self, count, dtype, device):
        x = torch.zeros(count, dtype=dtype)
        return Offloaded(self, torch.device(device)).mark(x)

    scratch = empty


class Apart(TorchDispatchMode):
    """Computes with tensors of the host, or of the device: with both it raises.

    As for a GPU, numbers without a dim may be the host's, and copies go anywhere.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = {x.device.type for x in given if x.ndim or x.is_meta}
        if name in ("copy_", "_foreach_copy_"):
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


def laid(values, store, dtype):
    """The tree on the device, but for what is sharded, where a store is given."""

    def to(x, sharded):
        dt = dtype if x.is_floating_point() else x.dtype
        if store is not None and sharded:
            return store.empty(x.numel(), dt, DEVICE).view(x.shape)
        return torch.empty(x.shape, dtype=dt, device=DEVICE)

    return moved(values, to)


def places(values):
    """By leaf, its device, and whether it is offloaded."""

    def where(x):
        x = x.local if is_sharded(x) and x.packed is None else x
        x = x.packed.flat if is_sharded(x) else x
        return (x.device, space_of(x).offloaded) if isinstance(x, torch.Tensor) else x

    return [where(x) for x in tree.leaves(values, is_leaf=is_sharded)]


def given(matrices, dtype):
    """What a rank holds: leaves of all layouts; or matrices alone."""
    values, plan = mixed(AXES) if matrices else (whole(0), None)
    plan = layouts(values, AXES) if plan is None else plan
    return placed(values, {k: replace(x, dtype=dtype) for k, x in plan.items()})


MATRICES = ("muon", "shampoo")
NARROW = ("master_weights", "scaled masters", "stochastic_rounding")
ALONE = ("adascale", "step_in_backward", "powersgd")  # see gradients being taken
OF_TORCH = "RMSprop"  # for all classes
NAMES = [x for x in EVERY if x not in ALONE and (x not in TORCHS or x == OF_TORCH)]
KINDS = ["params", "moments", "params moments"]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_computed_with_each_other_lies_together(name, kinds):
    """In three steps: into new memory, into the old, and as an update."""
    stores = {kind: Host() for kind in kinds.split()}
    params_in, moments_in = stores.get("params"), stores.get("moments")
    dtype = torch.bfloat16 if name in NARROW else torch.float32

    def main():
        optimizer, values = EVERY[name](), given(name in MATRICES, dtype)
        with Apart():
            params = laid(values, params_in, dtype)
            grads = floating(laid(values, params_in, dtype))
            with moments_go_to(moments_in):
                state = optimizer.init(params)
            state = settled_in(moments_in, state) if moments_in else state
            before = places(params)
            params, state = optimizer.apply(grads, state, params)
            assert places(params) == before
            with donated(params, state):
                params, state = optimizer.apply(grads, state, params)
            assert places(params) == before
            updates, _ = optimizer.update(grads, state, params)
            params = apply_updates(params, updates)
            assert places(params) == before

    ff.spmd(main, simulated(**AXES))()
