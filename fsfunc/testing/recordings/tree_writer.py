"""Trees of arguments as JSON and tensors, without pickles.

``tree_reader.py`` reads them.

A node is [kind of container, children], or ["class", name, static data, children]; a
leaf is its number in the table of leaves. Sharded leaves of one packed buffer refer to
a row of the table of buffers, so that they share it again when they are read. A buffer
is stored with what the rank had gathered of it: a later call does not gather it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from fsfunc import _torch, tree
from fsfunc.checkpoint.headers import dtype_name
from fsfunc.runtime.host_copies import wait_for
from fsfunc.runtime.memory_spaces import Offloaded, space_of
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.plain_leaves import placement_of
from fsfunc.testing.recordings.json_values import (
    UNSTORABLE,
    as_json,
    name_if_unstorable,
    placement_as_json,
)
from fsfunc.tree.nodes import TorchContext
from fsfunc.tree.structure import NAMESPACE, is_node
from fsfunc.tree.types import Leaf, PyTree


def copy_to_cpu(x: Tensor) -> Tensor:
    """Copies the present content of ``x``, contiguous, to the CPU."""
    with _torch.beneath_all_modes(), torch.no_grad(), torch.inference_mode(False):
        x = wait_for(x.detach()) if space_of(x).offloaded else x.detach()
        x = x.resolve_conj().resolve_neg()
        return x.to("cpu", copy=True).contiguous()


def _device_and_store(x: Tensor) -> list[str | None]:
    """Returns the kinds of a tensor's device, and of the store it is offloaded to."""
    space = space_of(x)
    device = space.device if isinstance(space, Offloaded) else x.device
    return [device.type, space.kind if isinstance(space, Offloaded) else None]


class TreeWriter:
    """Describes trees as JSON, and copies their tensors.

    Args:
        max_bytes: the most bytes to copy.

    Attributes:
        nbytes: the bytes that there are to copy, which may be more.
        tensors: the copies, by name.
        tables: the rows that descriptions refer to by number, by the table's name.
    """

    max_bytes: float
    nbytes: int

    def __init__(self, max_bytes: float = math.inf) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self.tensors: dict[str, Tensor] = {}
        self.tables: dict[str, list[Any]] = {
            "leaves": [], "layouts": [], "orders": [], "buffers": [],
        }  # fmt: skip
        # The row of each layout, order and buffer, and the leaf of each tensor, by id.
        self._row_numbers: dict[int, int] = {}
        self._leaf_numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # these objects: no other one may get such an id

    def add(self, value: PyTree) -> Any:
        """Adds the leaves of a tree to the tables; returns its description as JSON."""
        # Registers the classes in it that torch knows as nodes, for ``is_node``.
        tree.flatten(value, is_leaf=is_sharded)
        return self._node(value)

    def _node(self, value: PyTree) -> Any:
        if value is None:
            return None
        if is_sharded(value) or not is_node(type(value)):
            self.tables["leaves"].append(self._leaf(value))
            return len(self.tables["leaves"]) - 1
        children, static, entries, _ = optree.tree_flatten_one_level(
            value, namespace=NAMESPACE
        )
        nodes, kind = [self._node(x) for x in children], type(value)
        if kind in (dict, OrderedDict):  # optree sorts keys; stored is the dict's order
            by_key = dict(zip(entries, nodes, strict=True))
            pairs = [
                [name_if_unstorable(as_json(key), type(key)), by_key[key]]
                for key in value
            ]
            return [kind.__name__, pairs]
        if kind in (list, tuple):
            return [kind.__name__, nodes]
        name, static_json = f"{kind.__module__}:{kind.__qualname__}", None
        if not optree.is_namedtuple_class(kind):
            if isinstance(static, TorchContext):
                static_json = as_json(static.value)
                static_json = (
                    UNSTORABLE if static_json is UNSTORABLE else ["torch", static_json]
                )
            else:
                static_json = as_json(static)
            if static_json is UNSTORABLE and _has_only_fields(value, entries):
                static_json = ["fields", list(entries)]
        return ["class", name, name_if_unstorable(static_json, kind), nodes]

    def _leaf(self, x: Leaf) -> dict[str, Any]:
        """Returns the row of a leaf."""
        if is_sharded(x):
            return self._sharded(x)
        if isinstance(x, Tensor):
            return self._tensor(x)
        return {"value": name_if_unstorable(as_json(x), type(x))}

    def _tensor(self, x: Tensor) -> dict[str, Any]:
        if id(x) in self._leaf_numbers:
            return {"same": self._leaf_numbers[id(x)]}
        number = self._leaf_numbers[id(x)] = len(self.tables["leaves"])
        self._alive.append(x)
        # Neither subclasses, whose content is not known, nor spent tensors.
        if (kind := type(x)) not in (Tensor, Parameter):
            return {"value": name_if_unstorable(UNSTORABLE, kind)}
        if x.layout != torch.strided or x.is_meta:
            return {"value": name_if_unstorable(UNSTORABLE, kind)}
        name = f"leaf {number}"
        with _torch.beneath_all_modes():
            placement, stride = placement_of(x), list(x.stride())
            self._save(name, x)
        return {
            "tensor": name,
            "stride": stride,
            "grad": x.requires_grad,
            "parameter": kind is Parameter,
            "laid": None if placement is None else placement_as_json(placement),
            "home": _device_and_store(x),
        }

    def _sharded(self, leaf: Sharded) -> dict[str, Any]:
        if leaf.why_unusable or leaf.parts is not None:
            return {"value": name_if_unstorable(UNSTORABLE, Sharded)}
        packed = leaf.packed
        if packed is not None:
            positions = [
                i for i, member in enumerate(packed.members) if member is leaf.layout
            ]
            if positions:
                return {"buffer": self._buffer(packed), "member": positions[0]}
        number = len(self.tables["leaves"])
        self._save(f"leaf {number}", leaf.local)
        return {
            "layout": self._layout(leaf.layout),
            "tensor": f"leaf {number}",
            "grad": leaf.local.requires_grad,
            "home": _device_and_store(leaf.local),
        }

    def _buffer(self, packed: FlatShard) -> int:
        def make_row() -> Any:
            number, flat, whole = len(self.tables["buffers"]), packed.flat, packed.whole
            self._save(f"buffer {number}", flat)
            members = [self._layout(member) for member in packed.members]
            row = {"members": members, "at": dict(packed.coordinates)}
            row |= {
                "whole": None,
                "grad": flat.requires_grad,
                "home": _device_and_store(flat),
            }
            if whole is not None and packed.is_cached(whole.dtype):
                # The call begins with it, and does not gather it again.
                self._save(f"whole {number}", whole)
                is_part_of_whole = _torch.storage_key(whole) == _torch.storage_key(flat)
                offset = int(flat.storage_offset()) - int(whole.storage_offset())
                row["whole"] = offset if is_part_of_whole else -1
            return row

        return self._row_number("buffers", packed, make_row)

    def _layout(self, layout: Layout) -> int:
        def make_row() -> Any:
            order = layout.order
            make_order = lambda: [list(names) for names in order]  # noqa: E731
            return {
                "shape": list(layout.shape),
                "dtype": dtype_name(layout.dtype),
                "parts": [placement_as_json(part) for part in layout.parts],
                "name": layout.name,
                "order": self._row_number("orders", order, make_order)
                if order
                else None,
                "compute": layout.compute and dtype_name(layout.compute),
            }

        return self._row_number("layouts", layout, make_row)

    def _save(self, name: str, x: Tensor) -> None:
        self.nbytes += x.numel() * x.element_size()
        if self.nbytes <= self.max_bytes:
            self.tensors[name] = copy_to_cpu(x)

    def _row_number(self, table: str, x: Any, make_row: Callable[[], Any]) -> int:
        """Returns the number of ``x``'s row in a table; adds the row if it is new."""
        if id(x) not in self._row_numbers:
            row = make_row()
            self._alive.append(x)
            self._row_numbers[id(x)] = len(self.tables[table])
            self.tables[table].append(row)
        return self._row_numbers[id(x)]


def _has_only_fields(value: Any, entries: Sequence[Any]) -> bool:
    """Returns whether a value is a dataclass with no attribute but its fields."""
    if not dataclasses.is_dataclass(value):
        return False
    names = {f.name for f in dataclasses.fields(value)}
    return names == set(entries) == set(getattr(value, "__dict__", names))
