"""A view of a parameter that a backward reads, of every kind of view there is."""

import math

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from tests.checks import close, on_ranks, simulated
from tests.covering import examples

MESH = simulated()

# Of a tensor, another that lies in its memory; by what it asks of it.
STRIDED = {
    "transposed": lambda x: x.movedim(0, -1),
    "reversed dims": lambda x: x.permute(*reversed(range(x.ndim))),
    "every other": lambda x: x[::2],
    "tail": lambda x: x[1:] if len(x) > 1 else x,
    "column": lambda x: x.select(-1, x.shape[-1] - 1)[..., None],
    "expanded": lambda x: x[None].expand(2, *x.shape),
    "windows": lambda x: x.unfold(0, min(2, len(x)), 1),
    "diagonal": lambda x: x.diagonal(0, 0, -1)[None] if x.ndim > 1 else x,
    "flattened": lambda x: x.flatten() if x.is_contiguous() else x,
}
OF_COMPLEX = {
    "conjugated": torch.conj,
    "adjoint": lambda x: x.mH if x.ndim == 2 else x.conj(),
    "real": torch.real,
    "imag": torch.imag,
    "negated": lambda x: x.conj().imag,
    "pairs": lambda x: x if x.is_conj() else torch.view_as_real(x),
    "as floats": lambda x: (
        x
        if x.is_conj() or x.stride(-1) != 1
        else x.view(torch.float64 if x.dtype == torch.complex128 else torch.float32)
    ),
}
KINDS = torch.float32, torch.float64, torch.complex64, torch.complex128


def pairable(x):
    """True if two neighbours in the last dim may be read as one complex number."""
    steps = [*x.stride()[:-1], x.storage_offset()]
    fits = x.shape[-1] == 2 and x.stride(-1) == 1 and not any(n % 2 for n in steps)
    return fits and not x.is_neg() and x.dtype in (torch.float32, torch.float64)


def chained(x, names):
    """A view of ``x`` by these steps, those left out that it does not allow."""
    for name in names:
        if name == "as complex":
            x = torch.view_as_complex(x) if pairable(x) else x
        elif name == "as integers":
            same = {4: torch.int32, 8: torch.int64}.get(x.itemsize)
            x = x if same is None or x.is_neg() or x.is_conj() else x.view(same)
        elif name in STRIDED:
            x = STRIDED[name](x)
        elif x.is_complex():
            x = OF_COMPLEX[name](x)
    return x


def unit_of(names):
    @ff.unit
    def layer(p, x):
        v = chained(p["w"], names)
        if not (v.is_floating_point() or v.is_complex()):
            flat = p["b"].flatten()  # an index is saved too
            return x.sum() * flat[v.flatten().remainder(len(flat))].sum()
        y = v * v + x.sum() * v  # saves ``v``
        weight = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64)
        y = y.flatten() * weight.to(y.real.dtype)
        y = y.real.sum() + 2 * y.imag.sum() if y.is_complex() else y.sum()
        return y.to(torch.float64) + x.sum() * p["b"].square().sum()

    return layer


def params_of(kind, shape):
    n = math.prod(shape)
    real = torch.arange(1.0, n + 1, dtype=torch.float64).sin()
    w = torch.complex(real, real.flip(0) + 1) if kind.is_complex else real
    b = torch.tensor([0.5, 2.0, -1.0, 4.0], dtype=torch.float64)
    return {"w": w.to(kind).reshape(shape), "b": b}


NAMES = st.lists(
    st.sampled_from(["as complex", "as integers", *STRIDED, *OF_COMPLEX]),
    min_size=1,
    max_size=5,
)
AROUND = {
    "alone": lambda f: f,
    "remat": ff.remat,
    "offload": lambda f: ff.offload(f, activations="host"),
    "accumulate": lambda f: ff.accumulate(f, 2),
    "zero=2": lambda f: f,
}


@given(
    names=NAMES,
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([(4, 2), (3, 2), (2, 2, 2)]),
    around=st.sampled_from(list(AROUND)),
)
@example(names=["as complex"], kind=torch.float64, shape=(4, 2), around="alone")
@example(names=["negated"], kind=torch.complex128, shape=(3, 2), around="alone")
@example(names=["conjugated"], kind=torch.complex64, shape=(3, 2), around="alone")
@example(names=["as floats"], kind=torch.complex64, shape=(3, 2), around="alone")
@example(
    names=["tail", "as integers"], kind=torch.float64, shape=(3, 2), around="alone"
)
@example(
    names=["as complex", "negated"], kind=torch.float32, shape=(2, 2, 2), around="remat"
)
@settings(max_examples=examples(25))
def test_every_kind_of_view_is_read_again_as_it_was_saved(names, kind, shape, around):
    layer = unit_of(names)

    def loss(p, x):
        return layer(p, x) * x.mean()

    params, x = params_of(kind, shape), torch.arange(8, dtype=torch.float64) / 8
    step = AROUND[around](ff.value_and_grad(loss))
    sharded = ff.shard(step, MESH, "data", zero=2 if around == "zero=2" else 3)
    rows = x.view(4, 2)
    n = 4 if around == "accumulate" else 2
    each = [ff.value_and_grad(loss)(params, part) for part in rows.chunk(n)]
    expected = ff.tree.map(lambda *g: sum(g) / n, *each)
    tolerance = 1e-5 if kind in (torch.float32, torch.complex64) else 1e-12
    for found in on_ranks(sharded, params, rows, mesh=MESH):
        close(found, expected, tolerance)
