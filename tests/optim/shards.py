"""Trees laid out over simulated ranks by hand: flat, split, owned and replicated."""

import torch
from hypothesis import strategies as st

from fsfunc import tree
from fsfunc.comm.mesh import here
from fsfunc.sharded.layout import Layout, pack_flat
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.placements import Owned, Split
from fsfunc.sharded.slices import assemble, take

MESHES = st.sampled_from(
    [{"data": n, "model": 1} for n in (1, 2, 3, 5, 8)]
    + [{"data": 2, "model": 3}, {"data": 1, "model": 4}]
)


def whole(seed):
    """A model of three units, a split leaf, an owned one and a replicated one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "first": {"w": draw(3, 5), "b": draw(5), "scale": draw(), "none": draw(0, 2)},
        "second": [draw(4, 4), draw(2)],
        "both": {"b": draw(5), "w": draw(7, 3)},
        "split": draw(7, 2),
        "owned": draw(3),
        "norm": draw(6),
        "steps": torch.tensor(3),
    }


def layouts(values, axes):
    """By path, how each leaf lies.

    A flat buffer over one axis, one over two, and one of split leaves' parts.
    """
    paths, leaves, _ = tree.flatten_with_paths(values)
    shapes = {p: tuple(x.shape) for p, x in zip(paths, leaves, strict=True)}
    found = {}
    for unit, over in (("first", ["data"]), ("second", ["data", "model"])):
        names = [p for p in paths if p.startswith(unit)]
        packed = pack_flat(
            [shapes[p] for p in names],
            torch.float32,
            names,
            over,
            [axes[a] for a in over],
            unit,
        )
        found.update(zip(names, packed, strict=True))
    names = [p for p in paths if p.startswith("both")]
    cut = (Split(0, "model", axes["model"]),)
    packed = pack_flat(
        [shapes[p] for p in names],
        torch.float32,
        names,
        ["data"],
        axes["data"],
        "both",
        outer=[cut] * len(names),
    )
    found.update(zip(names, packed, strict=True))
    split, owned = Split(0, "model", axes["model"]), Owned("data", axes["data"], 0)
    found["split"] = Layout(shapes["split"], torch.float32, (split,), "split")
    found["owned"] = Layout(shapes["owned"], torch.float32, (owned,), "owned")
    return found


def place(values, axes):
    """This rank's part of ``values``; the leaves of a unit share a shard."""
    at = here().mesh.coordinates()
    plan, shards = layouts(values, axes), {}
    for layout in plan.values():
        if layout.flat:
            shards.setdefault(layout.flat.buffer, []).append(layout)
    made = {}
    for members in shards.values():
        own = {axis: at[axis] for axis in members[0].axes}
        chunk = members[0].flat.chunk
        shard = FlatShard(tuple(members), torch.zeros(chunk), own)
        made.update({leaf.name: leaf for leaf in shard.leaves()})

    def part(path, x):
        if path not in plan:
            return x.clone()
        local = take(x, plan[path], at)
        if path not in made:
            return Sharded(local.clone(), plan[path])
        made[path].local.copy_(local)
        return made[path]

    names = iter(tree.paths(values))
    leaves, treedef = tree.flatten(values)
    return tree.unflatten(treedef, [part(next(names), x) for x in leaves])


def unshard(by_rank, mesh):
    """The whole parameters, of which each rank gave its part and the state beside."""

    def join(*parts):
        if not is_sharded(parts[0]):
            return parts[0]
        places = [mesh.coordinates(rank) for rank in range(mesh.size)]
        held = list(zip(places, [x.local for x in parts], strict=True))
        return assemble(held, parts[0].layout)

    parts = [params for params, _ in by_rank]
    return tree.map(join, *parts, is_leaf=is_sharded)
