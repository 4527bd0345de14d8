"""The names that a program's listing gives to tensors and trees of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.placements import describe

_PLAIN = (bool, int, float, complex, str, type(None))
_TOLD = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def below(root: str, path: str) -> str:
    """``root/path``, or the one of them that is not empty."""
    return f"{root}/{path}" if root and path else root or path


def nested(value: Any, tell: Callable[[Any], str]) -> str:
    """The text for a tree, given that for what it holds."""
    if type(value) in (list, tuple):
        return "[" + ", ".join(map(tell, value)) + "]"
    if value is None:
        return "None"
    if type(value) is dict:
        pairs = [(str(key), value[key]) for key in sorted(value, key=str)]
    else:
        paths, leaves, _ = tree.flatten_with_paths(value)
        pairs = zip(paths, leaves, strict=True)
    return "{" + ", ".join(f"{path}: {tell(x)}" for path, x in pairs) + "}"


class Names:
    """The name of each tensor of a run.

    A tensor is known by the place it looks at: its storage, offset, shape and strides.
    The same place gets a new name when it is written.

    Args:
        params: paths of all parameters below ``root``, the name of their argument.
    """

    def __init__(self, root: str, params: Sequence[str]):
        self.root, self.params = root, tuple(params)
        self._names = StorageTable[dict[Any, str]]()  # by place; at None the last one
        self._glue = 0

    def give(self, x: Tensor, name: str = "") -> str:
        """Names ``x``; by default as the next result of glue."""
        if not name:
            name, self._glue = f"g{self._glue}", self._glue + 1
        known = self._names.get(x) or {}
        self._names[x] = known | {_place(x): name, None: name}
        return name

    def path(self, leaf: Any) -> str:
        """The name of a leaf of the loss's arguments."""
        return below(self.root, leaf.name) if leaf.parameter else leaf.name

    def of(self, x: Any) -> str:
        """The text for one leaf."""
        if isinstance(x, Tensor):
            if known := self._names.get(x):
                return known.get(_place(x), known[None])
            return f"captured {describe(x.shape, x.dtype)}"
        if isinstance(x, int) and x == sys.maxsize:
            return "end"  # of a slice
        if isinstance(x, _PLAIN):
            return repr(x)
        if isinstance(x, _TOLD):
            return str(x).removeprefix("torch.")
        return type(x).__name__

    def tree(self, value: Any) -> str:
        """The text for a tree; a whole subtree of parameters is one name."""
        paths, leaves, _ = tree.flatten_with_paths(value)
        names = [self.of(x) for x in leaves]
        if paths == [""]:
            return names[0]
        whole = self._subtree(names, paths)
        if whole is not None:
            return whole
        return nested(value, self.tree)

    def _subtree(self, names: list[str], paths: list[str]) -> str | None:
        """The path below which lie these parameters, and no other."""
        tail = "/" + paths[0] if paths else ""
        if not tail or not names[0].endswith(tail):
            return None
        top = names[0].removesuffix(tail)
        inner = top.removeprefix(self.root).removeprefix("/")
        whole = [below(self.root, p) for p in self.params if _within(p, inner)]
        same = names == [f"{top}/{path}" for path in paths] and names == whole
        return top if same else None

    def call(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> str:
        """The text for the arguments of a call."""
        shown = [self.tree(x) for x in args]
        return ", ".join(
            [*shown, *(f"{k}={self.tree(v)}" for k, v in keywords.items())]
        )


def _within(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(top + "/")


def _place(x: Tensor) -> Any:
    return x.storage_offset(), tuple(x.shape), x.stride()
