"""A branch by a number, or a word, is checked before a step takes it."""

import copy
import random
from functools import partial

import pytest
import torch

import fsfunc as ff
from fsfunc.tracing.rules import LawError, Unsteady
from tests.checks import close, simulated
from tests.derivatives.judging import by_turns

MESH = simulated(2)
W, X = torch.eye(3), torch.arange(12.0).reshape(4, 3)
unit = ff.unit(lambda w, x: x @ w)
each = ff.tree.map


def stepping(wrong, *, instead=lambda g, x: each(lambda g: g * x.mean(), g)):
    """A step that makes something else of its gradients where ``wrong`` says so."""

    def step(s, x, *more):
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s["w"], x)[1]
        g = instead(g, x) if wrong(s, *more) else g
        return {"w": each(lambda w, g: w - g / 8, s["w"], g), "n": s["n"] + 1}

    return step


def run(step, zero, *more, calls=2, x=X):
    def main():
        sharded = ff.shard(step, MESH, "data", zero=zero)
        mine = ff.local_batch(x, MESH, "data")
        state = ff.place(sharded, {"w": W, "n": 0}, mine, *more)
        for _ in range(calls):
            state = sharded(state, mine, *more)
        return ff.unshard(state)

    return ff.spmd(main, MESH)()


LATER = {
    "from a step on": (lambda s: s["n"] > 100,),
    "at one step": (lambda s: 100 == s["n"],),
    "each so many steps": (lambda s: s["n"] % 10 == 9,),
    "by half of a count": (lambda s: (s["n"] - 50) // 100,),
    "unless it is so": (lambda s: not 5 - s["n"],),
    "a rate": (lambda s, rate: rate >= 0.5, 0.1),
    "a word": (lambda s, mode: mode == "late", "early"),
    "one of several words": (lambda s, mode: mode in ("late", "last"), "early"),
    "words within": (
        lambda s, how: how["n"] == 3 and how["w"] != "a",
        dict(n=1, w="a"),
    ),
}


@by_turns(LATER)
def test_the_other_branch_is_refused_at_the_first_call(name, zero):
    wrong, *more = LATER[name]
    with pytest.raises(LawError, match="differs from rank to rank"):
        run(stepping(wrong), zero, *more)


def runs_of(rate):
    """How many runs the ranks make of a step before its first real call."""
    runs = []

    def step(s, x):
        runs.append(ff.recording())
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s.params, x)[1]
        return s.apply_gradients(g, ff.sgd(rate)), None

    def main():
        sharded = ff.shard(step, MESH, "data")
        mine = ff.local_batch(X, MESH, "data")
        sharded(ff.init_state(sharded, W, ff.sgd(rate), mine), mine)

    ff.spmd(main, MESH)()
    return sum(runs)


def test_a_schedule_of_a_users_own_is_no_branch():
    """Of it there is a rate alone: the step needs no check for it."""
    assert runs_of(0.1) == runs_of(lambda n: 0.1 if n < 5 else 0.01)


def test_a_branch_of_an_optimizer_of_a_users_own_is_checked():
    """Whichever of its functions compares, though the library calls it."""

    def step(s, x):
        def apply(grads, n, params):
            by = x.mean() if n > 100 else 1 / 8
            return each(lambda w, g: w - g * by, params, grads), n + 1

        optimizer = ff.Optimizer(lambda params: 0, lambda g, n, params: (g, n), apply)
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s["w"], x)[1]
        w, n = optimizer.apply(g, s["n"], s["w"])
        return {"w": w, "n": n}

    with pytest.raises(LawError, match="differs from rank to rank"):
        run(step, 1)


