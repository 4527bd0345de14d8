"""Trees of arguments as JSON and tensors: no pickle.

A container of Python's is told by its kind, any other node by the name of its class.
Sharded leaves of one packed buffer are kept as that buffer, with what the rank had
gathered of it.
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
    ODD,
    as_json,
    placement_as_json,
    told,
)
from fsfunc.tree.nodes import TorchContext
from fsfunc.tree.structure import NAMESPACE, is_node


def kept_tensor(x: Tensor) -> Tensor:
    """A copy of what ``x`` holds now, contiguous, on the CPU."""
    with _torch.beneath_all_modes(), torch.no_grad(), torch.inference_mode(False):
        x = wait_for(x.detach()) if space_of(x).offloaded else x.detach()
        x = x.resolve_conj().resolve_neg()
        return x.to("cpu", copy=True).contiguous()


def _home(x: Tensor) -> Any:
    """Where a tensor lies: its device, and the kind of its store if it has one."""
    space = space_of(x)
    device = space.device if isinstance(space, Offloaded) else x.device
    return [device.type, space.kind if isinstance(space, Offloaded) else None]


class TreeWriter:
    """Describes trees; ``tensors`` are copies of what they hold, by name.

    ``said`` has the tables that the descriptions refer to.

    Args:
        most: the bytes to copy; ``nbytes`` is what there is, which may be more.
    """

    def __init__(self, most: float = math.inf) -> None:
        self.most, self.nbytes = most, 0
        self.tensors: dict[str, Tensor] = {}
        self.said: dict[str, list[Any]] = {
            "leaves": [], "layouts": [], "orders": [], "buffers": [],
        }  # fmt: skip
        self._seen: dict[int, int] = {}  # by the id of a layout, an order or a buffer
        self._same: dict[int, int] = {}  # by the id of a tensor, which of the leaves
        self._alive: list[Any] = []  # whose ids these are

    def add(self, value: Any) -> Any:
        """The description of a tree, whose leaves are added to the tables."""
        tree.flatten(value, is_leaf=is_sharded)  # learns the classes in it
        return self._node(value)

    def _node(self, value: Any) -> Any:
        if value is None:
            return None
        if is_sharded(value) or not is_node(type(value)):
            self.said["leaves"].append(self._leaf(value))
            return len(self.said["leaves"]) - 1
        children, static, entries, _ = optree.tree_flatten_one_level(
            value, namespace=NAMESPACE
        )
        nodes, kind = [self._node(x) for x in children], type(value)
        if kind in (dict, OrderedDict):  # optree sorts the keys
            by_key = dict(zip(entries, nodes, strict=True))
            pairs = [[told(as_json(key), type(key)), by_key[key]] for key in value]
            return [kind.__name__, pairs]
        if kind in (list, tuple):
            return [kind.__name__, nodes]
        name, beside = f"{kind.__module__}:{kind.__qualname__}", None
        if not optree.is_namedtuple_class(kind):
            if isinstance(static, TorchContext):
                beside = as_json(static.value)
                beside = ODD if beside is ODD else ["torch", beside]
            else:
                beside = as_json(static)
            if beside is ODD and _is_plain_dataclass(value, entries):
                beside = ["fields", list(entries)]
        return ["class", name, told(beside, kind), nodes]

    def _leaf(self, x: Any) -> Any:
        if is_sharded(x):
            return self._sharded(x)
        if isinstance(x, Tensor):
            return self._plain(x)
        return {"value": told(as_json(x), type(x))}

    def _plain(self, x: Tensor) -> Any:
        if id(x) in self._same:
            return {"same": self._same[id(x)]}
        number = self._same[id(x)] = len(self.said["leaves"])
        self._alive.append(x)
        if (kind := type(x)) not in (Tensor, Parameter):  # one that is spent, too
            return {"value": told(ODD, kind)}
        if x.layout != torch.strided or x.is_meta:
            return {"value": told(ODD, kind)}
        name = f"leaf {number}"
        with _torch.beneath_all_modes():
            how, stride = placement_of(x), list(x.stride())
            self._keep(name, x)
        return {
            "tensor": name,
            "stride": stride,
            "grad": x.requires_grad,
            "parameter": kind is Parameter,
            "laid": None if how is None else placement_as_json(how),
            "home": _home(x),
        }

    def _sharded(self, leaf: Sharded) -> Any:
        if leaf.why_unusable or leaf.parts is not None:
            return {"value": told(ODD, Sharded)}
        packed = leaf.packed
        if packed is not None:
            found = [i for i, m in enumerate(packed.members) if m is leaf.layout]
            if found:
                return {"buffer": self._buffer(packed), "member": found[0]}
        number = len(self.said["leaves"])
        self._keep(f"leaf {number}", leaf.local)
        return {
            "layout": self._layout(leaf.layout),
            "tensor": f"leaf {number}",
            "grad": leaf.local.requires_grad,
            "home": _home(leaf.local),
        }

    def _buffer(self, packed: FlatShard) -> int:
        def row() -> Any:
            number, flat, whole = len(self.said["buffers"]), packed.flat, packed.whole
            self._keep(f"buffer {number}", flat)
            members = [self._layout(m) for m in packed.members]
            said = {"members": members, "at": dict(packed.coordinates)}
            said |= {"whole": None, "grad": flat.requires_grad, "home": _home(flat)}
            if whole is not None and packed.is_cached(whole.dtype):
                # A later call gathers it no more.
                self._keep(f"whole {number}", whole)
                same = _torch.storage_key(whole) == _torch.storage_key(flat)
                begin = int(flat.storage_offset()) - int(whole.storage_offset())
                said["whole"] = begin if same else -1
            return said

        return self._once("buffers", packed, row)

    def _layout(self, layout: Layout) -> int:
        def row() -> Any:
            order = layout.order
            listed = lambda: [list(names) for names in order]  # noqa: E731
            return {
                "shape": list(layout.shape),
                "dtype": dtype_name(layout.dtype),
                "parts": [placement_as_json(part) for part in layout.parts],
                "name": layout.name,
                "order": self._once("orders", order, listed) if order else None,
                "compute": layout.compute and dtype_name(layout.compute),
            }

        return self._once("layouts", layout, row)

    def _keep(self, name: str, x: Tensor) -> None:
        self.nbytes += x.numel() * x.element_size()
        if self.nbytes <= self.most:
            self.tensors[name] = kept_tensor(x)

    def _once(self, table: str, x: Any, row: Callable[[], Any]) -> int:
        """The place of ``x`` in a table, to which it is added if it is new."""
        if id(x) not in self._seen:
            said = row()
            self._alive.append(x)
            self._seen[id(x)] = len(self.said[table])
            self.said[table].append(said)
        return self._seen[id(x)]


def _is_plain_dataclass(value: Any, entries: Sequence[Any]) -> bool:
    """True of one that has its fields, and nothing else."""
    if not dataclasses.is_dataclass(value):
        return False
    names = {f.name for f in dataclasses.fields(value)}
    return names == set(entries) == set(getattr(value, "__dict__", names))
