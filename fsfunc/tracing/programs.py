"""A traced loss as data: its unit calls and the origins of their inputs.

A program is read, cut into stages and balanced; it is never replayed. A stage runs the
user's own loss, so the operations between unit calls are kept for reading only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.printing.folding import fold_repeats
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.placements import describe_tensor


class Value(NamedTuple):
    """An output leaf of a unit call, which is what may travel between stages."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Spec:
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device = field(default=torch.device("cpu"), repr=False)

    @classmethod
    def of(cls, x: Any) -> Any:
        """That of a tensor; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        return cls(tuple(x.shape), x.dtype, x.requires_grad, x.device)

    def __str__(self) -> str:
        return describe_tensor(self.shape, self.dtype)

    def zeros(self) -> Tensor:
        """A tensor that looks so."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Outputs:
    """A tree of outputs: its structure, and a :class:`Spec` or a plain value a leaf."""

    treedef: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, values: Any) -> Outputs:
        leaves, treedef = tree.flatten(values)
        return cls(treedef, tuple(map(Spec.of, leaves)))

    def __str__(self) -> str:
        return _told(tree.unflatten(self.treedef, self.leaves))


def _told(x: Any) -> str:
    if tree.paths(x) == [""]:
        return str(x) if isinstance(x, Spec) else repr(x)
    return nested(x, _told)


class Origins(NamedTuple):
    """The sources of a value, through the operations between unit calls.

    Args:
        needs: outputs of unit calls.
        reads: paths of parameters that such operations read.
        batch: names of leaves of the other arguments.
        draws: which of the program's draws of random numbers.
    """

    needs: frozenset[Value] = frozenset()
    reads: frozenset[str] = frozenset()
    batch: frozenset[str] = frozenset()
    draws: frozenset[int] = frozenset()

    def __or__(self, other: Origins) -> Origins:
        if other is NOWHERE or other is self:
            return self
        if self is NOWHERE:
            return other
        return Origins(
            self.needs | other.needs,
            self.reads | other.reads,
            self.batch | other.batch,
            self.draws | other.draws,
        )


NOWHERE = Origins()


@dataclass(frozen=True)
class Traced:
    """Outputs of a call, or of the loss, with their origins.

    Args:
        outputs: what was returned.
        origins: of all that it depends on, but for ``params`` of a unit call.
        text: what it was made of, as the listing shows it.
    """

    outputs: Outputs
    origins: Origins
    text: str

    @property
    def needs(self) -> frozenset[Value]:
        """Values that it depends on."""
        return self.origins.needs

    @property
    def reads(self) -> frozenset[str]:
        """Paths of parameters read outside units for it."""
        return self.origins.reads


class Loss(Traced):
    """Outputs of the loss, with their origins."""

    def __str__(self) -> str:
        return f"loss = {self.text} -> {self.outputs}"


@dataclass(frozen=True)
class TracedCall(Traced):
    """One unit call of a loss, not of one inside another unit.

    ``origins`` are those of its inputs, and of what its function captured.

    Args:
        number: its place among the calls.
        name: the unit's.
        params: paths of the parameters it was given as they are, in any argument.
        own: those of them in the first, where a unit takes its parameters.
        flops: of its forward pass; ``draws``: whether that draws random numbers.
        activations: bytes that its backward pass keeps, with its outputs; not
            parameters, nor inputs that another call or the batch holds.
        weights: bytes of ``params``.
        line: ``file:line`` of the call.
    """

    number: int
    name: str
    params: frozenset[str]
    own: frozenset[str]
    flops: int
    draws: bool
    activations: int
    weights: int
    line: str

    def __str__(self) -> str:
        return f"%{self.number} = {self.name}({self.text}) -> {self.outputs}"


@dataclass(frozen=True)
class Glue:
    """An operation between unit calls.

    Args:
        op: torch's name for it.
        text: the arguments, as the listing shows them.
        outputs: names of what it returned, or wrote.
        before: the number of the next unit call.
        grad: whether gradients were recorded.
        line: ``file:line`` in the loss.
    """

    op: str
    text: str
    outputs: tuple[str, ...]
    before: int
    grad: bool
    line: str

    def __str__(self) -> str:
        note = "" if self.grad else "  # no grad"
        return f"  {', '.join(self.outputs)} = {self.op}({self.text}){note}"


@dataclass(frozen=True)
class Draw:
    """An operation between unit calls that draws random numbers."""

    op: str
    line: str


@dataclass(frozen=True)
class Program:
    """The unit calls of a loss, and the operations between them.

    Args:
        name: the loss's.
        leaves: paths of the leaves of its first argument.
        calls: the unit calls, in order.
        glue: the operations between them, in order.
        loss: what it returned.
        mutated: outputs of unit calls that glue writes into in place.
        draws: the glue that draws random numbers.

    ``str`` lists it: ``%3`` is what call 3 returned, ``%3/mask`` one leaf of it, and
    ``g5`` the result of an operation between the calls. Calls that repeat three times
    or more are folded: ``%1-12 = block(params/blocks/0-11, %0-11)  x12``.
    """

    name: str
    leaves: tuple[str, ...]
    calls: tuple[TracedCall, ...]
    glue: tuple[Glue, ...]
    loss: Loss
    mutated: frozenset[Value]
    draws: tuple[Draw, ...]

    def __str__(self) -> str:
        lines: list[str] = []
        glue = list(self.glue)
        for call in (*self.calls, self.loss):
            number = call.number if isinstance(call, TracedCall) else len(self.calls)
            while glue and glue[0].before <= number:
                lines.append(str(glue.pop(0)))
            lines.append(str(call))
        return "\n".join(
            [f"{self.name}: {len(self.calls)} unit calls", *fold_repeats(lines)]
        )


# The names that a listing gives to tensors and trees of them

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
            return f"captured {describe_tensor(x.shape, x.dtype)}"
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
        """The path of the subtree of these parameters, and no others."""
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
