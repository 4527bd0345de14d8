"""The one file with private torch API; ``tests/test_torch.py`` names what breaks.

Everything here was written against torch 2.13 and runs on 2.11.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_current_level,
    maybe_get_level,
)
from torch._functorch import eager_transforms
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "active_modes",
    "arguments_of",
    "beneath_all_modes",
    "beneath_functorch",
    "compiler_at_work",
    "compiler_stance",
    "current_level",
    "differentiated_at",
    "fake_active",
    "forward_ad_active",
    "function_around",
    "forward_ad_on",
    "forward_ad_state",
    "functorch_active",
    "graph_nodes",
    "group_timeout",
    "held",
    "hook_saved",
    "hook_tables",
    "is_compiled",
    "is_hooked",
    "is_wrapped",
    "mapped_at",
    "mapping_levels",
    "output_shape",
    "quiet_fakes",
    "remembering_nothing",
    "outside_modes",
    "plain_tensors",
    "plainly",
    "saved_tensors_hooked",
    "seeds_a_backward",
    "set_compiler_stance",
    "set_forward_ad_state",
    "tells_value",
    "shared_forward_ad",
    "sequence_number",
    "set_tables",
    "storage",
    "storage_key",
    "storage_uses",
    "uses_of",
    "tables",
    "unwrapped",
    "written",
]


# What compiles the code that runs in this thread; None (or False: nothing new) where no
# compiled function is running. As torch has it: a frame of ours it would compile too.
compiler_at_work: Callable[[], Any] = (
    torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]
)


def compiler_stance() -> Any:
    """How compiled functions run: torch has one answer for all threads.

    None where nothing can have been compiled yet.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    return None if module is None else module._stance


def set_compiler_stance(stance: Any) -> None:
    """Puts back what :func:`compiler_stance` returned; or ``"force_eager"``: plainly.

    Between the graphs of a compiled function too, where torch's own way is shut.
    """
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    if module is None:
        return  # the first fake mode imports it
    if stance is None or isinstance(stance, str):
        stance = module.DynamoStance(stance or "default")
    module._stance = stance


def functorch_active() -> bool:
    """Whether a ``torch.func`` transform (grad, vjp, jvp, vmap) is running."""
    return torch._C._are_functorch_transforms_active()


def plainly() -> bool:
    """Whether nothing but autograd sees what is called here, and it looks."""
    quiet = not torch._C._are_functorch_transforms_active()
    return (
        quiet and torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack()
    )


@contextmanager
def beneath_functorch() -> Iterator[None]:
    """Inside, no ``torch.func`` transform sees what is called."""
    guard = torch._C._DisableFuncTorch()
    try:
        yield
    finally:
        del guard


@contextmanager
def beneath_modes(x: Tensor) -> Iterator[None]:
    """Inside, no dispatch mode sees what is done to ``x``, unless ``x`` is fake."""
    if isinstance(x, FakeTensor):
        yield
        return
    with beneath_all_modes():
        yield


@contextmanager
def beneath_all_modes() -> Iterator[None]:
    """Inside, no dispatch mode sees anything: what is made is real."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield


def plain_tensors() -> Any:
    """Inside, tensors of subclasses are taken for plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


def forward_ad_active() -> bool:
    """Whether a dual level of ``torch.autograd.forward_ad`` is open."""
    return torch.autograd.forward_ad._current_level >= 0


def forward_ad_on() -> Any:
    """Inside, tangents go through plain operations.

    torch shuts them off within a Function's ``jvp``, also those of outer levels: a
    plain operation there makes a ``jvp`` of a ``jvp`` zero in silence.
    """
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)


def forward_ad_state() -> tuple[int, int]:
    """(the open dual level, how deep in ``jvp``): torch has one for the process."""
    return torch.autograd.forward_ad._current_level, eager_transforms.JVP_NESTING


def set_forward_ad_state(state: tuple[int, int]) -> None:
    """Puts back what :func:`forward_ad_state` returned."""
    torch.autograd.forward_ad._current_level, eager_transforms.JVP_NESTING = state


