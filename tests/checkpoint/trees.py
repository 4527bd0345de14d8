"""Trees of any leaves on any mesh, by any layout, for the laws of checkpoints.

And a small one, whole or split over two ranks.
"""

import torch
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.sharded.slices import take

MESHES = [
    {}, {"data": 2}, {"data": 1}, {"data": 3}, {"data": 5}, {"node": 2, "data": 2},
    {"pipe": 3, "data": 2},
]  # fmt: skip
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
NAMES = ["w", "b", "0", "layers.1.weight", "größe", "a b", "w.1", "%s", "'"]
lengths = st.integers(0, 5)
shapes = st.one_of(
    st.lists(lengths, max_size=4).map(tuple),
    st.sampled_from([(), (0,), (1,), (9,), (17,), (3, 0, 2), (1, 1, 7), (2, 3, 4)]),
)
values = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"])),
)


def any_bits(shape, dtype, seed):
    """A tensor of random bits, so that there are NaNs of every kind among them."""
    draw = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=draw).bool()
    sizes = (*shape, dtype.itemsize)
    raw = torch.randint(256, sizes, generator=draw, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(x):
    """The bits of a tensor, which `torch.equal` compares."""
    x = x.detach().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def alike(x, y):
    """Whether two leaves are equal, NaNs by their bits, and of one kind."""
    if isinstance(y, torch.Tensor):
        same = x.dtype == y.dtype and x.shape == y.shape
        return same and torch.equal(bits(x), bits(y))
    return type(x) is type(y) and (x == y or x != x and y != y)


@st.composite
def layouts(draw, shape, dtype, axes, name):
    """Any layout of a leaf over some of the axes of a mesh."""
    chosen = draw(st.permutations(list(axes)))[: draw(st.integers(0, len(axes)))]
    n_flat = draw(st.integers(0, len(chosen)))
    outer = []
    for axis in chosen[n_flat:]:
        if shape and draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            outer.append(ff.Split(dim, axis, axes[axis]))
        else:
            owner = draw(st.integers(0, axes[axis] - 1))
            outer.append(ff.Owned(axis, axes[axis], owner))
    if not n_flat:
        return ff.Layout(shape, dtype, tuple(outer), name)
    flat = chosen[:n_flat]
    others = [draw(shapes), shape, draw(shapes)]
    sizes = [axes[axis] for axis in flat]
    return pack_flat(
        others, dtype, ["x", name, "y"], flat, sizes, "u", outer=[(), outer, ()]
    )[1]


@st.composite
def saved_and_asked(draw):
    """(mesh, layouts) to save by, (mesh, layouts) to load by, and the whole tree."""
    axes = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    leaf = st.tuples(shapes, st.sampled_from(DTYPES), st.integers(0, 99))
    trees = st.recursive(
        st.one_of(leaf.map(Drawn), values),
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=6,
    )
    drawn = draw(trees)
    whole = tree.map(lambda x: x.whole() if isinstance(x, Drawn) else x, drawn)
    sides = []
    for on in axes:
        how = [
            draw(layouts(x.shape, x.dtype, on, path)) if isinstance(x, Drawn) else None
            for path, x in zip(tree.paths(drawn), tree.leaves(drawn), strict=True)
        ]
        sides.append((on, how))
    return sides[0], sides[1], whole


class Drawn:
    """A leaf to be: its shape, dtype and seed."""

    def __init__(self, said):
        self.shape, self.dtype, self.seed = said

    def whole(self):
        return any_bits(self.shape, self.dtype, self.seed)

    def __repr__(self):
        return f"{self.dtype}{list(self.shape)}"


def laid_out(whole, how, mesh, abstract=False, empty=False):
    """This rank's parts of a whole tree."""
    at = {} if mesh is None else mesh.coordinates()
    leaves, treedef = tree.flatten(whole)
    return tree.unflatten(
        treedef,
        [
            _part(x, layout, at, abstract, empty)
            for x, layout in zip(leaves, how, strict=True)
        ],
    )


def _part(x, layout, at, abstract, empty):
    if layout is None:
        return type(x)() if empty else x
    part = take(x, layout, at).clone()
    if abstract:
        part = part.to("meta")
    elif empty:
        bits(part).fill_(0xA5 if x.dtype is not torch.bool else 1)
    return ff.Sharded(part, layout) if layout.parts else part


def on(axes, main):
    """What ``main(mesh)`` returns on every simulated rank, or without a mesh."""
    if not axes:
        return [main(None)]
    mesh = ff.make_mesh(axes, "simulated")
    return ff.spmd(lambda: main(mesh), mesh)()


# A small tree


PAIR = {"data": 2}


def tree_of(n=6, step=3):
    layers = [{"w": torch.arange(1.0 * n).view(2, -1), "b": torch.ones(3) * i}
              for i in range(2)]  # fmt: skip
    return {"params": {"layers": layers, "h": torch.ones(2).bfloat16()}, "step": step}


def empty(state):
    zero = lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0  # noqa: E731
    return ff.tree.map(zero, state)


def split(n):
    """The layouts of ``tree_of`` on two ranks, in the order of its leaves."""
    half = ff.Split(1, "data", 2)
    w = ff.Layout((2, n // 2), torch.float32, (half,))
    return [None if x == "step" else w if x == "w" else ff.Layout(*x)
            for x in (((2,), torch.bfloat16), B, "w", B, "w", "step")]  # fmt: skip


B = (3,), torch.float32


def save_on_two(path, n=6, **options):
    """Saves `tree_of` with the matrices split over two ranks."""
    state = tree_of(n)
    on(PAIR, lambda mesh: ff.save(path, laid_out(state, split(n), mesh), **options))
    return state
