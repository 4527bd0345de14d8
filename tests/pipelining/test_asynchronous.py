"""Asynchronous schedules: equal to what one process does that keeps every version."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.pipelining.actions import ScheduleError, forward_only
from fsfunc.pipelining.timing import Costs, simulate
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import held
from fsfunc.show import timeline
from tests.checks import close, same
from tests.checks import held as copies

S = ff.schedules
WIDTH = 3
RATE = 0.1
OPTIMIZERS = {
    "sgd": ff.sgd(RATE, weight_decay=0.1),
    "momentum": ff.sgd(RATE, momentum=0.5),
    "adam": ff.sharded_adam(RATE, weight_decay=0.1),
    "chain": ff.chain(ff.add_decayed_weights(0.1), ff.sgd(RATE, momentum=0.5)),
}


@ff.unit
def layer(p, x):
    return torch.tanh(x @ p["w"]) + p["b"]


@ff.unit
def join(p, x, first):
    return torch.tanh(x @ p["w"]) + p["b"] * first


def chain_loss(params, x):
    for p in params:
        x = layer(p, x)
    return (x**2).mean()


def skip_loss(params, x):
    """The last stage takes what the first one made, over all that lie between."""
    first = h = layer(params[0], x)
    for p in params[1:-1]:
        h = layer(p, h)
    return (join(params[-1], h * 2, first) ** 2).mean()


def model(n_stages, rows, seed):
    draw = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    params = [{"w": make(WIDTH, WIDTH), "b": make(WIDTH)} for _ in range(n_stages)]
    return params, make(rows, WIDTH)


def read(row):
    """(updates before each forward, the microbatches of each update) of a rank."""
    before, groups, open_group = {}, [], []
    for action in row:
        if action.kind == "F":
            before[action.microbatch] = len(groups)
        elif action.kind in ("B", "W"):
            open_group.append(action.microbatch)
        elif action.kind == "U":
            groups.append(open_group)
            open_group = []
    return before, groups


class Reference:
    """One process that does what a schedule means: the state of each stage, by version.

    ``states[s][k]`` are stage s's parameters and optimizer state after k updates.
    Microbatch m has one gradient, taken at the versions that the stages had at its
    forward; update k of a stage takes the mean of some of them, over their rows.
    """

    def __init__(self, loss, schedule, optimizer, stages, states, parts, ahead=None):
        self.loss, self.optimizer, self.parts, self.ahead = (
            loss, optimizer, parts, ahead
        )  # fmt: skip
        self.rows = [read(row) for row in schedule]
        self.late = S.staleness(schedule)
        self.states = [[state] for state in states]
        self.stages = stages  # by stage, how many layers
        self.gradients, self.losses = {}, {}
        for s, (_, groups) in enumerate(self.rows):
            self.state(s, len(groups))
        for m in range(len(parts)):
            self.gradient(m)

    def state(self, s, k):
        while len(self.states[s]) <= k:
            group = self.rows[s][1][len(self.states[s]) - 1]
            params, opt_state = self.states[s][-1]
            weights = [self.parts[m].shape[0] for m in group]
            total = tree.map(
                lambda *gs, w=weights: sum(
                    g * n for g, n in zip(gs, w, strict=True)
                ) / sum(w),
                *(self.gradient(m)[s] for m in group),
            )  # fmt: skip
            self.states[s].append(self.optimizer.apply(total, opt_state, params))
        return self.states[s][k]

    def used(self, s, m):
        """The parameters that microbatch m's forward has at stage s."""
        params, opt_state = self.state(s, self.rows[s][0][m])
        if self.ahead is None or not self.late[s][m]:
            return params
        return self.ahead(params, opt_state, self.late[s][m])

    def gradient(self, m):
        if m not in self.gradients:
            used = [self.used(s, m) for s in range(len(self.rows))]
            flat = ff.value_and_grad(
                lambda p: self.loss([x for stage in p for x in stage], self.parts[m])
            )
            self.losses[m], self.gradients[m] = flat(used)
        return self.gradients[m]

    @property
    def params(self):
        return [x for states in self.states for x in states[-1][0]]

    @property
    def mean_loss(self):
        rows = [x.shape[0] for x in self.parts]
        return sum(self.losses[m] * n for m, n in enumerate(rows)) / sum(rows)


