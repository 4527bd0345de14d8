"""Every optimizer by name, and torch's own where there is one: for all laws alike."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import fsfunc as ff


def matrices(path, leaf):
    return leaf.ndim > 1  # of a flat shard the local one has one dim


@dataclass(frozen=True)
class Kind:
    """Settings to draw, and what they make: ours, and torch's optimizer (or None)."""

    ours: Callable[..., ff.Optimizer]
    theirs: Callable | None = None
    plain: Callable | None = None  # torch's, by operators that are not fused
    settings: st.SearchStrategy = st.just({})
    exact: bool = False  # by its update, and on shards, to the bit as well
    sends: bool = False
    anew: bool = False  # makes its moments in new memory, donated or not


ADAMS = st.fixed_dictionaries(
    {},
    optional={
        "b1": st.sampled_from([0.0, 0.5]),
        "b2": st.sampled_from([0.0, 0.9]),
        "eps": st.sampled_from([1e-6, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.3]),
    },
)
DESCENTS = st.sampled_from(
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 1.0, "weight_decay": 0.1},
        {"dampening": 0.5},
    ]
)


def adamw(b1=0.9, b2=0.999, fused=True, **settings):
    how = {"fused": True} if fused else {"foreach": False}
    return functools.partial(torch.optim.AdamW, betas=(b1, b2), **how, **settings)


def descent(fused=True, **settings):
    how = {"fused": True} if fused else {"foreach": False}
    return functools.partial(torch.optim.SGD, lr=0.1, **how, **settings)


OWN = {
    "adam": Kind(
        ff.sharded_adam, adamw, functools.partial(adamw, fused=False), settings=ADAMS
    ),
    "sgd": Kind(
        functools.partial(ff.sgd, 0.1),
        descent,
        functools.partial(descent, fused=False),
        settings=DESCENTS,
    ),
}


