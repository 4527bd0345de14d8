"""Attention over a sequence cut among ranks: equal to the whole, at a counted cost."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.nn import (
    all_to_all_attention,
    ring_attention,
    unzigzag,
    zigzag,
    zigzag_positions,
)
from tests.checks import close, refusals, refused, same, simulated, unchanged

# forward mode loads torch's own decompositions, which scripts them
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

FORMS = {"ring": ring_attention, "all_to_all": all_to_all_attention}
ORDERS = {"every key": None, "zigzag": "zigzag", "contiguous": "contiguous"}
orders, forms = st.sampled_from(list(ORDERS.values())), st.sampled_from(list(FORMS))


def tensors(seed, shape_q, shape_k, shape_v, dtype=torch.float64):
    """q, k, v and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shape_q, shape_k, shape_v, (*shape_q[:3], shape_v[3])
    draws = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(dtype) for x in draws]


def judged(q, k, v, w, causal, scale=None, dtype=torch.float64):
    """torch's attention of the whole, in fp64, and its gradients."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.detach(), *torch.autograd.grad((out * w.to(dtype)).sum(), (q, k, v))


def cut(x, size, order):
    """What each rank holds."""
    return (zigzag(x, size, 2) if order == "zigzag" else x).chunk(size, 2)


def join(parts, order):
    whole = torch.cat(parts, 2)
    return unzigzag(whole, len(parts), 2) if order == "zigzag" else whole


def attention(form, order, **how):
    causal = {} if order is None else {"causal": True, "order": order}
    return lambda q, k, v: FORMS[form](q, k, v, "context", **causal, **how)


def on_ranks(fn, size, order, *whole):
    """``fn`` of each rank's parts; its results, joined."""
    mesh = simulated(context=size)
    parts = [cut(x, size, order) for x in whole]

    def main():
        return fn(*(x[ff.axis_index("context")] for x in parts))

    return [join(xs, order) for xs in zip(*ff.spmd(main, mesh)(), strict=True)]


def pulled(attend):
    """Its value and gradients, by plain autograd."""

    def run(q, k, v, w):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attend(q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), w)

    return run


def transformed(attend):
    """The same, by torch.func."""

    def run(q, k, v, w):
        def loss(*qkv):
            out = attend(*qkv)
            return (out * w).sum(), out

        grads, out = torch.func.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *grads

    return run


@st.composite
def cases(draw):
    """(axis size, order, shapes of q, k and v)."""
    size, order = draw(st.integers(1, 4)), draw(orders)
    batch, read, groups = (draw(st.integers(1, n)) for n in (2, 3, 3))
    width, value = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    value = draw(st.sampled_from([width, value]))
    n = draw(st.integers(1, 3)) * (2 if order else 1) * size
    m = n if order else draw(st.integers(1, 3)) * size
    shapes = (
        (batch, read * groups, n, width),
        (batch, read, m, width),
        (batch, read, m, value),
    )
    return size, order, shapes


# Equal to the whole


def in_fp32(attend, size, order, whole, scale=None):
    """As near as torch is in fp32 to what fp64 makes of the same numbers, and 1e-6."""
    singles = [x.float() for x in whole]
    causal = order is not None
    expected = judged(*singles, causal=causal, scale=scale)
    rounded = judged(*singles, causal=causal, scale=scale, dtype=torch.float32)
    found = on_ranks(pulled(attend), size, order, *singles)
    for x, y, theirs in zip(found, expected, rounded, strict=True):
        assert x.dtype == torch.float32
        off = (theirs - y).abs().max() + 1e-6 * max(1, y.abs().max())
        assert (x - y).abs().max() <= off


@settings(max_examples=20)
@given(cases(), st.sampled_from([True, False]), st.sampled_from([None, 0.3]))
@example((2, "zigzag", ((1, 6, 4, 4), (1, 3, 4, 4), (1, 3, 4, 4))), True, None)
def test_a_ring_is_torchs_attention(case, recompute, scale) -> None:
    size, order, shapes = case
    whole = tensors(size, *shapes)
    attend = attention("ring", order, recompute=recompute, scale=scale)
    expected = judged(*whole, causal=order is not None, scale=scale)
    close(on_ranks(pulled(attend), size, order, *whole), list(expected), 1e-12)
    in_fp32(attend, size, order, whole, scale)


@settings(max_examples=6)
@given(cases())
def test_under_torch_func(case) -> None:
    size, order, shapes = case
    whole = tensors(size, *shapes)
    expected = judged(*whole, causal=order is not None)
    ring = transformed(attention("ring", order))
    close(on_ranks(ring, size, order, *whole), list(expected), 1e-12)


