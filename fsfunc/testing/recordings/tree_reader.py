"""Trees of arguments, rebuilt from the JSON and tensors of ``tree_writer.py``.

A class in a file must be one that this program has imported and registered as a node of
trees: a file cannot import modules, or run code.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from fsfunc import tree
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.runtime.memory_spaces import Offloaded, Store
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.plain_leaves import lay_leaf
from fsfunc.testing.recordings.json_values import UNSTORABLE, from_json, placement_of
from fsfunc.tree.nodes import TorchContext, adopt
from fsfunc.tree.structure import NAMESPACE
from fsfunc.tree.types import Leaf, PyTree


class TreeReader:
    """Rebuilds trees from their descriptions.

    Args:
        tables: the tables of a `TreeWriter`.
        tensors: its tensors.
        stores: the stores to which the step offloads, by kind.
    """

    tables: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    stores: Mapping[str, Store]

    def __init__(
        self,
        tables: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        stores: Mapping[str, Store],
    ):
        self.tables, self.tensors, self.stores = tables, tensors, stores
        self._objects: dict[tuple[str, int], Any] = {}
        self._layout_counts: Counter[str] = Counter()  # how many have the same text

    def tree(self, node: Any) -> PyTree:
        """Rebuilds the tree of a description.

        Raises:
            CheckpointError: a class is not imported, or a leaf was not stored.
        """
        if node is None:
            return None
        if type(node) is int:
            leaf = self.leaf(node)
            if leaf is UNSTORABLE:
                row = self.tables["leaves"][node]
                row = self.tables["leaves"][row.get("same", node)]
                raise _not_stored_error(row["value"]["odd"])
            return leaf
        kind, *content = node
        if kind in ("dict", "OrderedDict"):
            rebuilt = {"dict": dict, "OrderedDict": OrderedDict}[kind]()
            for key_json, child in content[0]:
                if (key := from_json(key_json)) is UNSTORABLE:
                    raise _not_stored_error(key_json["odd"])
                rebuilt[key] = self.tree(child)
            return rebuilt
        if kind in ("list", "tuple"):
            children = [self.tree(child) for child in content[0]]
            return children if kind == "list" else tuple(children)
        name, static, child_nodes = content
        return _rebuild_node(name, static, [self.tree(child) for child in child_nodes])

    def leaves(self, node: Any) -> list[int]:
        """Returns the numbers of a description's leaves, in the order of the tree."""
        if node is None or type(node) is int:
            return [] if node is None else [node]
        kind, *content = node
        children = [child for _, child in content[0]] if "ict" in kind else content[-1]
        return sorted(i for child in children for i in self.leaves(child))

    def fill(self, node: Any, like: PyTree) -> PyTree:
        """Rebuilds the leaves of a description in the structure of ``like``.

        Leaves that could not be stored are those of ``like``.

        Raises:
            CheckpointError: ``like`` has another number of leaves.
        """
        like_leaves, treedef = tree.flatten(like, is_leaf=is_sharded)
        numbers = self.leaves(node)
        if len(numbers) != len(like_leaves):
            raise CheckpointError(
                "the arguments that replay was given to be like have "
                f"{len(like_leaves)} leaves, and the recorded ones {len(numbers)}"
            )
        recorded_leaves = map(self.leaf, numbers)
        pairs = zip(recorded_leaves, like_leaves, strict=True)
        return tree.unflatten(
            treedef,
            [
                like_leaf if recorded is UNSTORABLE else recorded
                for recorded, like_leaf in pairs
            ],
        )

    def leaf(self, number: int) -> Leaf:
        """Rebuilds a leaf; returns ``UNSTORABLE`` for one that was not stored."""
        row = self.tables["leaves"][number]
        if "same" in row:
            return self._object_of_row("leaves", row["same"], self._tensor)
        if "buffer" in row:
            buffer = self._object_of_row("buffers", row["buffer"], self._buffer)
            return buffer.leaves()[row["member"]]
        if "layout" in row:
            layout = self._object_of_row("layouts", row["layout"], self._layout)
            local = self._copy_to_device(self.tensors[row["tensor"]], row)
            return Sharded(local.requires_grad_(row["grad"]), layout)
        if "tensor" in row:
            return self._object_of_row("leaves", number, self._tensor)
        return from_json(row["value"])

    def _tensor(self, number: int) -> Tensor | object:
        row = self.tables["leaves"][number]
        if "tensor" not in row:
            return UNSTORABLE
        x = self._copy_to_device(
            _copy_with_strides(self.tensors[row["tensor"]], row["stride"]), row
        )
        if row["parameter"]:
            x = Parameter(x, requires_grad=row["grad"])
        elif row["grad"]:
            x.requires_grad_()
        if row["laid"] is not None:
            lay_leaf(x, placement_of(row["laid"]))
        return x

    def _buffer(self, number: int) -> FlatShard:
        row = self.tables["buffers"][number]
        members = [
            self._object_of_row("layouts", i, self._layout) for i in row["members"]
        ]
        flat = self._copy_to_device(self.tensors[f"buffer {number}"], row)
        whole = None
        if (offset := row["whole"]) is not None:
            whole = self._copy_to_device(self.tensors[f"whole {number}"], row)
            flat = whole[offset : offset + len(flat)] if offset >= 0 else flat
        flat.requires_grad_(row["grad"])
        packed = FlatShard(tuple(members), flat, row["at"])
        if whole is not None:
            packed.cache_gathered(whole)
        return packed

    def _copy_to_device(self, x: Tensor, row: Mapping[str, Any]) -> Tensor:
        """Copies a tensor to where it lay; to the CPU if there is no GPU here.

        Raises:
            CheckpointError: it lay in a store of a kind that this step does not have.
        """
        device, kind = row["home"]
        device_here = device if device != "cuda" or torch.cuda.is_available() else "cpu"
        if kind is None:
            return torch.empty_like(x, device=device_here).copy_(x)
        if kind not in self.stores:
            raise CheckpointError(
                f"the recorded arguments lie in {kind!r}, and this step offloads to "
                f"{sorted(self.stores) or 'nothing'}"
            )
        return Offloaded(self.stores[kind], torch.device(device_here)).copied(x)

    def _layout(self, number: int) -> Layout:
        row, order = self.tables["layouts"][number], ()
        if row["order"] is not None:
            order = self._object_of_row("orders", row["order"], self._order)
        # Two equal layouts in a file stay two objects: leaves tell their member of a
        # buffer by its layout's identity. Hence the count in the key.
        text = repr(row | {"order": id(order)})
        self._layout_counts[text] += 1
        return _intern(
            (text, self._layout_counts[text]), lambda: _layout_of_row(row, order)
        )

    def _order(self, number: int) -> list[tuple[str, ...]]:
        names = [tuple(names) for names in self.tables["orders"][number]]
        return _intern(tuple(names), lambda: names)

    def _object_of_row(
        self, table: str, number: int, make: Callable[[int], Any]
    ) -> Any:
        """Returns the object of a row: the same one wherever it is referred to."""
        key = table, number
        if key not in self._objects:
            self._objects[key] = make(number)
        return self._objects[key]


