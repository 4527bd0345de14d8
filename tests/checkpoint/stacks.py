"""A model, and every stack of transforms by which its state may be laid out."""

import functools

import torch
from torch.nn.functional import dropout

import fsfunc as ff
from fsfunc import tree
from tests.optim.steps import data, pipe

CALLS, WIDTH, ROWS = 3, 5, 24


def loss_of(first=0.0, later=0.0):
    """A loss of three kinds of unit, which drop so much of what they make."""

    @ff.unit
    def embed(p, tokens):
        return dropout(p["table"][tokens], first)

    @ff.unit
    def layer(p, x):
        return x + p["scale"] * dropout(torch.tanh(x @ p["w"] + p["b"]), later)

    @ff.unit
    def head(p, x):
        return x @ p["w"]

    def loss_fn(params, batch):
        x = embed(params["embed"], batch)
        for p in params["layers"]:
            x = layer(p, x)
        return head(params["head"], x).square().mean()

    return loss_fn


loss_fn = loss_of()


def params_of(seed=3):
    draw = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(s, generator=draw)  # noqa: E731
    layers = [
        {"w": rand(WIDTH, WIDTH), "b": rand(WIDTH), "scale": rand()}
        for _ in range(CALLS)
    ]
    return {
        "embed": {"table": rand(7, WIDTH)},
        "layers": layers,
        "head": {"w": rand(WIDTH, 2)},
    }


def batches(count):
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(7, (ROWS,), generator=draw) for _ in range(count)]


def optimizer():
    return ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.01))


def _zero(axes, zero, **how):
    return axes, functools.partial(data, zero=zero, **how)


HYBRID = {"node": 2, "data": 2}
GRID = {"data": 2, "pipe": 2}
# name -> the mesh (None: no mesh), and what wraps the step
STACKS = {
    "one device": (None, lambda f, mesh: f),
    "zero=0 on 2": _zero({"data": 2}, 0),
    "zero=1 on 3": _zero({"data": 3}, 1),
    "zero=2 on 2": _zero({"data": 2}, 2),
    **{f"zero=3 on {n}": _zero({"data": n}, 3) for n in (1, 2, 4)},
    **{f"HSDP zero={z}": _zero(HYBRID, z, replicate="node") for z in (1, 3)},
    "both axes": (HYBRID, lambda f, mesh: ff.shard(f, mesh, ("node", "data"))),
    "merged": _zero({"data": 2}, 3, min_bytes=10**6),
    "donate(shard)": ({"data": 2}, lambda f, mesh: ff.donate(data(f, mesh))),
    "pipeline": ({"pipe": 2}, pipe),
    "shard(pipeline)": (GRID, lambda f, mesh: data(pipe(f, mesh), mesh)),
    "shard(pipeline) zero=1": (
        GRID,
        lambda f, mesh: data(pipe(f, mesh), mesh, zero=1),
    ),
    "pipeline(shard)": (GRID, lambda f, mesh: pipe(data(f, mesh), mesh)),
}


def made(name, mesh, seed=3, opt=optimizer):
    """(step, first state, batches) of a stack on this rank."""
    axes, wrap = STACKS[name]
    opt = opt()
    step = wrap(opt(ff.value_and_grad(loss_fn)), mesh)
    mine = batches(4)
    cut = tuple(a for a in axes or () if a != "pipe")
    if cut:
        mine = [ff.local_batch(b, mesh, cut) for b in mine]
    if mesh is None:
        params = params_of(seed)
        return step, ff.TrainState(params, opt.init(params)), mine
    return step, ff.init_state(step, lambda: params_of(seed), opt, mine[0]), mine


def abstract(state):
    """``state`` without its memory."""
    meta = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x  # noqa: E731
    return tree.map(meta, state)