@contextmanager
def shared_forward_ad() -> Iterator[None]:
    """Inside, threads that take turns may each have a dual level open.

    torch has one for the process, and closing it ends everybody's tangents: here it
    stays open until the last has closed it. Who passes on the turn also passes
    :func:`forward_ad_state`.
    """
    ad = torch.autograd.forward_ad
    enter, leave, holders = ad.enter_dual_level, ad.exit_dual_level, 0

    def enter_shared() -> int:
        nonlocal holders
        if holders == 0 or ad._current_level >= 0:  # torch refuses to nest them
            enter()
        holders, ad._current_level = holders + 1, 0
        return 0

    def leave_shared(*, level: int | None = None) -> None:
        nonlocal holders
        holders -= 1
        if holders == 0:
            leave(level=level)
        ad._current_level = -1

    ad.enter_dual_level, ad.exit_dual_level = enter_shared, leave_shared
    try:
        yield
    finally:
        ad.enter_dual_level, ad.exit_dual_level = enter, leave


def fake_mode() -> FakeTensorMode | None:
    """The fake tensor mode that is on in this thread, if one is."""
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return next((m for m in reversed(stack) if isinstance(m, FakeTensorMode)), None)


def fake_active() -> bool:
    """Whether a fake tensor mode is on in this thread."""
    return fake_mode() is not None


def current_level() -> int:
    """The functorch level that is running (0: none)."""
    return maybe_current_level() or 0


def unwrapped(x: Tensor) -> Tensor:
    """The plain tensor inside any functorch wrappers."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def is_wrapped(x: Tensor) -> bool:
    """Whether a functorch level wraps ``x``."""
    return is_functorch_wrapped_tensor(x)


def _wrappers(x: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Each functorch wrapper around a tensor and its level, the outermost first."""
    while is_functorch_wrapped_tensor(x):
        yield x, maybe_get_level(x)
        x = get_unwrapped(x)


def differentiated_at(x: Tensor) -> int:
    """The innermost functorch level that differentiates ``x`` in reverse (0: none)."""
    levels = [
        n for y, n in _wrappers(x) if is_gradtrackingtensor(y) and y.requires_grad
    ]
    return max(levels, default=0)


def mapped_at(x: Tensor) -> list[int]:
    """The functorch levels that ``vmap`` over ``x``."""
    return [n for y, n in _wrappers(x) if is_batchedtensor(y)]


def mapping_levels() -> list[int]:
    """The functorch levels of the ``vmap``s around, the outermost first."""
    stack = get_interpreter_stack() or []
    return [i.level() for i in stack if i.key() == TransformType.Vmap]


def storage_key(x: Tensor) -> int:
    """Equal for two tensors exactly where they share a storage.

    ``data_ptr`` would not do: it is 0 for every fake tensor, and raises in functorch.
    A sparse tensor has no storage: it shares with itself alone.
    """
    try:
        return x.untyped_storage()._cdata
    except NotImplementedError:
        if x.layout == torch.strided:
            raise
        return x._cdata


def storage(x: Tensor) -> Any:
    """What holds the memory that ``x`` lies in: to keep alive, or to tell apart."""
    return x.untyped_storage() if x.layout == torch.strided else x


def storage_uses(x: Tensor) -> int:
    """How many tensors (and Python handles) hold the storage of ``x``."""
    return torch._C._storage_Use_Count(storage_key(x))


# Of ``storage._cdata``: how many tensors and handles hold that storage.
uses_of: Callable[[int], int] = torch._C._storage_Use_Count


def held(storage: torch.UntypedStorage) -> int:
    """How many tensors hold ``storage``, this handle counted as one more."""
    return uses_of(storage._cdata)


def sequence_number(node: Any) -> int:
    """When an autograd node was made, counted per thread."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread will have, or above it."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]


def seeds_a_backward() -> bool:
    """Whether torch itself makes what a backward starts from: a cotangent of ones."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_make_grads":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == torch.autograd.__file__


def current_node() -> Any:
    """The autograd node whose backward runs in this thread, if one does."""
    return torch._C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the backward that is under way comes to a node (None: to nothing).

    Of a leaf torch does not tell: yes, then.
    """
    if node is None or hasattr(node, "variable"):
        return node is not None
    return torch._C._will_engine_execute_node(node)


def output_shape(node: Any, k: int) -> tuple[int, ...]:
    """The shape of the ``k``-th tensor that an autograd node's op made."""
    return tuple(node._input_metadata[k].shape)


def active_modes() -> list[str]:
    """Names of the torch function and dispatch modes that are on in this thread."""
    functions = torch.overrides._get_current_function_mode_stack()
    dispatch = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return [
        type(m).__name__
        for m in [*functions, *dispatch]
        if not isinstance(m, torch.utils._device.DeviceContext)  # type: ignore[attr-defined]
    ]


