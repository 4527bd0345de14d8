"""A model and stacks of transforms over four ranks, between which its state moves."""

import torch

import fsfunc as ff

S = ff.schedules
WIDTH, ROWS = 6, 16


@ff.unit
def layer(p, x):
    hidden = torch.tanh(ff.nn.column_linear(x, p["up"], p["bias"]))
    return x + ff.nn.row_linear(hidden, p["down"])


def loss_fn(params, x):
    for p in params["layers"]:
        x = layer(p, x) * params["gain"]
    return x.square().mean()


def params_of():
    draw = torch.Generator().manual_seed(3)
    rand = lambda *s: torch.randn(s, generator=draw, dtype=torch.float64)  # noqa: E731
    layers = [
        {"up": rand(4, WIDTH), "bias": rand(4), "down": rand(WIDTH, 4)}
        for _ in range(3)
    ]
    return {"layers": layers, "gain": torch.ones(WIDTH, dtype=torch.float64)}


def adam():
    return ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.01))


MESHES = {
    "data": {"data": 4},
    "grid": {"data": 2, "model": 2},
    "turned": {"model": 2, "data": 2},
    "pipe": {"pipe": 2, "data": 2},
}
SPLIT = {
    "params/layers/*/up": ff.Split(0, "model"),
    "params/layers/*/bias": ff.Split(0, "model"),
    "params/layers/*/down": ff.Split(1, "model"),
}
WHOLE = {"params/**": ()}  # splits nothing


def _data(f, mesh, **how):
    return ff.shard(f, mesh, "data", **how)


def _pipe(f, mesh, m=2, **how):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=m, **how)


# name -> the mesh, what wraps the step, and how parameters are split (None: not told)
STACKS = {
    **{
        f"zero={z}": ("data", lambda f, m, z=z: _data(f, m, zero=z), None)
        for z in range(4)
    },
    "merged": ("data", lambda f, m: _data(f, m, min_bytes=10**6), None),
    "offloaded": (
        "data", lambda f, m: ff.offload(_data(f, m), params="cpu", moments="cpu"), None,
    ),
    "HSDP": ("grid", lambda f, m: _data(f, m, replicate="model"), None),
    "both axes": (
        "turned", lambda f, m: ff.shard(f, m, ("model", "data"), zero=2), None,
    ),
    "pipeline": ("pipe", lambda f, m: _data(_pipe(f, m), m), None),
    "zero=1 in stages": (
        "pipe", lambda f, m: _pipe(_data(f, m, zero=1), m, schedule=S.gpipe), None,
    ),
    "split": ("grid", lambda f, m: _data(f, m), SPLIT),
    "split, zero=0": ("turned", lambda f, m: _data(f, m, zero=0), SPLIT),
}  # fmt: skip


def mesh_of(name, backend="simulated"):
    return ff.make_mesh(MESHES[STACKS[name][0]], backend)


def step_of(name, mesh, optimizer=adam, loss=loss_fn):
    return STACKS[name][1](optimizer()(ff.value_and_grad(loss)), mesh)


def batch_of(name, mesh):
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    averaged = {"data", "model"} if name in ("HSDP", "both axes") else {"data"}
    return ff.local_batch(x, mesh, tuple(a for a in mesh.axes if a in averaged))


def begun(name, mesh, optimizer=adam, steps=1):
    """(state, loss) after some steps on this rank."""
    step, x = step_of(name, mesh, optimizer), batch_of(name, mesh)
    rules = STACKS[name][2]
    inner = (
        None
        if rules is None
        else {p.removeprefix("params/"): r for p, r in rules.items()}
    )
    state = ff.init_state(step, params_of, optimizer(), x, layouts=inner)
    for _ in range(steps):
        state, _ = step(state, x)
    return state
