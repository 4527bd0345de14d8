"""Every row of the table of transposes, by typed dot products: <f(x), g> = <x, f'(g)>.

The tensors hold integers, multiples of 840 squared so that means of means over
ranks are exact too: the two sides are equal, not close.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm import linear_maps
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.groups import get_group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.operations import OPERATIONS
from fsfunc.testing.transposes import COTANGENT, draw_typed, pairing

TRANSPOSES = {
    (op, *kinds): row
    for op in (*OPERATIONS, *linear_maps.LOCAL_TRANSPOSES)
    for kinds, row in linear_maps.get_transposes(op).items()
}
PLAIN = sorted(TRANSPOSES)
# Each as it is, and with V under the mean on either side.
ROWS = sorted(
    (op, *kinds)
    for op, of, to in PLAIN
    for kinds in itertools.product(
        *["VM" if kind == "V" else kind for kind in (of, to)]
    )
)
# These take own values that are the same on every rank.
AGREEING = {("enter", "V", "V"), ("slice", "V", "V"), ("cast", "V", "R")}


def plain(row):
    return tuple(part.replace("M", "V") if len(part) == 1 else part for part in row)


def dot_products(how: LinearMap, sizes, axis, shape, seed):
    """((<y, g>, <x, gx>) of each group, whether every value has its type)."""
    mesh = ff.make_mesh(dict(zip("ab", sizes, strict=True)), "simulated")
    generator = torch.Generator().manual_seed(seed)
    n = mesh.axis_size(axis)
    shape = tuple(n * k for k in shape)  # whatever the op cuts, it divides
    of, row = how.of, plain((how.op, how.of, how.to))
    xs = draw_typed(of in "IR" or row in AGREEING, shape, mesh, axis, generator)
    out = how.apply_to_all([xs[0]] * n)[0].shape
    alike = COTANGENT[how.to] in "IR" or TRANSPOSES[row] in AGREEING
    gs = draw_typed(alike, out, mesh, axis, generator)

    def main(x, g):
        y, pull = torch.func.vjp(lambda x: apply_map(x, how, get_group(axis)), x)
        return y, pull(g)[0]

    ys, gxs = zip(*ff.spmd(main, mesh)(xs, gs), strict=True)
    pairs, kept = [], True
    for ranks in {mesh.members(axis, r) for r in range(mesh.size)}:
        y, g, x, gx = ([v[r] for r in ranks] for v in (ys, gs, xs, gxs))
        pairs.append((pairing(how.to, y, g), pairing(of, x, gx)))
        for kind, values in ((how.to, y), (COTANGENT[of], gx)):
            if kind in "IR":
                kept &= all(torch.equal(v, values[0]) for v in values)
    return pairs, kept


@st.composite
def examples(draw, op):
    """The fields of a move of this op, and a mesh of up to 4 ranks to run it on."""
    sizes = draw(
        st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(
            lambda s: s[0] * s[1] <= 4
        )
    )
    axis = draw(st.sampled_from(["a", "b", ("a", "b"), ("b", "a")]))
    n = {"a": sizes[0], "b": sizes[1]}.get(axis, sizes[0] * sizes[1])
    targets = draw(st.permutations(range(n)))
    sources = draw(st.permutations(range(n)))
    count = draw(st.integers(0, n))
    fields = {
        "dim": draw(st.integers(0, 1)),
        "to_dim": draw(st.integers(0, 1)),
        "source": draw(st.integers(0, n - 1)),
        "power": draw(st.integers(-1, 1)) if op in ("psum", "cast") else 0,
    }
    if op == "ppermute":
        fields["pairs"] = tuple(zip(sources[:count], targets[:count], strict=True))
    shape = draw(st.tuples(st.integers(0, 2), st.integers(1, 2)))
    return fields, sizes, axis, shape, draw(st.integers(0, 999))


@pytest.mark.parametrize("row", ROWS, ids="-".join)
@settings(max_examples=5)
@given(data=st.data())
def test_a_move_and_its_transpose_pair_alike(row, data):
    """And its transpose takes the cotangent types; there and back is the move."""
    fields, sizes, axis, shape, seed = data.draw(examples(row[0]))
    if row[0] == "enter":
        fields["power"] = -1  # what it is: the mean of what is equal
    how = LinearMap(*row, **fields)
    pairs, kept = dot_products(how, sizes, axis, shape, seed)
    assert all(left == right for left, right in pairs)
    assert kept
    back = how.transpose()
    assert (back.of, back.to) == (COTANGENT[how.to], COTANGENT[how.of])
    if how.op != "enter":  # whose way back is a psum, as good as none on what is equal
        assert back.transpose() == how