# A step that is compiled whole has a graph for each set of layout objects: so all
# replays share them.
_INTERNED_LAYOUTS: dict[Any, Any] = {}


def _intern(key: Any, make: Callable[[], Any]) -> Any:
    """Returns the object of a key in all replays; makes it if it is new."""
    return (
        _INTERNED_LAYOUTS[key]
        if key in _INTERNED_LAYOUTS
        else _INTERNED_LAYOUTS.setdefault(key, make())
    )


def _layout_of_row(row: Mapping[str, Any], order: Any) -> Layout:
    return Layout(
        tuple(row["shape"]),
        getattr(torch, row["dtype"]),
        tuple(placement_of(part) for part in row["parts"]),
        row["name"],
        order,
        row["compute"] and getattr(torch, row["compute"]),
    )


def _copy_with_strides(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Copies a tensor with these strides; dense if they overlap or leave much out."""
    # Kernels are chosen by strides, and another kernel gives other bits.
    strides_and_sizes = [
        (step, size) for step, size in zip(stride, x.shape, strict=True) if size > 1
    ]
    end = 1
    for step, size in sorted(strides_and_sizes):
        if step < end:
            return x.clone()
        end = step * (size - 1) + end
    if end > 2 * x.numel():  # a column of a large matrix, say
        return x.clone()
    target = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)
    return target.copy_(x)


def _rebuild_node(name: str, static: Any, children: list[Any]) -> Any:
    """Rebuilds a node of a class that this program has imported.

    Raises:
        CheckpointError: there is no such class, or its static data were not stored.
    """
    module, _, path = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in path.split("."):
        cls = getattr(cls, part, None)
    if not isinstance(cls, type):
        raise CheckpointError(
            f"the recorded arguments hold a {name}, and this program has imported no "
            f"such class: import its module, or {_ADVICE}"
        )
    if optree.is_namedtuple_class(cls):
        return cls._make(children)  # type: ignore[attr-defined]
    kind = static[0] if isinstance(static, list) else None
    if kind == "fields" and dataclasses.is_dataclass(cls):
        rebuilt = object.__new__(cls)
        for field, child in zip(static[1], children, strict=True):
            object.__setattr__(rebuilt, field, child)
        return rebuilt
    adopt(cls)  # a class that is registered with torch alone becomes a node here too
    node: Any = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    if node is None or static == {"odd": name}:
        raise _not_stored_error(name)
    context = TorchContext(from_json(static[1])) if kind == "torch" else None
    return node.unflatten_func(context or from_json(static), children)


def _not_stored_error(name: str) -> CheckpointError:
    return CheckpointError(
        f"the recorded arguments hold a {name}, which is no tensor, number or text, "
        f"and was not kept: {_ADVICE}"
    )


_ADVICE = (
    "give replay arguments of the step that are like the recorded ones, replay(folder, "
    "step, state, batch, rank=...), whose structure and objects are taken"
)