def saved_tensors_hooked() -> bool:
    """Whether ``saved_tensors_hooks`` are on in this thread."""
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    return autograd._top_saved_tensors_default_hooks(True) is not None


_SAVED: dict[type, list[tuple[str, str]]] = {}


def _saved_attributes(kind: type) -> list[tuple[str, str]]:
    """(raw name, value name) of what nodes of this type save."""
    if kind not in _SAVED:
        raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        _SAVED[kind] = [
            (name, "saved_tensors" if name == "_raw_saved_tensors" else name[4:])
            for name in raw
        ]
    return _SAVED[kind]


def graph_nodes(roots: Iterable[Any], stop: set[Any]) -> list[Any]:
    """The autograd nodes reached from ``roots`` without entering ``stop``."""
    seen, found, todo = {None, *stop}, [], list(roots)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        found.append(node)
        for n, _ in node.next_functions:
            todo.append(n)
    return found


def hook_saved(
    nodes: Iterable[Any],
    storage: int,
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
) -> int:
    """Puts hooks on the saved tensors of ``nodes`` that lie in ``storage``.

    Returns how many there were. A tensor under somebody else's hooks is left alone:
    it then keeps what those hooks kept.
    """
    count = 0
    for node in nodes:
        for raw, value in _saved(node):
            if isinstance(value, Tensor) and storage_key(value) == storage:
                try:
                    raw.register_hooks(pack, unpack)
                except RuntimeError as error:
                    if "hooks" not in str(error):
                        raise
                    continue
                count += 1
    return count


def saved_under_hooks(nodes: Iterable[Any]) -> bool:
    """Whether ``nodes`` save anything under somebody's hooks."""
    if not _CAN_LOOK:
        return False
    for node in nodes:
        for name, _ in _saved_attributes(type(node)):
            raws = getattr(node, name)
            raws = raws if isinstance(raws, (tuple, list)) else (raws,)
            if any(raw.unpack_hook is not None for raw in raws):
                return True
    return False


def saved_tensors(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that ``nodes`` save as they are, under nobody's hooks."""
    for node in nodes:
        for _, value in _saved(node):
            if isinstance(value, Tensor):
                yield value


def _saved(node: Any) -> list[tuple[Any, Any]]:
    """What ``node`` saves: the handle on it, and the data.

    Where torch lets us look, without unpacking: to unpack is to run other people's
    hooks, which compute a checkpoint again or gather an inner unit's parameters.
    """
    kind, found = type(node), []
    names = _SAVED[kind] if kind in _SAVED else _saved_attributes(kind)
    for raw_name, name in names:
        raws = getattr(node, raw_name)
        raws = raws if isinstance(raws, (tuple, list)) else (raws,)
        if _CAN_LOOK:
            for raw in raws:
                if raw.unpack_hook is None:
                    found.append((raw, raw.data))
            continue
        values = getattr(node, name)
        values = values if isinstance(values, (tuple, list)) else (values,)
        found += zip(raws, values, strict=True)
    return found


_SavedTensor: Any = torch._C._autograd.SavedTensor  # type: ignore[attr-defined]
_CAN_LOOK = hasattr(_SavedTensor, "unpack_hook") and hasattr(_SavedTensor, "data")


# Attention on the CPU, of which torch's own counter of operations knows nothing.
CPU_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)

# A matrix product's node: which of its edges leads to the second factor, and under
# which name it saves the first.
_PRODUCTS = {"MmBackward0": (1, "_saved_self"), "AddmmBackward0": (2, "_saved_mat1")}
_NAMES = {
    **dict.fromkeys(_PRODUCTS, "product"),
    "EmbeddingBackward0": "lookup",
    "AccumulateGrad": "leaf",
    "TBackward0": "turn",
    "ViewBackward0": "view",
}


class _Kinds(dict[type, str | None]):
    def __missing__(self, kind: type) -> str | None:
        self[kind] = found = _NAMES.get(kind.__name__)
        return found


KINDS = _Kinds()  # by the type of a node; graphs are walked node by node


def kind_of(node: Any) -> str | None:
    """What an autograd node is: a product, lookup, leaf, turn (transpose) or view."""
    return KINDS[type(node)]