@settings(max_examples=15)
@given(cases(), st.sampled_from([True, False]))
def test_all_to_all_is_torchs_attention(case, recompute) -> None:
    size, order, shapes = case
    shapes = [(b, heads * size, *rest) for b, heads, *rest in shapes]
    whole = tensors(size, *shapes)
    attend = attention("all_to_all", order, recompute=recompute)
    expected = judged(*whole, causal=order is not None)
    for way in (pulled, transformed):
        close(on_ranks(way(attend), size, order, *whole), list(expected), 1e-12)
    in_fp32(attend, size, order, whole)


@settings(max_examples=10)
@given(cases())
def test_rows_are_computed_tile_by_tile(case) -> None:
    size, order, (q, k, v) = case
    whole = tensors(size, q, k, (*v[:3], k[3] + 1))  # wider: no kernel takes them
    expected = judged(*whole, causal=order is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsfunc.nn.attention_blocks._SCORES", 0)
        patch.setattr("fsfunc.nn.attention_blocks._ROWS", 2)
        found = on_ranks(pulled(attention("ring", order)), size, order, *whole)
    close(found, list(expected), 1e-12)


def curved(attend):
    """Second derivatives by plain autograd, with a key made of the query."""

    def run(q, k, v, w, *ts):
        q, k, v, w = (x.detach().requires_grad_() for x in (q, k, v, w))
        out = attend(q, k + q.sin(), v)
        gs = torch.autograd.grad((out * w).sum(), (q, k, v), create_graph=True)
        total = sum((g * t).sum() for g, t in zip(gs, ts, strict=True))
        return torch.autograd.grad(total, (q, k, v, w))

    return run


def curved_without_graph_of_cotangent(attend):
    def run(q, k, v, w, *ts):
        k = k.detach().requires_grad_()
        (g,) = torch.autograd.grad((attend(q, k, v) * w).sum(), k, create_graph=True)
        return torch.autograd.grad((g * ts[1]).sum(), k)

    return run


def forward_over_reverse(attend):
    def run(q, k, v, w, *ts):
        def pull(*qkv):
            return torch.func.vjp(attend, *qkv)[1](w)

        return torch.func.jvp(pull, (q, k, v), ts)[1]

    return run


def forward_mode(attend):
    def run(q, k, v, w, *ts):
        with torch.autograd.forward_ad.dual_level():
            duals = map(torch.autograd.forward_ad.make_dual, (q, k, v), ts)
            return tuple(torch.autograd.forward_ad.unpack_dual(attend(*duals)))

    return run


def mapped(attend):
    def run(q, k, v, w, *ts):
        both = (torch.stack(pair) for pair in zip((q, k, v), ts, strict=True))
        return tuple(torch.func.vmap(attend)(*both))

    return run


def mapped_backward(attend):
    def run(q, k, v, w, *_):
        q = q.detach().requires_grad_()
        out = attend(q, k, v)
        pull = torch.func.vmap(lambda w: torch.autograd.grad(out, q, w)[0])
        return tuple(pull(torch.stack([w, 2 * w])))

    return run


WAYS = [
    curved,
    curved_without_graph_of_cotangent,
    forward_over_reverse,
    forward_mode,
    mapped,
    mapped_backward,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
@pytest.mark.parametrize("form", FORMS)
def test_further_derivatives(form, order, way) -> None:
    # A rank in the middle of three neither sees all keys nor its own alone.
    size, shape = (3, (1, 3, 6, 2)) if form == "ring" else (2, (1, 2, 4, 2))
    whole = tensors(0, *[shape] * 3) + tensors(1, *[shape] * 3)[:3]

    def full(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=order is not None)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = way(full)(*whole)
    found = on_ranks(way(attention(form, order)), size, order, *whole)
    close(found, [x.detach() for x in expected], 1e-11)


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
@pytest.mark.parametrize("form", FORMS)
def test_on_a_vmap_mesh_all_ranks_run_as_one(form, order) -> None:
    whole = tensors(0, *[(1, 4, 8, 2)] * 3)
    parts = [cut(x, 4, order) for x in whole]
    mesh = ff.make_mesh({"context": 4}, "vmap")
    mine = ff.spmd(
        lambda: [x[ff.axis_index("context")] for x in parts[:3]], simulated(context=4)
    )()
    attend = attention(form, order)
    outs = ff.spmd(lambda qkv: attend(*qkv), mesh)(mine)
    expected = judged(*whole, causal=order is not None)[0]
    close(join(outs, order), expected, 1e-12)


# As it is used


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_dtypes_are_summed_in_fp32(form, dtype) -> None:
    for value in (8, 9):  # by a kernel, and by products
        shapes = (1, 4, 64, 8), (1, 4, 64, 8), (1, 4, 64, value)
        whole = tensors(0, *shapes, dtype=dtype)
        expected = judged(*whole, causal=True)
        found = on_ranks(pulled(attention(form, "zigzag")), 4, "zigzag", *whole)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == dtype
            steps = 3 * torch.finfo(dtype).eps * y.abs().max()  # of rounding
            assert (x.double() - y).abs().max() <= steps


@pytest.mark.parametrize("value", [4, 5])  # by a kernel, and by products
@pytest.mark.parametrize("form", FORMS)
def test_under_autocast_half_dtypes_are_sent(form, value) -> None:
    shapes = (1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, value)
    whole = tensors(0, *shapes, dtype=torch.float32)
    ring = attention(form, "zigzag")

    def cast(*qkv):
        with torch.autocast("cpu", torch.bfloat16):
            return ring(*qkv)

    expected = on_ranks(pulled(ring), 2, "zigzag", *(x.bfloat16() for x in whole))
    with ff.ledger() as log:
        found = on_ranks(pulled(cast), 2, "zigzag", *whole[:3], whole[3].bfloat16())
    same([x.bfloat16() for x in found], expected)
    assert {r.dtype for r in log.records} == {torch.bfloat16}


def test_inputs_of_any_layout_are_left_as_they_are() -> None:
    q, k, v, _ = (x.transpose(2, 3) for x in tensors(0, *[(1, 2, 4, 8)] * 3))
    ones = torch.ones(()).double().expand(1, 2, 8, 4)
    for form, size in itertools.product(FORMS, (1, 2)):
        attend = pulled(attention(form, None))
        with unchanged(q, k, v):
            found = on_ranks(attend, size, None, q, k, v, ones)
        close(found, list(judged(q, k, v, ones, False)), 1e-12)


def test_only_some_inputs_are_differentiated() -> None:
    q, k, v, w = tensors(0, *[(1, 2, 8, 4)] * 3)
    expected = judged(q, k, v, w, True)

    def by(which):
        def run(*qkvw):
            given = list(qkvw)
            given[which] = x = given[which].detach().requires_grad_()
            out = attention("ring", "zigzag")(*given[:3])
            return torch.autograd.grad((out * given[3]).sum(), (x,))

        return run

    for which in range(3):
        (found,) = on_ranks(by(which), 2, "zigzag", q, k, v, w)
        close(found, expected[1 + which], 1e-12)


HEADS, WIDTH, LENGTH = 4, 8, 8
WEIGHTS = {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2, "o": WIDTH}


def model(attend, enter=None):
    """A loss of two layers with grouped queries and learned positions."""

    def layer(p, x):
        p = p if enter is None else enter(p)
        q, k, v = (
            (x @ p[key].T).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for key in "qkv"
        )
        return x + torch.tanh(attend(q, k, v).transpose(1, 2).flatten(2) @ p["o"].T)

    layer = ff.unit(layer)

    def loss(params, batch):
        x = params["at"][batch["at"]] + batch["x"]
        for p in params["layers"]:
            x = layer(p, x)
        return ((x - batch["y"]) ** 2).mean()

    return loss


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def drawn_model(rows):
    """Parameters, a batch, and its loss and gradients on one device."""
    torch.manual_seed(0)
    params = {
        "at": drawn(LENGTH, WIDTH),
        "layers": [{k: drawn(n, WIDTH) / 3 for k, n in WEIGHTS.items()} for _ in "ab"],
    }
    batch = {name: drawn(rows, LENGTH, WIDTH) for name in "xy"}

    def whole(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    there = {"at": torch.arange(LENGTH), **batch}
    return params, batch, ff.value_and_grad(model(whole))(params, there)


STACKS = {
    "shard": lambda f, mesh: ff.shard(f, mesh, ("data", "context")),
    "shard(remat)": lambda f, mesh: ff.shard(ff.remat(f), mesh, ("data", "context")),
    "remat(shard)": lambda f, mesh: ff.remat(ff.shard(f, mesh, ("data", "context"))),
    "accumulate": lambda f, mesh: ff.shard(ff.accumulate(f, 2), mesh, ("data",
        "context"), zero=2),
}  # fmt: skip


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("form", FORMS)
def test_a_context_axis_may_be_one_of_shards(form, stack) -> None:
    params, batch, expected = drawn_model(rows=4)
    mesh = simulated(data=2, context=2)

    def main():
        index = ff.axis_index("context")
        mine = {
            name: zigzag(x, 2, 1).chunk(2, 1)[index].chunk(2, 0)[ff.axis_index("data")]
            for name, x in batch.items()
        }
        at = zigzag_positions(LENGTH, 2, index)
        mine["at"] = at.expand(len(mine["x"]), -1)
        loss = model(attention(form, "zigzag"))
        grad = STACKS[stack](ff.value_and_grad(loss), mesh)
        value, grads = grad(ff.place(grad, params, mine), mine)
        return value, ff.unshard(grads)

    for found in ff.spmd(main, mesh)():
        close(found, expected, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_outside_units_it_gives_a_rank_its_own(form) -> None:
    torch.manual_seed(0)
    w, x = drawn(4, 4), drawn(1, 2, 8, 4)
    project = ff.unit(lambda w, x: x @ w)

    def loss(attend):
        def run(w, x):
            q = project(w, x)
            return (attend(q, x, q) ** 3 + q).mean()

        return run

    def whole(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    expected = ff.value_and_grad(loss(whole))(w, x)
    mesh, parts = simulated(context=2), cut(x, 2, "zigzag")

    def main():
        mine = parts[ff.axis_index("context")]
        grad = ff.value_and_grad(loss(attention(form, "zigzag")))
        grad = ff.shard(grad, mesh, "context")
        value, grads = grad(ff.place(grad, w, mine), mine)
        return value, ff.unshard(grads)

    for found in ff.spmd(main, mesh)():
        close(found, expected, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_context_axis_may_split_the_work_of_one_loss(form) -> None:
    params, batch, expected = drawn_model(rows=2)

    def main():
        index = ff.axis_index("context")
        mine = {k: zigzag(x, 2, 1).chunk(2, 1)[index] for k, x in batch.items()}
        mine["at"] = zigzag_positions(LENGTH, 2, index)
        enter = lambda p: ff.pcast(p, "context", to="V")  # noqa: E731
        loss = model(attention(form, "zigzag"), enter)

        def one(params, batch):
            params = {**params, "at": enter(params["at"])}
            return ff.pmean(loss(params, batch), "context")

        return ff.value_and_grad(one)(params, mine)

    for found in ff.spmd(main, simulated(context=2))():
        close(found, expected, 1e-12)


PROGRAM = """
    import torch, fsfunc as ff
    from fsfunc.nn import all_to_all_attention, ring_attention, unzigzag, zigzag
    mesh = ff.make_mesh({"context": 2})
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 8, 4, dtype=torch.float64) for _ in range(3))
    q.requires_grad_()
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad, = torch.autograd.grad(whole.sin().sum(), q)
    def main():
        for attend in ring_attention, all_to_all_attention:
            i = ff.axis_index("context")
            mine = [zigzag(x.detach(), 2, 2).chunk(2, 2)[i] for x in (q, k, v)]
            mine[0].requires_grad_()
            out = attend(*mine, "context", causal=True, order="zigzag")
            g, = torch.autograd.grad(out.sin().sum(), mine[0])
            for x, y in ((out, whole), (g, grad)):
                x = unzigzag(ff.all_gather(x.detach(), "context", dim=2), 2, 2)
                torch.testing.assert_close(x, y.detach())
        print("equal")
    ff.spmd(main, mesh)()
"""


@pytest.mark.processes
def test_over_real_processes(processes) -> None:
    assert processes(PROGRAM, 2).split() == ["equal", "equal"]


# Refused


def refusing(call, size=2):
    return lambda: ff.spmd(call, simulated(context=size))()


def zeros(heads, n, width=4, batch=1, **how):
    return torch.zeros(batch, heads, n, width, **how)


def ring(q, k, v, **how):
    return refusing(lambda: ring_attention(q, k, v, "context", **how))


def ulysses(q, k, v, size=2, **how):
    return refusing(lambda: all_to_all_attention(q, k, v, "context", **how), size)


X = zeros(2, 4)
BAD = {
    "odd": (ring(*[zeros(2, 3)] * 3, causal=True, order="zigzag"), ValueError,
        "3 positions a rank.*multiple of 4, such as 4 or 8, not 6"),
    "odd, all to all": (ulysses(*[zeros(2, 1)] * 3, causal=True, order="zigzag"),
        ValueError, "all_to_all_attention: 1 positions.*such as 4, not 2"),
    "order": (ring(X, X, X, order="striped"), ValueError, "'zigzag' or 'contiguous'"),
    "no order": (ring(X, X, X, causal=True), TypeError,
        "ring_attention: causal=True over 'context' needs order=.*ff.nn.zigzag.*"
        '"contiguous"'),
    "no order, all to all": (ulysses(X, X, X, causal=True, size=1), TypeError,
        "all_to_all_attention: causal=True over 'context' needs order="),
    "a scale to learn": (ring(X, X, X, scale=torch.ones(())), TypeError,
        "scale is a tensor, .* multiply q by it"),
    "heads": (ring(zeros(6, 4), zeros(4, 4), zeros(4, 4)), ValueError,
        "6 query heads do not share 4 key heads.*work: 1, 2, 3, 6"),
    "heads, all to all": (ulysses(*[zeros(6, 4)] * 3, size=4), ValueError,
        '6 query heads and 6 key heads are not cut into 4 by "context". Axis sizes '
        "that work: 1, 2, 3, 6; or 4 or 8 key heads.*ring_attention"),
    "key heads, all to all": (ulysses(zeros(8, 4), zeros(2, 4), zeros(2, 4), size=4),
        ValueError, "work: 1, 2; or 4 key heads"),
    "dims": (ring(X[0], X, X), ValueError, r"batch, heads, n, head_dim.*q \(2, 4, 4\)"),
    "k and v": (ring(X, X, zeros(2, 5)), ValueError, "k and v differ in"),
    "batch": (ring(zeros(2, 4, batch=2), X, X), ValueError, "q and k differ in batch"),
    "head_dim": (ring(zeros(2, 4, 3), X, X), ValueError, "differ in head_dim"),
    "no keys": (ring(X, zeros(2, 0), zeros(2, 0)), ValueError, "no keys"),
    "causal lengths": (ring(zeros(2, 2), X, X, causal=True, order="zigzag"), ValueError,
        "as many queries as keys"),
    "dtypes": (ring(X, X, X.double()), TypeError,
        "one floating dtype.*v torch.float64"),
    "integers": (ring(X.long(), X.long(), X.long()), TypeError, "q torch.int64"),
    "axis": (refusing(lambda: ring_attention(X, X, X, "contxt")), ValueError,
        'unknown axis "contxt"'),
    "no mesh": (lambda: ring_attention(X, X, X, "context"), ff.comm.mesh.NoMesh,
        "no mesh in sight"),
    "a sequence": (lambda: zigzag(torch.zeros(10), 2, 0), ValueError,
        "10 is not cut into the 4 half-blocks of an axis of size 2.*such as 8 or 12"),
    "a short sequence": (lambda: unzigzag(torch.zeros(1, 3), 2, 1), ValueError,
        "such as 4$"),
    "a dim": (lambda: zigzag(torch.zeros(4), 2, 1), ValueError, r"dim=1.*\(4,\)"),
    "a size": (lambda: zigzag(torch.zeros(4), 0, 0), ValueError, "axis_size=0"),
    "an index": (lambda: zigzag_positions(4, 2, 2), ValueError, "index=2 is off"),
}  # fmt: skip


@refusals(BAD)
def test_bad_input_is_refused(call, error, way_out) -> None:
    refused(call, error, way_out)


def test_unlike_shapes_of_as_many_numbers_do_not_meet() -> None:
    def attend():
        x = zeros(*((2, 4), (4, 2))[ff.axis_index("context")])
        return ring_attention(x, x, x, "context")

    with pytest.raises(CollectiveMismatch, match=r"rank 1 ppermute .*\[1, 4, 2, 8\]"):
        refusing(attend)()


# The order


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_zigzag_and_back(size, half, before, after) -> None:
    n, dim = 2 * size * half, before
    x = torch.arange(n).view(*[1] * before, n, *[1] * after)
    x = x.expand(*[2] * before, n, *[2] * after)
    turned = zigzag(x, size, dim)
    same(unzigzag(turned, size, dim), x)
    same(zigzag(x, size, dim - x.ndim), turned)
    for i, part in enumerate(turned.chunk(size, dim)):
        at = zigzag_positions(n, size, i)
        same(part, x.index_select(dim, at))
        blocks = (i, 2 * size - 1 - i)
        assert at.tolist() == [b * half + j for b in blocks for j in range(half)]