def reference(loss, schedule, optimizer, stages, params, x, n, calls, ahead=None):
    """(parameters, losses) after some calls on the same batch."""
    given = iter(params)
    pieces = [[next(given) for _ in range(count)] for count in stages]
    states, losses = [(piece, optimizer.init(piece)) for piece in pieces], []
    for _ in range(calls):
        found = Reference(
            loss, schedule, optimizer, stages, states, x.tensor_split(n), ahead
        )
        states = [versions[-1] for versions in found.states]
        losses.append(found.mean_loss)
    return found.params, losses


def run(loss, schedule, optimizer, stages, params, x, n, calls=1, around=None, **how):
    """[(parameters, losses, calls, updates)] by rank of simulated ranks."""
    size = len(stages)
    mesh = ff.make_mesh({"pipe": size}, "simulated")

    def main():
        step = ff.pipeline(
            loss, mesh, "pipe", n_microbatches=n, schedule=schedule, stages=stages,
            update=optimizer, **how,
        )  # fmt: skip
        step = step if around is None else around(step)
        state, losses = ff.init_state(step, params, optimizer, x), []
        for _ in range(calls):
            before = copies(state) if around is None else ()
            old, (state, metrics) = state, step(state, x)
            if around is None:
                same(copies(old), before)
            losses.append(metrics["loss"])
        return ff.unshard(state.params), losses, state

    return ff.spmd(main, mesh)()


def count_of(opt_state):
    found = opt_state[-1] if type(opt_state) is tuple else opt_state  # of a chain
    return found.count


@st.composite
def written(draw, ranks, m):
    """A 1F1B-like schedule of a user's own: split backwards, updates anywhere."""
    rows = []
    split = draw(st.booleans())
    for row in S.zb_h1(ranks, m) if split else S.one_f_one_b(ranks, m):
        ends = [a for a in row if a.kind in ("B", "W")]
        last = ends[-1]
        found = []
        for action in row:
            found.append(str(action))
            if action in ends and (action == last or action.microbatch in (1, 4)):
                found.append(f"U{action.microbatch}@{action.stage}")
        rows.append(found)
    return rows


@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**20))
@settings(max_examples=60)
def test_equals_one_process_that_keeps_every_version(data, ranks, m, seed):
    draw = data.draw
    if draw(st.booleans()):
        interval = draw(st.integers(1, m + 1))
        make = functools.partial(S.asynchronous, interval=interval)
        schedule = make(ranks, m)
        given_schedule = make
    else:
        given_schedule = draw(written(ranks, m))
        schedule = S.parse(given_schedule)
        if draw(st.booleans()):
            edges = {(s, s + 1) for s in range(ranks - 1)}
            given_schedule = with_transfers(schedule, edges)
    stages = [draw(st.integers(1, 2)) for _ in range(ranks)]
    name = draw(st.sampled_from(list(OPTIMIZERS)))
    optimizer, ahead = OPTIMIZERS[name], None
    if name != "sgd" and draw(st.booleans()):
        ahead = ff.momentum_prediction(RATE)
    loss = chain_loss
    if sum(stages) > 1 and callable(given_schedule):
        loss = draw(st.sampled_from([chain_loss, skip_loss]))
    params, x = model(sum(stages), m + draw(st.integers(0, m)), seed)
    expected = reference(
        loss, schedule, optimizer, stages, params, x, m, 2, ahead=ahead
    )
    found = run(loss, given_schedule, optimizer, stages, params, x, m, 2, predict=ahead)
    for new, losses, state in found:
        close((new, losses), expected, 1e-11)
        assert state.step == 2
        assert count_of(state.opt_state) == 2 * len(read(schedule[0])[1])


@pytest.mark.parametrize("interval", [5, 100])
def test_one_update_a_call_is_the_synchronous_step(interval):
    params, x = model(3, 13, 1)
    optimizer = OPTIMIZERS["adam"]
    schedule = functools.partial(S.asynchronous, interval=interval)
    mesh = ff.make_mesh({"pipe": 3}, "simulated")

    def main():
        step = ff.pipeline(
            optimizer(ff.value_and_grad(chain_loss)), mesh, "pipe", n_microbatches=5
        )
        state, metrics = step(ff.init_state(step, params, optimizer, x), x)
        return ff.unshard(state.params), metrics["loss"]

    found = run(chain_loss, schedule, optimizer, [1, 1, 1], params, x, 5)
    for (new, (value,), _), expected in zip(found, ff.spmd(main, mesh)(), strict=True):
        close((new, value), expected, 1e-15)


@pytest.mark.parametrize(
    "around", [ff.remat, ff.donate, lambda f: ff.precision(f, torch.float64)]
)
def test_transforms_of_units_go_with_it(around):
    params, x = model(3, 8, 2)
    args = S.asynchronous, OPTIMIZERS["adam"], [1, 1, 1], params, x, 4, 2
    expected = run(chain_loss, *args)
    for (new, losses, _), other in zip(
        run(chain_loss, *args, around=around), expected, strict=True
    ):
        same((new, losses), other[:2])
    if around is not ff.donate:
        for (new, losses, _), other in zip(
            run(around(chain_loss), *args), expected, strict=True
        ):
            same((new, losses), other[:2])


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 22))
def test_staleness_has_its_closed_form(ranks, m, k):
    schedule = S.asynchronous(ranks, m, interval=k)
    ff.verify(schedule, in_flight=[min(m, ranks - r) for r in range(ranks)])
    ff.verify(with_transfers(schedule), n_stages=ranks, n_microbatches=m)
    assert S.staleness(schedule) == tuple(
        tuple(i // k - max(0, i - (ranks - 1 - r)) // k for i in range(m))
        for r in range(ranks)
    )
    without = tuple(tuple(a for a in row if a.kind != "U") for row in schedule)
    assert without == S.one_f_one_b(ranks, m)
    assert all(row[-1].kind == "U" for row in schedule)
    assert {sum(a.kind == "U" for a in row) for row in schedule} == {-(-m // k)}
    assert held(schedule) == held(without)
    assert forward_only(schedule) == forward_only(without)


def test_staleness_counts_to_the_weight_gradient():
    rows = ["F0 F1 I0 W0 U0 I1 W1 U1"]
    assert S.staleness(S.parse(rows)) == ((0, 1),)
    assert S.staleness(S.one_f_one_b(2, 3)) == ((0, 0, 0), (0, 0, 0))


def test_an_update_goes_after_what_its_backward_sends():
    assert S.listing(with_transfers(S.asynchronous(2, 2))) == (
        "0: F0 SF0>1 RB0<1 F1 SF1>1 RB1<1 B0 U0 B1 U1\n"
        "1: RF0<0 F0 RF1<0 B0 SB0>0 U0 F1 B1 SB1>0 U1"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("F0 U0 B0", "rank 0: U0@0 is to take up gradients, microbatch 0's .*is none"),
        ("F0 I0 U0 W0", "since the update before there is none"),
        ("F0 B0 F1 B1 U0", "since the update before there is microbatch 1's as last"),
        ("F0 B0 F1 B1 U1 U0", "U0@0 is to take up gradients, .* there is none"),
        ("F0 B0 U0 U0", "U0@0 comes 2 times"),
        ("F0 U0", "there is none"),
        ("F0 B0 U1", "U1@0 .*microbatch 0's as last|needs F, and B"),
        ("F0 F1 B0 U0 B1", r"of microbatches \[1\] of stage 0: .*missing.* U1@0"),
    ],
)
def test_every_gradient_has_one_update(row, message):
    with pytest.raises(ScheduleError, match=message):
        ff.verify(S.parse([row]))


def test_every_stage_updates_where_one_does():
    with pytest.raises(ScheduleError, match="rank 1: no update takes .* of stage 1"):
        ff.verify(S.parse(["F0 B0 U0", "F0 B0"]))


def test_an_update_costs_what_is_asked():
    schedule = S.asynchronous(2, 3)
    assert ff.bubble(schedule) == ff.bubble(S.one_f_one_b(2, 3))
    ends = [e.end for e in simulate(schedule, Costs(u=[0.5, 0.25])) if e.rank == 0]
    assert ends == [1, 2, 6, 6.5, 7.5, 9.5, 10, 12.5, 13]
    with pytest.raises(ScheduleError, match="u has the time -1"):
        Costs(u=-1)


def test_a_timeline_marks_updates():
    shown = str(timeline(S.asynchronous(2, 2))).splitlines()
    assert shown[1] == "rank 0 │F0│F1│░░░░░│B0   U░░│B1   U"
    assert shown[2] == "rank 1 │··│F0│B0   UF1│B1   U·····│"
    assert "U  update" in shown[4]
    wide = timeline(S.asynchronous(2, 1), Costs(u=1)).text()
    assert "│U0│" in wide and "B0   U" not in wide


def step_of(
    loss=chain_loss, ranks=2, schedule=S.asynchronous, update=None, n=2, predict=None
):
    mesh = ff.make_mesh({"pipe": ranks}, "simulated")
    update = ff.sgd(RATE) if update is None else update
    return mesh, lambda: ff.pipeline(
        loss, mesh, "pipe", n_microbatches=n, schedule=schedule, update=update,
        predict=predict,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"schedule": S.one_f_one_b}, "update= is for a schedule with updates"),
        ({"schedule": ["F0 B0 U0 F1 B1 U1", "F0 B0 F1 B1 U1"]}, r"update \[2, 1\]"),
        (
            {"schedule": ["F0@0 F0@1 B0@1 U0@1 B0@0 U0@0"], "n": 1,
             "ranks": 1},
            "2 stages on 1 ranks: under an asynchronous schedule a rank has one",
        ),
    ],
)  # fmt: skip
def test_a_schedule_that_makes_no_step_is_refused(how, message):
    _, make = step_of(**how)
    with pytest.raises(ScheduleError, match=message):
        make()


def test_updates_without_an_optimizer_are_refused():
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    piped = functools.partial(ff.pipeline, chain_loss, mesh, "pipe", n_microbatches=2)
    with pytest.raises(ScheduleError, match="there is no update=: give the loss and"):
        piped(schedule=S.asynchronous)
    with pytest.raises(ScheduleError, match="predict= goes with update="):
        piped(predict=ff.momentum_prediction(RATE))


def shared(params, x):
    return (layer(params[0], layer(params[1], layer(params[0], x))) ** 2).mean()


def glued(params, x):
    return (layer(params[0], layer(params[1], x)) * params[2]["b"]).mean()


def weighted(params, x):
    return ff.Weighted((layer(params[1], layer(params[0], x)) ** 2).sum(), x.shape[0])


def with_aux(params, x):
    return chain_loss(params, x), x.sum()


def sharded(f):
    return ff.shard(f, ff.make_mesh({"data": 1, "pipe": 2}, "simulated"), "data")


def in_two(f):
    return ff.accumulate(f, 2)


@pytest.mark.parametrize(
    ("how", "around", "error", "message"),
    [
        ({"loss": shared}, None, ValueError, "'0/b' is whole .* one stage has all"),
        ({"loss": glued}, None, ValueError, "'2/b' is whole .* read the leaf in u"),
        ({"loss": weighted}, None, ValueError, "all weights of a Weighted loss"),
        ({"loss": with_aux}, None, TypeError, "the loss must be a scalar tensor, got"),
        ({"loss": sharded(chain_loss)}, None, ValueError, "sharding around or inside"),
        ({"loss": in_two(chain_loss)}, None, ValueError, "accumulate around or inside"),
        ({}, in_two, ValueError, "accumulate around or inside"),
        ({}, sharded, ValueError, "sharding around or inside|one pipeline"),
        (
            {"update": ff.chain(ff.clip_by_global_norm(1.0), ff.sgd(RATE))},
            None, ValueError, 'the optimizer issues psum over "pipe"',
        ),
        (
            {"predict": ff.momentum_prediction(RATE)}, None, ValueError,
            "has 0 states with momentum",
        ),
        (
            {"predict": lambda params, state, updates: params[:1]}, None,
            tree.TreeMismatch, "predicted parameters",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_made_right_is_refused(how, around, error, message):
    params, x = model(3 if how.get("loss") is glued else 2, 4, 0)
    optimizer = how.get("update", ff.sgd(RATE))

    def main():
        step = make()
        step = step if around is None else around(step)
        return step(ff.init_state(step, params, optimizer, x), x)

    with pytest.raises(error, match=message), ff.ledger() as log:
        mesh, make = step_of(**how)
        ff.spmd(main, mesh)()
    assert not log.records


def test_a_state_that_is_not_laid_out_is_refused():
    params, x = model(2, 4, 0)
    mesh, make = step_of()
    state = ff.TrainState(params, ff.sgd(RATE).init(params))
    with pytest.raises(ValueError, match="'0/b' is whole on every .* by ff.init_state"):
        ff.spmd(lambda: make()(state, x), mesh)()
    with pytest.raises(ValueError, match="has no optimizer state"):
        ff.spmd(lambda: make()(ff.TrainState(params), x), mesh)()


def test_one_rank_takes_whole_leaves_shared_ones_and_norms():
    """Nothing is anybody else's there."""
    params, x = model(3, 4, 0)
    optimizer = ff.chain(ff.clip_by_global_norm(0.1), ff.sgd(RATE))
    mesh, make = step_of(shared, 1, update=optimizer)
    state = ff.TrainState(params, optimizer.init(params))
    ((state, _),) = ff.spmd(lambda: make()(state, x), mesh)()
    expected, opt_state = params, optimizer.init(params)
    for part in x.tensor_split(2):
        _, grads = ff.value_and_grad(shared)(expected, part)
        expected, opt_state = optimizer.apply(grads, opt_state, expected)
    same(state.params, expected)


def test_a_gradient_function_in_place_of_the_loss_is_refused():
    params, x = model(2, 4, 0)
    mesh, make = step_of(ff.value_and_grad(chain_loss))
    state = ff.TrainState(params, ff.sgd(RATE).init(params))
    with pytest.raises(RuntimeError, match="the loss itself differentiates"):
        ff.spmd(lambda: make()(state, x), mesh)()
    with pytest.raises(RuntimeError, match="the loss itself differentiates"):
        ff.spmd(lambda: ff.init_state(make(), params, ff.sgd(RATE), x), mesh)()


@pytest.mark.parametrize(
    "optimizer",
    [
        ff.sgd(RATE, momentum=0.5, dampening=0.5),
        ff.chain(ff.scale(2.0), ff.sharded_adam(RATE, weight_decay=0.0)),
    ],
)
def test_prediction_goes_on_as_the_last_update_went(optimizer):
    """Gradients that stay are their own momentum: then it is right, however far."""
    predict = ff.momentum_prediction(lambda count: RATE)
    params = {"w": torch.tensor([2.0, -1.0], dtype=torch.float64), "n": 3}
    grads = {"w": torch.tensor([1.0, 0.5], dtype=torch.float64), "n": None}
    state = optimizer.init(params)
    same(predict(params, state, 3), params)
    for _ in range(2):
        params, state = optimizer.apply(grads, state, params)
    found = predict(params, state, 3)
    for _ in range(3):
        params, state = optimizer.apply(grads, state, params)
    close(found, params, 1e-6)


def test_prediction_reads_a_count_that_is_a_tensor():
    optimizer, params = ff.sharded_adam(RATE), torch.ones(2)
    state, predict = optimizer.init(params), ff.momentum_prediction(RATE)
    for _ in range(2):
        told = state._replace(count=torch.tensor(state.count))
        expected = predict(params, state, 3)
        close(predict(params, told, 3), expected, 1e-5)
        params, state = optimizer.apply(torch.ones(2), state, params)
    with pytest.raises(ValueError, match="2 states with momentum"):
        predict(params, (state, state), 1)
    with pytest.raises(ValueError, match="learning_rate is -1"):
        ff.momentum_prediction(-1)


@pytest.mark.processes
def test_it_runs_over_processes(processes):
    """Two stages y = w x of one number, rate 1/2: gradients one update old at most."""
    out = processes(
        """
        import torch, fsfunc as ff

        scale = ff.unit(lambda p, x: x * p)
        mesh = ff.make_mesh({"pipe": 2})

        def loss(params, x):
            return scale(params[1], scale(params[0], x)).mean()

        optimizer = ff.sgd(0.5)
        step = ff.pipeline(
            loss, mesh, "pipe", n_microbatches=2, schedule=ff.schedules.asynchronous,
            update=optimizer,
        )
        params, x = [torch.tensor(2.0), torch.tensor(-1.0)], torch.tensor([1.0, 2.0])
        state, _ = step(ff.init_state(step, params, optimizer, x), x)
        print([w.item() for w in ff.unshard(state.params)])
        """,
        2,
    )
    # By hand: the first stage's second gradient is taken at w = 2 and v = -2, where
    # the first microbatch's has not come back to it.
    first = 2 - 0.5 * (-1 * 1) - 0.5 * (-2 * 2)
    second = -1 - 0.5 * (2 * 1) - 0.5 * (2 * 2)
    assert out.splitlines() == 2 * [str([first, second])]