def leaf_behind(x: Tensor) -> Tensor | None:
    """The leaf that ``x`` is, perhaps seen in another shape."""
    if x.grad_fn is None:
        return x
    node = x.grad_fn
    while node is not None and kind_of(node) in ("turn", "view"):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def weight_edge(node: Any) -> Any:
    """The edge of a plain product to its second factor, of a lookup to its rows.

    None where that needs no gradient, or where the node does more than that.
    """
    kind, at = kind_of(node), 0
    if kind == "product":
        at = _PRODUCTS[type(node).__name__][0]
        plain = getattr(node, "_saved_alpha", 1) == 1
    elif kind == "lookup":
        rare = node._saved_scale_grad_by_freq or node._saved_sparse
        # -1, which is no row: nothing is left out. On CUDA adding rows has no order.
        plain = not rare and node._saved_padding_idx in (-1, 2**64 - 1)
        plain = plain and node._saved_indices.device.type == "cpu"
    else:
        return None
    edge = node.next_functions[at]
    return edge if plain and edge[0] is not None else None


def first_factor(node: Any) -> Tensor:
    """What a matrix product saved of its first factor; it has it for the second's."""
    return getattr(node, _PRODUCTS[type(node).__name__][1])


def is_hooked(leaf: Tensor) -> bool:
    """Whether somebody registered a hook on a leaf, which sees its gradient."""
    return bool(leaf._backward_hooks)


def looked_up(node: Any) -> Tensor:
    """The numbers of the rows that a lookup took."""
    return node._saved_indices


def is_data_dependent(error: BaseException) -> bool:
    """Whether ``error`` is a fake tensor refusing to tell a value."""
    return isinstance(
        error,
        (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
        ),
    )


_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


@functools.cache
def _teach() -> None:
    """Tells torch what this does to tensors without data, where it does not know.

    It would run the operator on zeros of full size in their place.
    """
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has("aten::_fused_sgd_", "Meta"):
        _LIBRARY.impl("_fused_sgd_", lambda *args, **kwargs: None)


_CPU = torch.device("cpu")
# Each row times the matrix of its group: a mixture of experts.
GROUPED_PRODUCT: Any = torch.ops.aten._grouped_mm


