"""Checkpoints that were written once, kept as they are: each is loaded as it was saved.

``python -m tests.checkpoint.test_earlier FOLDER`` writes such ones anew. Those beside
this file stay: a library that reads no longer what it wrote once would pass all else.
"""

import sys
import zlib
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.checkpoint.reading import prove
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import take
from tests.checkpoint.stacks import loss_fn, made, params_of
from tests.checkpoint.test_resharding import agree
from tests.checkpoint.trees import on
from tests.interop.models import Stack
from tests.optim.steps import data

EARLIER = Path(__file__).parent / "earlier"
HERE = {"data": 2}


def of_stack(name, **options):
    return lambda mesh: made(name, mesh, **options)[1]


def small_moments():
    return ff.sharded_adam(0.01, moment_dtype=torch.uint8)


def offloaded(mesh):
    optimizer = ff.sharded_adam(0.01)
    step = data(optimizer(ff.value_and_grad(loss_fn)), mesh)
    step = ff.offload(step, params="host", moments="host")
    batch = torch.zeros(4, dtype=torch.long)
    return ff.init_state(step, params_of, optimizer, batch)


def of_module(mesh):
    apply, params, buffers = ff.from_module(Stack(), units="blocks.*")
    step = ff.value_and_grad(lambda p, x: apply(p, buffers, x).sum())
    optimizer = ff.sharded_adam(0.01)
    step = ff.shard(optimizer(step), mesh, "data")
    batch = torch.zeros(4, 3, dtype=torch.long)
    return ff.init_state(step, params, optimizer, batch)


def of_any_kind(mesh):
    """Complex numbers of which safetensors has none, what each rank has, and values."""
    own = torch.arange(3.0) + mesh.rank
    halves = ff.Layout((4, 3), torch.complex128, (ff.Split(0, "data", 2),), "z")
    z = ff.Sharded(torch.zeros(2, 3, dtype=torch.complex128), halves)
    empty = torch.zeros(0, 3)
    return {"own": own, "z": z, "none": empty, "s": "text", "n": 3, "x": 0.5, "b": True}


# name -> the mesh that saved it (None: without one), and what makes the state there
KINDS = {
    "plain": (None, of_stack("one device")),
    "sharded": (HERE, of_stack("zero=3 on 2")),
    "stages": ({"data": 2, "pipe": 2}, of_stack("shard(pipeline)")),
    "small-moments": (HERE, of_stack("zero=3 on 2", opt=small_moments)),
    "offloaded": (HERE, offloaded),
    "module": (HERE, of_module),
    "any-kind": (HERE, of_any_kind),
}


def numbered(state, mesh, empty=False):
    """``state`` with numbers that its paths tell in the place of its tensors' values.

    Values that are each rank's own stay.
    """
    at = {} if mesh is None else mesh.coordinates()
    paths, leaves, treedef = tree.flatten_with_paths(state, is_leaf=is_sharded)

    def filled(path, x):
        if not is_sharded(x) and not isinstance(x, torch.Tensor):
            return type(x)() if empty else x
        like = x.local if is_sharded(x) else x
        if path == "own":
            return torch.zeros_like(x) if empty else x
        shape = x.layout.shape if is_sharded(x) else x.shape
        whole = torch.arange(torch.Size(shape).numel()) + zlib.crc32(path.encode()) % 99
        whole = (0 * whole if empty else whole).to(like.dtype).view(shape)
        if not is_sharded(x):
            return whole
        part = take(whole, x.layout, at)
        return ff.Sharded(like.new_zeros(part.shape).copy_(part), x.layout)

    both = zip(paths, leaves, strict=True)
    return tree.unflatten(treedef, [filled(path, x) for path, x in both])


def write(folder):
    for name, (axes, make) in KINDS.items():
        torch.manual_seed(0)
        on(
            axes,
            lambda mesh, make=make, name=name: ff.save(
                folder / name, numbered(make(mesh), mesh), metadata={"kind": name}
            ),
        )
        ff.consolidate(folder / name, folder / f"{name}.safetensors")


@pytest.mark.parametrize("where", ["{}", "{}.safetensors"])
@pytest.mark.parametrize("name", KINDS)
def test_what_was_written_earlier_is_loaded_as_it_was_saved(name, where):
    path = EARLIER / where.format(name)
    axes, make = KINDS[name]

    def load(mesh):
        state = make(mesh)
        found = ff.load(path, numbered(state, mesh, empty=True), random=False)
        agree(found, numbered(state, mesh))

    on(axes, load)
    stored = ff.metadata(path)
    assert stored.metadata == {"kind": name} and stored.mesh == (axes or {})
    assert prove(stored) >= stored.nbytes


def test_what_two_ranks_wrote_earlier_goes_to_one():
    state = made("one device", None)[1]
    found = ff.load(EARLIER / "stages", numbered(state, None, empty=True))
    agree(found, numbered(state, None))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
