"""Complex leaves of optimizers: updated as torch.view_as_real of them, or refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from tests.checks import refused, simulated, unchanged
from tests.covering import examples
from tests.optim.optimizers import KINDS, OWN, TORCHS
from tests.optim.test_laws import of_every_kind
from tests.optim.trees import SEEDS, SHAPES, assert_bits, assert_near, donated, trained

DTYPES = [torch.complex64, torch.complex128, torch.float32, torch.float64]
MIXED = st.lists(
    st.tuples(SHAPES.map(lambda shapes: shapes[0]), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=4,
).map(lambda rest: [((3,), torch.complex64), *rest])
STEPS = 7  # RAdam's sixth step is of another kind than its first
NO_ORDER = {"adafactor", "lion"}  # which is clipped by value there
ELEMENTS = [name for name in KINDS if name not in NO_ORDER]
TWINS = [name for name in OWN | TORCHS if "own" not in name]


def drawn(leaves, seed):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=d, generator=generator) for s, d in leaves]
    return {"first": made[0], "rest": made[1:]}


def pairs(x):
    return torch.view_as_real(x) if x.is_complex() else x


def real(values):
    return [pairs(x) for x in tree.leaves(values) if isinstance(x, torch.Tensor)]


def as_torch(make, params, grads):
    """The leaves after steps of a ``torch.optim`` optimizer."""
    leaves = [torch.nn.Parameter(x.clone()) for x in tree.leaves(params)]
    optimizer = make(leaves)
    for each in grads:
        for leaf, grad in zip(leaves, tree.leaves(each), strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


@of_every_kind(3, TWINS, leaves=MIXED, seed=SEEDS)
def test_complex_leaves_are_trained_as_torch_does(kind, how, leaves, seed):
    params, grads = drawn(leaves, seed), [drawn(leaves, seed + k) for k in range(STEPS)]
    after, _ = trained(kind.ours(**how), params, grads)
    make = (kind.plain or kind.theirs)(**how)
    try:
        expected = as_torch(make, params, grads)
    except RuntimeError as error:  # torch's fused kernels take real numbers alone
        assert "floating point" in str(error)
    else:
        assert_near(expected, after, 1e-5 if kind.plain else 1e-6)
    bits = as_torch(kind.theirs(**how), *map(tree_of_pairs, (params, grads)))
    assert_bits(bits, real(after))


def tree_of_pairs(values):
    return tree.map(pairs, values)


@of_every_kind(3, ELEMENTS, leaves=MIXED, seed=SEEDS)
def test_a_complex_leaf_is_updated_as_its_real_pairs(kind, how, leaves, seed):
    """Out of place and in, by updates as well; and what is donated is written."""
    optimizer, params = kind.ours(**how), drawn(leaves, seed)
    grads = [drawn(leaves, seed + k) for k in range(3)]
    twin = kind.ours(**how)
    if any(word in repr(twin) for word in ("matrices", "partition")):
        return  # by the shapes of leaves, which pairs have others of
    expected = trained(twin, *map(tree_of_pairs, (params, grads)))
    with unchanged(params, grads):
        found = trained(optimizer, params, grads)
    assert_bits(real(expected), real(found))
    assert [x.dtype for x in tree.leaves(found[0])] == [
        x.dtype for x in tree.leaves(params)
    ]
    state = optimizer.init(params)
    mine = tree.leaves(params)
    for each in grads:
        updates, _ = optimizer.update(each, state, params)
        assert [u.shape for u in tree.leaves(updates)] == [p.shape for p in mine]
        with donated():
            params, state = optimizer.apply(each, state, params)
    assert_bits(real(expected), real((params, state)))
    if not kind.anew:
        assert all(a is b for a, b in zip(mine, tree.leaves(params), strict=True))


LAZY = {
    "conjugate": torch.conj,
    "transposed": lambda x: x.T,
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, 4),
    "conjugate transpose": lambda x: x.mH,
    "negative": lambda x: torch.complex(x.conj().imag, x.real),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0],
}


@pytest.mark.parametrize("view", LAZY)
def test_views_are_updated_by_their_values(view):
    p, g = (LAZY[view](torch.randn(4, 4, dtype=torch.complex64)) for _ in range(2))
    for optimizer, make in (
        (ff.sharded_adam(0.1), lambda ps: torch.optim.AdamW(ps, lr=0.1)),
        (ff.sgd(0.1), lambda ps: torch.optim.SGD(ps, lr=0.1)),
    ):
        plain = [x.resolve_conj().clone() for x in (p, g)]
        (expected,) = as_torch(make, *[[plain[0]], [[plain[1]]]])
        with unchanged(p, g):
            after, _ = trained(optimizer, p, [g])
        assert_near([expected], [after])
        state = optimizer.init(p)
        updates, _ = optimizer.update(g, state, p)
        assert_near([expected], [p + updates])


def test_a_donated_step_writes_where_the_state_lies():
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.ema(ff.sharded_adam(0.1)))
    loss = lambda p, x: (p["w"].abs() * x).sum() + p["s"].square().sum()  # noqa: E731
    step = ff.donate(optimizer(ff.value_and_grad(loss)))
    params = {"w": torch.randn(9, dtype=torch.complex64), "s": torch.randn(4)}
    state = ff.TrainState(params, optimizer.init(params))
    del params
    where = [x.data_ptr() for x in real(state)]
    for _ in range(2):
        state, _ = step(state, torch.ones(9))
        assert [x.data_ptr() for x in real(state)] == where


# Norms and sums


@settings(max_examples=examples(20))
@given(leaves=MIXED, seed=SEEDS, p=st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_norms_are_of_magnitudes(leaves, seed, p):
    values = drawn(leaves, seed)
    each = [x for x in tree.leaves(values) if x.numel()]
    expected = torch.nn.utils.get_total_norm(each, p)
    assert_near([expected.double()], [ff.global_norm(values, p).double()])
    assert not ff.global_norm(values, p).is_complex()
    norms = [x for x in tree.leaves(ff.leaf_norms(values, p)) if x]
    alone = [torch.linalg.vector_norm(x, p) for x in each]
    assert_near([x.double() for x in alone], [x.double() for x in norms])
    total = sum(x.sum().to(torch.complex128) for x in each)
    assert_near([total], [ff.tree_sum(values).to(torch.complex128)], 1e-5)
    clipped, _ = ff.clip_by_global_norm(0.5, p=p).update(values, ())
    params = [torch.nn.Parameter(x.clone()) for x in each]
    for x, g in zip(params, each, strict=True):
        x.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, 0.5, p)
    found = [x for x in tree.leaves(clipped) if x.numel()]
    assert_near([x.grad for x in params], found)


def test_a_part_that_is_infinite_is_seen():
    for bad in (complex(0, math.inf), complex(math.nan, 1), complex(-math.inf, 0)):
        assert not ff.all_finite([torch.tensor([1j, bad])])
    assert ff.all_finite([torch.tensor([1j, 3e38])])


def test_the_norm_of_zeros_and_of_nothing_has_a_derivative():
    for x in (torch.zeros(3, dtype=torch.complex64), torch.zeros(0) * 1j):
        for p in (1.0, 2.0, 3.0):
            norm = lambda x, p=p: ff.global_norm(x, p)  # noqa: E731
            assert_bits([torch.zeros_like(x)], [ff.value_and_grad(norm)(x)[1]])


def test_noise_has_a_variance_of_one_on_any_mesh():
    like = {"w": torch.zeros(300, dtype=torch.complex64), "b": torch.zeros(3)}
    torch.manual_seed(5)
    whole = ff.randn_like(like)
    assert abs(whole["w"].abs().square().mean() - 1) < 0.2
    unit = ff.unit(lambda p, x: (p["w"].real.sum() + p["b"].sum()) * x)
    mesh = simulated(3)
    f = ff.shard(unit, mesh, "data")

    def main():
        params = ff.place(f, like, torch.ones(()))
        torch.manual_seed(5)
        return ff.unshard(ff.randn_like(params))

    for found in ff.spmd(main, mesh)():
        assert_bits(whole, found)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_numbers_without_dims_keep_their_dtype_when_scaled(wide):
    values = [torch.ones((), dtype=torch.bfloat16), torch.ones((), dtype=torch.cfloat)]
    scaled = ff.tree_scale(values, torch.tensor(0.5, dtype=wide))
    for found, x in zip(scaled, values, strict=True):
        assert found.dtype == x.dtype and found == 0.5


# Refused

W = {"a": torch.ones(3), "w": torch.ones(2, 2, dtype=torch.complex64)}
WAY = "'w' is c64.2, 2. .*view_as_real.*view_as_complex"
NARROW = "'w' is c64.2, 2. .*bfloat16.*float32 does.*view_as_real"
TREES = {
    "adafactor": (lambda: ff.adafactor().init(W), "adafactor takes no.*|" + WAY),
    "muon": (lambda: ff.muon(0.1).init({"w": W["w"]}), WAY),
    "shampoo": (lambda: ff.shampoo(0.1).init({"w": W["w"]}), WAY),
    "by value": (lambda: ff.clip_by_value(1.0).update(W, ()), "order.*view_as_real"),
    "moments": (lambda: ff.lion(moment_dtype=torch.bfloat16).init(W), NARROW),
    "average": (lambda: ff.ema(ff.sgd(0.1), dtype=torch.bfloat16).init(W), NARROW),
    "scaled": (lambda: ff.sharded_adam(moment_dtype=torch.float16).init(W), WAY),
    "codes": (lambda: ff.sharded_adam(moment_dtype=torch.uint8).init(W), WAY),
}


@pytest.mark.parametrize("name", TREES)
def test_what_is_not_right_for_complex_numbers_is_refused(name):
    call, way_out = TREES[name]
    refused(call, TypeError, way_out)


def test_moments_in_another_width_are_complex_too():
    state = ff.sharded_adam(moment_dtype=torch.float64).init(W)
    assert state.mu["w"].dtype == state.nu["w"].dtype == torch.complex128
    state = ff.swa(ff.sgd(0.1), dtype=torch.float64).init(W)
    assert state.average["w"].dtype == torch.complex128


def test_real_and_complex_leaves_do_not_fit_each_other():
    optimizer = ff.sgd(0.1, momentum=0.9)
    w, x = torch.randn(3, dtype=torch.complex64), torch.randn(3)
    for p, g in ((w, x), (x, w)):
        call = lambda p=p, g=g: optimizer.apply([g], optimizer.init([p]), [p])  # noqa: E731
        refused(call, tree.TreeMismatch, "expected one like [cf].*, found [cf]")
    state = optimizer.init([x])
    refused(lambda: optimizer.apply([w], state, [w]), tree.TreeMismatch, "state do not")


def test_a_leaf_whose_part_lost_its_imaginary_numbers_is_named():
    """As by a tree_map that takes the real part: the layout still says complex."""
    mesh, optimizer = simulated(2), ff.sgd(0.1)
    unit = ff.unit(lambda p, x: (p["w"].abs() * x).sum())

    def step(state, x):
        _, grads = ff.value_and_grad(unit)(state.params, x)
        grads = ff.tree.map(lambda g: g.real, grads)
        return state.apply_gradients(grads, optimizer), {}

    def main():
        f, w = ff.shard(step, mesh, "data"), torch.ones(3, dtype=torch.complex64)
        ff.init_state(f, {"w": w}, optimizer, torch.ones(3))

    refused(ff.spmd(main, mesh), tree.TreeMismatch, "'w'.*c64.*held in torch.float32")