class Lion(torch.optim.Optimizer):
    """Not torch's: fills its states when it is made, and counts in Python."""

    def __init__(self, params, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1):
        held = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, held)
        for p in self.param_groups[0]["params"]:
            self.state[p] |= {"step": 0, "exp_avg": torch.full_like(p, 0.5)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                state, g = self.state[p], p.grad
                state["step"] += 1
                p.mul_(1 - rate * group["weight_decay"])
                way = state["exp_avg"].lerp(g, 1 - b1).sign_()
                p.add_(way, alpha=-rate / state["step"] ** 0.5)
                state["exp_avg"].lerp_(g, 1 - b2)


class Signum(torch.optim.Optimizer):
    """Not torch's: begins with its first gradient, counts in a tensor, sets `data`."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad.data.add_(p.data, alpha=0.1)
                if "buf" not in state:
                    state["step"], state["buf"] = torch.tensor(0.0), -2 * g
                state["step"] += 1
                state["buf"] = group["momentum"] * state["buf"] + g
                rate = group["lr"] / state["step"].item()
                p.data = p.data - rate * state["buf"].sign()


WORDS = {  # by class, as `from_torch` takes them
    Lion: {"moments": {"exp_avg": 0.5}, "numbers": {"step": 0}},
    Signum: {"moments": {"buf": 0.0}, "numbers": {"step": torch.tensor(0.0)}},
}
CLASSES = {
    "ASGD": ("ASGD", {"lr": 0.1, "weight_decay": 0.1}),
    "Adadelta": ("Adadelta", {"lr": 0.5}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "Adam": ("Adam", {"lr": 0.1}),
    "Adam amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True, "maximize": True}),
    "AdamW": ("AdamW", {"lr": 0.1, "weight_decay": 0.3}),
    "AdamW fused": ("AdamW", {"lr": 0.1, "fused": True}),
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {"lr": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ("RAdam", {"lr": 0.1}),
    "RMSprop": ("RMSprop", {"lr": 0.1, "centered": True, "momentum": 0.5}),
    "Rprop": ("Rprop", {"lr": 0.1}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD dampened": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "own Lion": (Lion, {"lr": 0.05}),
    "own Signum": (Signum, {}),
}


@functools.cache
def ours(name):
    kind, options = CLASSES[name]
    if not isinstance(kind, str):
        return ff.from_torch(kind, elementwise=True, **WORDS[kind], **options)
    return ff.from_torch(getattr(torch.optim, kind), **options)


def theirs(name):
    kind, options = CLASSES[name]
    make = getattr(torch.optim, kind) if isinstance(kind, str) else kind
    return functools.partial(make, **options)


TORCHS = {
    name: Kind(
        functools.partial(ours, name),
        functools.partial(theirs, name),
        exact="fused" not in name,
    )
    for name in CLASSES
}


def by_shape(matrix, other):
    label = lambda path, leaf: "matrix" if leaf.ndim > 1 else "other"  # noqa: E731
    return ff.partition({"matrix": matrix, "other": other}, label)


def nested_chain():
    return ff.chain(
        ff.clip_by_global_norm(1.0),
        ff.chain(ff.scale(2.0), ff.add_decayed_weights(0.1, matrices)),
        ff.sharded_adam(lambda count: 0.1 / (count + 1), mask=matrices),
    )


COMPOSED = {
    "adam, decay cuts the buffers": Kind(
        lambda: ff.sharded_adam(0.1, weight_decay=0.3, mask=matrices)
    ),
    "sgd, decay cuts the buffers": Kind(
        lambda: ff.sgd(0.1, momentum=0.9, weight_decay=0.3, mask=matrices)
    ),
    "clipped adam": Kind(
        lambda: ff.chain(
            ff.clip_by_global_norm(1.0), ff.sharded_adam(0.1, mask=matrices)
        ),
        sends=True,
    ),
    "a chain in a chain": Kind(nested_chain, sends=True),
    "torch's, scaled": Kind(
        lambda: ff.chain(ours("RMSprop"), ff.scale(0.5)), anew=True
    ),
    "partition": Kind(
        lambda: by_shape(ff.sharded_adam(0.1), ff.sgd(0.1, momentum=0.9))
    ),
    "clipped partition of torch's": Kind(
        lambda: ff.chain(
            ff.clip_by_global_norm(1.0), by_shape(ours("RMSprop"), ours("SGD dampened"))
        ),
        sends=True,
    ),
    "masked": Kind(
        lambda: ff.masked(
            ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.1)), matrices
        ),
        sends=True,
    ),
}
REDUCING = {
    "lion": Kind(lambda: ff.chain(ff.clip_by_value(0.5), ff.lion(0.1, mask=matrices))),
    "adafactor": Kind(
        lambda: ff.adafactor(0.1, weight_decay=0.1, mask=matrices),
        sends=True,
        anew=True,
    ),
    "lamb": Kind(lambda: ff.lamb(0.1, weight_decay=0.1, mask=matrices), sends=True),
    "lars": Kind(
        lambda: ff.lars(
            lambda count: 0.1 / (count + 1),
            trust_coefficient=0.1,
            nesterov=True,
            weight_decay=0.1,
            mask=matrices,
            trust_mask=matrices,
        ),
        sends=True,
    ),
    "averages, if finite": Kind(
        lambda: ff.apply_if_finite(
            ff.ema(ff.swa(ff.sharded_adam(0.1, mask=matrices), every=2), 0.8, start=1)
        ),
        sends=True,
    ),
    "schedule-free": Kind(
        lambda: ff.schedule_free(
            ff.sharded_adam(0.1, b1=0.0, weight_decay=0.0),
            0.1,
            weight_decay=0.2,
            mask=matrices,
        ),
    ),
}
KINDS = OWN | TORCHS | COMPOSED | REDUCING
OTHERS = {  # which have tests of their own
    "muon": lambda: ff.muon(0.1, ns_dtype=torch.float32),
    "shampoo": lambda: ff.shampoo(0.1, momentum=0.9, block=3),
    "muon, and others": lambda: ff.partition(
        {"matrix": ff.muon(0.1), "other": ff.sgd(0.1)},
        lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
    ),
    "moments of 16 bits": lambda: ff.sharded_adam(0.1, moment_dtype=torch.float16),
    "moments of 8 bits": lambda: ff.sharded_adam(0.1, moment_dtype=torch.uint8),
    "lion, 8 bits": lambda: ff.lion(0.1, moment_dtype=torch.uint8),
    "lamb, 8 bits": lambda: ff.lamb(0.1, moment_dtype=torch.uint8),
    "clipped by the largest": lambda: ff.chain(
        ff.clip_by_global_norm(0.5, p=torch.inf), ff.sgd(0.1)
    ),
    "adascale": lambda: ff.adascale(ff.sgd(0.1), scale=2.0),
    "loss_scale": lambda: ff.loss_scale(ff.sharded_adam(0.1), 8.0),
    "step_in_backward": lambda: ff.step_in_backward(ff.sharded_adam(0.1)),
    "master_weights": lambda: ff.master_weights(ff.sharded_adam(0.1)),
    "scaled masters": lambda: ff.loss_scale(
        ff.master_weights(ff.sharded_adam(0.1)), 8.0
    ),
    "stochastic_rounding": lambda: ff.stochastic_rounding(ff.sharded_adam(0.1)),
    "powersgd": lambda: ff.powersgd(ff.sgd(0.1), 1, 0.1),
}
EVERY = {name: kind.ours for name, kind in KINDS.items()} | OTHERS
