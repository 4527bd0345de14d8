"""torch's operators: their classes (elementwise, a sum, ...), arguments and FLOPs.

`class_of` reads torch's tags where they say enough, and the tables below where not. The
type check types results by these classes, pipelines and plans count FLOPs by `FLOPS`.
Modes that see operators run derive from `_torch.OperatorMode`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fsfunc import _torch
from fsfunc._torch import OperatorMode
from fsfunc.tree import Leaf, PyTree

_LIKE_FIRST = {"zeros_like", "ones_like", "full_like", "empty_like"}
# Views that do nothing to a part, which is 1-D, but transpose the whole leaf.
TRANSPOSES = {"t", "transpose", "permute"}
COPIES = {"copy", "clone", "alias", "contiguous", "detach", "lift_fresh"}
# torch tags it as pointwise, and it gives one answer for all elements.
_NOT_ELEMENTWISE = {"equal"}
# By the field of `OperatorClass`: the operators for which it is set, whatever torch's
# tags say. tests/tracing/test_operators.py tries each entry.
_OPERATORS_BY_FIELD: dict[str, set[str]] = {
    "elementwise": {
        "copy", "_to_copy", "to", "fill", "zero", "lift_fresh", "contiguous",
        "type_as", "_fused_adamw", "_fused_adam", "_fused_sgd", "_fused_adagrad",
        "softplus", "softplus_backward", "smooth_l1_loss", "smooth_l1_loss_backward",
        "huber_loss", "huber_loss_backward", "mse_loss", "mse_loss_backward",
        "log_sigmoid_forward", "log_sigmoid_backward", "threshold",
        "threshold_backward", "floor_divide", "rsub", "hardswish",
        "hardswish_backward", "complex", "polar", "alias_copy", "detach_copy",
        *_LIKE_FIRST,
    },
    "alike": _LIKE_FIRST,
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
        sums: whether it reduces by a sum, and so is linear in what it reduces.
        adds: whether it adds or subtracts, and so is linear in both.
        scales: whether it is linear in what it scales.
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
def class_of(operator: _torch.OpOverload) -> OperatorClass:
    """Returns the class of an operator, by torch's tags, and by its name.

    What neither says to be elementwise is taken not to be: a wrong refusal is better
    than a wrong number.

    >>> class_of(torch.ops.aten.tanh.default).elementwise
    True
    >>> class_of(torch.ops.aten.mm.default).elementwise
    False
    """
    packet = operator.overloadpacket
    name = packet.__name__
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    tags = set(operator.tags)
    # torch tags ``add`` but not ``add_``: an operator in place takes the tags of both.
    if base != name:
        packet_of_base = getattr(torch.ops.aten, base, None)
        functional = (
            getattr(packet_of_base, operator._overloadname, None)
            if packet_of_base
            else None
        )
        tags |= set(getattr(functional, "tags", ()))
    fields = {field: base in names for field, names in _OPERATORS_BY_FIELD.items()}
    pointwise = torch.Tag.pointwise in tags and base not in _NOT_ELEMENTWISE
    fields["elementwise"] |= pointwise or _is_elementwise_over_lists(base)
    random = torch.Tag.nondeterministic_seeded in tags
    return OperatorClass(name=base, random=random, **fields)


def _is_elementwise_over_lists(name: str) -> bool:
    """Returns whether an operator over lists is elementwise at each position."""
    if not name.startswith("_foreach_"):
        return False
    packet: Any = getattr(torch.ops.aten, name.removeprefix("_foreach_"), None)
    overloads = (
        []
        if packet is None
        else [getattr(packet, overload) for overload in packet.overloads()]
    )
    elementwise = [
        class_of(overload).elementwise
        for overload in overloads
        if "out" not in overload._overloadname and _of_a_tensor(overload)
    ]
    return bool(elementwise) and all(elementwise)


def _of_a_tensor(operator: _torch.OpOverload) -> bool:
    """Returns whether the first argument of an operator is one tensor."""
    parameters = operator._schema.arguments
    return bool(parameters) and str(parameters[0].type) == "Tensor"


def class_of_call(
    operator: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
) -> OperatorClass:
    """Returns the class of one call: a loss that is reduced is not elementwise.

    >>> x = torch.ones(2)
    >>> class_of_call(torch.ops.aten.mse_loss.default, (x, x), {}).elementwise
    False
    """
    op = class_of(operator)
    if op.elementwise and _has_reduction(operator):
        arguments = _torch.arguments_of(operator, args, kwargs)
        return replace(op, elementwise=arguments["reduction"] == _NO_REDUCTION)
    return op


_NO_REDUCTION = 0


@functools.cache
def _has_reduction(operator: _torch.OpOverload) -> bool:
    """Returns whether an operator has an argument ``reduction``, such as "mean"."""
    return any(a.name == "reduction" for a in operator._schema.arguments)


def draws(
    operator: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
) -> bool:
    """Returns whether a call draws from a default generator; a dropout of 0 does not.

    >>> x = torch.ones(2)
    >>> draws(torch.ops.aten.bernoulli.default, (x,), {})
    True
    >>> draws(torch.ops.aten.native_dropout.default, (x, 0.0, True), {})
    False
    """
    if not is_random(operator, args, kwargs):
        return False
    return _torch.arguments_of(operator, args, kwargs).get("generator") is None


def is_random(
    operator: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
) -> bool:
    """Returns whether a call draws from any generator."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = _torch.arguments_of(operator, args, kwargs)
    return all(arguments[name] != 0 for name in ("p", "dropout_p") if name in arguments)


