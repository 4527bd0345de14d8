"""What optimizers and schedules refuse, each as (call, error, way out); unwritten."""

import functools
import math

import pytest
import torch
from torch.func import vmap

import fsfunc as ff
from fsfunc import tree
from fsfunc.tree.structure import TreeMismatch
from tests.checks import refusals, refused, unchanged
from tests.optim.optimizers import ours
from tests.optim.trees import assert_bits, donated

W, P = torch.ones(2, 3), torch.ones(2)
TWO = {"a": P, "b": P}
BY_PATH = lambda path, leaf: path  # noqa: E731
DECAYED = ff.add_decayed_weights(0.5, lambda path, leaf: path == "w")
HALVED = ff.chain(ff.scale(0.5), ff.sgd(0.1))
SCALED = ff.loss_scale(ff.sgd(0.1))
AROUND = {
    "ema": ff.ema,
    "swa": ff.swa,
    "apply_if_finite": ff.apply_if_finite,
    "schedule_free": lambda base: ff.schedule_free(base, 0.1),
}
LABELLED = ff.partition({"a": ff.sgd(0.1)}, lambda path, leaf: "a")


def torchs(name, **options):
    return lambda: ff.from_torch(getattr(torch.optim, name), **options)


def applied(optimizer, params, state=None, grads=None):
    """One step, with this state or a new one; ``grads``: the parameters themselves."""

    def call():
        held = optimizer.init(params) if state is None else state
        optimizer.apply(params if grads is None else grads, held, params)

    return call


def updated(optimizer, grads=P, params=None):
    given = () if params is None else (params,)
    state = optimizer.init(P if params is None else params)
    return lambda: optimizer.update(grads, state, *given)


def only(name):
    return ff.masked(ff.sgd(1.0), lambda path, leaf: path == name)


class Normed(torch.optim.Optimizer):
    """One that knows of no layout, and needs a norm."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm())


def vmapped(optimizer):
    state = optimizer.init(P)
    return lambda: vmap(lambda p: optimizer.apply(p, state, p)[0])(torch.ones(3, 2))


ADAM, MUON = ff.sharded_adam(), ff.muon()
NARROW = ff.sharded_adam(moment_dtype=torch.float16)  # moments times a scale
STRANGE = [
    ("sharded_adam keeps AdamState, and is given ScaledAdamState", ADAM, NARROW),
    ("sgd keeps SgdState, and is given AdamState", ff.sgd(0.1), ADAM),
    ("sgd keeps SgdState, and is given LionState", ff.lars(0.1), ff.lion()),
    ("lion keeps LionState, and is given SgdState", ff.lion(), ff.sgd(0.1, momentum=1)),
    ("lamb keeps AdamState, and is given ScaledAdamState", ff.lamb(), NARROW),
    ("muon keeps MuonState, and is given SgdState", MUON, ff.sgd(0.1, momentum=1)),
    ("chain keeps tuple, and is given MasterState", HALVED, ff.master_weights(ADAM)),
    (
        "stochastic_rounding keeps RoundingState, and is given AverageState",
        ff.stochastic_rounding(ff.sgd(0.1)),
        ff.ema(ff.sgd(0.1)),
    ),
]
BOTH = {"w": W, "b": W}
ONLY = ff.masked(ff.sgd(1.0), lambda path, leaf: path == "w")
PARTS = ff.partition({"a": ADAM}, lambda path, leaf: "a" if path == "w" else None)
FREEZING = [ff.schedule_free(o, 0.1) for o in (ONLY, ff.chain(ff.scale(1.0), PARTS))]
HALF = ff.scale(0.5)
FOLLOWED = [
    ("MasterState", ff.chain(ff.master_weights(ADAM), HALF)),
    ("MasterState", ff.adascale(ff.master_weights(ff.sgd(0.1)))),
    ("AverageState", ff.chain(HALF, ff.chain(ff.ema(ADAM)), HALF)),
    ("AverageState", ff.adascale(ff.masked(ff.swa(ADAM), lambda *_: True))),
    ("ScheduleFreeState", ff.chain(ff.schedule_free(ff.sgd(0.1), 0.1), HALF)),
    ("RoundingState", ff.chain(ff.stochastic_rounding(ADAM), HALF)),
]
VALUES = [
    ("learning_rate is -1.0", lambda: ff.sharded_adam(-1.0)),
    ("learning_rate is nan", lambda: ff.sharded_adam(math.nan)),
    ("b1 is 1.0", lambda: ff.sharded_adam(0.1, b1=1.0)),
    ("b2 is -0.1", lambda: ff.sharded_adam(0.1, b2=-0.1)),
    ("eps is -1e-08", lambda: ff.sharded_adam(0.1, eps=-1e-8)),
    ("weight_decay is -1", lambda: ff.sharded_adam(0.1, weight_decay=-1)),
    ("learning_rate is -1.0", lambda: ff.sgd(-1.0)),
    ("momentum is -1.0", lambda: ff.sgd(0.1, momentum=-1.0)),
    ("weight_decay is -1.0", lambda: ff.sgd(0.1, weight_decay=-1.0)),
    ("nesterov needs momentum", lambda: ff.sgd(0.1, nesterov=True)),
    ("dampening is", lambda: ff.sgd(0.1, nesterov=True, momentum=0.9, dampening=0.1)),
    ("weight_decay is -1", lambda: ff.add_decayed_weights(-1)),
    ("LBFGS cannot run on shards: it takes a closure", torchs("LBFGS")),
    ("sums over rows and columns.*take ff.adafactor", torchs("Adafactor")),
    ("ff.leaf_norms", lambda: ff.from_torch(Normed)),
    ("b1 is 1.0", lambda: ff.lion(b1=1.0)),
    ("weight_decay is -1", lambda: ff.lion(weight_decay=-1)),
    ("max_value is 0", lambda: ff.clip_by_value(0)),
    ("max_value is nan", lambda: ff.clip_by_value(math.nan)),
    ("trust_coefficient is -1", lambda: ff.lars(0.1, trust_coefficient=-1)),
    ("nesterov needs momentum", lambda: ff.lars(0.1, momentum=0, nesterov=True)),
    ("b2 is 1", lambda: ff.lamb(b2=1)),
    ("eps is -1", lambda: ff.scale_by_trust_ratio(eps=-1)),
    (r"a trust ratio.*update\(grads, state, params\)",
     updated(ff.scale_by_trust_ratio())),
    (r"call update\(grads, state, params\)", updated(ff.lamb())),
    (r"call update\(grads, state, params\)", updated(ff.adafactor())),
    ("beta2_decay is 0.8", lambda: ff.adafactor(beta2_decay=0.8)),
    ("d is 0.5", lambda: ff.adafactor(d=0.5)),
    ("eps2 is -1", lambda: ff.adafactor(eps=(None, -1))),
    ("take ff.sharded_adam", vmapped(ff.adafactor())),
    ("decay is 1", lambda: ff.ema(ff.sgd(0.1), 1)),
    ("start is -1", lambda: ff.ema(ff.sgd(0.1), start=-1)),
    ("every is 0", lambda: ff.swa(ff.sgd(0.1), every=0)),
    (r"ema.*call update\(grads, state, params\)", updated(ff.ema(ff.sgd(0.1)))),
    ("made by ff.ema, ff.swa or ff.schedule_free",
     lambda: ff.eval_params(ff.sgd(0.1).init(P), P)),
    ("b1 is 0", lambda: ff.schedule_free(ff.sgd(0.1), 0.1, b1=0)),
    ("b1 is 1", lambda: ff.schedule_free(ff.sgd(0.1), 0.1, b1=1)),
    ("learning_rate is -1", lambda: ff.schedule_free(ff.sgd(0.1), -1)),
    (r"call update\(grads, state, params\)",
     updated(ff.schedule_free(ff.sgd(0.1), 0.1))),
    (r"of schedule_free\(b1=0.5\)", applied(
        ff.schedule_free(ff.sgd(0.1), 0.1), P,
        ff.schedule_free(ff.sgd(0.1), 0.1, b1=0.5).init(P))),
    *[(f"put that around.*{name}", lambda make=make: make(SCALED))
      for name, make in AROUND.items()],
    ("max_consecutive_errors is -1", lambda: ff.apply_if_finite(ff.sgd(0.1), -1)),
    *[("p is", lambda p=p: ff.leaf_norms(P, p)) for p in (0, -1, math.nan)],
    ("orthogonalises a matrix", torchs("Muon")),
    ("sparse gradients", torchs("SparseAdam")),
    (r"from_torch\(Adam\) does without capturable", torchs("Adam", capturable=True)),
    ("take ff.sharded_adam", torchs("Adam", differentiable=True)),
    ("16 bits on a CPU", applied(torchs("SGD", fused=True)(), P.bfloat16())),
    ("Invalid learning rate", torchs("RMSprop", lr=-1.0)),
    ("Invalid alpha", torchs("RMSprop", alpha=-1.0)),
    ("steps is 0", lambda: ff.linear(0, 1, 0)),
    ("steps is -1", lambda: ff.cosine_decay(1, -1)),
    ("warmup_steps is 0", lambda: ff.warmup_cosine(1, 0, 5)),
    ("warmup_steps is 5 of total_steps 5", lambda: ff.warmup_cosine(1, 5, 5)),
    ("1 schedules at 1 boundaries", lambda: ff.join([ff.constant(1)], [3])),
    ("must rise", lambda: ff.join([ff.constant(1)] * 3, [3, 3])),
    ("begin above 0", lambda: ff.join([ff.constant(1)] * 2, [0])),
    *[("p is", lambda p=p: ff.global_norm(P, p)) for p in (0, -1, math.nan)],
    *[("p is", lambda p=p: ff.clip_by_global_norm(1, p=p)) for p in (0, -1, math.nan)],
    *[
        ("max_norm is", lambda bound=bound: ff.clip_by_global_norm(bound))
        for bound in (0, -1.0, math.nan)
    ],
    ("at least one", ff.chain),
    ("chain of 2 was given a state of 1", applied(HALVED, P, ((),))),
    ("needs them", updated(DECAYED)),
    (r"update\(grads, state, params\)", updated(ff.sharded_adam(weight_decay=0.1))),
    (r"update\(grads, state, params\)",
     updated(ff.sgd(1, momentum=0.9, weight_decay=1))),
    (r"call update\(grads, state, params\)", updated(ours("RMSprop"))),
    ("write partition", applied(ff.chain(only("a"), only("b")), TWO)),
    ("'b' is labelled 'b', which names no",
     lambda: ff.partition({"a": ff.sgd(0.1)}, BY_PATH).init(TWO)),
    (r"labels \['b'\], the optimizers have", applied(LABELLED, TWO, {"b": ()})),
    *[(f"{says}, which another", applied(optimizer, W, other.init(W)))
      for says, optimizer, other in STRANGE],
    *[("base of schedule_free leaves 'b' out, .*ff.masked", lambda o=o: o.init(BOTH))
      for o in FREEZING],
    *[(f"the updates .* keeps {name}, .* as in ff.master", lambda o=o: o.init(P))
      for name, o in FOLLOWED],
    ("the state keeps .*'momentum_buffer'", applied(
        ours("Adam"), P, ours("RMSprop").init(P))),
    ("cannot be differentiated or batched", vmapped(ours("RMSprop"))),
    ("-1.0 at count 0", applied(ff.sharded_adam(lambda count: -1.0), P)),
]  # fmt: skip
DTYPES = [
    ("moment_dtype", torch.int8, ff.lion),
    ("moment_dtype", torch.int64, ff.lamb),
    ("dtype", torch.uint8, lambda **how: ff.ema(ff.sgd(0.1), **how)),
    ("dtype", torch.bool, lambda **how: ff.swa(ff.sgd(0.1), **how)),
]
TYPES = [
    (
        r"from_torch\(torch.optim.AdamW, lr=.*an object of SGD; it needs no parameters",
        lambda: ff.from_torch(torch.optim.SGD([torch.ones(1)], 0.1)),
    ),
    *[
        (
            f"^{name} is {dtype}: give one of torch.float64, .*torch.float16",
            functools.partial(make, **{name: dtype}),
        )
        for name, dtype, make in DTYPES
    ],
]
UNFIT = {
    "gradients do not fit.*keys": {"w": W},
    r"gradients do not fit.*'w'.*\[2, 3\].*\[3, 2\]": {"w": W.t(), "b": W},
    "gradients do not fit.*'b'.*a list": {"w": W, "b": [W]},
    "'b'.*on cpu.*on meta": {"w": W, "b": W.to("meta")},
}
MISMATCHES = [
    *[(said, applied(ff.sharded_adam(), BOTH, None, g)) for said, g in UNFIT.items()],
    *[(said, updated(ff.sharded_adam(), g, BOTH)) for said, g in UNFIT.items()],
    ("gradients do not fit", applied(ours("RMSprop"), P, None, torch.ones(3))),
    ("gradients do not fit", applied(LABELLED, TWO, None, {"a": P})),
    ("optimizer state.*'w'.*None", applied(
        ff.sharded_adam(), {"w": W}, ff.sharded_adam().init({"w": torch.tensor(1)}))),
    ("state does not fit.*'w'.*second moments", applied(
        ff.adafactor(), {"w": W}, ff.adafactor().init({"w": W.t()}))),
    ("gradients do not fit.*'b'", applied(
        ff.ema(ff.sgd(0.1)), BOTH, ff.ema(ff.sgd(0.1)).init({**BOTH, "b": P}))),
    ("optimizer state.*'b'", applied(
        ff.schedule_free(ff.sgd(0.1), 0.1), BOTH,
        ff.schedule_free(ff.sgd(0.1), 0.1).init({**BOTH, "b": P}))),
]  # fmt: skip


def rows(error, table):
    return {f"{error.__name__} {k}": (f, error, s) for k, (s, f) in enumerate(table)}


@refusals(
    rows(ValueError, VALUES) | rows(TypeError, TYPES) | rows(TreeMismatch, MISMATCHES)
)
def test_bad_input_is_refused_unwritten(call, error, way_out):
    with donated(), unchanged(W, P):
        refused(call, error, way_out)


def refuse(grads, state, params=None):
    raise RuntimeError("a collective failed")


LATE = ff.chain(ff.Optimizer(lambda params: (), refuse), ff.sgd(0.1))


@pytest.mark.parametrize(
    "optimizer", [LATE, ff.partition({"a": ff.sgd(0.1), "b": LATE}, BY_PATH)]
)
def test_nothing_is_written_before_the_last_part_is_ready(optimizer):
    with donated(), unchanged(TWO), pytest.raises(RuntimeError, match="a collective"):
        optimizer.apply(tree.map(torch.clone, TWO), optimizer.init(TWO), TWO)


def test_parameters_are_asked_for_where_they_decay_alone():
    for make in (ff.sharded_adam, lambda **how: ff.sgd(0.1, momentum=0.9, **how)):
        free = make(weight_decay=0)
        assert_bits(free.update(P, free.init(P), P), free.update(P, free.init(P)))
