"""Numbers of ranks that come to differ in training: told within a few calls.

A rank's own loss moves its learning rate, say. Each program reads its number where it
enters; from a call on, one rank's is another.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.comm.typed_maps import LawError
from tests.checks import same, simulated
from tests.models import chain, floats, layers, split, splits

MESH = simulated(2)
X, SGD = floats(8, 4), ff.sgd(0.125)
loss = chain()
UNLIKE = "update one state by unlike optimizers or numbers"


def by_schedule(number):
    optimizer = ff.sgd(lambda count: number[0])
    return optimizer(ff.value_and_grad(loss))


def by_schedule_later(number):
    """Alike at every count that is asked for beforehand."""
    optimizer = ff.sgd(lambda count: number[0] if count in (3, 4, 5) else 0.125)
    return optimizer(ff.value_and_grad(loss))


def applied(make):
    def program(number):
        def step(state, x, *more):
            value, g = ff.value_and_grad(loss)(state.params, x)
            return make(state, g, number[0] if number else more[0]), value

        return step

    return program


def glue(state, g, rate):
    params = tree.map(lambda w, g: w - rate * g, state.params, g)
    return state.replace(params=params, step=state.step + 1)


def own(rate):
    """An optimizer whose number is known to its closure alone."""

    def update(grads, state, params=None):
        return tree.map(lambda g: -rate * g, grads), state

    return ff.Optimizer(lambda params: (), update)


def configured(rate):
    step = lambda g, s, p=None: (tree.map(torch.neg, g), s)  # noqa: E731
    return ff.Optimizer(lambda params: (), step, configuration={"rate": rate})


PROGRAMS = {
    "a schedule's closure": (by_schedule, RanksDiffer),
    "a schedule, at one count": (by_schedule_later, RanksDiffer),
    "a rate": (applied(lambda s, g, r: s.apply_gradients(g, ff.sgd(r))), RanksDiffer),
    "a decay": (
        applied(lambda s, g, r: s.apply_gradients(g, ff.sgd(0.125, weight_decay=r))),
        RanksDiffer,
    ),
    "a maximum": (
        applied(
            lambda s, g, r: s.apply_gradients(
                g, ff.chain(ff.clip_by_global_norm(r), SGD)
            )
        ),
        RanksDiffer,
    ),
    "a configuration": (
        applied(lambda s, g, r: s.apply_gradients(g, configured(r))),
        RanksDiffer,
    ),
    "a scale": (
        applied(lambda s, g, r: s.apply_gradients(ff.tree_scale(g, r), SGD)),
        RanksDiffer,
    ),
    "arithmetic": (applied(glue), LawError),
    "one's own optimizer": (
        applied(lambda s, g, r: s.apply_gradients(g, own(r))),
        LawError,
    ),
}
FIRST = {"a maximum": ff.chain(ff.clip_by_global_norm(1.0), SGD)}
BY_ARGUMENT = ("a rate", "arithmetic", "a scale")  # one that the step is given


def trained(name, zero=3, *, mesh=MESH, drifts=0, calls=9, argument=False):
    """The states of the ranks; the last one's number differs from a call on."""

    def main():
        number = [0.125]
        step = PROGRAMS[name][0]([] if argument else number)
        sharded = ff.shard(step, mesh, "data", zero=zero)
        mine = ff.local_batch(X, mesh, "data")
        more = (0.125,) if argument else ()
        state = ff.init_state(sharded, layers(), FIRST.get(name, SGD), mine, *more)
        for call in range(1, calls + 1):
            if call == drifts and mesh.rank == mesh.size - 1:
                number[0] = 0.25
            more = (number[0],) if argument else ()
            state, _ = sharded(state, mine, *more)
            CALLS[mesh.rank] = call
        return ff.unshard(state)

    CALLS.clear()
    return ff.spmd(main, mesh)()


CALLS = {}
ALL = [
    *((name, False, (1, 2, 3)[i % 3]) for i, name in enumerate(PROGRAMS)),
    *((name, True, (3, 0)[i % 2]) for i, name in enumerate(BY_ARGUMENT)),
]


