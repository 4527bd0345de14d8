"""Each private torch function, and what breaks when torch changes it."""

import dataclasses
import re
import sys
import textwrap
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fsfunc import _torch
from fsfunc._torch import fake_modes, fake_results, formulas, products, versions
from tests.probes import Watch
from tests.programs import ROOT, python

README = (ROOT / "README.md").read_text()


def breaks(effect: str) -> str:
    return f"torch {torch.__version__}: {effect}"


def test_functorch_levels_are_seen():
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((_torch.functorch_active(), _torch.current_level()))
        seen.append((_torch.is_wrapped(x), _torch.is_wrapped(_torch.unwrapped(x))))
        return x.sum()

    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 3))
    effect = "units under torch.func no longer take the composable path"
    assert seen == [(True, 2), (True, False)], breaks(effect)
    assert (_torch.functorch_active(), _torch.current_level()) == (False, 0)


def test_the_levels_that_differentiate_and_map_a_tensor_are_told():
    """A derivative sample by sample is told from one of a batch."""
    seen = []

    def look(w, x):
        seen.append((_torch.differentiation_level(w), _torch.vmap_levels_of(x)))
        assert _torch.vmap_levels() == seen[-1][1], breaks(effect)
        return (w * x).sum()

    effect = "per-sample derivatives of sharded leaves are not told, and mix the ranks"
    w, xs = torch.ones(2), torch.ones(3, 2)
    grad, vmap = torch.func.grad, torch.func.vmap
    vmap(grad(look), (None, 0))(w, xs)  # the derivative is inside the map
    grad(lambda w: vmap(lambda x: look(w, x))(xs).sum())(w)  # and outside
    look(w, xs)
    assert seen == [(2, [1]), (1, [2]), (0, [])], breaks(effect)


def test_the_dim_that_is_mapped_is_told_by_its_stride():
    """Rows of a Jacobian that lie side by side are told from other dims of it."""
    seen = []

    def look(x):
        seen.append(_torch.vmap_dim(x))
        return x.sum()

    torch.func.vmap(look, 1)(torch.ones(2, 3))
    look(torch.ones(2))
    effect = "a sum over another dim of a Jacobian passes as one over its rows"
    assert seen == [(1, 3), (0, 0)], breaks(effect)


@pytest.mark.parametrize(
    "name", ["c10d.allreduce_", "c10d.send", "_c10d_functional.all_reduce"]
)
def test_collectives_of_torchs_own_are_told_by_their_namespace(name):
    space, _, op = name.partition(".")
    operator = getattr(getattr(torch.ops, space), op).default
    effect = "a step that calls torch.distributed passes, and trains on its own rows"
    with pytest.raises(fake_results.Communicates):
        fake_results.refuse_communication(operator)
        raise AssertionError(breaks(effect))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents_are_found_at_every_level():
    """Of a jvp of a jvp there are three, and none under ``vmap`` alone."""
    seen = []

    def look(x):
        y = x * x
        found = [_torch.unwrapped(t).tolist() for t in _torch.tangents_of(y)]
        seen.append(found)
        return y

    x, v = torch.tensor([1.0]), torch.tensor([3.0])
    torch.func.jvp(look, (x,), (v,))
    torch.func.jvp(lambda x: torch.func.jvp(look, (x,), (v,))[1], (x,), (v,))
    torch.func.vmap(look)(x[None])
    with torch.autograd.forward_ad.dual_level():
        torch.func.grad(lambda x: look(x).sum())(
            torch.autograd.forward_ad.make_dual(x, v)
        )
    effect = "what forward mode brings out of a unit passes as one value on all ranks"
    assert seen == [[[6.0]], [[6.0], [6.0], [18.0]], [], [[6.0]]], breaks(effect)


def test_forward_mode_is_seen():
    assert not _torch.forward_ad_active()
    with torch.autograd.forward_ad.dual_level():
        effect = "units under forward-mode AD lose their tangents"
        assert _torch.forward_ad_active(), breaks(effect)
        assert _torch.transforms_active(), breaks(effect)
    assert not _torch.transforms_active(), "none is left behind"


def test_a_storage_has_one_key():
    with _torch.FakeTensorMode():
        a, b = torch.empty(4), torch.empty(4)
        effect = "saved parameters are mistaken for other tensors on fake tensors"
        assert _torch.storage_key(a) == _torch.storage_key(a[1:]), breaks(effect)
        assert _torch.storage_key(a) != _torch.storage_key(b), breaks(effect)
    x = torch.eye(2).to_sparse()
    effect = "a wrong gradient passes where it is sparse: its type is not known"
    assert _torch.storage(x) is x, breaks(effect)
    assert _torch.storage_key(x) == _torch.storage_key(x), breaks(effect)
    assert _torch.storage_key(x) != _torch.storage_key(x * 1), breaks(effect)


def test_it_is_seen_whether_devices_have_threads():
    seen = [_torch.uses_device_threads()]
    with torch.autograd.set_multithreading_enabled(False):
        seen.append(_torch.uses_device_threads())
        with torch.inference_mode(False):
            seen.append(_torch.uses_device_threads())
        seen.append(_torch.uses_device_threads())
    for on in (False, True):
        _torch.set_uses_device_threads(on)
        seen.append(_torch.uses_device_threads())
    effect = "a backward pass on a GPU finds no frame, and ranks no rank"
    assert seen == [True, False, True, False, False, True], breaks(effect)


def test_holders_of_a_storage_are_counted():
    storage = torch.UntypedStorage(16)
    held = lambda: _torch.storage_uses_by_key(storage._cdata)  # noqa: E731
    effect = "the pool hands out memory that somebody still reads, or never again"
    assert held() == 1, breaks(effect)
    x = torch.empty(0).set_(storage, 0, (4,))
    assert held() == _torch.storage_uses(x) == 2, breaks(effect)
    effect = "a donated step writes into what somebody still reads, or copies all"
    for hold in (lambda: x[1:], x.detach, x.numpy, lambda: (x.detach(), x.data)[0]):
        y = hold()
        assert held() == 3, breaks(effect)
        del y
        assert held() == 2, breaks(effect)


UNLIKE = {
    "dtype": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "shape": lambda x: x[:1],
    "strides": lambda x: x.t().contiguous().t(),
    "layout": lambda x: x.to_sparse(),
    "class": torch.nn.Parameter,
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "of a graph": lambda x: x.clone().requires_grad_() * 1,
    "batched": lambda x: torch._C._functorch._add_batch_dim(x[None], 0, 1),
    "twice": lambda x: None,
    "no tensor": lambda x: 1.0,
}


