"""Torch's operators: classes, arguments, FLOPs. `_torch.OperatorMode` sees them run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fsfunc import _torch
from fsfunc._torch import OperatorMode

_ALIKE = {"zeros_like", "ones_like", "full_like", "empty_like"}
# Views of a row that mean another thing where the leaf has dims.
TURNS = {"t", "transpose", "permute"}
COPIES = {"copy", "clone", "alias", "contiguous", "detach", "lift_fresh"}
# What torch tags as pointwise, and gives one number for all elements.
_NOT_ELEMENTWISE = {"equal"}
# By the field of a class: the operators that are so, whatever torch's tags say.
_KNOWN = {
    "elementwise": {
        "copy", "_to_copy", "to", "fill", "zero", "lift_fresh", "contiguous",
        "type_as", "_fused_adamw", "_fused_adam", "_fused_sgd", "_fused_adagrad",
        "softplus", "softplus_backward", "smooth_l1_loss", "smooth_l1_loss_backward",
        "huber_loss", "huber_loss_backward", "mse_loss", "mse_loss_backward",
        "log_sigmoid_forward", "log_sigmoid_backward", "threshold",
        "threshold_backward", "floor_divide", "rsub", "hardswish",
        "hardswish_backward", "complex", "polar", "alias_copy", "detach_copy", *_ALIKE,
    },
    "alike": _ALIKE,
    "factory": {
        "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
        "_new_zeros_with_same_feature_meta", "zeros", "ones", "full",
        "_efficientzerotensor",
    },
    "joins": {"cat", "stack"},
    "picks": {
        "slice", "select", "split", "split_with_sizes", "unbind", "narrow",
        "diagonal", "unfold", "tensor_split", "chunk",
    },
    "sums": {"sum", "dot", "vdot", "_foreach_sum"},
    "adds": {"add", "sub", "_foreach_add", "_foreach_sub"},
    "scales": {
        "mul", "div", "neg", "clone", "_to_copy", "copy", "_foreach_mul",
        "_foreach_div", "_foreach_neg",
    },
}  # fmt: skip


@dataclass(frozen=True)
class OperatorClass:
    """Properties of an operator.

    Args:
        name: without its overload, and without the underscore of one in place.
        random: whether it draws random numbers.
        elementwise: whether it computes each element from those at its place (for a
            loss: without a ``reduction``, see `class_of_call`).
        alike: whether its result has the shape of its first argument, and not its
            values, as ``zeros_like``.
        factory: whether it makes a tensor of any shape from no tensor.
        joins: whether it concatenates tensors.
        picks: whether it returns a view of some elements, chosen by their places.
        sums, adds, scales: whether it is linear in what it reduces, adds or scales.
    """

    name: str
    random: bool
    elementwise: bool
    alike: bool
    factory: bool
    joins: bool
    picks: bool
    sums: bool
    adds: bool
    scales: bool


@functools.cache
def class_of(operator: Any) -> OperatorClass:
    """The class of an operator, by its tags where torch gives them, else by its name.

    What neither says to be elementwise is not.

    >>> class_of(torch.ops.aten.tanh.default).elementwise
    True
    >>> class_of(torch.ops.aten.mm.default).elementwise
    False
    """
    packet = operator.overloadpacket
    name = packet.__name__
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    tags = set(operator.tags)
    if base != name:  # one in place has the tags of the other, where there is one
        plain = getattr(torch.ops.aten, base, None)
        same = getattr(plain, operator._overloadname, None) if plain else None
        tags |= set(getattr(same, "tags", ()))
    known = {field: base in names for field, names in _KNOWN.items()}
    pointwise = torch.Tag.pointwise in tags and base not in _NOT_ELEMENTWISE
    known["elementwise"] |= pointwise or _each_is_elementwise(base)
    random = torch.Tag.nondeterministic_seeded in tags
    return OperatorClass(name=base, random=random, **known)


def _each_is_elementwise(name: str) -> bool:
    """True if an operator over lists is elementwise at each position."""
    if not name.startswith("_foreach_"):
        return False
    one: Any = getattr(torch.ops.aten, name.removeprefix("_foreach_"), None)
    ways = [] if one is None else [getattr(one, way) for way in one.overloads()]
    found = [
        class_of(way).elementwise
        for way in ways
        if "out" not in way._overloadname and _of_a_tensor(way)
    ]
    return bool(found) and all(found)


def _of_a_tensor(operator: Any) -> bool:
    given = operator._schema.arguments
    return bool(given) and str(given[0].type) == "Tensor"


def class_of_call(operator: Any, args: Any, kwargs: Any) -> OperatorClass:
    """The class of one call: a loss that is reduced is not elementwise.

    >>> x = torch.ones(2)
    >>> class_of_call(torch.ops.aten.mse_loss.default, (x, x), {}).elementwise
    False
    """
    op = class_of(operator)
    if op.elementwise and _reduces(operator):
        said = _torch.arguments_of(operator, args, kwargs)
        return replace(op, elementwise=said["reduction"] == _NO_REDUCTION)
    return op


_NO_REDUCTION = 0


@functools.cache
def _reduces(operator: Any) -> bool:
    """True if an operator has a ``reduction``: the sum or mean of its results."""
    return any(a.name == "reduction" for a in operator._schema.arguments)


def draws(operator: Any, args: Any, kwargs: Any) -> bool:
    """True if a call draws of a default generator: not of a dropout of 0.

    >>> x = torch.ones(2)
    >>> draws(torch.ops.aten.bernoulli.default, (x,), {})
    True
    >>> draws(torch.ops.aten.native_dropout.default, (x, 0.0, True), {})
    False
    """
    if not is_random(operator, args, kwargs):
        return False
    return _torch.arguments_of(operator, args, kwargs).get("generator") is None


def is_random(operator: Any, args: Any, kwargs: Any) -> bool:
    """True if a call draws of any generator."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    said = _torch.arguments_of(operator, args, kwargs)
    return all(said[name] != 0 for name in ("p", "dropout_p") if name in said)


