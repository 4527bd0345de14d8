"""What a sharded step sends: counts and bytes equal the closed forms, by scheme."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import fsfunc as ff
from fsfunc.testing.drawn_models import embed, layer
from tests.checks import simulated, with_ledger
from tests.closed_forms import Buffer, UnitBuffers, sharded_step

MESH = ff.make_mesh({"data": 3}, "simulated")
GRID = ff.make_mesh({"node": 2, "data": 2}, "simulated")
SIZES = {"table": (4, 3), "w": (3, 3), "b": (3,), "wide": (3,), "tied": (3,)}
SIZES["complex"] = (5,)

first, second, third = (ff.unit(layer) for _ in range(3))
spectral = ff.unit(lambda p, x: (x * p).abs().mean())
frozen_layer = ff.unit(lambda p, x: layer(p["mine"], x) + x @ p["base"])


def make(*names):
    """Leaves of ones, in float32 but for ``wide`` and ``complex``."""
    dtypes = {"wide": torch.float64, "complex": torch.complex64}
    return {n: torch.ones(SIZES[n], dtype=dtypes.get(n, torch.float32)) for n in names}


EMBED = UnitBuffers((Buffer("embed", 12),), reads=False)
FIRST = UnitBuffers((Buffer("first", 12),))
SECOND = UnitBuffers((Buffer("second", 9),))  # not a multiple of any mesh here
LAST = UnitBuffers((Buffer("third", 12),))
PLAIN = [EMBED, FIRST, SECOND, LAST]


def params_of(*extra):
    p = {
        "embed": make("table"),
        "first": make("w", "b"),
        "second": make("w"),
        "third": make("w", "b"),
    }
    return p | {n: v for n, v in zip(extra[::2], extra[1::2], strict=True)}


def plain(p, frozen, tokens):
    h = first(p["first"], embed(p["embed"], tokens))
    return third(p["third"], second(p["second"], h)).sum(-1).mean()


def twice(p, frozen, tokens):
    h = first(p["first"], embed(p["embed"], tokens))
    h = first(p["first"], second(p["second"], h))
    return third(p["third"], h).sum(-1).mean()


def tied(p, frozen, tokens):
    h = first(p["first"] | {"tied": p["tied"]}, embed(p["embed"], tokens))
    h = second(p["second"] | {"tied": p["tied"]}, h)
    return third(p["third"], h).sum(-1).mean()


def with_frozen(p, frozen, tokens):
    h = first(p["first"], embed(p["embed"], tokens))
    h = frozen_layer({"mine": p["second"], "base": frozen["base"]}, h)
    return third(p["third"], h).sum(-1).mean()


def mixed(p, frozen, tokens):
    p = p | {"second": p["second"] | {"wide": p["wide"]}}
    return spectral(p["complex"], plain(p, frozen, tokens))


def ignoring(p, frozen, tokens):
    """A unit whose output the loss ignores is gathered and reduced all the same."""
    h = first(p["first"], embed(p["embed"], tokens))
    second(p["second"], h)
    return third(p["third"], h).sum(-1).mean()


TIED, BASE = Buffer("tied", 3), Buffer("base", 9, reduced=0)
COMPLEX = Buffer("complex", 5, gathered=8, reduced=8)  # no number of it is cut
WIDE = Buffer("wide", 3, gathered=8, reduced=8)
MODELS = {
    "plain": (plain, params_of(), PLAIN),
    "a unit twice": (twice, params_of(), [EMBED, FIRST, SECOND, FIRST, LAST]),
    "a tied leaf": (
        tied,
        params_of("tied", make("tied")["tied"]),
        [
            EMBED,
            UnitBuffers((*FIRST.buffers, TIED)),
            UnitBuffers((*SECOND.buffers, TIED)),
            LAST,
        ],
    ),
    "a frozen leaf": (
        with_frozen,
        params_of(),
        [EMBED, FIRST, UnitBuffers((*SECOND.buffers, BASE)), LAST],
    ),
    "three dtypes": (
        mixed,
        params_of(*itertools.chain(*make("wide", "complex").items())),
        [
            EMBED,
            FIRST,
            UnitBuffers((*SECOND.buffers, WIDE)),
            LAST,
            UnitBuffers((COMPLEX,)),
        ],
    ),
    # Its backward reads nothing, since no gradient comes to it.
    "an ignored unit": (ignoring, params_of(), PLAIN),
}
SCHEMES = {
    **{f"zero={z}": {"zero": z} for z in range(4)},
    "kept": {"reshard_after_forward": False},
    **{
        f"some kept, {' in '.join(reversed(order))}": {
            "reshard_after_forward": {"first/*": False, "**/embed": False},
            "kept": {"first", "embed"},
            "order": order,
        }
        for order in [
            ("shard",),
            ("remat", "shard"),
            ("shard", "accumulate"),
            ("accumulate", "remat", "shard"),
        ]
    },
    "shard(remat)": {"order": ("remat", "shard")},
    "remat(shard)": {"order": ("shard", "remat")},
    **{
        f"shard(accumulate) zero={z}": {"zero": z, "order": ("accumulate", "shard")}
        for z in (0, 1, 3)
    },
    **{
        f"accumulate(shard) zero={z}": {"zero": z, "order": ("shard", "accumulate")}
        for z in (0, 1, 3)
    },
    "accumulate(shard(remat))": {"order": ("remat", "shard", "accumulate")},
    "shard(remat(accumulate))": {"order": ("accumulate", "remat", "shard")},
    **{f"HSDP zero={z}": {"zero": z, "replicate": "node"} for z in (0, 2, 3)},
    "two axes": {"axis": ("node", "data")},
}
MICROBATCHES = 2


def measure(loss, params, mesh, order, axis, dtypes=None, **options):
    """The ledger of a step that follows a step."""
    frozen = {"base": torch.ones(3, 3)} if loss is with_frozen else {}
    tokens = torch.zeros(mesh.size * MICROBATCHES, dtype=torch.int64)
    names = tuple(mesh.axes)
    transforms = {
        "remat": ff.remat,
        "accumulate": lambda f: ff.accumulate(f, MICROBATCHES),
        "shard": lambda f: ff.shard(f, mesh, axis, **options),
        "precision": lambda f: ff.precision(f, **(dtypes or {})),
    }

    def step(params, frozen, tokens):
        loss_and_grads = ff.value_and_grad(loss)(params, frozen, tokens)
        return torch.utils._pytree.tree_map(
            lambda p, g: p - g, params, loss_and_grads[1]
        )

    for name in order:
        step = transforms[name](step)

    def main():
        mine = ff.local_batch(tokens, mesh, names)
        base = frozen and ff.place(lambda f: step(params, f, mine), frozen)
        placed = ff.place(step, params, base, mine)
        placed = step(placed, base, mine)
        with ff.ledger() as log:
            step(placed, base, mine)
        return log

    return ff.spmd(main, mesh)()


def sums(log, rank, over):
    """(op, over) -> (count, bytes), with the axes named as the closed form does."""
    found = {}
    for r in log.of(rank):
        key = r.op, over[r.axis]
        count, size = found.get(key, (0, Fraction(0)))
        found[key] = count + 1, size + r.bytes
    return found


def check(loss, params, calls, order=("shard",), axis="data", replicate=None, kept=(),
          **how):  # fmt: skip
    mesh = GRID if replicate or isinstance(axis, tuple) else MESH
    logs = measure(loss, params, mesh, order, axis, replicate=replicate, **how)
    said = {k: how[k] for k in how.keys() & {"zero", "reshard_after_forward"}}
    said = {"kept": kept} if kept else said
    if replicate:
        over = {("node",): "replicate", ("data",): "shard", ("node", "data"): "all"}
    else:
        over = {(axis,) if isinstance(axis, str) else axis: "shard"}
    expected = {
        (s.op, s.over): (s.count, s.bytes)
        for s in sharded_step(
            calls,
            mesh.axis_size(axis),
            replicas=mesh.axes["node"] if replicate else 1,
            remat="remat" in order,
            microbatches=MICROBATCHES if "accumulate" in order else 1,
            reduce_each="accumulate" in order[order.index("shard") :],
            **said,
        )
    }
    if not replicate:  # one axis carries both: its psums are added up
        loss_psum = expected.pop(("psum", "all"))
        count, size = expected.get(("psum", "shard"), (0, 0))
        expected["psum", "shard"] = count + loss_psum[0], size + loss_psum[1]
    for rank, log in enumerate(logs):
        assert sums(log, rank, over) == expected


SOME = {"zero=0", "zero=1", "zero=3", "kept", "shard(remat)", "two axes", "HSDP zero=3",
        "shard(accumulate) zero=3", "accumulate(shard) zero=1",
        "accumulate(shard(remat))"}  # fmt: skip


OTHERS = [m for m in MODELS if m != "plain"]  # by turns
CASES = [("plain", scheme) for scheme in sorted(SOME)]
CASES += [
    (OTHERS[i % len(OTHERS)], scheme)
    for i, scheme in enumerate(sorted(SCHEMES.keys() - SOME))
]


@pytest.mark.parametrize(("model", "scheme"), CASES)
def test_a_step_sends_what_the_closed_form_says(model, scheme):
    loss, params, calls = MODELS[model]
    if model == "an ignored unit":
        calls = [EMBED, FIRST, replace(SECOND, reads=True), LAST]
    check(loss, params, calls, **SCHEMES[scheme])


@pytest.mark.parametrize(
    ("zero", "reduce", "order"),
    [
        (0, None, ("precision", "shard")),
        (1, torch.float32, ("shard", "precision")),
        (3, torch.float32, ("precision", "shard")),
        (3, None, ("shard", "precision")),
    ],
)
def test_precision_sends_the_smaller_dtype(zero, reduce, order):
    dtypes = {"compute": torch.bfloat16, "reduce": reduce}
    cast = {"gathered": 2, "reduced": 4 if reduce else 2}
    calls = [
        replace(c, buffers=tuple(replace(b, **cast) for b in c.buffers)) for c in PLAIN
    ]
    check(plain, params_of(), calls, zero=zero, order=order, dtypes=dtypes)


@pytest.mark.parametrize(("zero", "order"), [(0, ("shard",)), (3, ("remat", "shard"))])
def test_small_neighbours_share_a_buffer(zero, order):
    """Of no more bytes than the smallest has, than two have, and than all have."""
    check(plain, params_of(), PLAIN, zero=zero, min_bytes=48, order=order)
    both = UnitBuffers((Buffer("embed + first", 24),))
    rest = UnitBuffers((Buffer("second + third", 21),))
    check(plain, params_of(), [both, rest], zero=zero, min_bytes=96, order=order)
    every = UnitBuffers((Buffer("all", 45),))
    check(plain, params_of(), [every], zero=zero, min_bytes=10**6, order=order)


inner = ff.unit(lambda p, x: torch.tanh(x @ p["w"]))


@ff.unit
def around(p, x):
    """A unit around units, whose own leaf is read after them."""
    for q in p["inner"]:
        x = inner(q, x)
    return x * p["b"]


NESTED = [
    UnitBuffers((Buffer("outer0", 3),)),
    UnitBuffers((Buffer("inner0", 9),), reads=False),  # a first layer, on data
    UnitBuffers((Buffer("inner1", 9),)),
    UnitBuffers((Buffer("outer1", 3),)),
    UnitBuffers((Buffer("inner2", 9),)),
    UnitBuffers((Buffer("inner3", 9),)),
]


@pytest.mark.parametrize("scheme", ["zero=0", "zero=3", "shard(remat)"])
def test_nested_units_send_what_flat_ones_would(scheme):
    def loss(p, frozen, tokens):
        x = torch.ones(len(tokens), 3)
        for q in p:
            x = around(q, x)
        return x.sum(-1).mean()

    params = [make("b") | {"inner": [make("w"), make("w")]} for _ in range(2)]
    check(loss, params, NESTED, **SCHEMES[scheme])


def test_an_axis_of_one_rank_sends_nothing():
    tokens, grad = torch.zeros(2, dtype=torch.int64), ff.value_and_grad(plain)
    wrap = lambda mesh: ff.shard(grad, mesh, "data", replicate="node")  # noqa: E731
    given = params_of(), {}, tokens
    ((_, log),) = with_ledger(wrap, *given, mesh=simulated(data=1, node=1))
    assert log.records == []
