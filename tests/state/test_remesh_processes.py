"""`ff.remesh` over processes: what it sends, what it refuses, and a death meanwhile.

That a whole run goes on while processes come and die: examples/test_elastic.py.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.launch import PerRank
from tests.checks import same, simulated
from tests.state.test_remeshing import begin, train

pytestmark = pytest.mark.processes

Processes = Callable[..., str]

# Each program begins so: processes meet by a store that none of them holds.
MEET = """
    import os, pathlib, sys, torch, torch.distributed as dist, fsfunc as ff
    from datetime import timedelta
    from fsfunc import tree
    from fsfunc.sharded.leaf import is_sharded
    from tests.state.moves import adam, params_of
    from tests.state.test_remeshing import rows_of, stepped
    number, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, wait_for_workers=False)

    def meet(name, numbers, **axes):
        # The mesh of the processes with these numbers, in this order.
        if dist.is_initialized():
            dist.destroy_process_group()
        if number not in numbers:
            return None
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=numbers.index(number),
            world_size=len(numbers), timeout=timedelta(seconds=30),
        )
        return ff.make_mesh(axes)

    def begin(mesh):
        step = stepped(mesh, replicate="node")
        return ff.init_state(step, params_of, adam(), rows_of(mesh))

    def parts(state):
        leaves = tree.leaves(state, is_leaf=is_sharded)
        return [x.local if is_sharded(x) else x for x in leaves]

    def keep(what, name):
        torch.save(what, folder / name)
"""


def parts_of(state: object) -> list:
    leaves = ff.tree.leaves(state, is_leaf=ff.is_sharded)
    return [x.local if ff.is_sharded(x) else x for x in leaves]


GROWS = """
    mesh, state = meet("one", [1, 2], node=1, data=2), None
    torch.manual_seed(number)
    if mesh is not None:
        state, _ = stepped(mesh, replicate="node")(begin(mesh), rows_of(mesh))
        keep(torch.get_rng_state(), f"drawn {mesh.rank}")
    later = meet("two", [1, 2, 0, 3], node=2, data=2)
    with ff.ledger() as log:
        state = ff.remesh(state, later, on=mesh)
    keep((parts(state), torch.get_rng_state(), int(log.bytes())), f"grown {later.rank}")
    state, _ = stepped(later, replicate="node")(state, rows_of(later))
    # Rank 1 of them, number 2, is gone: its replica has the same. Rank 3 is 1 now.
    last = meet("three", [1, 3, 0], node=1, data=3)
    if last is not None:
        with ff.ledger() as log:
            state = ff.remesh(state, last, on=later)
        keep((parts(state), int(log.bytes())), f"shrunk {last.rank}")
    # And one is left alone, and then is not.
    pair, state = meet("four", [3, 0], node=2, data=1), None
    state = None if pair is None else begin(pair)
    alone = meet("five", [0], node=1, data=1)
    if alone is not None:
        state = ff.remesh(state, alone, on=pair)
        keep(parts(state), "alone")
    both = meet("six", [0, 2], node=1, data=2)
    if both is not None:
        state = ff.remesh(state if number == 0 else None, both, on=alone)
        keep(parts(state), f"again {both.rank}")
"""


def test_it_sends_and_leaves_what_simulated_ranks_do(
    processes: Processes, tmp_path: Path
) -> None:
    """Two become four, these three, and so on: each has its parts, to the bit."""
    processes(MEET + GROWS, 4, str(tmp_path))
    how = {"replicate": "node"}
    two, four = simulated(node=1, data=2), simulated(node=2, data=2)
    three = simulated(node=1, data=3)
    states, _ = train(begin(two, **how), two, **how)
    with ff.ledger() as log:
        states = ff.remesh(states, four, on=two)
    generator = torch.load(tmp_path / "drawn 0")
    assert not torch.equal(generator, torch.load(tmp_path / "drawn 1"))
    for rank, state in enumerate(states):
        held, drawn, count = torch.load(tmp_path / f"grown {rank}", weights_only=False)
        same(held, parts_of(state))
        same(drawn, generator)  # of the first that stays
        assert count == log.bytes(rank=rank)
    states, _ = train(states, four, **how)
    states[1] = None
    with ff.ledger() as log:
        states = ff.remesh(states, three, on=four)
    for rank, state in enumerate(states):
        held, count = torch.load(tmp_path / f"shrunk {rank}", weights_only=False)
        same(held, parts_of(state))
        assert count == log.bytes(rank=rank)
    assert sum(log.bytes(rank=rank) for rank in range(3))
    one = simulated(node=1, data=1)
    same(
        torch.load(tmp_path / "alone", weights_only=False),
        parts_of(begin(one, **how)[0]),
    )
    for rank, state in enumerate(begin(two, **how)):
        same(
            torch.load(tmp_path / f"again {rank}", weights_only=False), parts_of(state)
        )


REFUSES = """
    from types import SimpleNamespace
    from fsfunc.sharded.plain_leaves import lay_leaf
    mesh = meet("one", [0, 1, 2], node=1, data=3)
    step = stepped(mesh, replicate="node")
    first = begin(mesh)
    second, _ = step(first, rows_of(mesh))
    spent, before = begin(mesh), parts(second)
    ff.donate(step)(spent, rows_of(mesh))
    count = torch.tensor(number)
    lay_leaf(count)
    posing = ff.Mesh(mesh.axes, "processes", SimpleNamespace(rank=1))

    def refused(name, state, on=mesh):
        torch.manual_seed(number)
        drawn = torch.get_rng_state()
        try:
            ff.remesh(state, mesh, on=on, checkpoint="run/step-7")
            print(number, name, "was taken")
        except Exception as error:
            said = str(error).replace(chr(10), " | ")
            print(number, name, type(error).__name__, said, flush=True)
        assert torch.equal(drawn, torch.get_rng_state())

    refused("unlike", (first, second, second)[number])
    refused("count", {"n": count})
    refused("alone", second, None if number == 1 else mesh)
    refused("spent", spent if number == 2 else second)
    refused("nobody", None, None)
    lost = (None, None) if number == 1 else (second, mesh)
    refused("lost", *lost)
    refused("posing", {"n": 1}, posing if number == 2 else mesh)
    refused("pickle", {"n": lambda: 1})
    refused("both", None if number == 0 else second)
    same_again = ff.remesh(second, mesh, on=mesh)
    for a, b, c in zip(before, parts(second), parts(same_again), strict=True):
        assert a is b and (torch.equal(a, c) if torch.is_tensor(a) else a == c)
