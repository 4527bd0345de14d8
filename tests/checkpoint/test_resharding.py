"""What was saved by any layout on any mesh is loaded by any other, bit by bit."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.slices import take
from tests.checkpoint.stacks import STACKS, abstract, made
from tests.checkpoint.trees import alike, laid_out, on, saved_and_asked
from tests.checks import same
from tests.covering import examples


def agree(found, expected):
    """Raises unless two trees hold the same bits."""
    paths, xs, treedef = tree.flatten_with_paths(found)
    ys, expected_treedef = tree.flatten(expected)
    assert treedef == expected_treedef
    for path, x, y in zip(paths, xs, ys, strict=True):
        assert alike(x, y), f"{path}: {x} is not {y}"


@settings(max_examples=examples(15))
@given(saved_and_asked(), st.booleans())
def test_any_layout_is_loaded_by_any_other(drawn, is_abstract):
    (there, saved_by), (here, asked_by), whole = drawn

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step-1")

        def save(mesh):
            ff.save(path, laid_out(whole, saved_by, mesh), metadata={"from": there})

        def load(mesh):
            target = laid_out(whole, asked_by, mesh, is_abstract, empty=True)
            before = tree.map(lambda x: x, target)
            found = ff.load(path, target)
            agree(found, laid_out(whole, asked_by, mesh))
            if not is_abstract:
                agree(target, before)

        on(there, save)
        on(here, load)
        stored = ff.metadata(path)
        assert stored.metadata == {"from": there} and stored.mesh == there
        assert [p.name for p in Path(folder).iterdir()] == ["step-1"]
        tensors = {
            p: x
            for p, x in zip(tree.paths(whole), tree.leaves(whole), strict=True)
            if isinstance(x, torch.Tensor)
        }
        assert stored.leaves == {p: (x.shape, x.dtype) for p, x in tensors.items()}
        assert stored.nbytes == sum(x.nbytes for x in tensors.values())
        # Each element is written once, whatever the number of its replicas.
        held = [
            (c.file, c.begin, x.dtype.itemsize * torch.Size(c.sizes).numel())
            for p, x in tensors.items()
            for c in stored.tensors[p].chunks
        ]
        assert sum(n for *_, n in held) == stored.nbytes


VIEWS = {
    "transposed": lambda x: x.t(),
    "every other": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1),
    "conjugate": lambda x: x.conj(),
    "negative": lambda x: x.conj().imag,
    "part of a buffer": lambda x: x[1:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_saved_as_it_reads(tmp_path, view):
    x = VIEWS[view](torch.randn(3, 4, dtype=torch.complex64))
    ff.save(tmp_path / "a", {"x": x})
    found = ff.load(tmp_path / "a", {"x": torch.zeros_like(x).contiguous()})
    assert torch.equal(found["x"], x)


@pytest.fixture(scope="module")
def trained():
    """The whole state after two steps on one device, after a third, and its loss."""
    step, state, mine = made("one device", None)
    for batch in mine[:2]:
        state, _ = step(state, batch)
    third, metrics = step(state, mine[2])
    return state, third, metrics["loss"].item()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, trained):
    """That state as every stack saves it: where."""
    folder = tmp_path_factory.mktemp("stacks")
    ff.save(folder / "whole", trained[0])
    for i, (name, (axes, _)) in enumerate(STACKS.items()):

        def main(mesh, name=name, path=folder / str(i)):
            _, target, _ = made(name, mesh, seed=8)
            ff.save(path, ff.load(folder / "whole", abstract(target)))

        on(axes, main)
    return {name: folder / str(i) for i, name in enumerate(STACKS)}


@pytest.mark.slow  # from stacks to stacks
@pytest.mark.parametrize("name", STACKS)
def test_every_stack_loads_what_any_saved(name, saved, trained):
    """Parameters, moments and the count; and it goes on from there, to rounding."""
    expected, third, loss = trained

    def main(mesh):
        step, target, mine = made(name, mesh, seed=8)
        first = tree.map(lambda x: x.clone() if is_tensor(x) else x, target)
        parts = tree.map(part_of(mesh), target, expected, is_leaf=ff.is_sharded)
        # An eighth of them: any layout to any other is drawn above.
        at = list(STACKS).index(name)
        for source, path in list(saved.items())[at % 8 :: 8]:
            state = ff.load(path, target)
            try:
                same(state, parts)
            except AssertionError as error:
                raise AssertionError(f"saved by {source}: {error}") from error
        same(target, first)
        whole = state if mesh is None else ff.unshard(state)
        same(whole, expected)
        state, metrics = step(state, mine[2])
        whole = state if mesh is None else ff.unshard(state)
        return whole, metrics["loss"].item()

    for state, found in on(STACKS[name][0], main):
        assert found == pytest.approx(loss, rel=1e-6)
        assert state.step == 3
        torch.testing.assert_close(state.params, third.params, rtol=1e-5, atol=1e-5)


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def part_of(mesh):
    """What a rank should hold of a whole leaf, laid out as another is."""

    def part(leaf, whole):
        if not ff.is_sharded(leaf):
            return whole
        return leaf.with_local(take(whole, leaf.layout, mesh.coordinates()))

    return part