@pytest.mark.parametrize("how", UNLIKE)
def test_unlike_tensors_are_told_in_one_call(how):
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    check = _torch.likeness_check([x, y])
    effect = "an update takes tensors for those of the step before, which were others"
    assert check(x, y) and check(y + 1, x + 2), breaks(effect)
    other = UNLIKE[how](y)
    assert not check(x, x if other is None else other), breaks(effect)
    kept = weakref.ref(x)
    del x, y, other
    assert kept() is None, breaks("old parameters stay in memory")


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        AROUND.append((_torch.function_runs(), _torch.takes_tangents()))
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum()


AROUND = []


def test_a_function_is_known_and_its_saved_tensors_can_be_replaced():
    w = torch.ones((), requires_grad=True) * 2
    y = Scale.apply(torch.ones(3, requires_grad=True), w)
    effect = "collectives in a Function with another backward give wrong gradients"
    AROUND.append((_torch.function_runs(), _torch.takes_tangents()))
    with torch.no_grad():
        AROUND.append((_torch.function_runs(), _torch.takes_tangents()))
    with torch.inference_mode():
        AROUND.append((_torch.function_runs(), _torch.takes_tangents()))
    inside, *outside, inference = AROUND
    assert inside == (True, False) and inference == (False, False), breaks(effect)
    assert outside == [(False, True)] * 2, breaks(effect)
    assert _torch.is_function_node(y.grad_fn), breaks(effect)
    assert not _torch.is_function_node((y + 1).grad_fn), breaks(effect)
    nodes = _torch.graph_nodes([y.grad_fn], {w.grad_fn})
    key = _torch.storage_key(w)
    found = _torch.hook_saved(nodes, key, lambda t: t, lambda t: t)
    assert found == 1, breaks("shard(remat(f)) keeps the gathered parameters")


