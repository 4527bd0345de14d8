"""Trees of arguments, made again of their JSON and tensors.

A class is one that this program has imported, and a node of trees: nothing is imported
for a file.
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
from fsfunc.testing.recordings.json_values import ODD, from_json, placement_of
from fsfunc.tree.nodes import TorchContext, adopt
from fsfunc.tree.structure import NAMESPACE


class TreeReader:
    """Makes trees of their descriptions again.

    Args:
        said: the tables of a `TreeWriter`; ``tensors``: its tensors.
        stores: those to which the step offloads, by their kinds.
    """

    def __init__(
        self,
        said: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        stores: Mapping[str, Store],
    ):
        self.said, self.tensors, self.stores = said, tensors, stores
        self._made: dict[tuple[str, int], Any] = {}
        self._texts: Counter[str] = Counter()  # of layouts

    def tree(self, node: Any) -> Any:
        """Makes the tree of a description.

        Raises:
            CheckpointError: a class is not there, or a leaf is kept by nobody.
        """
        if node is None:
            return None
        if type(node) is int:
            leaf = self.leaf(node)
            if leaf is ODD:
                said = self.said["leaves"][node]
                said = self.said["leaves"][said.get("same", node)]
                raise _unkept(said["value"]["odd"])
            return leaf
        kind, *rest = node
        if kind in ("dict", "OrderedDict"):
            made = {"dict": dict, "OrderedDict": OrderedDict}[kind]()
            for said, child in rest[0]:
                if (key := from_json(said)) is ODD:
                    raise _unkept(said["odd"])
                made[key] = self.tree(child)
            return made
        if kind in ("list", "tuple"):
            children = [self.tree(child) for child in rest[0]]
            return children if kind == "list" else tuple(children)
        name, static, nodes = rest
        return _rebuilt(name, static, [self.tree(child) for child in nodes])

    def leaves(self, node: Any) -> list[Any]:
        """Returns the numbers of a description's leaves, in the order of the tree's."""
        if node is None or type(node) is int:
            return [] if node is None else [node]
        kind, *rest = node
        below = [child for _, child in rest[0]] if "ict" in kind else rest[-1]
        return sorted(i for child in below for i in self.leaves(child))

    def filled(self, node: Any, like: Any) -> Any:
        """Makes the tree of a description, in the structure of another one.

        What a recording cannot keep is that of ``like``.

        Raises:
            CheckpointError: that has another number of leaves.
        """
        theirs, treedef = tree.flatten(like, is_leaf=is_sharded)
        numbers = self.leaves(node)
        if len(numbers) != len(theirs):
            raise CheckpointError(
                f"the arguments that replay was given to be like have {len(theirs)} "
                f"leaves, and the recorded ones {len(numbers)}"
            )
        mine = map(self.leaf, numbers)
        both = zip(mine, theirs, strict=True)
        return tree.unflatten(treedef, [x if a is ODD else a for a, x in both])

    def leaf(self, number: int) -> Any:
        """Makes a leaf; returns a mark for one that is not kept."""
        said = self.said["leaves"][number]
        if "same" in said:
            return self._once("leaves", said["same"], self._plain)
        if "buffer" in said:
            buffer = self._once("buffers", said["buffer"], self._buffer)
            return buffer.leaves()[said["member"]]
        if "layout" in said:
            layout = self._once("layouts", said["layout"], self._layout)
            local = self._home(self.tensors[said["tensor"]], said)
            return Sharded(local.requires_grad_(said["grad"]), layout)
        if "tensor" in said:
            return self._once("leaves", number, self._plain)
        return from_json(said["value"])

    def _plain(self, number: int) -> Tensor | object:
        said = self.said["leaves"][number]
        if "tensor" not in said:
            return ODD
        x = self._home(_strided(self.tensors[said["tensor"]], said["stride"]), said)
        if said["parameter"]:
            x = Parameter(x, requires_grad=said["grad"])
        elif said["grad"]:
            x.requires_grad_()
        if said["laid"] is not None:
            lay_leaf(x, placement_of(said["laid"]))
        return x

    def _buffer(self, number: int) -> FlatShard:
        said = self.said["buffers"][number]
        members = [self._once("layouts", i, self._layout) for i in said["members"]]
        flat, whole = self._home(self.tensors[f"buffer {number}"], said), None
        if (begin := said["whole"]) is not None:
            whole = self._home(self.tensors[f"whole {number}"], said)
            flat = whole[begin : begin + len(flat)] if begin >= 0 else flat
        flat.requires_grad_(said["grad"])
        packed = FlatShard(tuple(members), flat, said["at"])
        if whole is not None:
            packed.cache_gathered(whole)
        return packed

    def _home(self, x: Tensor, said: Mapping[str, Any]) -> Tensor:
        """A copy where the recorded tensor lay; on the CPU where there is no GPU.

        Raises:
            CheckpointError: it lay in a store, of a kind to which this step has none.
        """
        device, kind = said["home"]
        on = device if device != "cuda" or torch.cuda.is_available() else "cpu"
        if kind is None:
            return torch.empty_like(x, device=on).copy_(x)
        if kind not in self.stores:
            raise CheckpointError(
                f"the recorded arguments lie in {kind!r}, and this step offloads to "
                f"{sorted(self.stores) or 'nothing'}"
            )
        return Offloaded(self.stores[kind], torch.device(on)).copied(x)

    def _layout(self, number: int) -> Layout:
        said, order = self.said["layouts"][number], ()
        if said["order"] is not None:
            order = self._once("orders", said["order"], self._order)
        # Of two that are alike each stays one.
        text = repr(said | {"order": id(order)})
        self._texts[text] += 1
        return _interned((text, self._texts[text]), lambda: _layout_of(said, order))

    def _order(self, number: int) -> list[tuple[str, ...]]:
        names = [tuple(names) for names in self.said["orders"][number]]
        return _interned(tuple(names), lambda: names)

    def _once(self, table: str, number: int, make: Callable[[int], Any]) -> Any:
        """What is made of an entry of a table: one object wherever it is named."""
        key = table, number
        if key not in self._made:
            self._made[key] = make(number)
        return self._made[key]


# A step that is compiled whole has a graph for each set of layouts: so there is one
# object of equal ones for all replays.
_INTERNED: dict[Any, Any] = {}


def _interned(key: Any, make: Callable[[], Any]) -> Any:
    return _INTERNED[key] if key in _INTERNED else _INTERNED.setdefault(key, make())


def _layout_of(said: Mapping[str, Any], order: Any) -> Layout:
    return Layout(
        tuple(said["shape"]),
        getattr(torch, said["dtype"]),
        tuple(placement_of(part) for part in said["parts"]),
        said["name"],
        order,
        said["compute"] and getattr(torch, said["compute"]),
    )


def _strided(x: Tensor, stride: Sequence[int]) -> Tensor:
    """A copy with these strides, by which kernels choose; dense if they overlap."""
    sized = [(step, n) for step, n in zip(stride, x.shape, strict=True) if n > 1]
    end = 1
    for step, n in sorted(sized):
        if step < end:
            return x.clone()
        end = step * (n - 1) + end
    if end > 2 * x.numel():  # a column of something large
        return x.clone()
    room = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)
    return room.copy_(x)


def _rebuilt(name: str, static: Any, children: list[Any]) -> Any:
    """A node of a class that this program has imported.

    Raises:
        CheckpointError: it has none of that name, or its static data were not kept.
    """
    module, _, path = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in path.split("."):
        cls = getattr(cls, part, None)
    if not isinstance(cls, type):
        raise CheckpointError(
            f"the recorded arguments hold a {name}, and this program has imported no "
            f"such class: import its module, or {_LIKE}"
        )
    if optree.is_namedtuple_class(cls):
        return cls._make(children)  # type: ignore[attr-defined]
    kind = static[0] if isinstance(static, list) else None
    if kind == "fields" and dataclasses.is_dataclass(cls):
        made = object.__new__(cls)
        for field, child in zip(static[1], children, strict=True):
            object.__setattr__(made, field, child)
        return made
    adopt(cls)  # if it is registered with torch, and was not seen yet
    node: Any = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    if node is None or static == {"odd": name}:
        raise _unkept(name)
    context = TorchContext(from_json(static[1])) if kind == "torch" else None
    return node.unflatten_func(context or from_json(static), children)


def _unkept(name: str) -> CheckpointError:
    return CheckpointError(
        f"the recorded arguments hold a {name}, which is no tensor, number or text, "
        f"and was not kept: {_LIKE}"
    )


_LIKE = (
    "give replay arguments of the step that are like the recorded ones, replay(folder, "
    "step, state, batch, rank=...), whose structure and objects are taken"
)
