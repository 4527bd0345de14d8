"""Every optimizer by name, and torch's own where there is one: for all laws alike."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from fsfunc import (
    adascale,
    loss_scale,
    master_weights,
    muon,
    powersgd,
    shampoo,
    step_in_backward,
    stochastic_rounding,
)
from fsfunc.optim import (
    Optimizer,
    adafactor,
    add_decayed_weights,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    clip_by_value,
    ema,
    from_torch,
    lamb,
    lars,
    lion,
    masked,
    partition,
    scale,
    schedule_free,
    sgd,
    sharded_adam,
    swa,
)


def matrices(path, leaf):
    return leaf.ndim > 1  # of a flat shard the local one has one dim


@dataclass(frozen=True)
class Kind:
    """Settings to draw, and what they make: ours, and torch's optimizer (or None)."""

    ours: Callable[..., Optimizer]
    theirs: Callable | None = None
    plain: Callable | None = None  # torch's, by operators that are not fused
    settings: st.SearchStrategy = st.just({})
    exact: bool = False  # by its update, and on shards, to the bit as well
    sends: bool = False
    anew: bool = False  # makes its moments in new memory, donated or not
    few: bool = False  # examples: it has tests of its own


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
        sharded_adam, adamw, functools.partial(adamw, fused=False), settings=ADAMS
    ),
    "sgd": Kind(
        functools.partial(sgd, 0.1),
        descent,
        functools.partial(descent, fused=False),
        settings=DESCENTS,
    ),
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
}


@functools.cache
def ours(name):
    kind, options = CLASSES[name]
    return from_torch(getattr(torch.optim, kind), **options)


def theirs(name):
    kind, options = CLASSES[name]
    return functools.partial(getattr(torch.optim, kind), **options)


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
    return partition({"matrix": matrix, "other": other}, label)


def nested_chain():
    return chain(
        clip_by_global_norm(1.0),
        chain(scale(2.0), add_decayed_weights(0.1, matrices)),
        sharded_adam(lambda count: 0.1 / (count + 1), mask=matrices),
    )


COMPOSED = {
    "adam, decay cuts the buffers": Kind(
        lambda: sharded_adam(0.1, weight_decay=0.3, mask=matrices)
    ),
    "sgd, decay cuts the buffers": Kind(
        lambda: sgd(0.1, momentum=0.9, weight_decay=0.3, mask=matrices)
    ),
    "clipped adam": Kind(
        lambda: chain(clip_by_global_norm(1.0), sharded_adam(0.1, mask=matrices)),
        sends=True,
    ),
    "a chain in a chain": Kind(nested_chain, sends=True),
    "torch's, scaled": Kind(lambda: chain(ours("RMSprop"), scale(0.5)), anew=True),
    "partition": Kind(lambda: by_shape(sharded_adam(0.1), sgd(0.1, momentum=0.9))),
    "clipped partition of torch's": Kind(
        lambda: chain(
            clip_by_global_norm(1.0), by_shape(ours("RMSprop"), ours("SGD dampened"))
        ),
        sends=True,
    ),
    "masked": Kind(
        lambda: masked(chain(clip_by_global_norm(1.0), sharded_adam(0.1)), matrices),
        sends=True,
    ),
}
REDUCING = {
    "lion": Kind(lambda: chain(clip_by_value(0.5), lion(0.1, mask=matrices)), few=True),
    "adafactor": Kind(
        lambda: adafactor(0.1, weight_decay=0.1, mask=matrices),
        sends=True,
        anew=True,
        few=True,
    ),
    "lamb": Kind(
        lambda: lamb(0.1, weight_decay=0.1, mask=matrices), sends=True, few=True
    ),
    "lars": Kind(
        lambda: lars(
            lambda count: 0.1 / (count + 1),
            trust_coefficient=0.1,
            nesterov=True,
            weight_decay=0.1,
            mask=matrices,
            trust_mask=matrices,
        ),
        sends=True,
        few=True,
    ),
    "averages, if finite": Kind(
        lambda: apply_if_finite(
            ema(swa(sharded_adam(0.1, mask=matrices), every=2), 0.8, start=1)
        ),
        sends=True,
        few=True,
    ),
    "schedule-free": Kind(
        lambda: schedule_free(
            sharded_adam(0.1, b1=0.0, weight_decay=0.0),
            0.1,
            weight_decay=0.2,
            mask=matrices,
        ),
        few=True,
    ),
}
KINDS = OWN | TORCHS | COMPOSED | REDUCING
OTHERS = {  # which have tests of their own
    "muon": lambda: muon(0.1, ns_dtype=torch.float32),
    "shampoo": lambda: shampoo(0.1, momentum=0.9, block=3),
    "muon, and others": lambda: partition(
        {"matrix": muon(0.1), "other": sgd(0.1)},
        lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
    ),
    "moments of 16 bits": lambda: sharded_adam(0.1, moment_dtype=torch.float16),
    "moments of 8 bits": lambda: sharded_adam(0.1, moment_dtype=torch.uint8),
    "lion, 8 bits": lambda: lion(0.1, moment_dtype=torch.uint8),
    "lamb, 8 bits": lambda: lamb(0.1, moment_dtype=torch.uint8),
    "clipped by the largest": lambda: chain(
        clip_by_global_norm(0.5, p=torch.inf), sgd(0.1)
    ),
    "adascale": lambda: adascale(sgd(0.1), scale=2.0),
    "loss_scale": lambda: loss_scale(sharded_adam(0.1), 8.0),
    "step_in_backward": lambda: step_in_backward(sharded_adam(0.1)),
    "master_weights": lambda: master_weights(sharded_adam(0.1)),
    "stochastic_rounding": lambda: stochastic_rounding(sharded_adam(0.1)),
    "powersgd": lambda: powersgd(sgd(0.1), 1, 0.1),
}
EVERY = {name: kind.ours for name, kind in KINDS.items()} | OTHERS
STEPS_ALONE = {"adascale", "step_in_backward", "powersgd"}  # no gradients but its own
