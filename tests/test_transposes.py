"""Every row of the table of transposes, by typed dot products: <f(x), g> = <x, f'(g)>.

The tensors hold integers, multiples of 840 so that means over up to 8 ranks are exact
too: the two sides are equal, not close.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import moves
from fsfunc.launching import PerRank
from fsfunc.moves import Move
from fsfunc.moving import group, move

ROWS = sorted(moves._TRANSPOSES)
COTANGENT = {"V": "V", "I": "I", "R": "P", "P": "R", "M": "M"}


def pairing(kind: str, xs, gs) -> Fraction:
    """<x, g> over the ranks of one group, where x is of this type and g of its dual."""
    each = [Fraction((x * g).sum().item()) for x, g in zip(xs, gs, strict=True)]
    if kind == "I":
        return each[0]
    if kind == "P":  # g is equal on all ranks, x in parts: <sum of parts, g>
        return Fraction((sum(xs) * gs[0]).sum().item())
    if kind == "R":
        return Fraction((xs[0] * sum(gs)).sum().item())
    return sum(each) / (len(each) if kind == "M" else 1)


def typed(kind: str, shape, mesh, axis, generator) -> PerRank:
    """Integers for every rank: the same ones in a group where the type says so."""
    made = {}
    for rank in range(mesh.size):
        key = mesh.members(axis, rank) if kind in "IR" else rank
        if key not in made:
            made[key] = 840.0 * torch.randint(-9, 10, shape, generator=generator)
    keys = [mesh.members(axis, r) if kind in "IR" else r for r in range(mesh.size)]
    return PerRank([made[key].double() for key in keys])


def dot_products(how: Move, sizes, axis, shape, seed):
    """((<y, g>, <x, gx>) of each group, whether every value has its type)."""
    mesh = ff.make_mesh(dict(zip("ab", sizes, strict=True)), "simulated")
    generator = torch.Generator().manual_seed(seed)
    n = mesh.axis_size(axis)
    shape = tuple(n * k for k in shape)  # whatever the op cuts, it divides
    of = "I" if how.op == "enter" else how.of  # which only takes equal values
    xs = typed(of, shape, mesh, axis, generator)
    out = how.across([xs[0]] * n)[0].shape
    gs = typed(COTANGENT[how.to], out, mesh, axis, generator)

    def main(x, g):
        y, pull = torch.func.vjp(lambda x: move(x, how, group(axis)), x)
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
    """The fields of a move of this op, and a mesh of up to 8 ranks to run it on."""
    sizes = draw(
        st.tuples(st.integers(1, 8), st.integers(1, 8)).filter(
            lambda s: s[0] * s[1] <= 8
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
        "mean": op in ("psum", "cast") and draw(st.booleans()),
    }
    if op == "ppermute":
        fields["pairs"] = tuple(zip(sources[:count], targets[:count], strict=True))
    shape = draw(st.tuples(st.integers(0, 2), st.integers(1, 2)))
    return fields, sizes, axis, shape, draw(st.integers(0, 999))


@pytest.mark.parametrize("row", ROWS, ids="-".join)
@given(data=st.data())
def test_a_move_and_its_transpose_pair_alike(row, data):
    fields, sizes, axis, shape, seed = data.draw(examples(row[0]))
    pairs, kept = dot_products(Move(*row, **fields), sizes, axis, shape, seed)
    assert all(left == right for left, right in pairs)
    assert kept


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_a_transpose_takes_the_cotangent_types(row):
    """From the dual of ``to`` to the dual of ``of``; and there and back is the row."""
    back = moves._TRANSPOSES[row]
    assert back[1:] == (COTANGENT[row[2]], COTANGENT[row[1]])
    if row[0] != "enter":  # I seen as M: the way back is a psum, as good as none
        assert moves._TRANSPOSES[back] == row


@pytest.mark.parametrize("op", ["psum", "cast", "all_gather", "psum_scatter"])
def test_a_transpose_forgets_no_field(op):
    to = {"psum": "I", "cast": "V"}.get(op, "V")
    of = {"cast": "I"}.get(op, "V")
    how = Move(op, of, to, dim=1, source=2, mean=True)
    assert how.transpose().transpose() == how


PLANTED = [
    (("psum", "V", "I"), ("psum", "V", "I"), 4),
    (("all_gather", "V", "I"), ("psum_scatter", "V", "V"), 4),
    (("psum", "P", "R"), ("cast", "V", "P"), None),
    (("all_gather", "V", "M"), ("psum_scatter", "V", "V"), 4),
    (("psum_scatter", "V", "V"), ("embed", "V", "P"), None),
    (("cast", "I", "V"), ("cast", "I", "V"), None),
    (("cast", "I", "R"), ("cast", "P", "I"), None),
    (("pbroadcast", "V", "V"), ("keep", "I", "V"), None),
    (("ppermute", "V", "V"), ("cast", "V", "V"), None),
    (("slice", "R", "V"), ("all_gather", "V", "I"), 4),
    (("keep", "I", "P"), ("psum", "P", "I"), 4),
    (("enter", "M", "M"), ("cast", "M", "M"), None),
]


@pytest.mark.parametrize(("row", "wrong", "ratio"), PLANTED, ids=lambda v: str(v))
def test_a_wrong_transpose_is_caught(row, wrong, ratio, monkeypatch):
    monkeypatch.setitem(moves._TRANSPOSES, row, wrong)
    how = Move(*row, dim=1, source=1, pairs=((0, 1), (2, 0)) * (row[0] == "ppermute"))
    pairs, kept = dot_products(how, (4, 1), "a", (1, 2), seed=3)
    ((left, right),) = pairs
    assert left != right or not kept
    if ratio is not None:
        assert right == ratio * left != 0


def test_turned_pairs_are_needed(monkeypatch):
    """A ppermute whose transpose keeps its pairs is caught too."""
    turned = Move.transpose

    def unturned(self):
        back = turned(self)
        return Move(back.op, pairs=self.pairs)

    how = Move("ppermute", pairs=((0, 1), (1, 2)))
    ((left, right),), _ = dot_products(how, (3, 1), "a", (1, 1), seed=0)
    assert left == right
    monkeypatch.setattr(Move, "transpose", unturned)
    ((left, right),), _ = dot_products(how, (3, 1), "a", (1, 1), seed=0)
    assert left != right