def _grouped_product(mode: FakeTensorMode, given: dict[str, Any]) -> Tensor:
    """What a product of groups returns on a CPU (a mixture of experts).

    torch's own rule for tensors without data knows only one of its dtypes.
    """
    a, b = given["self"], given["mat2"]
    dtype, groups = given["out_dtype"] or a.dtype, ()
    if a.ndim == b.ndim:
        groups = given["offs"].shape if a.ndim == 2 else a.shape[:-2]
    size = (*groups, a.shape[-2], b.shape[-1])
    step = 16 // dtype.itemsize  # rows begin at a multiple of 16 bytes
    row = -(-size[-1] // step) * step
    strides = (size[-2] * row, row, 1)[-len(size) :]
    with torch._C._DisableTorchDispatch():
        return FakeTensor(
            mode, torch.empty_strided(size, strides, dtype=dtype, device="meta"), _CPU
        )


class _HereFakeMode(FakeTensorMode):
    """Fake tensors of the devices that this torch can run, and of no others.

    Of another device autograd would end the process, where it looks for its streams.
    ``always`` is what they have in common beside the tensor itself.
    """

    always: dict[str, Any] | None = None

    def dispatch(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is GROUPED_PRODUCT.default:
            given = arguments_of(func, tuple(args), dict(kwargs or {}))
            if device_of(given["self"]) == _CPU:
                return _grouped_product(self, given)
        out = super().dispatch(func, types, args, kwargs)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, FakeTensor):
                check_device(x.fake_device)
        return out


def check_device(device: torch.device) -> None:
    """Refuses tensors without data of a device that this torch cannot run.

    Raises:
        ValueError: names the device and the way out.
    """
    if device.type in ("cpu", "meta"):
        return
    if not (device.type == "cuda" and torch.cuda.is_available()):
        raise ValueError(
            f"a fake tensor of device {str(device)!r} cannot be used with this torch, "
            "which cannot run that device: make parameters and batch on the CPU; a "
            "plan is the same"
        )


def _new_fake_mode() -> FakeTensorMode:
    _teach()
    return _HereFakeMode(allow_non_fake_inputs=True)


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """The mode of the fake tensors among ``values``, or a new one."""
    for x in values:
        if isinstance(x, FakeTensor):
            return x.fake_mode
    return _new_fake_mode()


def remembering_nothing(mode: FakeTensorMode) -> Any:
    """Inside, each operator on fakes is asked anew.

    The results that torch remembers share views, and forward mode cannot have those.
    """
    return fake_tensor.disable_fake_tensor_cache(mode)


@functools.cache
def abstract_mode() -> FakeTensorMode:
    """The one mode of all abstract meshes: tensors of two modes cannot meet."""
    return _new_fake_mode()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Inside, torch does not log what an operator refuses on fake tensors."""
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def fake_of(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """``x`` without its data."""
    return x if isinstance(x, FakeTensor) else mode.from_tensor(x, static_shapes=True)


def forget_fakes(mode: FakeTensorMode) -> None:
    """Lets go of the weak references that a mode keeps to what it made.

    A module that is converted (``module.double()``) cannot swap a parameter for another
    while there is one.
    """
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


_aten: Any = torch.ops.aten
# What depends on shapes alone, alike on every device.
_OF_ONE = {
    _aten.slice.Tensor, _aten.select.int, _aten.as_strided.default,
    _aten.detach.default, _aten.alias.default, _aten.view.default,
    _aten.t.default, _aten.transpose.int, _aten.permute.default,
    _aten.expand.default, _aten._unsafe_view.default,
}  # fmt: skip
_LIKE_ONE = {
    _aten.zeros_like.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_zeros.default,
}  # fmt: skip
_OF_NONE = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default,
}  # fmt: skip


def function_around() -> Any:
    """The user's ``autograd.Function`` whose forward is running, if any."""
    code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    frame = sys._getframe(1)
    while frame is not None:
        cls = frame.f_locals.get("cls") if frame.f_code is code else None
        if cls is not None and not cls.__module__.startswith("fsfunc."):
            return cls
        frame = frame.f_back
    return None


def tells_value(func: Any) -> bool:
    """Whether an operator gives the value of its tensor as a number of Python."""
    return func is torch.ops.aten._local_scalar_dense.default


def quick_fake(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` returns for fake tensors of CPUs, or ``NotImplemented``.

    The mode's own way costs three times as much; this one knows a few operators.
    """
    if func._schema.is_mutable and not func._schema.returns:
        return None  # it only writes, and there is nothing to write
    kwargs = dict(kwargs)
    if func in _OF_ONE or func in _LIKE_ONE:
        x = args[0]
        odd = not isinstance(x, FakeTensor) or x.constant is not None
        if odd or x.fake_device != _CPU or x.fake_mode is not mode:
            return NotImplemented
    elif func not in _OF_NONE:
        return NotImplemented
    device = kwargs.pop("device", None)
    if kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    if device is not None and torch.device(device) != _CPU:
        return NotImplemented
    if func not in _OF_ONE:
        kwargs["device"] = "meta"
    with torch._C._DisableTorchDispatch():
        return _over(mode, func(*args, **kwargs))


def _over(mode: FakeTensorMode, x: Tensor) -> FakeTensor:
    """A fake tensor of the CPU over one on "meta", as its constructor makes it.

    That one takes three times as long: all but the tensor itself is always the same.
    """
    if not isinstance(mode, _HereFakeMode):
        return FakeTensor(mode, x, _CPU)
    if mode.always is None:
        mode.always = dict(FakeTensor(mode, x.detach(), _CPU).__dict__)
    fake = Tensor._make_subclass(
        FakeTensor,
        x,
        x.requires_grad,
        dispatch_device=True,
        device_for_backend_keys=_CPU,  # type: ignore[arg-type]
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(mode.always)
    return fake


_MADE: dict[Any, Any] = {}  # what operators made of arguments that look so
_MOST_MADE = 1 << 16
_ODD = object()
_SHAPELESS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format}
    | {torch.device}
)


def fake_result(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` returns for fake tensors of CPUs.

    The mode's own way is asked once for arguments that look alike: it costs ten times
    as much as what is remembered here, of operators that make new memory.
    """
    out = quick_fake(mode, func, args, kwargs)
    if out is not NotImplemented:
        return out
    key = None
    if _makes_anew(func):
        looks = _looks(mode, args), _looks(mode, tuple(kwargs.items()))
        if _ODD not in looks:
            key = func, torch.get_default_dtype(), looks
    made = _MADE.get(key) if key is not None else None
    if made is None:
        out = func(*args, **kwargs)
        if key is not None:
            if len(_MADE) >= _MOST_MADE:
                _MADE.clear()
            _MADE[key] = _made_anew(out, args, kwargs)
        return out
    if made is _ODD:
        return func(*args, **kwargs)
    kind, specs = made
    with torch._C._DisableTorchDispatch():
        new = [
            _over(mode, torch.empty_strided(*spec[:2], dtype=spec[2], device="meta"))
            for spec in specs
        ]
    return new[0] if kind is None else kind(new)


@functools.cache
def _makes_anew(func: Any) -> bool:
    """Whether shapes alone say what an operator makes, in memory of its own."""
    told = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    schema = func._schema
    return (
        func.namespace == "aten"
        and not schema.is_mutable
        and not told & set(func.tags)
        and bool(schema.returns)
        and all(
            r.alias_info is None and str(r.type) in ("Tensor", "List[Tensor]")
            for r in schema.returns
        )
    )


def _looks(mode: FakeTensorMode, x: Any) -> Any:
    """What of an argument decides how results look, or ``_ODD``."""
    kind = type(x)
    if kind is FakeTensor:
        if (
            x.fake_mode is not mode
            or x.fake_device != _CPU
            or x.constant is not None
            or x.ndim == 0  # it may stand for a number of Python
            or x.layout is not torch.strided
            or x.is_conj()
            or x.is_neg()
        ):
            return _ODD
        return x.dtype, x.shape, x.stride()
    if kind in _SHAPELESS:
        return kind, x
    if kind is tuple or kind is list:
        found = (kind, *[_looks(mode, y) for y in x])
        return _ODD if _ODD in found else found
    return _ODD


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _made_anew(out: Any, args: Any, kwargs: Any) -> Any:
    """How results look that lie in memory of their own, or ``_ODD``."""
    kind = type(out) if isinstance(out, (tuple, list)) else None
    specs = []
    seen = {storage_key(x) for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
    for x in (out,) if kind is None else out:
        if type(x) is not FakeTensor or x.fake_device != _CPU or x.constant is not None:
            return _ODD
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            return _ODD
        steps = zip(x.shape, x.stride(), strict=True)
        reach = 1 + sum((n - 1) * step for n, step in steps) if x.numel() else 0
        size = x.untyped_storage().nbytes()
        key = storage_key(x)
        if x.storage_offset() or size != reach * x.element_size() or key in seen:
            return _ODD
        seen.add(key)
        specs.append((tuple(x.shape), x.stride(), x.dtype))
    return kind, specs


def device_of(x: Tensor) -> torch.device:
    """``x.device``, without the operator that a fake tensor runs to tell it."""
    return x.fake_device if isinstance(x, FakeTensor) else x.device


def arguments_of(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What an operator is called with, by name and in its schema's order."""
    found = {}
    for i, argument in enumerate(operator._schema.arguments):
        if i < len(args):
            found[argument.name] = args[i]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


# In training they write the running statistics, and their schemas do not say so.
_BATCH_NORMS = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
}


def written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments, tensors or lists of them, that an operator says it writes.

    Version counters would not tell a mode: they rise after it has returned.
    """
    schema = operator._schema
    if schema.name in _BATCH_NORMS and args[5]:
        return list(args[3:5])
    if not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module keeps its own parameters and its own buffers, by attribute."""
    return module._parameters, module._buffers


def set_tables(module: torch.nn.Module, parameters: Any, buffers: Any) -> None:
    """Makes a module look for its parameters and buffers in these dicts."""
    module.__dict__["_parameters"] = parameters
    module.__dict__["_buffers"] = buffers


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether somebody called a module's ``compile()``."""
    return module._compiled_call_impl is not None


_HOOKS_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_HOOKS_AFTER = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def hook_tables(module: torch.nn.Module, *, before: bool) -> list[dict[Any, Any]]:
    """Where a module keeps the hooks that run before its forward, or the others."""
    names = _HOOKS_BEFORE if before else _HOOKS_AFTER
    return [module.__dict__[name] for name in names]


@contextmanager
def outside_modes() -> Iterator[None]:
    """Whatever modes are on, tensors that are copied here are what they were."""
    with beneath_all_modes(), torch.inference_mode(False):
        yield


def group_timeout(group: Any) -> timedelta | None:
    """How long a process group waits for a rank; None where its kind has no limit."""
    found = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", None))
    return min((t for t in found if t is not None), default=None)