class DrawsWithin(OperatorMode):
    """Adds ``name`` to ``found`` if what runs inside draws of a default generator."""

    def __init__(self, found: set[str], name: str):
        super().__init__()
        self.found, self.name = found, name

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if draws(func, args, kwargs):
            self.found.add(self.name)
        return func(*args, **kwargs)


# Arguments and results


OF_LISTS = ("aten::_foreach_", "aten::_fused_")


def rows(args: Any, kwargs: Any, made: list[Tensor]) -> list[tuple[list[Any], Any]]:
    """Arguments and results of an operator over lists, at each position."""
    every = [*args, *kwargs.values()]
    n = len(args[0])
    lists = [x for x in every if isinstance(x, (list, tuple)) and len(x) == n]
    others = [x for x in every if not isinstance(x, (list, tuple))]
    results = [made[i::n] for i in range(n)] if len(made) % n == 0 else [made] * n
    return [([*(x[i] for x in lists), *others], results[i]) for i in range(n)]


def names_dims(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if an operator is given dims to work along."""
    for i, name in _dims_of(func):
        x = args[i] if i < len(args) else kwargs.get(name)
        if x not in (None, [], ()):
            return True
    return False


@functools.cache
def _dims_of(func: Any) -> list[tuple[int, str]]:
    """The places of arguments that are dims to work along, and their names."""
    names = enumerate(a.name for a in func._schema.arguments)
    return [(i, name) for i, name in names if name in ("dim", "dims")]


def number(x: Any) -> Any:
    """A comparable value for an argument that is no tensor."""
    if isinstance(x, torch.Generator):
        return "generator", x.initial_seed()
    simple = isinstance(x, (bool, int, float, complex, str, type(None)))
    return x if simple else type(x).__name__


def shown(x: Tensor) -> Any:
    """Offset, shape and strides of a tensor that shows only a part of its memory."""
    if x.layout != torch.strided or x.nbytes == x.untyped_storage().nbytes():
        return None
    return x.storage_offset(), tuple(x.shape), x.stride()


def flat(values: Any) -> list[Any]:
    """The elements of nested lists, as one list."""
    found: list[Any] = []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return [values]
    if _SINGLE.issuperset(map(type, values)):
        return list(values)
    for x in values:
        if type(x) not in _SINGLE and isinstance(x, (tuple, list, dict)):
            found += flat(x)
        else:
            found.append(x)
    return found


_SINGLE = {Tensor, _torch.FakeTensor, int, float, bool, str, type(None), torch.dtype}


# FLOPs


def _product(*given: Any, **_: Any) -> int:
    """Two for each element of the first factor, and each column of the second.

    torch's own formulas give the same, and flatten and copy the arguments for it.
    """
    a, b = [x for x in given if isinstance(x, Tensor)][-2:]
    return 2 * a.numel() * b.shape[-1]


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """q k^T and then (that) v, for each batch entry and head."""
    rows = q.shape[:-1].numel()
    return 2 * rows * k.shape[-2] * (k.shape[-1] + v.shape[-1])


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Each row, or each column, times those of its own group alone."""
    pairs = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * pairs * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention_backward(g: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The scores again, and the gradients of v, of the scores, of q and of k."""
    rows, keys = q.shape[:-1].numel(), k.shape[-2]
    return 2 * rows * keys * (3 * q.shape[-1] + 2 * v.shape[-1])


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "addbmm", "addbmm_")
# torch counts nothing for the first three, and for products that are added in place.
FLOPS: dict[Any, Any] = {
    _torch.CPU_ATTENTION: _attention,
    _torch.CPU_ATTENTION_BACKWARD: _attention_backward,
    _torch.GROUPED_PRODUCT: _grouped,
    **flop_registry,
    **{getattr(torch.ops.aten, name): _product for name in _PRODUCTS},
}