@pytest.mark.parametrize("how, zero", [("an attribute", 3), ("a captured tensor", 1)])
def test_what_an_attribute_chooses_is_checked_later(how, zero):
    """As it stands by then; no argument tells of it."""
    seen, late, factors = [], [], [torch.tensor(1 / 8)] * 2

    def step(s, x):
        rank = MESH.rank
        if not ff.recording():
            seen.append(rank)
        if seen.count(rank) > 4:
            late.append(rank)
            factors[rank] = torch.tensor(rank / 8)
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s["w"], x)[1]
        by = factors[rank] if how == "a captured tensor" else 1 / 8
        by = x.mean() if late and how == "an attribute" else by
        return {"w": each(lambda w, g: w - g * by / 99, s["w"], g), "n": s["n"] + 1}

    with pytest.raises(LawError, match="differs from rank to rank"):
        run(step, zero, calls=18)
    assert {4, 8} & {*map(seen.count, (0, 1))}  # before calls 5 and 9


def test_a_branch_of_a_step_of_library_functions_is_checked_later():
    """It combines no numbers: nothing but a later check sees what it does then."""
    seen, optimizer = [0, 0], ff.sgd(0.01)

    def step(s, x):
        seen[MESH.rank] += not ff.recording()
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s.params, x)[1]
        g = each(lambda g: g * x.mean(), g) if seen[MESH.rank] > 10 else g
        return s.apply_gradients(g, optimizer), None

    def main():
        sharded = ff.shard(step, MESH, "data")
        mine = ff.local_batch(X / 12, MESH, "data")
        state = ff.init_state(sharded, W, optimizer, mine)
        for _ in range(17):
            state, _ = sharded(state, mine)

    with pytest.raises(LawError, match="differs from rank to rank"):
        ff.spmd(main, MESH)()
    assert max(seen) == 16


def test_what_a_later_check_alone_raises_is_told():
    """Real calls do not: a check runs the step without data, or on ranks alike."""
    seen = []

    def step(s, x):
        seen.append(ff.recording())
        if len(seen) > 32 and ff.recording():
            raise ZeroDivisionError("in a check alone")
        g = ff.value_and_grad(lambda w, x: unit(w, x).mean())(s["w"], x)[1]
        return {"w": each(lambda w, g: w - g / 99, s["w"], g), "n": s["n"] + 1}

    told = r"calls 17.* raised ZeroDivisionError\('in a check alone'\).* unchecked"
    with pytest.warns(UserWarning, match=told):
        found = run(step, 3, calls=18)
    assert [state["n"] for state in found] == [18, 18] and any(seen[32:])


def test_a_tensor_that_a_later_check_has_left_behind_is_named():
    """Of what is kept from the fifth call on: the first call has seen none of it."""
    kept, calls = ([], []), [0, 0]

    def step(s, x):
        rank = MESH.rank
        calls[rank] += not ff.recording()
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s["w"], x)[1]
        if calls[rank] > 4:
            kept[rank].append(g)
            g = kept[rank][-2:][0]
        return {"w": each(lambda w, g: w - g / 99, s["w"], g), "n": s["n"] + 1}

    with pytest.raises(Unsteady, match="returns a tensor without data at 'w'"):
        run(step, 0, calls=18)
    assert max(calls) == 9


def test_a_count_that_begins_later_is_refused_by_a_later_check():
    """Which runs the step without data, and would count once more than calls."""
    seen, counted = [], [0, 0]

    def step(s, x):
        rank = MESH.rank
        if not ff.recording():
            seen.append(rank)
        counted[rank] += seen.count(rank) > 9
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s["w"], x)[1]
        by = 1 / (8 + counted[rank])
        return {"w": each(lambda w, g: w - g * by / 99, s["w"], g), "n": s["n"] + 1}

    with pytest.raises(Unsteady, match="when it is run again"):
        run(step, 3, calls=18)


def both(s, *more):
    """Reads and computes with it as with any number; another answer may raise."""
    n = s["n"]
    assert n < 1000, "a step that never comes"
    table = {0: "a", 1: "b"}
    known = table[n % 2], f"{n:03d}", list(range(n)), [3, 4, 5][n % 3], -n, 2**n
    assert copy.deepcopy(n) == n and isinstance(n, int) and hash(n) == hash(int(n))
    return n % 2 == 0 and known[0] == "a" and len(torch.full((n + 1,), n)) > n