"""
SAID = {  # by case: the error's class and text on all ranks
    "unlike": "RanksDiffer .*unlike states: .* step: rank 0: 0; ranks 1, 2: 1 .*newest",
    "count": "RanksDiffer .* n: rank 0: .* 0; rank 1: .* 1; rank 2: .* 2 ",
    "alone": "ValueError .*remesh of a state without on=.*joins gives None",
    "spent": "RuntimeError .*'params/gain': this state was donated",
    "nobody": "ValueError remesh: no process has a state: load the last checkpoint",
    "lost": "ValueError .* on rank 1 alone, which is gone.*checkpoint, run/step-7$",
    "posing": r"ValueError .*ranks \[1, 2\] of the new mesh all were rank 1 of the old",
    "pickle": "PicklingError .*pickle",
    "both": "ValueError .*without a state, on a mesh",
}
AT = {"alone": 1, "spent": 2, "both": 0}  # the process that finds it


def test_what_one_process_cannot_do_is_refused_on_all(
    processes: Processes, tmp_path: Path
) -> None:
    """And then the same processes move the same state: none is a message behind."""
    lines = processes(MEET + REFUSES, 3, str(tmp_path)).splitlines()
    assert len(lines) == 3 * len(SAID)
    for line in lines:
        number, case, said = line.split(" ", 2)
        assert re.search(SAID[case], said), line
        if case in AT:
            others = f"rank {AT[case]} could not go on" in said
            assert others == (int(number) != AT[case]), line


DIES = """
    from fsfunc.state import remeshing
    from fsfunc.state.leaf_moves import LeafMove
    mesh = meet("one", [0, 1, 2, 3], node=2, data=2)
    state, _ = stepped(mesh, replicate="node")(begin(mesh), rows_of(mesh))
    before = [x.clone() if torch.is_tensor(x) else x for x in parts(state)]
    wide = meet("two", [0, 1, 2, 3], node=1, data=4)
    move, raise_everywhere, calls = LeafMove.run, remeshing.raise_everywhere, []

    def dying(f, name, count):  # as it calls it for the n-th time
        def call(*args):
            calls.append(name)
            if number == 2 and sys.argv[2] == name and calls.count(name) == count:
                os._exit(0)
            return f(*args)
        return call

    LeafMove.run = dying(move, "meanwhile", 3)
    remeshing.raise_everywhere = dying(raise_everywhere, "having its own parts", 2)
    try:
        ff.remesh(state, wide, on=mesh)
        print(number, "went on")
    except RuntimeError as error:
        print(number, type(error).__name__, getattr(error, "rank", None), flush=True)
    LeafMove.run, remeshing.raise_everywhere = move, raise_everywhere
    for a, b in zip(before, parts(state), strict=True):
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    three = meet("three", [0, 1, 3], node=1, data=3)
    keep(parts(ff.remesh(state, three, on=mesh)), f"rank {three.rank}")
"""


@pytest.mark.parametrize("when", ["meanwhile", "having its own parts"])
def test_a_death_leaves_the_others_states_as_they_were(
    when: str, processes: Processes, tmp_path: Path
) -> None:
    out = processes(MEET + DIES, 4, str(tmp_path), when)
    # All hear of it, and most say whose death it was.
    assert re.findall(r"^(\d) PeerFailed", out, re.M) == ["0", "1", "3"], out
    four, three = simulated(node=2, data=2), simulated(node=1, data=3)
    states, _ = train(begin(four, replicate="node"), four, replicate="node")
    states = ff.remesh(PerRank([*states[:2], None, states[3]]), three, on=four)
    for rank, state in enumerate(states):
        same(torch.load(tmp_path / f"rank {rank}"), parts_of(state))
