"""A tree's tensors whole, one at a time: equal to unshard's, in bytes and bits.

As a program, on three processes, it prints a line of JSON for each rank.
"""

import json
import os
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.sharded.leaf import is_sharded
from tests.checkpoint.stacks import STACKS, made
from tests.checkpoint.trees import (
    MESHES,
    alike,
    any_bits,
    laid_out,
    layouts,
    on,
    shapes,
)
from tests.checks import same, simulated
from tests.covering import examples

SENDABLE = [torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool]
MESH = simulated(3)


@st.composite
def leaves_of_one_mesh(draw):
    axes = draw(st.sampled_from(MESHES))
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(SENDABLE)), max_size=3))
    whole = {f"w{i}": any_bits(*kind, i) for i, kind in enumerate(kinds)}
    how = [draw(layouts(x.shape, x.dtype, axes, path)) for path, x in whole.items()]
    size = torch.Size(axes.values()).numel()
    return axes, how, whole, draw(st.sampled_from([None, size - 1]))


def sent(act, mesh):
    """What it returns, and the bytes that this rank sends meanwhile, with the ops."""
    with ff.ledger() as log:
        out = act()
    rank = mesh.rank if mesh is not None else 0
    return out, [(r.op, r.bytes) for r in log.of(rank)]


@settings(max_examples=examples(24), deadline=None)
@given(leaves_of_one_mesh())
def test_any_layout_becomes_what_unshard_makes_of_it_for_the_same_bytes(drawn):
    axes, how, whole, only = drawn

    def main(mesh):
        t = laid_out(whole, how, mesh)
        found, cost = sent(lambda: dict(ff.whole_leaves(t, only=only)), mesh)
        expected, as_much = sent(lambda: ff.unshard(t, only=only), mesh)
        assert cost == as_much
        if only is None or mesh is None or mesh.rank == only:
            assert list(found) == list(whole)
            assert all(alike(found[k], whole[k]) for k in whole)
            assert all(alike(expected[k], whole[k]) for k in whole)
        else:
            assert found == {}

    on(axes, main)


@pytest.mark.parametrize(
    "name", [n for n in STACKS if n not in ("one device", "zero=3 on 1")]
)
def test_the_parameters_of_every_stack(name):
    """For the bytes that a closed form of the layouts says, on all ranks and on one."""

    def main(mesh):
        _, state, _ = made(name, mesh)
        everywhere, cost = sent(lambda: dict(ff.whole_leaves(state.params)), mesh)
        on_one, less = sent(lambda: dict(ff.whole_leaves(state.params, only=1)), mesh)
        leaves = [x for x in tree.leaves(state.params, is_sharded) if is_sharded(x)]
        at = mesh.coordinates(mesh.rank)
        assert sum(n for _, n in cost) == sum(
            bytes_on_all(x.layout, at) for x in leaves
        )
        assert sum(n for _, n in less) == sum(
            x.local.nbytes if is_asked(x.layout, mesh) else 0 for x in leaves
        )
        return everywhere, on_one, by_path(ff.unshard(state.params))

    for rank, (everywhere, on_one, whole) in enumerate(on(STACKS[name][0], main)):
        same(everywhere, whole)
        same(on_one, whole if rank == 1 else {})


def by_path(t):
    return dict(zip(tree.paths(t), tree.leaves(t), strict=True))


def bytes_on_all(layout, at):
    """An all-gather of parts, and of a stage's leaf a broadcast to the other stages."""
    owners, nbytes = dict.fromkeys(p.axis for p in layout.owners), Fraction(0)
    for p in layout.owners:
        nbytes += Fraction(p.size - 1, p.size) * layout.nbytes
    if all(at[p.axis] == p.coordinate for p in layout.owners):
        others = {a: n for a, n in layout.sizes.items() if a not in owners}
        n = torch.Size(others.values()).numel()
        spots = [at | {**dict(zip(others, c, strict=True))} for c in all_of(others)]
        largest = max(torch.Size(layout.local_shape(s)).numel() for s in spots)
        nbytes += (n - 1) * largest * layout.dtype.itemsize
    return nbytes


def all_of(axes):
    return torch.cartesian_prod(*map(torch.arange, axes.values())).view(
        -1, len(axes)
    ).tolist() if axes else [[]]  # fmt: skip


def is_asked(layout, mesh):
    """Whether this rank's part goes to rank 1: it is another, and no other copy."""
    one, here = mesh.coordinates(1), mesh.coordinates(mesh.rank)
    copies = [a for a in mesh.axes if a not in layout.axes]
    return mesh.rank != 1 and all(one[a] == here[a] for a in copies)


# Memory


FLAGS = 256  # bytes by which three ranks tell that they go on


@pytest.mark.parametrize("kind", ["flat", "rows", "stage"])
def test_one_leaf_is_made_at_a_time(kind):
    """Bytes beside the state, counted while a loop keeps no leaf, on every rank."""
    n, count, size = 3 * 1024, 6, 3
    nbytes = 4 * n

    def place(i):
        layout = {
            "flat": ff.Flat(("data",), size, "u", 0, n // size),
            "rows": ff.Split(0, "data", size),
            "stage": ff.Owned("data", size, i % size),
        }[kind]
        return ff.Layout((3, n // 3), torch.float32, (layout,), f"w{i}")

    def main(mesh):
        state = {}
        for i in range(count):
            layout = place(i)
            part = torch.full(layout.local_shape(mesh.coordinates()), float(i))
            state[f"w{i}"] = ff.Sharded(part, layout)
        held = sum(x.local.nbytes for x in state.values())
        rises = []
        for only in (None, 0):
            leaves = ff.whole_leaves(state, only=only)
            with ff.testing.live_bytes(state) as seen:
                for _, x in leaves:
                    del x
            rises.append(seen.peak_bytes - held)
        with ff.testing.live_bytes(state) as seen:
            ff.unshard(state)
        assert seen.peak_bytes - held >= count * nbytes  # which the bound is far below
        return rises

    for rank, (on_all, on_one) in enumerate(on({"data": size}, main)):
        assert on_all <= 2 * nbytes + nbytes // size + FLAGS
        once = 2 if kind == "rows" else 1
        assert on_one <= (once * nbytes if rank == 0 else 0) + FLAGS


# Names


def test_names_are_the_modules_own_and_tied_ones_are_there_once():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    apply, params, _ = ff.from_module(model, units="*")

    def main():
        f = ff.shard(lambda p, x: apply(p, {}, x).sum(), MESH, "data")
        placed = ff.place(f, params, torch.ones(1, 2))
        renamed = lambda path: None if path == "1.bias" else f"m.{path}"  # noqa: E731
        return dict(ff.whole_leaves(placed)), dict(
            ff.whole_leaves(placed, rename=renamed)
        )

    for found, renamed in ff.spmd(main, MESH)():
        same(found, {k: x.detach() for k, x in model.named_parameters()})
        same(renamed, {f"m.{k}": x for k, x in found.items() if k != "1.bias"})


def test_a_leaf_at_two_paths_comes_under_both_names():
    def main(mesh):
        x = part_of(mesh)
        return dict(ff.whole_leaves({"a": x, "b": x, "step": 3}))

    for found in on({"data": 3}, main):
        same(found, {"a": WHOLE, "b": WHOLE})


WHOLE = torch.arange(9.0).view(3, 3)
ROWS = ff.Layout((3, 3), torch.float32, (ff.Split(0, "data", 3),), "w")


def part_of(mesh, dtype=torch.float32):
    return ff.Sharded(WHOLE[mesh.rank : mesh.rank + 1].to(dtype), ROWS)


def test_a_cast_is_made_before_what_is_sent():
    def main(mesh):
        t = {"w": part_of(mesh), "n": ff.lay_like(torch.tensor(7), torch.tensor(7))}
        with ff.ledger() as log:
            found = dict(ff.whole_leaves({"w": t["w"]}, dtype=torch.bfloat16))
        return found, log.bytes(rank=mesh.rank)

    for found, nbytes in on({"data": 3}, main):
        same(found, {"w": WHOLE.bfloat16()})
        assert nbytes == 2 * 3 * 2


@pytest.mark.parametrize("store", ["host", "folder"])
def test_offloaded_parameters(store, tmp_path):
    where = "host" if store == "host" else tmp_path
    optimizer = ff.sharded_adam(0.1)
    unit = ff.unit(lambda w, x: torch.tanh(x @ w))

    def step(state, x):
        loss = lambda ws, x: unit(ws[1], unit(ws[0], x)).sum()  # noqa: E731
        value, grads = ff.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads, optimizer), value

    def main():
        f = ff.donate(ff.offload(ff.shard(step, MESH, "data"), params=where))
        x = torch.ones(1, 3)
        state = ff.init_state(f, [WHOLE, WHOLE + 1], optimizer, x)
        before = dict(ff.whole_leaves(state.params))
        state, _ = f(state, x)
        return before, dict(ff.whole_leaves(state.params)), ff.unshard(state.params)

    for before, after, expected in ff.spmd(main, MESH)():
        same(before, {"0": WHOLE, "1": WHOLE + 1})
        same(after, {"0": expected[0], "1": expected[1]})


# Training goes on


def trained(mesh):
    unit, optimizer = ff.unit(lambda w, x: torch.tanh(x @ w)), ff.sgd(0.1)

    def step(state, x):
        loss = lambda ws, x: unit(ws["b"], unit(ws["a"], x)).sum()  # noqa: E731
        value, grads = ff.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads, optimizer), value

    f, x = ff.donate(ff.shard(step, mesh, "data")), torch.ones(1, 3)
    state = ff.init_state(f, {"a": WHOLE, "b": WHOLE + 1}, optimizer, x)
    return f, state, x


def test_tensors_are_no_views_of_a_state_that_is_donated_later():
    def main(mesh):
        f, state, x = trained(mesh)
        found = dict(ff.whole_leaves(state.params))
        before = {k: x.clone() for k, x in found.items()}
        f(state, x)
        same(found, before)

    on({"data": 2}, main)


@pytest.mark.parametrize("only", [None, 0])
def test_nor_of_parts_that_are_all_of_a_leaf(only):
    """Over axes of one rank, where nothing is sent; ``unshard`` copies them too."""
    kinds = (
        ff.Owned("data", 1, 0),
        ff.Split(0, "data", 1),
        ff.Flat(("data",), 1, "u", 0, 9),
    )

    def main(mesh):
        layouts = [ff.Layout((3, 3), torch.float32, (part,)) for part in kinds]
        t = [
            ff.Sharded(WHOLE.clone().view(x.local_shape(mesh.coordinates())), x)
            for x in layouts
        ]
        found = [x for _, x in ff.whole_leaves(t, only=only)]
        found += ff.unshard(t, only=only)
        for x in t:
            x.local.zero_()
        same(found, [WHOLE] * 6)

    on({"data": 1}, main)


def test_a_state_that_is_donated_meanwhile_is_refused_on_every_rank():
    def main(mesh):
        f, state, x = trained(mesh)
        leaves = ff.whole_leaves(state.params)
        next(leaves)
        f(state, x)
        with pytest.raises(RuntimeError, match="donated"):
            next(leaves)
        return ff.psum(torch.ones(()), "data").item()  # ranks are still in step

    assert on({"data": 2}, main) == [2, 2]


def test_a_state_that_is_not_donated_may_be_trained_meanwhile():
    def main(mesh):
        t, found = {"a": part_of(mesh), "b": part_of(mesh)}, {}
        for name, x in ff.whole_leaves(t):
            found[name] = x
            ff.psum(x, "data")
        return found

    for found in on({"data": 3}, main):
        same(found, {"a": WHOLE, "b": WHOLE})


# A consumer that stops


def in_step(mesh):
    """Whether the next collective of each rank meets that of the others."""
    return ff.psum(torch.ones(()), "data").item() == mesh.size


def test_all_may_stop_at_one_place():
    def main(mesh):
        taken = []
        for name, _ in ff.whole_leaves({k: part_of(mesh) for k in "abc"}):
            taken.append(name)
            if name == "b":
                break
        return taken, in_step(mesh)

    assert on({"data": 3}, main) == [(["a", "b"], True)] * 3


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_rank_that_stops_alone_is_named_on_those_that_go_on(after):
    def main(mesh):
        leaves = ff.whole_leaves({k: part_of(mesh) for k in "abc"})
        if mesh.rank == 1:
            for _ in range(after):
                next(leaves)
            leaves.close()
        else:
            said = (
                rf"rank 1 stopped after {after} of 3 leaves.*asks for '{'abc'[after]}'"
            )
            with pytest.raises(RanksDiffer, match=said):
                list(leaves)
        return in_step(mesh)

    assert on({"data": 3}, main) == [True] * 3


def test_a_rank_that_stops_after_the_last_leaf_has_taken_all():
    def main(mesh):
        leaves = ff.whole_leaves({"a": part_of(mesh)})
        next(leaves)
        if mesh.rank == 1:
            leaves.close()
        else:
            assert list(leaves) == []
        return in_step(mesh)

    assert on({"data": 3}, main) == [True] * 3


@pytest.mark.parametrize("stops_at", ["a", "b", "c"])
def test_where_the_one_rank_stops_the_others_end(stops_at):
    def main(mesh):
        taken = []
        for name, x in ff.whole_leaves({k: part_of(mesh) for k in "abc"}, only=2):
            taken.append(name)
            same(x, WHOLE)
            if name == stops_at:
                break
        return taken, in_step(mesh)

    all_taken = list("abc"["abc".index("a") : "abc".index(stops_at) + 1])
    assert on({"data": 3}, main) == [([], True), ([], True), (all_taken, True)]


def test_an_error_of_a_consumer_is_what_is_raised():
    def main(mesh):
        for name, _ in ff.whole_leaves({k: part_of(mesh) for k in "abc"}, only=2):
            raise KeyError(f"the engine has no {name}")

    with pytest.raises(KeyError, match="the engine has no a"):
        on({"data": 3}, main)


# Refused


def test_what_cannot_be_given_whole_is_refused_before_anything_is_sent():
    def main(mesh):
        x, own = part_of(mesh), torch.full((2,), 1.0 * mesh.rank)
        f = ff.shard(lambda t, x: x.sum(), mesh, "data")
        carried = ff.place(f, {"h": own}, own, layouts={"h": ff.Own("data")})
        both = lambda path: "w"  # noqa: E731
        with ff.ledger() as log:
            for t, how, error, said in (
                (
                    {"x": x, **carried},
                    {},
                    ValueError,
                    "'h' is each rank's own .*rename=",
                ),
                ({"x": x, "h": own}, {}, RanksDiffer, "'h': rank 0: .*checksum"),
                (
                    {"x": x.with_local(x.local.to("meta"))},
                    {},
                    ValueError,
                    "meta device",
                ),
                ({"x": x}, {"only": 3}, ValueError, r"only=3\).*from 0 to 2"),
                ({"x": x}, {"dtype": torch.int8}, ValueError, "floating dtype"),
                (
                    {"a": x, "b": x},
                    {"rename": both},
                    ValueError,
                    "'a' and 'b' would both",
                ),
                (
                    {"x": x},
                    {"only": mesh.rank},
                    RanksDiffer,
                    "only=: rank 0: 0; rank 1: 1",
                ),
                ({"x": x} if mesh.rank else {"y": x}, {}, RanksDiffer, "'x': rank 0"),
            ):
                with pytest.raises(error, match=said):
                    ff.whole_leaves(t, **how)
        assert log.of(mesh.rank) == []
        same(dict(ff.whole_leaves({"x": x, "n": torch.ones(2)}))["n"], torch.ones(2))
        return in_step(mesh)

    assert on({"data": 3}, main) == [True] * 3


def test_one_ranks_error_is_raised_on_all():
    def main(mesh):
        def rename(path):
            return path if mesh.rank else {}[path]

        with pytest.raises(KeyError, match="w"):
            ff.whole_leaves({"w": part_of(mesh)}, rename=rename)
        return in_step(mesh)

    assert on({"data": 3}, main) == [True] * 3


def test_inside_of_a_step_unshard_is_named():
    def loss(p, x):
        return sum(w.sum() for _, w in ff.whole_leaves(p)) + x.sum()

    def main():
        step = ff.shard(loss, MESH, "data")
        ff.place(step, {"w": WHOLE}, torch.ones(1))

    with pytest.raises(RuntimeError, match=r"inside of a step.*ff\.unshard"):
        ff.spmd(main, MESH)()


def test_without_a_mesh_tensors_are_copied():
    t = {"w": WHOLE.clone(), "step": 3, "none": None}
    found = dict(ff.whole_leaves(t, dtype=torch.float32))
    t["w"].zero_()
    same(found, {"w": WHOLE})


# Processes


KINDS = {
    "flat": (torch.float32, ff.Flat(("data",), 3, "u", 0, 4)),
    "rows": (torch.bfloat16, ff.Split(0, "data", 3)),
    "stage": (torch.float32, ff.Owned("data", 3, 1)),
    "columns": (torch.int16, ff.Split(1, "data", 3)),
    "empty": (torch.float32, ff.Owned("data", 3, 2)),
}


def claims(mesh, folder):
    """What is found, and sent, where all goes well and where a rank stops."""
    whole, how = {}, []
    for name, (dtype, part) in KINDS.items():
        shape = (0, 2) if name == "empty" else (3, 3)
        whole[name] = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        how.append(ff.Layout(shape, dtype, (part,), name))
    placed = laid_out(dict(sorted(whole.items())), sorted(how, key=by_name), mesh)
    found, said = [], []
    for only in (None, 2):
        for act in (lambda n: dict(ff.whole_leaves(placed, only=n)),
                    lambda n: ff.unshard(placed, only=n)):  # fmt: skip
            out, cost = sent(lambda act=act, only=only: act(only), mesh)
            found.append({k: x.tolist() for k, x in out.items() if x is not None})
            said.append([(op, str(n)) for op, n in cost])
    ff.export(folder / "model", placed, max_bytes=20)
    stops = []
    for only in (None, 0):
        leaves = ff.whole_leaves(placed, only=only)
        try:
            for name, _ in leaves:
                stops.append(name)
                if mesh.rank == 0 and name == "empty":
                    leaves.close()
        except RanksDiffer as error:
            stops.append(str(error)[:40])
        stops.append(in_step(mesh))
    return [found, said, stops]


def by_name(layout):
    return layout.name


def main():
    torch.set_num_threads(1)
    mesh = ff.make_mesh({"data": 3})
    line = json.dumps([mesh.rank, claims(mesh, Path(sys.argv[1]))])
    os.write(1, f"{line}\n".encode())
    torch.distributed.destroy_process_group()


@pytest.mark.processes
def test_processes_find_and_send_what_simulated_ranks_do(processes, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    found = dict(
        map(json.loads, processes(Path(__file__), 3, str(tmp_path / "a")).splitlines())
    )
    expected = on({"data": 3}, lambda mesh: claims(mesh, tmp_path / "b"))
    assert found == dict(enumerate(json.loads(json.dumps(expected))))
    assert [stops for _, _, stops in expected] == [
        ["columns", "empty", True, "columns", "empty", True],
        ["columns", "empty", "rank 0 stopped after 2 of 5 leaves, and ", True, True],
        ["columns", "empty", "rank 0 stopped after 2 of 5 leaves, and ", True, True],
    ]
    for name in os.listdir(tmp_path / "b/model"):
        one, other = (tmp_path / f / "model" / name for f in "ab")
        assert one.read_bytes() == other.read_bytes()


if __name__ == "__main__":
    main()
