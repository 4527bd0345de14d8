"""Adam and SGD: torch's bits, its tolerance, and what a fused operator would miss."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.optim import AdamState, sgd, sharded_adam
from tests.optim.trees import (
    SEEDS,
    SHAPES,
    assert_bits,
    assert_near,
    by_torch,
    copies,
    donated,
    floating,
    like,
    params_of,
    trained,
    trained_by_update,
)

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


def torch_adamw(settings, **kwargs):
    named = dict(settings)
    betas = (named.pop("b1", 0.9), named.pop("b2", 0.999))
    return functools.partial(torch.optim.AdamW, betas=betas, **named, **kwargs)


def torch_sgd(settings, **kwargs):
    return functools.partial(torch.optim.SGD, lr=0.1, **settings, **kwargs)


# (settings, our optimizer and torch's of them)
KINDS = st.one_of(
    st.tuples(ADAMS, st.just((sharded_adam, torch_adamw))),
    st.tuples(DESCENTS, st.just((functools.partial(sgd, 0.1), torch_sgd))),
)


def of_all(test):
    return given(shapes=SHAPES, seed=SEEDS, kind=KINDS)(test)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@of_all
def test_apply_has_the_bits_of_torchs_fused(dtype, shapes, seed, kind):
    settings, (ours, theirs) = kind
    params = params_of(shapes, seed, dtype)
    grads = [like(params, seed + k) for k in range(3)]
    expected = by_torch(theirs(settings, fused=True), params, grads)
    after, state = trained(ours(**settings), params, grads)
    assert_bits(expected, floating(after))
    assert state.count == 3
    assert after["steps"] is params["steps"] and after["no"] is None


def test_the_defaults_are_torchs():
    params = {"w": torch.ones(4)}
    grads = [{"w": torch.linspace(-1, 1, 4)}] * 4
    expected = by_torch(functools.partial(torch.optim.AdamW, fused=True), params, grads)
    assert_bits(expected, floating(trained(sharded_adam(), params, grads)[0]))


@of_all
def test_update_and_apply_agree_with_torchs_plain(shapes, seed, kind):
    settings, (ours, theirs) = kind
    params, optimizer = params_of(shapes, seed), ours(**settings)
    grads = [like(params, seed + k) for k in range(3)]
    expected = by_torch(theirs(settings, foreach=False), params, grads)
    applied, state = trained(optimizer, params, grads)
    updated, its_state = trained_by_update(optimizer, params, grads)
    assert_near(expected, floating(applied))
    assert_near(expected, floating(updated))
    assert_near(state, its_state)


@of_all
def test_donated_is_pure_and_pure_changes_nothing(shapes, seed, kind):
    settings, (ours, _) = kind
    optimizer = ours(**settings, mask=lambda path, leaf: leaf.ndim > 1)
    params = params_of(shapes, seed)
    state = optimizer.init(params)
    for k in range(2):
        grads = like(params, seed + k)
        before = copies((params, state, grads))
        pure = optimizer.apply(grads, state, params)
        optimizer.update(grads, state, params)
        assert_bits(before, (params, state, grads))

        mine = floating((params, state))
        versions = [x._version for x in mine]
        with donated():
            given_away = optimizer.apply(grads, state, params)
        assert_bits(pure, given_away)
        assert_bits(before[2], grads)
        pairs = zip(mine, floating(given_away), strict=True)
        assert all(a is b for a, b in pairs)
        # `shard` sees by the version what changed; fused operators bump none.
        for tensor, version in zip(mine, versions, strict=True):
            assert tensor._version > version or not tensor.numel()
        params, state = given_away


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(sharded_adam, torch_adamw), (functools.partial(sgd, 0.1), torch_sgd)],
    ids=["adam", "sgd"],
)
@given(shapes=SHAPES, seed=SEEDS)
def test_the_mask_says_which_leaves_decay(ours, theirs, shapes, seed):
    params = params_of(shapes, seed)
    grads = [like(params, seed + k) for k in range(2)]

    def mask(path, leaf):
        return path.startswith("blocks") and leaf.ndim > 1

    expected = []
    for decay in (0.3, 0.0):
        make = theirs({"weight_decay": decay}, fused=True)
        expected.append(by_torch(make, params, grads))
    paths = [p for p in tree.paths(params) if p != "steps"]
    wanted = [
        yes if mask(path, leaf) else no
        for yes, no, path, leaf in zip(*expected, paths, floating(params), strict=True)
    ]
    optimizer = ours(weight_decay=0.3, mask=mask)
    assert_bits(wanted, floating(trained(optimizer, params, grads)[0]))
    assert_near(wanted, floating(trained_by_update(optimizer, params, grads)[0]))


def test_one_fused_call_for_each_group(monkeypatch):
    calls = []
    real = torch._fused_adamw_

    def counted(params, *rest, **how):
        calls.append((len(params), how["weight_decay"]))
        return real(params, *rest, **how)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    params = {"b": torch.ones(3), "w": [torch.ones(2, 2)] * 3, "e": torch.ones(0)}
    optimizer = sharded_adam(mask=lambda path, leaf: leaf.ndim > 1)
    optimizer.apply(params, optimizer.init(params), params)
    assert sorted(calls) == [(1, 0), (3, 0.01)]  # and the empty leaf in none


@pytest.mark.parametrize(
    "strange",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(x.shape),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ],
    ids=["transposed", "expanded", "strided"],
)
@pytest.mark.parametrize("which", ["params", "grads", "both"])
def test_tensors_that_are_not_dense(strange, which):
    p, g = torch.randn(3, 4), torch.randn(3, 4)
    if which in ("params", "both") and strange(p).stride(0) != 0:
        p = strange(p)
    if which in ("grads", "both"):
        g = strange(g)
    plain = [x.clone(memory_format=torch.contiguous_format) for x in (p, g)]
    expected, _ = trained(sharded_adam(), plain[0], [plain[1]] * 2)
    pure, _ = trained(sharded_adam(), p, [g] * 2)
    assert_bits(expected, pure)
    with donated():
        given_away, _ = trained(sharded_adam(), p, [g] * 2)
    assert given_away is p
    assert_bits(expected, p)


@pytest.mark.parametrize("other", [lambda p: p, torch.Tensor.detach])
def test_memory_at_two_places_is_not_written_twice(other):
    p, g = torch.ones(3), torch.ones(3)
    params, grads = {"a": p, "b": other(p)}, [{"a": g, "b": g}]
    expected, _ = trained(sharded_adam(0.1), params, grads)
    with donated():
        actual, _ = trained(sharded_adam(0.1), params, grads)
    assert_bits(expected, actual)
    assert_bits(torch.ones(3), p)
    with donated():  # a gradient at two places is only read there
        params["b"] = torch.ones(3)
        assert trained(sharded_adam(0.1), params, grads)[0]["a"] is p


def test_gradients_of_another_dtype_are_cast():
    params, grads = {"w": torch.randn(5)}, {"w": torch.randn(5).bfloat16()}
    wide = tree.map(torch.Tensor.float, grads)
    optimizer = sharded_adam()
    assert_bits(
        trained(optimizer, params, [wide] * 2), trained(optimizer, params, [grads] * 2)
    )
    assert_near(
        trained_by_update(optimizer, params, [wide] * 2),
        trained_by_update(optimizer, params, [grads] * 2),
    )


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_moments_of_another_dtype(dtype, moments):
    params, grads = {"w": torch.randn(50).to(dtype)}, {"w": torch.randn(50).to(dtype)}
    optimizer = sharded_adam(moment_dtype=moments)
    after, state = trained(optimizer, params, [grads])
    assert after["w"].dtype == dtype
    assert state.mu["w"].dtype == state.nu["w"].dtype == moments
    wide, wide_state = trained(
        sharded_adam(),
        tree.map(torch.Tensor.float, params),
        [tree.map(torch.Tensor.float, grads)],
    )
    assert_bits(tree.map(lambda x: x.to(dtype), wide), after)
    assert_bits(wide_state.nu["w"].to(moments), state.nu["w"])
    with donated():
        actual = trained(optimizer, params, [grads])
    assert_bits((after, state), actual)


def test_a_leaf_without_a_gradient_keeps_its_moments():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    optimizer = sharded_adam(0.1)
    params, state = trained(optimizer, params, [params])
    after, later = optimizer.apply({"a": torch.ones(2), "b": None}, state, params)
    assert after["b"] is params["b"] and later.nu["b"] is state.nu["b"]
    assert not torch.equal(after["a"], params["a"])
    updates, _ = optimizer.update({"a": torch.ones(2), "b": None}, state, params)
    assert updates["b"] is None and updates["a"] is not None


def test_a_schedule_is_asked_for_each_count():
    asked = []

    def schedule(count):
        asked.append(count)
        return 0.1 / (count + 1)

    params, grads = {"w": torch.ones(3)}, {"w": torch.ones(3)}
    after, _ = trained(sharded_adam(schedule), params, [grads] * 3)
    assert asked == [0, 1, 2]
    leaf = torch.nn.Parameter(torch.ones(3))
    reference = torch.optim.AdamW([leaf], lr=0.1, fused=True)
    for count in range(3):
        reference.param_groups[0]["lr"] = 0.1 / (count + 1)
        leaf.grad = torch.ones(3)
        reference.step()
    assert_bits(leaf.detach(), after["w"])


@given(kind=KINDS)
def test_the_count_may_be_a_tensor(kind):
    settings, (ours, _) = kind
    w, g, optimizer = torch.randn(3), torch.randn(3), ours(**settings)
    state = optimizer.init(w)
    counted = state._replace(count=torch.tensor(0))
    for k in range(2):
        updates = [optimizer.update(g, s, w)[0] for s in (state, counted)]
        assert_near(*updates)
        (after, state), (its, counted) = (
            optimizer.apply(g, s, w) for s in (state, counted)
        )
        assert_bits(after, its)
        assert counted.count.item() == k + 1
        w = after


def test_there_is_no_momentum_without_momentum():
    assert sgd(0.1).init(torch.ones(2)).momentum is None


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("lay_out", ["place", "init_state"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_tensor_count_is_recorded_and_sharded(zero, lay_out, given):
    plain = sharded_adam(ff.warmup_cosine(0.1, 2, 5, start=0.05))
    init = lambda params: plain.init(params)._replace(count=torch.tensor(0))  # noqa: E731
    optimizer = plain._replace(init=init)
    unit = ff.unit(lambda params, x: x @ params["w"])
    loss = lambda params, x: unit(params, x).square().mean()  # noqa: E731
    params, x = {"w": torch.eye(3)}, torch.ones(4, 3)

    def step(state, x):
        _, grads = ff.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads, optimizer), state.opt_state.count

    expected = ff.TrainState(params, optimizer.init(params))
    for _ in range(3):
        expected, _ = step(expected, x)
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        sharded = ff.shard(step, mesh, "data", zero=zero)
        if lay_out == "place":
            whole = ff.TrainState(params, optimizer.init(params))
            state = ff.place(sharded, whole, x)
        else:
            state = ff.init_state(sharded, params, optimizer, x)
        run = ff.donate(sharded) if given else sharded
        for _ in range(3):
            state, _ = run(state, x)
        return ff.unshard(state.params)["w"], state.opt_state.count

    for w, count in ff.spmd(main, mesh)():
        assert isinstance(count, torch.Tensor) and count.item() == 3
        assert_near(w, expected.params["w"])


def test_state_survives_saving(tmp_path):
    params, grads = {"w": torch.randn(3)}, {"w": torch.randn(3)}
    optimizer = sharded_adam(lambda count: 0.1 / (count + 1))
    params, state = trained(optimizer, params, [grads])
    leaves, treedef = tree.flatten(state)
    torch.save(leaves, tmp_path / "state")
    loaded = tree.unflatten(treedef, torch.load(tmp_path / "state"))
    assert isinstance(loaded, AdamState)
    assert_bits(
        optimizer.apply(grads, state, params), optimizer.apply(grads, loaded, params)
    )


def test_a_step_runs_on_fake_tensors():
    from fsfunc._torch import FakeTensorMode

    optimizer = sharded_adam(lambda count: 0.1 / (count + 1))
    with FakeTensorMode():
        params = {"w": torch.ones(3), "b": torch.ones(())}
        params, state = trained(optimizer, params, [params] * 2)
        with donated():
            params, state = optimizer.apply(params, state, params)
    assert state.count == 3 and params["w"].shape == (3,)


def test_parameters_that_ask_for_gradients_leave_no_graph_behind():
    p = torch.ones(3, requires_grad=True)
    after, state = trained(sharded_adam(), p, [torch.ones(3)])
    assert after.grad_fn is None and state.mu.grad_fn is None


# torch's own jvp decompositions are scripted when first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize("make", [sharded_adam, functools.partial(sgd, momentum=0.9)])
def test_apply_differentiates(make):
    optimizer = make(0.1)

    def after_two_steps(p):
        new, _ = trained(optimizer, p, [torch.sin(p), torch.cos(p)])
        return new.square().sum()

    p = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
    h = 1e-6
    steps = torch.eye(3, dtype=torch.float64) * h
    expected = torch.stack(
        [(after_two_steps(p + s) - after_two_steps(p - s)) / (2 * h) for s in steps]
    )
    torch.testing.assert_close(torch.func.grad(after_two_steps)(p), expected)
    asking = p.clone().requires_grad_()
    (found,) = torch.autograd.grad(after_two_steps(asking), asking)
    torch.testing.assert_close(found, expected)
    _, tangent = torch.func.jvp(after_two_steps, (p,), (torch.ones_like(p),))
    torch.testing.assert_close(tangent, expected.sum())
    stacked = torch.stack([p, 2 * p])
    torch.testing.assert_close(
        torch.func.vmap(after_two_steps)(stacked)[1], after_two_steps(2 * p)
    )


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (sharded_adam, {"learning_rate": -1.0}, "learning_rate is -1.0"),
        (sharded_adam, {"learning_rate": float("nan")}, "learning_rate is nan"),
        (sharded_adam, {"b1": 1.0}, "b1 is 1.0"),
        (sharded_adam, {"b2": -0.1}, "b2 is -0.1"),
        (sharded_adam, {"eps": -1e-8}, "eps is -1e-08"),
        (sharded_adam, {"weight_decay": -1}, "weight_decay is -1"),
        (sgd, {"learning_rate": -1.0}, "learning_rate is -1.0"),
        (sgd, {"momentum": -1.0}, "momentum is -1.0"),
        (sgd, {"weight_decay": -1.0}, "weight_decay is -1.0"),
        (sgd, {"nesterov": True}, "nesterov needs momentum"),
        (sgd, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening is"),
    ],
)
def test_bad_settings_are_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**{"learning_rate": 0.1, **settings})


def test_a_schedule_below_zero_is_refused_before_anything_is_written():
    p = torch.ones(2)
    optimizer = sharded_adam(lambda count: -1.0)
    with donated(), pytest.raises(ValueError, match="-1.0 at count 0"):
        optimizer.apply(p, optimizer.init(p), p)
    assert_bits(torch.ones(2), p)


@pytest.mark.parametrize(
    "make", [sharded_adam, functools.partial(sgd, 0.1, momentum=0.9)]
)
def test_decay_needs_the_parameters(make):
    p = torch.ones(2)
    optimizer = make(weight_decay=0.1)
    with pytest.raises(ValueError, match="update\\(grads, state, params\\)"):
        optimizer.update(p, optimizer.init(p))
    free = make(weight_decay=0)
    assert_bits(free.update(p, free.init(p), p), free.update(p, free.init(p)))


W = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"w": W}, "gradients do not fit.*keys"),
        ({"w": W.t(), "b": W}, "gradients do not fit.*'w'.*\\[2, 3\\].*\\[3, 2\\]"),
        ({"w": W, "b": [W]}, "gradients do not fit.*'b'.*a list"),
        ({"w": W, "b": W.to("meta")}, "'b'.*on cpu.*on meta"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_unwritten(grads, message):
    params = {"w": W.clone(), "b": W.clone()}
    optimizer = sharded_adam()
    state = optimizer.init(params)
    with donated(), pytest.raises(tree.TreeMismatch, match=message):
        optimizer.apply(grads, state, params)
    with pytest.raises(tree.TreeMismatch, match=message):
        optimizer.update(grads, state, params)
    assert_bits({"w": W, "b": W}, params)


def test_a_state_of_other_parameters_is_refused():
    optimizer = sharded_adam()
    state = optimizer.init({"w": torch.tensor(1)})
    with pytest.raises(tree.TreeMismatch, match="optimizer state.*'w'.*None"):
        optimizer.apply({"w": W}, state, {"w": W})


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="view_as_real"):
        sharded_adam().init({"w": torch.ones(2, dtype=torch.complex64)})
