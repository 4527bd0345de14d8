"""Operators as torch describes them: decompositions, and functional counterparts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

from fsfunc._torch.dispatch import OpOverload, OpOverloadPacket

TO_COPY: OpOverloadPacket = torch.ops.aten._to_copy
"""A cast, or a copy to another device or layout, as modes see it."""

_COMPOSITE = torch.DispatchKey.CompositeImplicitAutograd


@functools.cache
def decomposition(func: OpOverload) -> Callable[..., Any] | None:
    """Returns a function that computes an operator by simpler ones, if torch has one.

    It is from torch's table of decompositions, from ``torch.ops.prims``, or the
    operator's own kernel, if that calls other operators.
    """
    if function := decomposition_table.get(func):
        return function
    if function := getattr(func, "impl_aten", None):  # of torch.ops.prims
        return function
    if func.has_kernel_for_dispatch_key(_COMPOSITE):
        return func.decompose
    return None


@functools.cache
def functional(func: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """Returns the operator that computes the same without writing, and what to write.

    ``add_`` and ``add.out`` are ``add``, written into ``self`` and into ``out``. None
    for an operator that does not write, or has no such counterpart.
    """
    schema = func._schema
    written_arguments = [
        a for a in schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    if not written_arguments:
        return None
    names = tuple(a.name for a in written_arguments)
    out_names = tuple(
        n for n, a in zip(names, written_arguments, strict=True) if a.is_out
    )
    namespace, _, name = schema.name.partition("::")
    name = name if out_names else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or not out_names and name == schema.name.partition("::")[2]:
        return None
    parameters = [
        (a.name, str(a.type)) for a in schema.arguments if a.name not in out_names
    ]
    for overload in packet.overloads():
        other = getattr(packet, overload)
        other_parameters = [(a.name, str(a.type)) for a in other._schema.arguments]
        if other_parameters == parameters and not other._schema.is_mutable:
            return other, names
    return None


def is_seeded(func: OpOverload) -> bool:
    """Returns whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags
