"""Asynchronous schedules: equal to what one process does that keeps every version."""

import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.pipelining.actions import forward_only
from fsfunc.pipelining.timing import Costs, simulate
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import peak_microbatches
from tests.checks import all_refused, close, same
from tests.checks import held as copies
from tests.covering import examples
from tests.models import chain, floats, layer, layers

S = ff.schedules
RATE = 0.1
OPTIMIZERS = {
    "sgd": ff.sgd(RATE, weight_decay=0.1),
    "adam": ff.sharded_adam(RATE, weight_decay=0.1),
    "chain": ff.chain(ff.add_decayed_weights(0.1), ff.sgd(RATE, momentum=0.5)),
}


def ahead_by(params, state, updates):
    """As if every update to come were like the last."""
    momentum = state.mu if hasattr(state, "mu") else state[1].momentum
    return tree.map(lambda p, m: p - updates * RATE * m, params, momentum)


@ff.unit
def join(p, x, first):
    return torch.tanh(x @ p["w"]) + p["b"] * first


chain_loss = chain()


def skip_loss(params, x):
    """The last stage takes what the first one made, over all that lie between."""
    first = h = layer(params[0], x)
    for p in params[1:-1]:
        h = layer(p, h)
    return (join(params[-1], h * 2, first) ** 2).mean()


def model(n_stages, rows, seed):
    how = {"seed": seed, "dtype": torch.float64}
    return layers(n_stages, 3, make=floats, **how), floats(rows, 3, **how)


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
    """[(parameters, losses, state)] by rank of simulated ranks."""
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


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**20))
@settings(max_examples=examples(12))
def test_equals_one_process_that_keeps_every_version(data, ranks, m, seed):
    draw = data.draw
    if draw(st.booleans()):
        interval = draw(st.integers(1, m + 1))
        given_schedule = functools.partial(S.asynchronous, interval=interval)
    else:
        given_schedule = draw(written(ranks, m))
        if draw(st.booleans()):
            edges = {(s, s + 1) for s in range(ranks - 1)}
            given_schedule = with_transfers(S.parse(given_schedule), edges)
    stages = [draw(st.integers(1, 2)) for _ in range(ranks)]
    name = draw(st.sampled_from(list(OPTIMIZERS)))
    optimizer, ahead = OPTIMIZERS[name], None
    if name != "sgd" and draw(st.booleans()):
        ahead = ahead_by
    loss = chain_loss
    if sum(stages) > 1 and callable(given_schedule):
        loss = draw(st.sampled_from([chain_loss, skip_loss]))
    params, x = model(sum(stages), m + draw(st.integers(0, m)), seed)
    around = draw(st.sampled_from([None, ff.remat, ff.donate]))  # of units
    given, args = given_schedule, (stages, params, x, m, 2)
    schedule = given(ranks, m) if callable(given) else S.parse(given)
    expected = reference(loss, schedule, optimizer, *args, ahead=ahead)
    for new, losses, state in run(loss, given, optimizer, *args, around, predict=ahead):
        close((new, losses), expected, 1e-11)
        assert state.step == 2
        assert count_of(state.opt_state) == 2 * len(read(schedule[0])[1])


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 22))
def test_staleness_has_its_closed_form(ranks, m, k):
    schedule = S.asynchronous(ranks, m, interval=k)
    assert peak_microbatches(schedule) == tuple(min(m, ranks - r) for r in range(ranks))
    ff.verify(with_transfers(schedule), n_stages=ranks, n_microbatches=m)
    assert S.staleness(schedule) == tuple(
        tuple(i // k - max(0, i - (ranks - 1 - r)) // k for i in range(m))
        for r in range(ranks)
    )
    without = tuple(tuple(a for a in row if a.kind != "U") for row in schedule)
    assert without == S.one_f_one_b(ranks, m)
    assert all(row[-1].kind == "U" for row in schedule)
    assert {sum(a.kind == "U" for a in row) for row in schedule} == {-(-m // k)}
    assert peak_microbatches(schedule) == peak_microbatches(without)
    assert forward_only(schedule) == forward_only(without)


def test_an_update_goes_after_what_its_backward_sends():
    assert S.listing(with_transfers(S.asynchronous(2, 2))) == (
        "0: F0 SF0>1 RB0<1 F1 SF1>1 RB1<1 B0 U0 B1 U1\n"
        "1: RF0<0 F0 RF1<0 B0 SB0>0 U0 F1 B1 SB1>0 U1"
    )
    schedule = S.asynchronous(2, 3)
    assert ff.bubble(schedule) == ff.bubble(S.one_f_one_b(2, 3))
    ends = [e.end for e in simulate(schedule, Costs(u=[0.5, 0.25])) if e.rank == 0]
    assert ends == [1, 2, 6, 6.5, 7.5, 9.5, 10, 12.5, 13]


def step_of(
    loss=chain_loss, ranks=2, schedule=S.asynchronous, update=None, n=2, predict=None
):
    mesh = ff.make_mesh({"pipe": ranks}, "simulated")
    update = ff.sgd(RATE) if update is None else update
    return mesh, lambda: ff.pipeline(
        loss, mesh, "pipe", n_microbatches=n, schedule=schedule, update=update or None,
        predict=predict,
    )  # fmt: skip


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


CLIPPED = ff.chain(ff.clip_by_global_norm(1.0), ff.sgd(RATE))
UNLAID = ff.TrainState(model(2, 4, 0)[0], ff.sgd(RATE).init(model(2, 4, 0)[0]))
REFUSED = {  # what step_of takes, what is around the step, a state that is not laid out
    "a shared leaf": ({"loss": shared}, "'0/b' is whole .* one stage has all"),
    "a leaf of no unit": ({"loss": glued}, "'2/b' is whole .* read the leaf in u"),
    "weights": ({"loss": weighted}, "all weights of a Weighted loss"),
    "aux": ({"loss": with_aux}, "the loss must be a scalar tensor, got"),
    "shard inside": ({"loss": sharded(chain_loss)}, "sharding around or inside"),
    "shard": ({"around": sharded}, "sharding around or inside|one pipeline"),
    "accumulate inside": ({"loss": in_two(chain_loss)}, "accumulate around or inside"),
    "accumulate": ({"around": in_two}, "accumulate around or inside"),
    "a norm": ({"update": CLIPPED}, 'the optimizer issues psum over "pipe"'),
    "fewer": ({"predict": lambda p, state, updates: p[:1]}, "predicted parameters"),
    "a state": ({"state": UNLAID}, "'0/b' is whole on every .* by ff.init_state"),
    "no state": (
        {"state": ff.TrainState(UNLAID.params)}, "has no optimizer state",
    ),
    "a gradient": (
        {"loss": ff.value_and_grad(chain_loss)}, "the loss itself differentiates",
    ),
    "no updates": ({"schedule": S.one_f_one_b}, "update= is for a schedule with upd"),
    "other updates": (
        {"schedule": ["F0 B0 U0 F1 B1 U1", "F0 B0 F1 B1 U1"]}, r"update \[2, 1\]",
    ),
    "two stages": (
        {"schedule": ["F0@0 F0@1 B0@1 U0@1 B0@0 U0@0"], "n": 1, "ranks": 1},
        "2 stages on 1 ranks: under an asynchronous schedule a rank has one",
    ),
    "no optimizer": ({"update": False}, "there is no update=: give the loss and"),
    "a prediction alone": (
        {"update": False, "schedule": S.one_f_one_b, "predict": ahead_by},
        "predict= goes with update=",
    ),
    "a gradient, at once": (
        {"loss": ff.value_and_grad(chain_loss), "state": UNLAID},
        "the loss itself differentiates",
    ),
}  # fmt: skip


def refusing(around=lambda f: f, state=None, **how):
    """A step of `step_of`, from a state that is laid out or not."""

    def call():
        params, x = model(3 if how.get("loss") is glued else 2, 4, 0)
        mesh, make = step_of(**how)

        def main():
            step, optimizer = around(make()), how.get("update", ff.sgd(RATE))
            return step(state or ff.init_state(step, params, optimizer, x), x)

        ff.spmd(main, mesh)()

    return call


ERRORS = ValueError, TypeError, RuntimeError, tree.TreeMismatch
test_what_cannot_be_made_right_is_refused = all_refused(
    {k: (refusing(**how), ERRORS, says) for k, (how, says) in REFUSED.items()}
)
