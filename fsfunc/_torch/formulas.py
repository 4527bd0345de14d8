"""Operators as torch describes them: decompositions, and functional counterparts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

TO_COPY: Any = torch.ops.aten._to_copy
"""A cast, or a copy to another device or layout, as modes see it."""

_COMPOSITE = torch.DispatchKey.CompositeImplicitAutograd


@functools.cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """Returns a function that computes an operator by simpler ones, if torch has one.

    It is torch's own table, that of its primitives, or the kernel that calls others.
    """
    if found := decomposition_table.get(func):
        return found
    if found := getattr(func, "impl_aten", None):  # of torch.ops.prims
        return found
    if func.has_kernel_for_dispatch_key(_COMPOSITE):
        return func.decompose
    return None


@functools.cache
def functional(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Returns what an operator that writes is without writing, and what it writes.

    ``add_`` and ``add.out`` are ``add``, written into ``self`` and into ``out``.
    """
    schema = func._schema
    written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if not written:
        return None
    names = tuple(a.name for a in written)
    out = tuple(n for n, a in zip(names, written, strict=True) if a.is_out)
    namespace, _, name = schema.name.partition("::")
    name = name if out else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or not out and name == schema.name.partition("::")[2]:
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in out]
    for overload in packet.overloads():
        other = getattr(packet, overload)
        taken = [(a.name, str(a.type)) for a in other._schema.arguments]
        if taken == wanted and not other._schema.is_mutable:
            return other, names
    return None


def is_seeded(func: Any) -> bool:
    """True of an operator that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags
