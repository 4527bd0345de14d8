"""Attention over a cut sequence is torch's, under any mask; what it sends."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.nn import ring_attention
from tests.checks import close, simulated, unchanged
from tests.covering import examples
from tests.nn.test_context_parallel import (
    FORMS,
    WAYS,
    cut,
    join,
    pulled,
    tensors,
    transformed,
)

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


# One device


def reach(causal, window):
    """How far a query sees before and after itself."""
    left, right = window if isinstance(window, tuple) else (window, window)
    return left, 0 if causal else right


def is_seen(n, m, causal, window, documents):
    """[batch or 1, 1, n, m], pair by pair as the docstring has it."""
    left, right = reach(causal, window)
    apart = torch.arange(n)[:, None] - torch.arange(m)
    seen = torch.ones(1, 1, n, m, dtype=torch.bool)
    seen = seen if left is None else seen & (apart <= left)
    seen = seen if right is None else seen & (-apart <= right)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    return seen


def as_torch(seen, mask):
    """One mask for torch's attention."""
    if mask is None or mask.dtype == torch.bool:
        return seen if mask is None else seen & mask
    return mask.masked_fill(~seen, -torch.inf)


def torchs(seen, mask=None, by="MATH", scale=None):
    def attend(q, k, v):
        whole = as_torch(seen, mask)
        whole = whole if whole.dtype == torch.bool else whole.to(q.dtype)
        kind = getattr(torch.nn.attention.SDPBackend, by)
        with torch.nn.attention.sdpa_kernel(kind):
            return F.scaled_dot_product_attention(
                q, k, v, whole, scale=scale, enable_gqa=True
            )

    return attend


# On ranks


def on_ranks(run, size, order, whole, documents, mask, **how):
    """``run`` of attention to each rank's parts; its results, joined."""
    parts = [cut(x, size, order) for x in whole]
    if documents is not None:
        documents = cut(documents[..., None, :, None], size, order)
    if mask is not None and mask.shape[-2] > 1:
        mask = cut(mask[(None,) * (4 - mask.ndim)], size, order)

    def main():
        at = ff.axis_index("context")
        mine = dict(how, order=order)
        if documents is not None:
            mine["documents"] = documents[at].flatten(1)
        if mask is not None:
            mine["attn_mask"] = mask[at] if isinstance(mask, tuple) else mask
        form = FORMS[mine.pop("form")]
        attend = lambda q, k, v: form(q, k, v, "context", **mine)  # noqa: E731
        return run(attend)(*(x[at] for x in parts))

    found = ff.spmd(main, simulated(context=size))()
    return [join(xs, order) for xs in zip(*found, strict=True)]


@st.composite
def masks(draw, batch, heads, n, m):
    """Truth values or numbers, with rows of which nothing is left."""
    kind = draw(st.sampled_from([None, bool, float]))
    if kind is None:
        return None
    shape = [draw(st.sampled_from(sorted({1, x}))) for x in (batch, heads, n)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    kept = torch.rand(*shape, m, generator=generator) < 0.5
    kept[..., 0, :] = False
    if kind is bool:
        return kept[0, 0] if draw(st.booleans()) else kept
    numbers = torch.randn(*shape, m, generator=generator, dtype=torch.float64)
    return numbers.masked_fill(~kept, draw(st.sampled_from([-torch.inf, -1e9])))


@st.composite
def cases(draw):
    """(form, axis size, order, causal, window, documents, mask, shapes of q, k, v)."""
    form, size = draw(st.sampled_from(list(FORMS))), draw(st.integers(1, 4))
    order = draw(st.sampled_from([None, "zigzag", "contiguous"]))
    batch, read, groups = (draw(st.integers(1, n)) for n in (2, 3, 3))
    read = read if form == "ring" else read * size  # each rank has some of the heads
    n = m = (2 if order == "zigzag" else 1) * draw(st.integers(1, 3)) * size
    limit = st.integers(0, n) | st.none()
    causal = window = documents = mask = None
    if order and draw(st.booleans()):
        causal, window = draw(st.booleans()), draw(limit | st.tuples(limit, limit))
        mask = draw(masks(batch, read * groups, n, n))
    elif order:
        causal = True
    if draw(st.booleans()):
        rows = draw(st.sampled_from(sorted({1, batch})))
        ids = st.lists(st.integers(0, 2), min_size=rows * n, max_size=rows * n)
        documents = torch.tensor(draw(ids)).view(rows, n).sort(1)[0]
    elif order is None:
        m = draw(st.integers(1, 3)) * size
    width = draw(st.integers(1, 5))
    value = draw(st.sampled_from([width, draw(st.integers(1, 5))]))
    shapes = (batch, read * groups, n, width), (batch, read, m, width)
    shapes = *shapes, (batch, read, m, value)
    return form, size, order, bool(causal), window, documents, mask, shapes


DOCUMENTS = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
PLAIN = ((1, 2, 8, 4),) * 3
SOME = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
SOME[..., 3, :] = -torch.inf
ALL = (
    *(True, 5, DOCUMENTS.repeat_interleave(2)[None], SOME.double()),
    ((2, 4, 16, 4),) * 3,
)
TURNED = True, None, DOCUMENTS[None], None, PLAIN
WITHIN = False, None, DOCUMENTS[None], None, PLAIN
THREE_EACH = True, None, None, None, ((1, 6, 4, 4), (1, 3, 4, 4), (1, 3, 4, 4))
NO_KERNEL = True, None, None, None, ((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 5))

OTHER_KEYS = False, None, None, None, ((1, 2, 4, 4), (1, 2, 8, 4), (1, 2, 8, 4))


@settings(max_examples=examples(20))
@given(
    cases(),
    st.sampled_from([True, False]),
    st.sampled_from([None, 0.3, -0.3, 0.0]),
    st.sampled_from([pulled, transformed]),
    st.sampled_from([False, False, True]),
)
@example(("ring", 4, "zigzag", *ALL), True, None, pulled, True)
@example(("ring", 4, "zigzag", *ALL), True, None, transformed, False)
@example(("all_to_all", 4, "zigzag", *ALL), True, None, pulled, False)
@example(("ring", 4, "contiguous", *ALL), True, None, pulled, False)
@example(("ring", 2, "contiguous", *TURNED), True, None, pulled, False)
@example(("ring", 2, "contiguous", *NO_KERNEL), True, None, pulled, False)
@example(("ring", 2, "zigzag", *WITHIN), True, None, pulled, False)
@example(("ring", 2, "zigzag", *THREE_EACH), True, None, pulled, False)
@example(("ring", 3, "zigzag", *NO_KERNEL), True, 0.3, transformed, True)
@example(("ring", 2, None, *OTHER_KEYS), True, None, pulled, False)
@example(("ring", 2, "zigzag", *THREE_EACH), True, 0.0, pulled, False)
@example(("all_to_all", 2, "zigzag", *TURNED), True, -0.3, pulled, False)
def test_it_is_torchs_attention(case, recompute, scale, way, tiled) -> None:
    form, size, order, causal, window, documents, mask, shapes = case
    n, m = shapes[0][2], shapes[1][2]
    whole = [x.mT.contiguous().mT for x in tensors(n, *shapes)]  # of any layout
    seen = is_seen(n, m, causal, window, documents)
    how = {"causal": causal, "window": window, "form": form, "scale": scale}
    how["recompute"] = recompute
    expected = pulled(torchs(seen, mask, scale=scale))(*whole)
    with pytest.MonkeyPatch.context() as patch:
        if tiled:  # rows of scores are computed two by two
            patch.setattr("fsfunc.nn.attention_blocks._MAX_SCORES", 0)
            patch.setattr("fsfunc.nn.attention_blocks._MIN_ROWS", 2)
        with unchanged(*whole):
            found = on_ranks(way, size, order, whole, documents, mask, **how)
            singles = [x.float() for x in whole]
            short = on_ranks(way, size, order, singles, documents, mask, **how)
    # Of -1e9 and a score as many digits are left as torch leaves.
    low = mask is not None and mask.dtype != torch.bool and (mask == -1e9).any()
    exact = 1e-12 if mask is None and window is None else 1e-11
    close(found, list(expected), 1e-6 if low else exact)
    by = "MATH" if shapes[1] != shapes[2] else "FLASH_ATTENTION"  # as ours, by a kernel
    rounded = pulled(torchs(seen, mask, by, scale))(*(x.contiguous() for x in singles))
    for x, y, theirs in zip(short, expected, rounded, strict=True):
        assert x.dtype == torch.float32
        off = (theirs - y).abs().max() + 1e-6 * max(1, y.abs().max())
        assert (x - y).abs().max() <= off


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("form", "order"),
    [
        ("ring", None),
        ("ring", "zigzag"),
        ("ring", "contiguous"),
        ("all_to_all", "contiguous"),
    ],
)
def test_further_derivatives(form, order, way) -> None:
    # A rank in the middle of three neither sees all keys nor its own alone.
    size, n = (3, 6) if form == "ring" else (2, 4)
    whole = tensors(0, *[(1, size, n, 2)] * 3) + tensors(1, *[(1, size, n, 2)] * 3)[:3]
    documents = mask = None
    how = {"causal": order == "zigzag", "window": (2, 1) if order else None}
    if order:
        documents, mask = torch.arange(n)[None] // 3, torch.ones(n, n).bool()
        mask[3], mask[2, :2] = False, False  # one sees nothing, one itself alone
    seen = is_seen(n, n, how["causal"], how["window"], documents)
    expected = way(torchs(seen, mask))(*whole)
    found = on_ranks(way, size, order, whole, documents, mask, form=form, **how)
    close(found, [x.detach() for x in expected], 1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_one_row_of_a_mask_is_of_all_queries_of_a_rank(form) -> None:
    whole, rows = tensors(0, *PLAIN), torch.arange(16).view(2, 1, 8) % 3 > 0

    def main():
        mine = (cut(x, 2, None)[ff.axis_index("context")] for x in whole[:3])
        how = {"order": "contiguous", "attn_mask": rows[ff.axis_index("context")]}
        return FORMS[form](*mine, "context", **how)

    found = ff.spmd(main, simulated(context=2))()
    every = rows[:, 0].repeat_interleave(4, 0)[None, None]
    close(join(found, None), torchs(every)(*whole[:3]), 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_of_numbers_may_be_learnt(form) -> None:
    n = 8
    *whole, w = tensors(0, *[(2, 2, n, 4)] * 3)
    bias = tensors(1, *[(1, 2, n, n)] * 3)[0]
    seen = is_seen(n, n, True, None, None)

    def loss(attend, bias, w):
        return (attend(bias) * w).sum()

    def on_one(bias):
        return torchs(seen, bias)(*whole)

    expected = torch.func.grad(lambda bias: loss(on_one, bias, w))(bias)
    parts = [cut(x, 2, "zigzag") for x in (*whole, bias, w)]

    def main():
        *mine, bias, w = (x[ff.axis_index("context")] for x in parts)
        bias = bias.clone().requires_grad_()

        def attend(bias):
            how = {"causal": True, "order": "zigzag", "attn_mask": bias}
            return FORMS[form](*mine, "context", **how)

        plain = torch.autograd.grad(loss(attend, bias, w), bias)[0]
        return plain, torch.func.grad(lambda bias: loss(attend, bias, w))(bias.detach())

    for found in zip(*ff.spmd(main, simulated(context=2))(), strict=True):
        close(join(found, "zigzag"), expected, 1e-12)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_on_a_mesh_of_vmap_and_on_one_device(order) -> None:
    n, how = 8, {"causal": True, "window": 3}
    whole, documents = tensors(0, *[(1, 2, n, 4)] * 3)[:3], torch.arange(n)[None] // 5
    mask = torch.arange(n * n).view(n, n) % 3 > 0
    expected = torchs(is_seen(n, n, documents=documents, **how), mask)(*whole)
    told = {"documents": documents, "attn_mask": mask}
    close(ring_attention(*whole, None, **how, **told), expected, 1e-12)
    parts = [torch.stack(cut(x, 2, order)) for x in (*whole, mask[None, None])]
    documents = torch.stack(cut(documents[:, None, :, None], 2, order))[:, :, 0, :, 0]

    def main():
        at = ff.axis_index("context")
        q, k, v, mask = (x[at] for x in parts)
        told = {"documents": documents[at], "attn_mask": mask}
        return ring_attention(q, k, v, "context", order=order, **how, **told)

    found = ff.spmd(main, ff.make_mesh({"context": 2}, "vmap"))()
    close(join(found, order), expected, 1e-12)


# What it costs


def parts_of(size, order, n):
    """The positions of each rank's parts."""
    each = torch.arange(n)[None, None, :, None]
    whole = [x.flatten() for x in cut(each, size, order)]
    return [x.chunk(2) if order == "zigzag" else [x] for x in whole]


def needed(size, order, n, causal, window):
    """(source, target, part) of the keys that another rank sees."""
    seen, parts = is_seen(n, n, causal, window, None)[0, 0], parts_of(size, order, n)
    return {
        (j, t, p)
        for j in range(size)
        for t in range(size)
        for p, keys in enumerate(parts[j])
        if j != t and seen[torch.cat(list(parts[t]))][:, keys].any()
    }


@pytest.mark.parametrize(
    ("order", "causal", "window", "messages"),
    [
        ("contiguous", True, 2, 3),
        ("contiguous", False, 5, 10),
        ("contiguous", False, (4, 0), 3),
        ("zigzag", True, 2, 6),
        ("zigzag", False, (0, 3), 11),
    ],
)
def test_keys_go_where_some_query_sees_them(order, causal, window, messages) -> None:
    size, n = 4, 16
    shapes = (2, 4, n, 4), (2, 2, n, 4), (2, 2, n, 6)
    whole, ids = tensors(0, *shapes), torch.zeros(2, n, dtype=torch.int32)
    how = {"form": "ring", "causal": causal, "window": window}
    moved = needed(size, order, n, causal, window)
    part = 2 * 2 * (n // size) * (4 + 6) * 8 // (2 if order == "zigzag" else 1)
    for documents, run in ((None, forward), (None, pulled), (ids, pulled)):
        with ff.ledger() as log:
            on_ranks(run, size, order, whole, documents, None, **how)
        assert log.count("all_gather") == (documents is not None)
        for i in range(size):
            out = sum(j == i for j, *_ in moved)
            back = sum(t == i for _, t, _ in moved)  # gradients go home
            gathered = 0 if documents is None else (size - 1) * 2 * (n // size) * 4
            times = out if run is forward else 2 * out + back
            assert log.bytes("context", rank=i) == times * part + gathered
    assert len(moved) == messages


def forward(attend):
    return lambda q, k, v, w: (attend(q, k, v),)


def test_masks_stay_in_a_ring_and_travel_with_heads() -> None:
    size, n = 2, 8
    whole, mask = tensors(0, *[(2, 4, n, 4)] * 3), torch.rand(4, n, n) < 0.8
    for form, told, sent in (
        ("ring", mask, 0),
        ("all_to_all", mask, mask.numel() // 4),  # half of the rows, of half the heads
        ("all_to_all", mask[0], n * n // 2),
        ("all_to_all", mask[0, :1], n),  # one row, which stands for a rank's own
    ):
        logs = []
        for attn_mask in (None, told):
            with ff.ledger() as log:
                on_ranks(forward, size, "zigzag", whole, None, attn_mask, form=form)
            logs.append(log.bytes("context", rank=1))
        assert logs[1] - logs[0] == sent