@pytest.mark.parametrize("name, argument, zero", ALL)
def test_it_is_told_within_two_calls(name, argument, zero):
    error = PROGRAMS[name][1]
    told = UNLIKE if error is RanksDiffer else "(mul|own) "
    with pytest.raises(error, match=f"(?s){told}"):
        trained(name, zero, drifts=3, argument=argument)
    assert max(CALLS.values()) in (2, 3, 4)  # of a rank that is through with it


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_stays_alike_trains(name):
    one, other = trained(name, calls=5)
    same(other, one)


def test_the_first_call_is_compared_too():
    """A state was laid out for the numbers as they were then."""
    with pytest.raises(RanksDiffer, match=UNLIKE):
        trained("a schedule's closure", drifts=1)
    assert set(CALLS.values()) == {1}


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_along_which_parameters_are_split_are_compared(zero):
    mesh = simulated(data=1, model=2)
    params = {"up": floats(8, 4), "down": floats(4, 8, seed=1)}

    def main():
        number = [0.125]
        optimizer = ff.sgd(lambda count: number[0])
        step = optimizer(ff.value_and_grad(lambda p, x: split(p, x).square().mean()))
        sharded = ff.shard(step, mesh, "data", zero=zero)
        state = ff.init_state(sharded, params, optimizer, X, layouts=splits())
        for _ in range(4):
            state, _ = sharded(state, X)
            number[0] = 0.125 * (1 + mesh.rank)

    with pytest.raises(RanksDiffer, match=f"along 'model' {UNLIKE}"):
        ff.spmd(main, mesh)()


def test_a_number_in_a_unit_or_a_metric_is_the_ranks_own():
    scaled = ff.unit(lambda p, x, by: torch.tanh(x @ p["w"] * by))

    def step(state, x, by):
        def of(params, x):
            for p in params:
                x = scaled(p, x, by)
            return x.square().mean()

        value, g = ff.value_and_grad(of)(state.params, x)
        return state.apply_gradients(g, SGD), (value, value * by)

    def main():
        sharded, mine = ff.shard(step, MESH, "data"), ff.local_batch(X, MESH, "data")
        state = ff.init_state(sharded, layers(), SGD, mine, 0.5)
        for call in range(9):
            state, _ = sharded(state, mine, 0.5 + call * MESH.rank)
        return ff.unshard(state)

    one, other = ff.spmd(main, MESH)()
    same(other, one)


@pytest.mark.parametrize("donated", [False, True])
def test_a_step_that_is_compiled_whole_is_compared(donated):
    def main():
        number = [0.125]
        optimizer = ff.sgd(lambda count: number[0])
        step = optimizer(ff.value_and_grad(loss))
        step = ff.jit(ff.shard(step, MESH, "data"), whole_step=True, backend="eager")
        step = ff.donate(step) if donated else step
        mine = ff.local_batch(X, MESH, "data")
        state = ff.init_state(step, layers(), optimizer, mine)
        for call in range(1, 5):
            number[0] = 0.125 * (1 + MESH.rank * (call > 2))
            state, _ = step(state, mine)
            CALLS[MESH.rank] = call

    with pytest.raises(RanksDiffer, match="(?s)" + UNLIKE + ".*rate of a schedule"):
        ff.spmd(main, MESH)()
    assert max(CALLS.values()) in (3, 4)


@pytest.mark.processes
def test_processes_are_told_too(processes):
    out = processes(
        """
        import fsfunc as ff
        import tests.state.test_drifting_numbers as cases

        mesh = ff.make_mesh({"data": 2}, timeout=30)
        told = []
        for name, (_, error) in cases.PROGRAMS.items():
            cases.trained(name, mesh=mesh, calls=5)
            try:
                cases.trained(name, mesh=mesh, drifts=3)
            except error as why:
                told.append((name, max(cases.CALLS.values())))
        assert {n for n, _ in told} == {*cases.PROGRAMS}, told
        assert {call for _, call in told} == {2, 3}, told
        print("told", len(told))
        """,
        2,
    )
    assert out.count(f"told {len(PROGRAMS)}") == 2, out