class Odd(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise KeyError


def test_comparisons_of_residuals_are_hidden_from_modes_of_functions():
    seen = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(4, 2)
    with Seeing():
        near = _torch.norms_are_near(_torch.saved_norms(x), x)
        alike = _torch.all_true([near])
    effect = "first_difference takes remat's own sums for what a unit computes"
    names = {getattr(func, "__name__", "") for func in seen}
    assert alike and not names & {"mul", "matmul", "isclose"}, breaks(effect)


def test_a_tensor_may_change_its_class():
    x = torch.ones(3)
    x.__class__ = Odd
    effect = "a spent tensor is read in silence, or can no longer be given back"
    with pytest.raises(KeyError):
        x + 1
    with pytest.raises(KeyError):
        _ = x.shape
    with _torch.as_plain_tensors():
        assert x.shape == (3,) and x._version == 0, breaks(effect)
    x.__class__ = Tensor
    assert (x + 1).tolist() == [2, 2, 2], breaks(effect)


def test_it_is_known_when_autograd_alone_looks():
    effect = "a leaf's part is made where a transform or a mode sees it"
    x, mode = torch.ones(()), fake_modes.fake_mode_of([])
    assert _torch.only_autograd_sees(x), breaks(effect)
    seen = []
    torch.func.grad(lambda x: (seen.append(_torch.only_autograd_sees(x)), x)[1])(x)
    with torch.no_grad():
        seen.append(_torch.only_autograd_sees(x))
    with FlopCounterMode(display=False):
        seen.append(_torch.only_autograd_sees(x))
    with mode:
        assert _torch.only_autograd_sees(torch.ones(())), "modes are to see fakes"
        seen.append(_torch.only_autograd_sees(x))
    assert seen == [False] * 4, breaks(effect)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_view_of_any_dtype_is_made_anew_of_its_place(offset):
    """``offset``: where a complex number may not begin, it is a copy."""
    memory = torch.arange(25.0, dtype=torch.float64)
    base = memory[:24]
    z = base.view(torch.complex128)[2:]
    views = [
        base[3:].view(-1, 3).t(), z, z.conj(), z.conj().imag, z.real[::2],
        base[1:9].view(torch.int32), base[:0], base[5].expand(2, 3),
    ]  # fmt: skip
    other = torch.empty(26, dtype=torch.float64)[offset:]
    other[:25] = memory
    for x in views:
        y = _torch.view_at(other, _torch.place_of(x))
        effect = "a saved view of a parameter is read in another way: wrong gradients"
        assert torch.equal(x.resolve_conj().resolve_neg(), y), breaks(effect)
        assert (y.dtype, y.shape) == (x.dtype, x.shape), breaks(effect)
        assert (y.is_conj(), y.is_neg()) == (x.is_conj(), x.is_neg()), breaks(effect)
        shares = _torch.storage_key(y) == _torch.storage_key(other)
        assert shares or offset and x.is_complex() or not x.numel(), breaks(effect)


def test_the_compiler_tells_which_function_it_may_not_look_into():
    @_torch.outside_graphs("because of this")
    def apart(x):
        return x + 1

    with pytest.raises(Exception, match="because of this") as caught:
        torch.compile(lambda x: apart(x) * 2, backend="eager", fullgraph=True)(
            torch.ones(2)
        )
    effect = "a unit with a collective is refused by jit in words of the compiler"
    assert _torch.is_compiler_error(caught.value), breaks(effect)


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
    effect = "gathered parameters are kept after the forward pass: ZeRO-3 is lost"
    assert count == 1, breaks(effect)
    first = torch.autograd.grad(y.sum(), [w, x], create_graph=True)
    assert packed, breaks("the backward does not gather again")
    plain = torch.autograd.grad(
        torch.tanh(x @ (w * 1)).sum(), [w, x], create_graph=True
    )
    for a, b in zip(first, plain, strict=True):
        torch.testing.assert_close(a, b)
    effect = "a replaced saved tensor lost its history: second derivatives are wrong"
    again = torch.autograd.grad(sum(g.square().sum() for g in first), w)
    expected = torch.autograd.grad(sum(g.square().sum() for g in plain), w)
    torch.testing.assert_close(again, expected, msg=lambda m: breaks(effect) + m)


def test_nodes_are_numbered_in_order():
    x = torch.ones(1, requires_grad=True)
    a, number, b = x * 1, _torch.next_sequence_number(), x * 1
    numbers = [_torch.sequence_number(n.grad_fn) for n in (a, b)]
    effect = "captured tensors go unseen, and operators are booked under the wrong unit"
    assert numbers[0] < number <= numbers[1], breaks(effect)
    with torch.no_grad():
        x * 2
    assert _torch.next_sequence_number() >= number


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_errors_of_the_compiler_are_told():
    effect = "jit names neither the unit nor the way out where a unit does not compile"
    branches = torch.compile(
        lambda x: x if x.sum() > 0 else -x, backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="ranch") as found:
        branches(torch.ones(2))
    assert _torch.is_compiler_error(found.value), breaks(effect)
    scaled = torch.compile(
        lambda x, k: x * k, backend="eager", fullgraph=True, dynamic=False
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        with pytest.raises(Exception, match="fullgraph=True") as found:
            for k in range(3):
                scaled(torch.ones(2), k / 3)
    torch._dynamo.reset()
    assert _torch.is_compiler_error(found.value), breaks(effect)
    assert not _torch.is_compiler_error(KeyError())


def test_a_meta_tensor_is_a_fake_one_of_the_cpu():
    effect = "plans of models on meta hold every score of their attention"
    mode = fake_modes.fake_mode_of(())
    x = torch.empty(2, 3, device="meta", requires_grad=True).t()
    for found in (fake_modes.fake_of(mode, x.detach()), _under(mode, lambda: x * 1)):
        assert found.device.type == "cpu" and found.shape == (3, 2), breaks(effect)
    one, other = fake_modes.fake_of(mode, x), fake_modes.fake_of(mode, x)
    assert one is other and one.stride() == x.stride(), breaks(effect)


def _under(mode, run):
    with mode:
        return run()


def test_modes_are_seen():
    effect = "spmd drops a mode, or hooks, around it in silence"
    assert _torch.active_modes() == [] and not _torch.saved_tensors_hooked()
    with Watch(), torch.device("cpu"):
        assert _torch.active_modes() == ["Watch"], breaks(effect)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert _torch.saved_tensors_hooked(), breaks(effect)


def test_what_autograd_saves_is_shown_to_no_hooks_from_outside():
    effect = "a check on shapes within a unit is taken for what the unit saves"
    x, packed = torch.ones(2, requires_grad=True), []

    def pack(value):
        packed.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        with _torch.outside_saved_tensors_hooks():
            hidden = x * x
        assert not packed, breaks(effect)
        x * x
    assert len(packed) == 2 and hidden.sum().backward() is None
    torch.func.grad(lambda x: _hidden_square(x).sum())(x.detach())  # forbids hooks


def _hidden_square(x):
    with _torch.outside_saved_tensors_hooks():
        return x * x


def test_what_changes_equal_calls_is_seen():
    """Unlike `active_modes` it tells two modes of one class apart."""
    effect, usual = "a plan takes unlike calls for equal ones", _torch.modes_around()
    kernels = torch.nn.attention.sdpa_kernel
    for context in (
        Watch(), TorchFunctionMode(), torch.device("cpu"),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        kernels(torch.nn.attention.SDPBackend.MATH),
    ):  # fmt: skip
        with context:
            assert _torch.modes_around() != usual, breaks(effect)
        assert _torch.modes_around() == usual, breaks(effect)


def test_fake_tensors_say_what_they_are():
    assert not _torch.fake_active()
    mode = fake_modes.fake_mode_of([])
    x = fake_modes.fake_of(mode, torch.ones(2))
    assert isinstance(x, _torch.FakeTensor) and fake_modes.fake_of(mode, x) is x
    assert fake_modes.fake_mode_of([x]) is mode, breaks("fake batches are refused")
    with mode:
        assert _torch.fake_active()
        with pytest.raises(Exception) as caught:
            x.sum().item()
    effect = "recording no longer names the line that reads a value"
    assert _torch.is_data_dependent(caught.value), breaks(effect)


def test_a_schema_says_what_an_operator_writes():
    aten, x, y = torch.ops.aten, torch.zeros(2), torch.zeros(2)
    effect = "glue that writes in place makes a pipeline wrong in silence"
    for op, args, kwargs, expected in (
        (aten.add.Tensor, (x, y), {}, []),
        (aten.add_.Tensor, (x, y), {}, [x]),
        (aten.add.out, (x, x), {"out": y}, [y]),
        (aten._foreach_add_.Scalar, ([x, y], 1), {}, [x, y]),
        (aten.native_batch_norm.default, (x, x, x, x, y, True, 0, 0), {}, [x, y]),
        (aten.native_batch_norm.default, (x, x, x, x, y, False, 0, 0), {}, []),
        (aten.native_batch_norm.default, (x, x, x, None, None, True, 0, 0), {}, []),
    ):
        found = _torch.tensors_written(op, args, kwargs)
        assert list(map(id, found)) == list(map(id, expected)), breaks(effect)
    effect = "remat would keep a value under the operator that made a view of it"
    for op, makes in (
        (aten.add.Tensor, True), (aten.add_.Tensor, False), (aten.add.out, False),
        (aten.view.default, False), (aten.split.Tensor, False), (aten.mm.default, True),
    ):  # fmt: skip
        assert _torch.makes_memory(op) is makes, breaks(effect)


def test_products_say_what_they_multiplied():
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    bias = torch.ones(4, requires_grad=True)
    effect = "a pipeline makes each weight gradient in memory of its own"
    for y in x @ w, torch.addmm(bias, x, w):
        assert products.node_kind(y.grad_fn) == "product", breaks(effect)
        assert torch.equal(products.first_factor(y.grad_fn), x), breaks(effect)
        assert products.weight_edge(y.grad_fn)[0].variable is w, breaks(effect)
    assert products.weight_edge((x @ w.detach()).grad_fn) is None
    assert products.weight_edge(torch.addmm(bias, x, w, alpha=2).grad_fn) is None
    assert products.weight_edge((x * x).grad_fn) is None
    kinds = [x.t().grad_fn, x.view(6).grad_fn, (x * 1).grad_fn.next_functions[0][0]]
    found = list(map(products.node_kind, kinds))
    assert found == ["turn", "view", "leaf"], breaks(effect)
    assert products.node_kind(x.exp().grad_fn) is None


def test_lookups_say_what_they_looked_up():
    w, rows = torch.ones(4, 2, requires_grad=True), torch.tensor([[1, 3]])
    look, effect = torch.nn.functional.embedding, "embeddings' gradients are made anew"
    y = look(rows, w)
    assert products.node_kind(y.grad_fn) == "lookup", breaks(effect)
    assert torch.equal(products.lookup_indices(y.grad_fn), rows), breaks(effect)
    assert products.weight_edge(y.grad_fn)[0].variable is w, breaks(effect)
    for how in {"padding_idx": 1}, {"sparse": True}, {"scale_grad_by_freq": True}:
        assert products.weight_edge(look(rows, w, **how).grad_fn) is None, how
    # the engine comes to an edge that is asked for, and to no leaf that is not
    edge, came = torch.autograd.graph.get_gradient_edge(y), []
    edge.node.register_prehook(lambda grads: came.append(grads[0]))
    torch.autograd.backward([y.sum()], inputs=[edge])
    assert len(came) == 1 and w.grad is None, breaks("weights get no gradient")


def test_attention_on_the_cpu_has_the_names_that_are_counted():
    attend = torch.nn.functional.scaled_dot_product_attention
    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        attend(q, q, q)
    assert counter.get_total_flops() == 0, "torch counts it now: drop our formula"
    with Watch() as ran:
        torch.autograd.grad(attend(q, q, q).sum(), q)
    effect = "attention, or its backward, counts for nothing"
    assert ran.seen.count(_torch.CPU_ATTENTION) == 1, breaks(effect)
    assert _torch.CPU_ATTENTION_BACKWARD in ran.seen, breaks(effect)
    q = fake_modes.fake_of(fake_modes.fake_mode_of([]), q.detach())
    with Watch() as ran:
        attend(q, q, q)
    assert _torch.CPU_ATTENTION in ran.seen, breaks(effect)


def test_attention_of_a_gpu_runs_on_fake_tensors_of_a_cpu():
    mode = fake_modes.fake_mode_of([])
    q = fake_modes.fake_of(mode, torch.ones(1, 2, 4, 24)).requires_grad_()
    v = fake_modes.fake_of(mode, torch.ones(1, 2, 4, 16))
    with Watch() as ran:
        y = _torch.EFFICIENT_ATTENTION(q, q, v, None, True, 0.5, True, scale=None)[0]
        y.sum().backward()
    effect = "no attention of heads of unlike sizes can be planned for a GPU"
    assert y.shape == (1, 2, 4, 16) and q.grad is not None, breaks(effect)
    assert ran.seen.count(_torch.EFFICIENT_ATTENTION) == 1, breaks(effect)


def test_a_hook_on_a_leaf_is_seen():
    w = torch.ones(2, requires_grad=True)
    assert not products.is_hooked(w)
    handle = w.register_hook(lambda g: g)
    assert products.is_hooked(w), breaks("a pipeline passes by hooks on parameters")
    handle.remove()
    assert not products.is_hooked(w), breaks("gradients are added in place more rarely")


# What plans stand on

aten = torch.ops.aten
X = {"dtype": torch.float32}
# Each operator that ``quick_fake`` knows, on arguments of many kinds.
QUICK = [
    *[
        (op, make, rest, {})
        for make in (
            lambda: torch.ones(4, 6),
            lambda: torch.ones(6, 4, dtype=torch.bfloat16).t(),
            lambda: torch.ones(10, 6)[2:6],
            lambda: torch.ones(4, 6, dtype=torch.int64),
            lambda: torch.ones(1, 6).expand(4, 6),
        )
        for op, rest in (
            (aten.slice.Tensor, (0, 1, 3)),
            (aten.slice.Tensor, (1, -3, 9223372036854775807, 2)),
            (aten.slice.Tensor, ()),
            (aten.select.int, (0, -1)),
            (aten.as_strided.default, ([2, 2], [1, 2])),
            (aten.as_strided.default, ([3], [1], 1)),
            (aten.detach.default, ()),
            (aten.alias.default, ()),
            (aten.view.default, ([4, 2, 3],)),
            (aten.t.default, ()),
            (aten.transpose.int, (0, -1)),
            (aten.permute.default, ([1, 0],)),
            (aten.expand.default, ([3, 4, 6],)),
            (aten._unsafe_view.default, ([4, 2, 3],)),
            (aten.unsqueeze.default, (-1,)),
            (aten.squeeze.dim, (0,)),
            (aten.unbind.int, (1,)),
            (aten.split.Tensor, (2, -1)),
            (aten.split_with_sizes.default, ([1, 3],)),
            (aten.view.dtype, (torch.int16,)),
            (aten._new_zeros_with_same_feature_meta.default, (torch.ones(30)[3:9],)),
        )
    ],
    *[
        (op, make, rest, how)
        for make in (
            lambda: torch.ones(4, 6),
            lambda: torch.ones(6, 4, dtype=torch.bfloat16).t(),
            lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
            lambda: torch.ones(1, 6).expand(4, 6),
            lambda: torch.ones(8, 6)[::2],
        )
        for op, rest, how in (
            (aten.zeros_like.default, (), {}),
            (aten.zeros_like.default, (), {"dtype": torch.float64}),
            (aten.zeros_like.default, (), {"dtype": None}),
            (aten.empty_like.default, (), {"memory_format": torch.contiguous_format}),
            (aten.empty_like.default, (), {"device": torch.device("cpu")}),
            (aten.new_empty.default, ([3, 2],), {}),
            (aten.new_zeros.default, ([0],), {"dtype": torch.int32}),
            (aten.new_empty.default, ([],), {"device": "cpu", "pin_memory": False}),
        )
    ],
    (aten.empty.memory_format, None, ([2, 3],), X),
    (aten.empty.memory_format, None, ([],), {}),
    (aten.empty.memory_format, None, ([1, 2, 3, 4],),
     {"memory_format": torch.channels_last}),
    (aten.empty_strided.default, None, ([2, 3], [5, 1]), X | {"device": "cpu"}),
    (aten.zeros.default, None, ([2, 3],), {"dtype": torch.bool, "layout": None}),
]  # fmt: skip


def check_alike(fast, slow, mode, given, op):
    """A fake tensor is what the mode's own is, in the same memory."""
    effect = "plans have other shapes, or views that share no memory"
    assert isinstance(fast, _torch.FakeTensor) and fast.fake_mode is mode
    for name in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(fast, name) == getattr(slow, name), breaks(effect)
    assert fast.stride() == slow.stride(), (op, breaks(effect))
    assert fast.storage_offset() == slow.storage_offset(), breaks(effect)
    assert fast.is_contiguous() == slow.is_contiguous()
    size = [y.untyped_storage().nbytes() for y in (fast, slow)]
    assert size[0] == size[1], (op, breaks("plans count other bytes"))
    if given:
        key = _torch.storage_key(given[0])
        shares = [_torch.storage_key(y) == key for y in (fast, slow)]
        assert shares[0] == shares[1], (op, breaks(effect))
    assert vars(fast).keys() == vars(slow).keys(), breaks("torch's fakes have more")
    mine = {k: v for k, v in vars(slow).items() if k != "dispatch_keys"}
    assert mine.items() <= vars(fast).items()


def test_quick_fakes_are_those_of_the_mode():
    quick = 0
    for op, make, rest, how in QUICK:
        mode = fake_modes.fake_mode_of([])
        with mode:
            try:
                given = [] if make is None else [make()]
                with pytest.MonkeyPatch.context() as plainly:
                    run = lambda mode, run, *given: run(*given)  # noqa: E731
                    plainly.setattr(fake_modes, "fake_result", run)
                    slow = op(*given, *rest, **how)
            except RuntimeError:  # no view of these strides
                with pytest.raises(RuntimeError):
                    fake_results.quick_fake(mode, op, (*given, *rest), how)
                continue
            fast = fake_results.quick_fake(mode, op, (*given, *rest), how)
        quick += fast is not NotImplemented
        assert fast is not NotImplemented, (op, how)
        assert type(fast) is type(slow)
        several = isinstance(fast, list)
        for one, other in zip(fast, slow, strict=True) if several else [(fast, slow)]:
            check_alike(one, other, mode, given, op)
    assert quick > 70


def wide(dtype=torch.float32):
    return torch.ones(6, 4, dtype=dtype)


# Operators whose results are remembered, or must not be: views, and what is odd.
REMEMBERED = [
    (aten.add.Tensor, lambda: (wide(), wide()), {}, True),
    (aten.add.Tensor, lambda: (wide(), wide(torch.bfloat16)), {"alpha": 2}, True),
    (aten.mul.Tensor, lambda: (wide(torch.int64), 2), {}, True),
    (aten.mul.Tensor, lambda: (wide(torch.int64), 2.0), {}, True),
    (aten.mul.Tensor, lambda: (wide().t(), wide().t()), {}, True),
    (aten.mm.default, lambda: (wide(), wide().t()), {}, True),
    (aten.cat.default, lambda: ([wide(), wide()], 1), {}, True),
    (aten._foreach_add.List, lambda: ([wide(), wide()[0]], [wide(), wide()[1]]), {},
     True),
    (aten._foreach_mul.Scalar, lambda: ([wide(), wide()[0], wide(), wide()], 2.0), {},
     True),
    (aten._foreach_add.List, lambda: ([wide(), wide(), wide(torch.float64)],
     [wide(), wide(torch.float64), wide(torch.float64)]), {}, True),
    (aten._foreach_norm.Scalar, lambda: ([wide(), wide().t(), wide()], 2), {}, True),
    (aten.native_layer_norm.default, lambda: (wide(), [4], None, None, 1e-5), {}, True),
    (aten._to_copy.default, lambda: (wide(),), {"dtype": torch.float64}, True),
    (aten.clone.default, lambda: (wide().t(),), {"memory_format":
     torch.contiguous_format}, True),
    (aten.sum.dim_IntList, lambda: (wide(), [0]), {}, True),
    (aten.mul_.Tensor, lambda: (wide(), 2.0), {}, True),
    (aten.copy_.default, lambda: (wide(), wide(torch.bfloat16)), {}, True),
    (aten.addmm_.default, lambda: (wide(), wide(), torch.ones(4, 4)), {}, True),
    (aten.transpose_.default, lambda: (wide(), 0, 1), {}, False),
    (aten.resize_.default, lambda: (wide(), [30]), {}, False),
    (aten._unsafe_view.default, lambda: (wide(), [24]), {}, False),
    (aten.permute.default, lambda: (wide(), [1, 0]), {}, False),
    (aten.add.Tensor, lambda: (wide(), torch.ones(())), {}, True),
    (aten.mul.Tensor, lambda: (torch.ones(()), torch.ones(())), {}, True),
    (aten.pow.Tensor_Scalar, lambda: (torch.ones(()), 2), {}, True),
    (aten.stack.default, lambda: ([torch.ones(()), torch.ones(())],), {}, True),
    # Which of two types, where one may be a number's?
    (aten.add.Tensor, lambda: (wide(torch.bfloat16), torch.ones(())), {}, False),
    (aten.mul.Tensor, lambda: (wide(torch.int64), torch.ones(())), {}, False),
    (aten.mul.Tensor, lambda: (torch.ones((), dtype=torch.float64), 2.0), {}, False),
    (aten.mul.Tensor, lambda: (torch.ones((), dtype=torch.int64), 2), {}, False),
    (aten.neg.default, lambda: (torch.ones(2, dtype=torch.cfloat).conj().imag,), {},
     False),
]  # fmt: skip


def test_remembered_fakes_are_those_of_the_mode():
    def looks(out):
        out = out if isinstance(out, (tuple, list)) else (out,)
        return [
            (x.shape, x.stride(), x.dtype, x.device, x.storage_offset(), x.layout)
            + (x.untyped_storage().nbytes(), x.requires_grad, x.is_neg())
            for x in out
        ]

    for op, make, how, remembered in REMEMBERED:
        mode = fake_modes.fake_mode_of([])
        asked = []

        def counted(*args, op=op, asked=asked, **kwargs):
            asked.append(op)
            return op(*args, **kwargs)

        func = type("Counted", (), {"__call__": staticmethod(counted)})()
        for name in ("namespace", "_schema", "tags"):
            setattr(func, name, getattr(op, name))
        slow = looks(op(*make(), **how))
        with mode:
            for _ in range(3):
                given = make()
                run = lambda func, given, how: func(*given, **how)  # noqa: E731
                out = fake_results.fake_result(mode, run, func, given, how)
                assert looks(out) == slow, (op, breaks("plans have other shapes"))
                assert (out is given[0]) == op._schema.is_mutable
                assert type(out) is type(op(*given, **how))
        assert (len(asked) == 1) == remembered, (op, len(asked))


def test_views_of_fake_tensors_are_told():
    mode = fake_modes.fake_mode_of([])
    with mode:
        x = torch.ones(2, 3)
    for func in aten.t.default, aten.unbind.int, aten.detach.default:
        assert _torch.is_view(func, (x,)), breaks("plans cost more")
        assert not _torch.is_view(func, (torch.ones(2, 3),))  # which becomes a fake
    for func in aten.add_.Tensor, aten.clone.default, aten.reshape.default:
        assert not _torch.is_view(func, (x,)), breaks("plans miss what is computed")


class ViewsBelow(_torch.OperatorMode):
    """Asks for views below itself, and notes whether there was an answer."""

    def __init__(self):
        super().__init__()
        self.answers = []

    def operator(self, func, args, kwargs):
        out = fake_results.view_below(func, args)
        self.answers.append(out is not NotImplemented)
        return func(*args, **kwargs) if out is NotImplemented else out


def test_views_are_made_below_a_mode():
    mode = fake_modes.fake_mode_of([])
    with mode:
        x = torch.ones(2, 3)
    effect = breaks("plans take another way for views, or none")
    with mode, ViewsBelow() as asked:
        several = [x.t(), *x.unbind(0), x[:, 1:], x.detach()]
        assert asked.answers and all(asked.answers), effect
        x + 1, x.clone(), torch.ones(2).t()
        assert not any(asked.answers[-3:-1])
    with mode:
        expected = [x.t(), *x.unbind(0), x[:, 1:], x.detach()]
    for one, other in zip(several, expected, strict=True):
        check_alike(one, other, mode, [x], "a view")
    with mode, ViewsBelow() as outer, ViewsBelow() as asked:
        x.t()
    assert outer.answers == [True] and asked.answers == [False], effect


def test_many_fake_tensors_are_made_as_torch_makes_each():
    mode = fake_modes.fake_mode_of([])
    effect = breaks("moments of a recorded step have other shapes")
    with mode:
        given = [torch.ones(2, 3), torch.ones(()), torch.ones(0, 2).int()]
        wanted = [None, torch.bfloat16, torch.float64]
        made = fake_results.fakes_like(given, wanted)
        assert made is not None, effect
        for x, dtype, y in zip(given, wanted, made, strict=True):
            check_alike(y, torch.empty_like(x, dtype=dtype), mode, given, effect)
            assert not y.requires_grad and _torch.storage_key(y) != _torch.storage_key(
                x
            )
        # torch makes them where these differ from that, or somebody is to see it.
        for odd in (given[0].t(), given[0].expand(4, 2, 3), given[0].bfloat16().conj()):
            answer = fake_results.fakes_like([given[0], odd], [None, None])
            assert (answer is None) == (not odd.is_contiguous()), effect
        with Watch():
            assert fake_results.fakes_like(given, wanted) is None, effect
        per_row = lambda x: x if fake_results.fakes_like([x], [None]) is None else None  # noqa: E731
        assert torch.func.vmap(per_row)(given[0]) is not None, effect
        assert fake_results.fakes_like([], []) is None
    real = torch.ones(2)
    assert fake_results.fakes_like([real], [None]) is None
    assert fake_results.fakes_like(given, wanted) is None  # the mode is off
    with mode:
        assert fake_results.fakes_like([given[0], real], [None, None]) is None
    with fake_modes.fake_mode_of([]):
        assert fake_results.fakes_like(given, wanted) is None, effect


def test_the_node_whose_backward_runs_is_known():
    def look(func):
        node = _torch.current_node()
        return func.overloadpacket, None if node is None else node.name()

    x = torch.ones(2, requires_grad=True)
    with Watch(look) as ran:
        y = x.exp().sum()
        torch.autograd.grad(y, x)
    effect = "operators of a backward are booked as the forward's"
    assert (aten.exp, None) in ran.seen, breaks(effect)
    assert (aten.mul, "ExpBackward0") in ran.seen, breaks(effect)
    assert _torch.current_node() is None


def test_saved_tensors_are_those_without_hooks():
    x = torch.ones(2, requires_grad=True)
    plain = x.exp()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        hooked = x.exp()
    nodes = _torch.graph_nodes([plain.grad_fn, hooked.grad_fn], set())
    found = list(_torch.saved_tensors(nodes))
    assert len(found) == 1 and torch.equal(found[0], plain), breaks("bytes are counted")


def test_no_mode_sees_what_is_done_to_a_real_tensor():
    x = torch.ones(4)
    with fake_modes.fake_mode_of([]):
        fake = torch.ones(4)
        with _torch.beneath_modes(x):
            part = x[1:]
        with _torch.beneath_modes(fake):
            other = fake[1:]
    effect = "a plan turns leaves of the state into fake tensors"
    assert type(part) is Tensor and part.data_ptr() == x[1:].data_ptr(), breaks(effect)
    assert isinstance(other, _torch.FakeTensor), breaks(effect)
    with _torch.FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        with _torch.outside_modes():
            copied = x.clone()
    effect = "a module's constants become fake tensors where it is first recorded"
    assert type(copied) is Tensor and not copied.is_inference(), breaks(effect)
    with _torch.FakeTensorMode():
        with _torch.beneath_all_modes():
            made = torch.ones(2)
        assert isinstance(torch.ones(2), _torch.FakeTensor)
    effect = "an init function draws no key, or computes with no values"
    assert type(made) is Tensor and made.tolist() == [1, 1], breaks(effect)


def test_devices_that_cannot_run_are_refused():
    if torch.cuda.is_available():
        pytest.skip("this torch can run them")
    for device in "cpu", "meta":
        fake_modes.check_device(torch.device(device))
    with pytest.raises(Exception, match="cuda"):
        fake_modes.check_device(torch.device("cuda"))
    with fake_modes.fake_mode_of([]), pytest.raises(Exception, match="cuda"):
        torch.ones(2, device="cuda").requires_grad_()


def test_a_module_reads_its_tensors_from_tables():
    module = torch.nn.BatchNorm1d(2)
    parameters, buffers = _torch.tensor_tables(module)
    effect = "units made of modules run on no parameters, or on those of another call"
    assert [*parameters, *buffers] == [
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    ], breaks(effect)  # fmt: skip
    _torch.set_tensor_tables(module, {"weight": 1, "bias": None}, {"running_mean": 2})
    found = module.weight, module.bias, module.running_mean
    assert found == (1, None, 2), breaks(effect)
    effect = "hooks of modules run twice, or outside their units"
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None, with_kwargs=True)
    counts = [
        [len(x) for x in _torch.hook_tables(module, before=before)]
        for before in (True, False)
    ]
    assert counts == [[1, 0], [1, 1, 0, 0, 0]], breaks(effect)


def test_fakes_that_are_forgotten_can_be_swapped():
    mode = _torch.FakeTensorMode()
    with mode:
        linear = torch.nn.Linear(2, 2)
        weight = linear.weight
        fake_modes.forget_fakes(mode)
        effect = "a module cannot be converted within an init function"
        assert not weakref.getweakrefs(weight), breaks(effect)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_fakes_do_need_not_be_remembered():
    """Twice, as the second time torch would hand out what it remembers."""
    mode = fake_modes.fake_mode_of(())

    def slopes(x):
        return torch.func.vmap(torch.func.jacfwd(lambda x: torch.tanh(x @ x)))(x)

    for _ in range(2):
        with mode, fake_modes.without_fake_cache(mode):
            assert slopes(torch.ones(3, 2)).shape == (3, 2)
            effect = "a step with forward mode in it cannot be recorded twice"
            assert not mode.cache_enabled, breaks(effect)


def test_what_hides_tensors_from_autograd_is_named():
    """A Function's forward and torch's checkpoint; a leaf that is no tensor is lost."""
    named = []

    def note(x):
        named.append((_torch.hides_tensors(), _torch.reverse_mode_around()))
        return 2 * x

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return note(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    x = torch.ones(1, requires_grad=True)
    note(x)
    Double.apply(x)
    torch.func.vjp(Double.apply, x.detach())
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(note, x, use_reentrant=reentrant)
    effect = "gradients by placed leaves that a Function or a checkpoint reads are zero"
    (plain, own, func, hooked, nested) = named
    assert plain == ("", False), breaks("units are refused")
    assert "autograd.Function" in own[0] and not own[1], breaks(effect)
    assert "autograd.Function" in func[0] and func[1], breaks(effect)
    assert hooked[0] == "torch.utils.checkpoint", breaks(effect)
    assert "reentrant" in nested[0], breaks(effect)
    assert not _torch.reverse_mode_around(), breaks("units are refused")


@pytest.mark.parametrize("version", ["2.10.2", "2.15.0a0+git1", "2.14.9+cpu"])
def test_a_torch_that_nobody_has_tried_is_told_once(version):
    program = f"""
        import torch, warnings
        torch.__version__ = {version!r}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            import fsfunc, fsfunc.comm.launch
        print([str(x.message) for x in told if "fsfunc is tested" in str(x.message)])
        """
    done = python("-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.count("torch 2.11 to 2.14") == ("2.14" not in version)


def test_the_versions_that_are_tested_are_named_alike_everywhere():
    """Where pip looks, and in README."""
    minor = int(versions.NEWEST.partition(".")[2])
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f"torch>={versions.OLDEST},<2.{minor + 1}" in pyproject
    tested = re.search(r"torch (2\.\d+)[\d.]*(?:, [\d.]+)* and (2\.\d+)", README)
    assert tested and tested.groups() == (versions.OLDEST, versions.NEWEST)


def test_a_generator_that_nobody_else_holds_is_gone():
    generator = torch.Generator()
    reference = versions.generator_reference(generator)
    effect = "remat restores generators that a unit makes for itself, or none at all"
    assert reference() is generator, breaks(effect)
    other, generator = generator, None
    assert reference() is other, breaks(effect)
    del other
    assert reference() is None, breaks(effect)


def test_the_node_of_a_function_lives_as_long_as_is_said():
    """Whoever holds it; and in every version while something above it is held."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx, g):  # type: ignore[override]
            return g * 2

    effect = "the second half of a split backward finds no nodes"
    y = Twice.apply(torch.ones(1, requires_grad=True))
    edge, above = torch.autograd.graph.get_gradient_edge(y), y.sin().grad_fn
    node, token = edge.node, edge.ownership_token
    del y, edge
    assert node.next_functions, breaks(effect)
    token = None
    assert node.next_functions, breaks(effect)
    above = None
    try:
        alive = bool(node.next_functions)
    except RuntimeError:
        alive = False
    assert alive == versions.NODES_KEEP_FUNCTIONS_ALIVE, breaks(effect)
    assert token is above is None


def test_fake_modes_may_be_entered_in_threads_that_end():
    program = """
        from threading import Thread
        from fsfunc import _torch
        def enter():
            with _torch.FakeTensorMode():
                pass
        _torch.ready_for_threads()
        for thread in [Thread(target=enter) for _ in range(3)]:
            thread.start()
            thread.join()
        """
    done = python("-c", textwrap.dedent(program), timeout=60)
    assert done.returncode == 0, breaks("simulated ranks end the process")


def test_a_backward_begins_with_ones_like_each_loss():
    """Before any node runs; these cotangents are the same on every rank."""
    made = []

    def look(func):
        if func is torch.ops.aten.ones_like.default:
            made.append(_torch.current_node())

    x = torch.ones(2, requires_grad=True)
    with Watch(look):
        torch.autograd.grad([x.sum(), x.sum()], x, [None, torch.ones(())])
        x.sum().backward()
        torch.func.grad(torch.sum)(torch.ones(2))
    assert made == [None] * 3, breaks("a step's cotangents have a type")


def test_a_backward_that_keeps_its_graph_says_so():
    x, kept = torch.ones(1, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda g: kept.append(_torch.keeps_graph()))
    torch.autograd.grad(y, x, retain_graph=True)
    torch.autograd.grad(y, x)
    effect = "a second derivative of a sharded unit is refused, or torch's own error"
    assert kept == [True, False], breaks(effect)


def test_leaves_behind_a_tensor_are_seen():
    x = torch.ones(1, requires_grad=True)
    y = x.view(1) * 2
    effect = "a nested gradient call cuts the graph to what its function closes over"
    assert _torch.reaches_leaves(y, set()), breaks(effect)
    stop = {y.grad_fn.next_functions[0][0]}
    assert not _torch.reaches_leaves(y, stop), "what is beyond a node is not asked"


def test_who_asks_for_a_value_is_told():
    with Watch(lambda func: _torch.data_dependence(func) == "value") as ran:
        x = torch.ones(())
        float(x), x.item(), bool(x == 1)
    effect = "a step that asks for values is not looked at any more"
    assert sum(ran.seen) == 3 and ran.seen[0] is False, breaks(effect)


def test_fakes_that_refuse_may_be_quiet(caplog):
    mode = fake_modes.fake_mode_of(())
    with mode, fake_modes.without_fake_logs(), pytest.raises(RuntimeError):
        torch.ones(3) * torch.ones(4)
    effect = "a step that raises is logged by torch as it is tried"
    assert not caplog.records, breaks(effect)


def test_rrelu_saves_its_noise_before_it_has_drawn_it():
    x = torch.ones(3, requires_grad=True)
    said = [
        _torch.saves_before_filling(torch.nn.functional.rrelu(x, training=how).grad_fn)
        for how in (True, False)
    ]
    assert said == [True, False], breaks("rrelu under remat has memory as its gradient")
    assert not _torch.saves_before_filling(x.sin().grad_fn)


def test_a_process_group_says_how_long_it_waits():
    limit = timedelta(seconds=8)
    how = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    for backend, expected in {"gloo": limit, "fake": None}.items():
        dist.init_process_group(backend, timeout=limit, **how)
        try:
            found = _torch.group_timeout(dist.group.WORLD)
        finally:
            dist.destroy_process_group()
        effect = "a timeout that the user gave is lost on a mesh of two axes"
        assert found == expected, breaks(effect)


def test_what_a_fork_must_not_free_is_kept():
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=1)
    try:
        effect = "ranks no longer hear one another beside their collectives"
        assert isinstance(_torch.default_store(), dist.Store), breaks(effect)
        group = dist.group.WORLD
        before = sys.getrefcount(group)
        _torch.never_free_process_groups()
        effect = "a fork of a rank never ends: it frees groups whose threads it has not"
        assert sys.getrefcount(group) == before + 1, breaks(effect)
    finally:
        dist.destroy_process_group()


def test_code_between_graphs_knows_of_its_compiler():
    found = [_torch.compiler_at_work()]

    def between(x):
        if torch.compiler.is_dynamo_compiling():
            raise ValueError("not to be compiled")
        found.append(_torch.compiler_at_work())
        return x + 1

    torch.compile(between, backend="eager")(torch.ones(1))
    effect = "a compiled step is torn into graphs in silence"
    assert found[0] is None, breaks(effect)
    assert len(found) == 2 and callable(found[1]), breaks(effect)


def test_compiled_functions_run_plainly_and_compiled_again():
    ran = []

    def backend(graph, _):
        return lambda *args: ran.append(1) or graph.forward(*args)

    double = torch.compile(lambda x: x + x, backend=backend)
    double(torch.ones(1))
    before = _torch.compiler_stance()
    _torch.set_compiler_stance("force_eager")
    double(torch.ones(1))
    effect = "compiled kernels read the memory of fake tensors: segmentation fault"
    assert len(ran) == 1, breaks(effect)
    _torch.set_compiler_stance(before)
    double(torch.ones(1))
    assert len(ran) == 2, breaks("units are compiled no more")


def test_a_module_tells_that_it_was_compiled():
    module = torch.nn.Linear(1, 1)
    assert not _torch.is_compiled(module)
    module.compile(backend="eager")
    effect = "modules compiled in place run uncompiled, without a word"
    assert _torch.is_compiled(module), breaks(effect)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fakes_know_the_product_of_groups(dtype):
    """That of a mixture of experts: both passes, as they lie in memory."""

    def found():
        x = torch.ones(6, 8, dtype=dtype, requires_grad=True)
        w = torch.ones(3, 8, 16, dtype=dtype, requires_grad=True)
        ends = torch.tensor([2, 5, 6], dtype=torch.int32)
        y = torch.nn.functional.grouped_mm(x, w, offs=ends)
        grads = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        odd = torch.nn.functional.grouped_mm(x, w.detach()[..., :12], offs=ends)
        pairs = torch.nn.functional.grouped_mm(w.mT.detach(), w.detach())
        every = [y, *grads, odd, pairs]
        return [(x.shape, x.stride(), x.dtype, x.device) for x in every]

    with fake_modes.fake_mode_of(()):
        fake = found()
    effect = "a model with experts cannot be recorded"
    assert fake == found(), breaks(effect)


def test_a_compiled_forward_keeps_what_a_partitioner_says():
    from functorch.compile import aot_function, nop

    from fsfunc._torch.partitions import partitioner

    def saved(share):
        w, x = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4)
        fn = lambda w, x: torch.sigmoid(torch.sin(x @ w)) @ w  # noqa: E731
        y = aot_function(fn, nop, partition_fn=partitioner(share))(w, x)
        given = {x.untyped_storage()._cdata for x in (w, x)}
        return {x.untyped_storage()._cdata for x in y.grad_fn.saved_tensors} - given

    effect = "jit keeps and computes again other values than it says"
    assert not saved(0.0), breaks(effect)
    assert len(saved(1.0)) == 1, breaks(effect)  # the product, and no value made of it
    assert "custom_partitioner_fn" in torch._inductor.list_options(), breaks(effect)


def test_a_graph_has_writes_collectives_and_constants():
    from fsfunc._torch import operator_graphs as graphs

    beside, calls = torch.ones(2), []

    class Run:
        def start(self, x, y, number):
            calls.append(("start", number))
            y.copy_(x * 2)

        def wait(self, x, y, number):
            calls.append(("wait", number))

    with fake_modes.fake_mode_of(()):
        x, y = torch.empty(2), torch.empty(2)

        def run():
            token = x.new_empty(0)
            sent, got = x + beside, x.new_empty(2)
            token = graphs.START(sent, got, token, 7)
            graphs.WAIT(sent, got, token, 7)
            y.add_(got)
            return [got]

        found = graphs.trace_operators(run, [x, y])
    effect = "jit(whole_step=True) writes, sends or reads other than the step"
    assert found.written_inputs == [1] and found.constants[0] is beside, breaks(effect)
    given = [torch.tensor([1.0, 2.0]), torch.zeros(2)]
    with graphs.running(Run()), torch.no_grad():
        (made,) = found.graph(*given, beside)
    assert calls == [("start", 7), ("wait", 7)], breaks(effect)
    assert made.tolist() == given[1].tolist() == [4.0, 6.0], breaks(effect)


def test_a_registered_dataclass_says_which_fields_it_leaves_out():
    @dataclasses.dataclass
    class Known:
        w: object
        name: object = None
        b: object = None

    torch_pytree.register_dataclass(Known)
    node = torch_pytree.SUPPORTED_NODES[Known]
    effect = "a gradient with None at a word has another structure than its parameters"
    for value, said in (
        (Known(1, "x", 2), [["w", "name", "b"], []]),
        (Known(1, None, 2), [["w", "b"], ["name"]]),
        (Known(1), [["w"], ["name", "b"]]),
    ):
        assert node.flatten_fn(value)[1] == said, breaks(effect)
    context = [["w", "name", "b"], []]
    assert node.unflatten_fn([1, None, 2], context) == Known(1, None, 2), breaks(effect)


def test_an_operator_is_known_by_its_formula():
    aten = torch.ops.aten
    assert formulas.decomposition(aten.silu.default) is not None
    assert formulas.decomposition(torch.ops.prims.mul.default) is torch.mul
    assert formulas.decomposition(aten.linalg_svd.default) is not None  # calls another
    assert formulas.decomposition(aten._linalg_svd.default) is None
    assert formulas.functional(aten.add.Tensor) is None
    assert formulas.functional(aten.add_.Tensor) == (aten.add.Tensor, ("self",))
    assert formulas.functional(aten.add.out) == (aten.add.Tensor, ("out",))
    assert formulas.is_seeded(aten.bernoulli_.float)
    assert not formulas.is_seeded(aten.add.Tensor)
    assert _torch.gives_views(aten.transpose.int)
    assert not _torch.gives_views(aten.add_.Tensor)
    assert not _torch.gives_views(aten.to.dtype)  # it may copy
    x = torch.arange(3)
    assert formulas.TO_COPY(x, dtype=torch.float64).dtype == torch.float64


def test_a_mode_says_whether_it_acts_in_every_thread():
    class Everywhere(_torch.DispatchMode):
        enters_ranks = True

    class Here(_torch.DispatchMode):
        pass

    with Everywhere() as everywhere, Here():
        assert _torch.modes_of_ranks() == [everywhere]
        assert _torch.is_rounded()
        Everywhere.rounds = False
        assert not _torch.is_rounded()
        assert _torch.active_modes() == ["Here"]
