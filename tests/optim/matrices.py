"""Steps over trees of matrices, laid out by units, whose gradients are given."""

import torch
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.mesh import here
from fsfunc.sharded.layout import Layout, pack_flat
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.placements import Owned, Split
from fsfunc.sharded.slices import assemble, take

DIMS = st.one_of(st.integers(1, 9), st.just(0))
UNITS = st.lists(
    st.lists(st.tuples(DIMS, DIMS), min_size=1, max_size=3), min_size=1, max_size=2
)


def drawn(shapes, seed):
    """Trees of these shapes by unit, of numbers whose means over ranks are exact."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randint(-64, 65, tuple(shape), generator=generator) / 64

    return [{f"w{i}": draw(s) for i, s in enumerate(unit)} for unit in shapes]


@ff.unit
def linear(params, factors):
    return sum((p * factors[name]).sum() for name, p in params.items())


def loss(params, batch):
    """Of which ``batch`` is the gradient."""
    return sum(linear(p, x) for p, x in zip(params, batch, strict=True))


def trained(optimizer, shapes, steps=2, transform=lambda step: step):
    """The whole parameters after some steps, and the state."""
    step = transform(optimizer(ff.value_and_grad(loss)))
    state = ff.init_state(step, drawn(shapes, 0), optimizer, drawn(shapes, 1))
    for i in range(steps):
        state, _ = step(state, drawn(shapes, i + 1))
    return ff.unshard(state.params), state


def by_hand(values, plan):
    """This rank's part of whole tensors, which lie as the layouts by path say."""
    at = here().mesh.coordinates()
    paths, leaves, treedef = tree.flatten_with_paths(values)
    shards, made = {}, {}
    for layout in plan.values():
        if layout.flat:
            key = layout.flat.buffer, layout.owned
            shards.setdefault(key, []).append(layout)
    for members in shards.values():
        absent = members[0].block(at) is None
        own = {axis: at[axis] for axis in members[0].axes}
        flat = torch.zeros(0 if absent else members[0].flat.chunk)
        shard = FlatShard(tuple(members), flat, own)
        made.update({leaf.name: leaf for leaf in shard.leaves()})
    for path, x in zip(paths, leaves, strict=True):
        if path in made:
            made[path].local.copy_(take(x, plan[path], at))
        elif path in plan:
            made[path] = Sharded(take(x, plan[path], at).clone(), plan[path])
        else:
            made[path] = x.clone()
    return tree.unflatten(treedef, [made[path] for path in paths])


def together(by_rank, mesh):
    """The whole trees of which each rank holds its part."""

    def join(*parts):
        if not is_sharded(parts[0]):
            return parts[0]
        places = [mesh.coordinates(rank) for rank in range(mesh.size)]
        held = list(zip(places, [x.local for x in parts], strict=True))
        return assemble(held, parts[0].layout)

    return tree.map(join, *by_rank, is_leaf=is_sharded)


def mixed(axes):
    """Whole matrices, and how they lie: split, owned, flat over one axis or two."""
    shapes = {
        "ab": [(4, 5), (3, 3), (7, 2)],
        "ba": [(5, 4), (2, 6)],
        "split": [(7, 4), (4, 6)],
        "stage": [(6, 3), (2, 2)],
        "model": [(5, 3), (3, 7)],
        "whole": [(3, 4)],
    }
    values = {k: dict(enumerate(v)) for k, v in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    values = {
        k: {f"{i}": torch.randn(s, generator=generator) for i, s in v.items()}
        for k, v in values.items()
    }
    m, d = axes["model"], axes["data"]

    def packed(unit, over, outer=None):
        names = [f"{unit}/{i}" for i in range(len(shapes[unit]))]
        sizes = [axes[a] for a in over]
        flats = pack_flat(
            shapes[unit], torch.float32, names, over, sizes, unit, outer=outer
        )
        return dict(zip(names, flats, strict=True))

    both = [(Split(i, "model", m),) for i in range(2)]
    plan = packed("ab", ["model", "data"]) | packed("ba", ["data", "model"])
    plan |= packed("split", ["data"], both)
    plan |= packed("stage", ["data"], [(Owned("model", m, m - 1),)] * 2)
    for i, shape in enumerate(shapes["model"]):
        path = f"model/{i}"
        parts = (Split(1 - i, "model", m),) if i else (Owned("data", d, 0),)
        plan[path] = Layout(shape, torch.float32, parts, path)
    return values, plan