@pytest.mark.parametrize("zero", [0, 3])
def test_where_both_answers_are_right_nothing_changes(zero):
    step = stepping(both, instead=lambda g, x: each(lambda g: g / 2, g))
    expected = {"w": W, "n": 0}
    for _ in range(4):
        expected = step(expected, X)
    for found in run(step, zero, calls=4):
        close(found, expected)
        assert type(found["n"]) is int


def test_in_a_unit_it_is_what_it_is():
    seen = []

    @ff.unit
    def scaled(w, x, n):
        seen.append(n > 5)
        return x @ w

    def step(s, x):
        loss = lambda w, x, n: scaled(w, x, n).mean()  # noqa: E731
        return ff.value_and_grad(loss, batch_argnums=1)(s["w"], x, s["n"])[1]

    def main():
        sharded = ff.shard(step, MESH, "data")
        sharded(ff.place(sharded, {"w": W, "n": 0}, X), X)

    ff.spmd(main, MESH)()
    assert seen and not any(seen)


SGD = ff.sgd(0.1)
MEAN = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())
COMES = {
    "a count": lambda s: s.step % 10 == 1,
    "a carried rate": lambda s: s.extra["rate"] < 0.01,
    "a carried word": lambda s: s.extra["phase"] == "late",
}


def begun(sharded, x, extra):
    """The state of another step, which compares nothing, and what that returned."""
    other = ff.shard(SGD(MEAN), MESH, "data")
    state = ff.init_state(other, W, SGD, x, extra=extra)
    return state, other(state, x)[0]


def loaded(sharded, x, extra, path):
    ff.save(path, begun(sharded, x, extra)[0])
    return ff.load(path, ff.abstract_state(sharded, W, SGD, x, extra=extra))


def planned(sharded, x, extra):
    state = begun(sharded, x, extra)[0]
    ff.plan(sharded, state, x)
    return state


def whole(sharded, x, extra):
    return ff.init_state(sharded, W, SGD, x, extra=extra)


def searched(step, zero):
    """The step of what a search finds best."""
    loss = lambda w, x: unit(w, x).square().mean()  # noqa: E731
    space = {"zero": (zero,), "remat": (None,), "accumulate": (1,)}
    given = loss, SGD, lambda: W.clone(), X, dict(MESH.axes), ff.hardware.CPU
    return ff.search(*given, **space).best.build(step, MESH)


WAYS = {
    "init_state": whole,
    "init_state of a function": lambda f, x, extra: ff.init_state(
        f, lambda: torch.ones(3, 3), SGD, x, extra=lambda w: extra
    ),
    "place": lambda f, x, extra: ff.place(
        f, ff.TrainState(W, SGD.init(W), extra=extra), x
    ),
    "another step's init_state": lambda *given: begun(*given)[0],
    "an earlier call": lambda *given: begun(*given)[1],
    "plan": planned,
    "search": whole,
}


DRAWN = [(way, i // 2 % 3) for i, way in enumerate([*WAYS, "load"])]


@pytest.mark.parametrize("way, of", DRAWN)
def test_however_a_first_call_comes_the_other_branch_is_refused(way, of, tmp_path):
    comes, zero = list(COMES.values())[of], random.Random(way).randrange(4)
    extra = {"rate": 0.1, "phase": "early"}
    ways = WAYS | {"load": partial(loaded, path=tmp_path / "saved")}

    def step(s, x):
        loss, g = MEAN(s.params, x)
        g = each(lambda g: g * x.mean(), g) if comes(s) else g
        return s.apply_gradients(g, SGD), loss

    sharded = ff.shard(step, MESH, "data", zero=zero)
    sharded = searched(step, zero) if way == "search" else sharded

    def main():
        mine = ff.local_batch(X, MESH, "data")
        sharded(ways[way](sharded, mine, extra), mine)

    with pytest.raises(LawError, match="differs from rank to rank"):
        ff.spmd(main, MESH)()
