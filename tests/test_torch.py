"""Each private torch function, and what breaks when torch changes it."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fsfunc import _torch, tree
from fsfunc.arena import Arena


def breaks(what: str) -> str:
    return f"torch {torch.__version__}: {what}"


def test_functorch_levels_are_seen():
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((_torch.functorch_active(), _torch.current_level()))
        seen.append((_torch.is_wrapped(x), _torch.is_wrapped(_torch.unwrapped(x))))
        return x.sum()

    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 3))
    what = "units under torch.func no longer take the composable path"
    assert seen == [(True, 2), (True, False)], breaks(what)
    assert (_torch.functorch_active(), _torch.current_level()) == (False, 0)


def test_forward_mode_is_seen():
    assert not _torch.forward_ad_active()
    with torch.autograd.forward_ad.dual_level():
        what = "units under forward-mode AD lose their tangents"
        assert _torch.forward_ad_active(), breaks(what)


def test_a_storage_has_one_key():
    with _torch.FakeTensorMode():
        a, b = torch.empty(4), torch.empty(4)
        what = "saved parameters are mistaken for other tensors on fake tensors"
        assert _torch.storage_key(a) == _torch.storage_key(a[1:]), breaks(what)
        assert _torch.storage_key(a) != _torch.storage_key(b), breaks(what)


def test_holders_of_a_storage_are_counted():
    storage = torch.UntypedStorage(16)
    what = "the arena hands out memory that somebody still reads, or never again"
    assert _torch.held(storage) == 1, breaks(what)
    x = torch.empty(0).set_(storage, 0, (4,))
    assert (_torch.held(storage), _torch.storage_uses(x)) == (2, 2), breaks(what)
    y = x[1:]
    assert _torch.held(storage) == 3, breaks(what)
    del x, y
    assert _torch.held(storage) == 1, breaks(what)


def test_the_arena_reuses_only_what_is_free():
    arena, like = Arena(), torch.empty(1)
    a = arena.get(8, torch.float32, like)
    where = a.data_ptr()
    b = arena.get(8, torch.float32, like)
    assert b.data_ptr() != where, "memory in use was handed out"
    view = a[2:]
    del a
    assert arena.get(8, torch.float32, like).data_ptr() != where, "a view is a use"
    del view
    assert arena.get(4, torch.float64, like).data_ptr() == where, "free memory is lost"


def test_the_graph_can_be_walked_and_saved_tensors_replaced():
    w = torch.randn(3, 3, requires_grad=True)
    v = w * 1  # a non-leaf: saved by mm as it is
    x = torch.randn(2, 3, requires_grad=True)
    y = (x @ v).tanh()
    nodes = _torch.graph_nodes([y.grad_fn], {v.grad_fn})
    packed = []

    def unpack(saved: Tensor) -> Tensor:
        packed.append("unpacked")
        return saved

    count = _torch.hook_saved(nodes, _torch.storage_key(v), lambda t: t.clone(), unpack)
    what = "gathered parameters are kept after the forward pass: ZeRO-3 is lost"
    assert count == 1, breaks(what)
    first = torch.autograd.grad(y.sum(), [w, x], create_graph=True)
    assert packed, breaks("the backward does not gather again")
    plain = torch.autograd.grad(
        torch.tanh(x @ (w * 1)).sum(), [w, x], create_graph=True
    )
    for a, b in zip(first, plain, strict=True):
        torch.testing.assert_close(a, b)
    what = "a replaced saved tensor lost its history: second derivatives are wrong"
    again = torch.autograd.grad(sum(g.square().sum() for g in first), w)
    expected = torch.autograd.grad(sum(g.square().sum() for g in plain), w)
    torch.testing.assert_close(again, expected, msg=lambda m: breaks(what) + m)


def test_a_function_s_saved_tensors_can_be_replaced():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, (g * x).sum()

    w = torch.ones((), requires_grad=True) * 2
    y = Scale.apply(torch.ones(3, requires_grad=True), w)
    nodes = _torch.graph_nodes([y.grad_fn], {w.grad_fn})
    key = _torch.storage_key(w)
    found = _torch.hook_saved(nodes, key, lambda t: t, lambda t: t)
    assert found == 1, breaks("shard(remat(f)) keeps the gathered parameters")


def test_nodes_are_numbered_in_order():
    x = torch.ones(1, requires_grad=True)
    a, b = x * 1, x * 1
    numbers = [_torch.sequence_number(n.grad_fn) for n in (a, b)]
    assert numbers[0] < numbers[1], breaks("captured tensors go unseen")


def test_modes_are_seen():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert _torch.active_modes() == []
    with Mode(), torch.device("cpu"):
        what = "spmd drops a mode around it in silence"
        assert _torch.active_modes() == ["Mode"], breaks(what)


def test_fake_tensors_say_what_they_are():
    assert not _torch.fake_active()
    mode = _torch.fake_mode_of([])
    x = _torch.fake_of(mode, torch.ones(2))
    assert isinstance(x, _torch.FakeTensor) and _torch.fake_of(mode, x) is x
    assert _torch.fake_mode_of([x]) is mode, breaks("fake batches are refused")
    with mode:
        assert _torch.fake_active()
        with pytest.raises(Exception) as caught:
            x.sum().item()
    what = "recording no longer names the line that reads a value"
    assert _torch.is_data_dependent(caught.value), breaks(what)


def test_a_schema_says_what_an_operator_writes():
    aten, x, y = torch.ops.aten, torch.zeros(2), torch.zeros(2)
    what = "glue that writes in place makes a pipeline wrong in silence"
    for op, args, kwargs, expected in (
        (aten.add.Tensor, (x, y), {}, []),
        (aten.add_.Tensor, (x, y), {}, [x]),
        (aten.add.out, (x, x), {"out": y}, [y]),
        (aten._foreach_add_.Scalar, ([x, y], 1), {}, [x, y]),
        (aten.native_batch_norm.default, (x, x, x, x, y, True, 0, 0), {}, [x, y]),
        (aten.native_batch_norm.default, (x, x, x, x, y, False, 0, 0), {}, []),
        (aten.native_batch_norm.default, (x, x, x, None, None, True, 0, 0), {}, []),
    ):
        found = tree.leaves(_torch.written(op, args, kwargs))
        assert list(map(id, found)) == list(map(id, expected)), breaks(what)


def test_products_say_what_they_multiplied():
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    bias = torch.ones(4, requires_grad=True)
    what = "a pipeline makes each weight gradient in memory of its own"
    for y in x @ w, torch.addmm(bias, x, w):
        assert _torch.kind_of(y.grad_fn) == "product", breaks(what)
        assert torch.equal(_torch.first_factor(y.grad_fn), x), breaks(what)
        assert _torch.weight_edge(y.grad_fn)[0].variable is w, breaks(what)
    assert _torch.weight_edge((x @ w.detach()).grad_fn) is None
    assert _torch.weight_edge(torch.addmm(bias, x, w, alpha=2).grad_fn) is None
    assert _torch.weight_edge((x * x).grad_fn) is None
    kinds = [x.t().grad_fn, x.view(6).grad_fn, (x * 1).grad_fn.next_functions[0][0]]
    found = list(map(_torch.kind_of, kinds))
    assert found == ["turn", "view", "leaf"], breaks(what)
    assert _torch.kind_of(x.exp().grad_fn) is None


def test_lookups_say_what_they_looked_up():
    w, rows = torch.ones(4, 2, requires_grad=True), torch.tensor([[1, 3]])
    look, what = torch.nn.functional.embedding, "embeddings' gradients are made anew"
    node = look(rows, w).grad_fn
    assert _torch.kind_of(node) == "lookup", breaks(what)
    assert torch.equal(_torch.looked_up(node), rows), breaks(what)
    assert _torch.weight_edge(node)[0].variable is w, breaks(what)
    for how in {"padding_idx": 1}, {"sparse": True}, {"scale_grad_by_freq": True}:
        assert _torch.weight_edge(look(rows, w, **how).grad_fn) is None, how


def test_the_engine_comes_to_an_edge_that_is_asked_for():
    """And computes nothing for a leaf that is not: ``pull_back`` stands on both."""
    w, rows = torch.ones(4, 2, requires_grad=True), torch.tensor([1, 3])
    y, came = torch.nn.functional.embedding(rows, w), []
    edge = torch.autograd.graph.get_gradient_edge(y)
    edge.node.register_prehook(lambda grads: came.append(grads[0]))
    torch.autograd.backward([y.sum()], inputs=[edge])
    assert len(came) == 1 and w.grad is None, breaks("weights get no gradient")


def test_a_hook_on_a_leaf_is_seen():
    w = torch.ones(2, requires_grad=True)
    assert not _torch.is_hooked(w)
    handle = w.register_hook(lambda g: g)
    assert _torch.is_hooked(w), breaks("a pipeline passes by hooks on parameters")
    handle.remove()
    assert not _torch.is_hooked(w), breaks("gradients are added in place more rarely")


def test_attention_on_the_cpu_has_the_name_that_is_counted():
    q = torch.ones(1, 1, 4, 8)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert counter.get_total_flops() == 0, "torch counts it now: drop our formula"
    mode = _torch.fake_mode_of([])
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    q = _torch.fake_of(mode, q)
    with Watch():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert _torch.CPU_ATTENTION in seen, breaks("attention counts for nothing")