class DrawsWithin(OperatorMode):
    """Adds ``name`` to ``names`` if what runs inside draws from a default generator."""

    names: set[str]
    name: str

    def __init__(self, names: set[str], name: str):
        super().__init__()
        self.names, self.name = names, name

    def operator(
        self, func: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
    ) -> Any:
        if draws(func, args, kwargs):
            self.names.add(self.name)
        return func(*args, **kwargs)


# Arguments and results


OF_LISTS = ("aten::_foreach_", "aten::_fused_")


def by_position(
    args: _torch.Args, kwargs: _torch.Kwargs, made: list[Tensor]
) -> list[tuple[list[Any], list[Tensor]]]:
    """Returns (arguments, results) of an operator over lists, for each position.

    Args:
        made: all results, in the order of torch: by result, and then by position.
    """
    arguments = [*args, *kwargs.values()]
    count = len(args[0])
    lists = [x for x in arguments if isinstance(x, (list, tuple)) and len(x) == count]
    others = [x for x in arguments if not isinstance(x, (list, tuple))]
    results = (
        [made[i::count] for i in range(count)]
        if len(made) % count == 0
        else [made] * count
    )
    return [([*(x[i] for x in lists), *others], results[i]) for i in range(count)]


def names_dims(
    func: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
) -> bool:
    """Returns whether a call names dims to work along."""
    for i, name in _dims_of(func):
        x = args[i] if i < len(args) else kwargs.get(name)
        if x not in (None, [], ()):
            return True
    return False


@functools.cache
def _dims_of(func: _torch.OpOverload) -> list[tuple[int, str]]:
    """Returns the positions and names of the arguments that are dims to work along."""
    names = enumerate(a.name for a in func._schema.arguments)
    return [(i, name) for i, name in names if name in ("dim", "dims")]


def comparable(x: Leaf) -> Hashable:
    """Returns a value to compare for an argument that is no tensor."""
    if isinstance(x, torch.Generator):
        return "generator", x.initial_seed()
    simple = isinstance(x, (bool, int, float, complex, str, type(None)))
    return x if simple else type(x).__name__


def partial_view(x: Tensor) -> tuple[Hashable, ...] | None:
    """Returns a tensor's offset, shape and strides; None if it shows all its memory."""
    if x.layout != torch.strided or x.nbytes == x.untyped_storage().nbytes():
        return None
    return x.storage_offset(), tuple(x.shape), x.stride()


def flatten_lists(values: PyTree) -> list[Leaf]:
    """Returns the elements of nested lists, tuples and dicts, as one list.

    It runs for every operator and is faster than ``tree.leaves``, for these alone.
    """
    elements: list[Leaf] = []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return [values]
    if _NOT_NESTED.issuperset(map(type, values)):
        return list(values)
    for x in values:
        if type(x) not in _NOT_NESTED and isinstance(x, (tuple, list, dict)):
            elements += flatten_lists(x)
        else:
            elements.append(x)
    return elements


# What holds no other values, found without looking for a base class.
_NOT_NESTED: set[type] = {
    Tensor,
    _torch.FakeTensor,
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
}


# FLOPs


def _product_flops(*arguments: Any, **_: Any) -> int:
    """Returns two for each element of the first factor and each column of the second.

    torch's own formulas give the same, but flatten and copy the arguments first.
    """
    a, b = [x for x in arguments if isinstance(x, Tensor)][-2:]
    return 2 * a.numel() * b.shape[-1]


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Counts q k^T, and that times v, for each batch entry and head."""
    by_position = q.shape[:-1].numel()
    return 2 * by_position * k.shape[-2] * (k.shape[-1] + v.shape[-1])


def _grouped_product_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Counts each row, or each column, times the matrix of its own group alone."""
    pairs = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * pairs * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention_backward_flops(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> int:
    """Counts the scores again, and the gradients of v, of the scores, of q and of k."""
    by_position, keys = q.shape[:-1].numel(), k.shape[-2]
    return 2 * by_position * keys * (3 * q.shape[-1] + 2 * v.shape[-1])


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "addbmm", "addbmm_")
# torch counts nothing for the first three, and for products that are added in place.
FLOPS: dict[_torch.OpOverloadPacket, Callable[..., int]] = {
    _torch.CPU_ATTENTION: _attention_flops,
    _torch.CPU_ATTENTION_BACKWARD: _attention_backward_flops,
    _torch.GROUPED_PRODUCT: _grouped_product_flops,
    **flop_registry,
    **{getattr(torch.ops.aten, name): _product_flops for name in _PRODUCTS},
}
