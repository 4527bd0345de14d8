"""Trees laid out over simulated ranks by hand: flat, split, owned and replicated."""

import torch
from hypothesis import strategies as st

from fsfunc import tree
from fsfunc.comm.mesh import here
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.sharded.placements import Owned, Split
from fsfunc.sharded.slices import assemble, take

MESHES = st.sampled_from(
    [{"data": n, "model": 1} for n in (2, 1, 3, 5)]
    + [{"data": 2, "model": 2}, {"data": 1, "model": 3}]
)


def draws(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def whole(seed):
    """A model of three units, a split leaf, an owned one and a replicated one."""
    draw = draws(seed)
    return {
        "first": {"w": draw(3, 5), "b": draw(5), "scale": draw(), "none": draw(0, 2)},
        "second": [draw(4, 4), draw(2)],
        "both": {"b": draw(5), "w": draw(7, 3)},
        "split": draw(7, 2),
        "owned": draw(3),
        "norm": draw(6),
        "steps": torch.tensor(3),
    }


def packed(values, unit, axes, over, outer=None):
    """By path, how the leaves of a unit lie in one buffer over some axes."""
    pairs = zip(tree.paths(values), tree.leaves(values), strict=True)
    shapes = {p: tuple(x.shape) for p, x in pairs if p.split("/")[0] == unit}
    sizes, names = [axes[a] for a in over], list(shapes)
    if not names:
        return {}
    outer = outer and [(part,) for part in outer]
    dims = list(shapes.values())
    flats = pack_flat(dims, torch.float32, names, over, sizes, unit, outer=outer)
    return dict(zip(names, flats, strict=True))


def layouts(values, axes):
    """A buffer over one axis, one over two, and one of split leaves' parts."""
    split, owned = Split(0, "model", axes["model"]), Owned("data", axes["data"], 0)
    found = packed(values, "first", axes, ["data"])
    found |= packed(values, "second", axes, ["data", "model"])
    found |= packed(values, "both", axes, ["data"], [split] * 2)
    for name, part in (("split", split), ("owned", owned)):
        shape = tuple(values[name].shape)
        found[name] = Layout(shape, torch.float32, (part,), name)
    return found


def mixed(axes):
    """Whole matrices, and how they lie: split, owned, flat over one axis or two."""
    m, d, draw = axes["model"], axes["data"], draws(0)
    values = {
        "ab": [draw(4, 5), draw(3, 3), draw(7, 2)],
        "ba": [draw(5, 4), draw(2, 6)],
        "split": [draw(7, 4), draw(4, 6)],
        "stage": [draw(6, 3), draw(2, 2)],
        "model": [draw(5, 3), draw(3, 7)],
        "whole": [draw(3, 4)],
    }
    plan = packed(values, "ab", axes, ["model", "data"])
    plan |= packed(values, "ba", axes, ["data", "model"])
    plan |= packed(
        values, "split", axes, ["data"], [Split(i, "model", m) for i in (0, 1)]
    )
    plan |= packed(values, "stage", axes, ["data"], [Owned("model", m, m - 1)] * 2)
    for i, part in enumerate([Owned("data", d, 0), Split(0, "model", m)]):
        shape = tuple(values["model"][i].shape)
        plan[f"model/{i}"] = Layout(shape, torch.float32, (part,), f"model/{i}")
    return values, plan


def placed(values, plan):
    """This rank's part of whole tensors; the leaves of a buffer share a shard."""
    at, shards, made = here().mesh.coordinates(), {}, {}
    for layout in plan.values():
        if layout.flat:
            key = layout.flat.buffer, layout.owners
            shards.setdefault(key, []).append(layout)
    for members in shards.values():
        absent = members[0].block(at) is None
        own = {axis: at[axis] for axis in members[0].axes}
        flat = torch.zeros(0 if absent else members[0].flat.chunk)
        shard = FlatShard(tuple(members), flat, own)
        made.update({leaf.name: leaf for leaf in shard.leaves()})

    def part(path, x):
        if path not in plan:
            return x.clone()
        local = take(x, plan[path], at)
        if path not in made:
            return Sharded(local.clone(), plan[path])
        made[path].local.copy_(local)
        return made[path]

    paths, leaves, treedef = tree.flatten_with_paths(values)
    return tree.unflatten(treedef, list(map(part, paths, leaves)))


def place(values, axes):
    return placed(values, layouts(values, axes))


def together(by_rank, mesh):
    """The whole trees of which each rank holds its part."""

    def join(*parts):
        if not is_sharded(parts[0]):
            return parts[0]
        places = [mesh.coordinates(rank) for rank in range(mesh.size)]
        held = list(zip(places, [x.local for x in parts], strict=True))
        return assemble(held, parts[0].layout)

    return tree.map(join, *by_rank, is_leaf=is_sharded)


def unshard(by_rank, mesh):
    """The whole parameters, of which each rank gave its part and the state beside."""
    return together([params for params, _ in by_rank], mesh)
