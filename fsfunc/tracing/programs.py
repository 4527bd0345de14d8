"""A traced loss as data: its unit calls and the origins of their inputs.

`tracer` makes a :class:`Program`; a pipeline cuts it into stages, and a plan counts its
costs. It is read, and never replayed: a stage runs the user's own loss, so the
operations between unit calls are only noted to be read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.printing.folding import fold_repeats
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.placements import describe_tensor
from fsfunc.tree import Leaf, PyTree, TreeDef


class Value(NamedTuple):
    """An output leaf of a unit call, which is what may travel between stages.

    Args:
        call: the number of the call.
        leaf: the number of the leaf among its outputs.
    """

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
    def of(cls, x: Leaf) -> Leaf:
        """Returns the spec of a tensor; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        return cls(tuple(x.shape), x.dtype, x.requires_grad, x.device)

    def __str__(self) -> str:
        return describe_tensor(self.shape, self.dtype)

    def zeros(self) -> Tensor:
        """Returns a tensor of this shape, dtype and device."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Outputs:
    """A tree of outputs.

    Args:
        treedef: its structure.
        leaves: a :class:`Spec` for each tensor; other leaves as they are.
    """

    treedef: TreeDef
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, values: PyTree) -> Outputs:
        leaves, treedef = tree.flatten(values)
        return cls(treedef, tuple(map(Spec.of, leaves)))

    def __str__(self) -> str:
        return _outputs_text(tree.unflatten(self.treedef, self.leaves))


def _outputs_text(x: PyTree) -> str:
    """Returns the text for a tree of specs and plain values."""
    if tree.paths(x) == [""]:
        return str(x) if isinstance(x, Spec) else repr(x)
    return nested_text(x, _outputs_text)


class Origins(NamedTuple):
    """The sources of a value, through the operations between unit calls.

    Args:
        needs: the outputs of unit calls that it is made of.
        reads: the paths of parameters that operations between unit calls read for it.
        batch: the names of leaves of the other arguments.
        draws: the numbers of the program's draws of random numbers.
    """

    needs: frozenset[Value] = frozenset()
    reads: frozenset[str] = frozenset()
    batch: frozenset[str] = frozenset()
    draws: frozenset[int] = frozenset()

    def __or__(self, other: Origins) -> Origins:
        # Most operators read tensors of one origin: no sets are made for those.
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
        origins: those of all that it depends on, but for ``params`` of a unit call.
        text: what it was made of, as the listing shows it.
    """

    outputs: Outputs
    origins: Origins
    text: str

    @property
    def needs(self) -> frozenset[Value]:
        """The outputs of unit calls that it depends on."""
        return self.origins.needs

    @property
    def reads(self) -> frozenset[str]:
        """The paths of parameters that are read outside units for it."""
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
        number: its number among the calls.
        name: the unit's.
        params: the paths of the parameters that it was given as they are, in any
            argument.
        own: those in its first argument, where a unit takes its parameters.
        flops: those of its forward pass.
        operators: how many of torch's its forward pass runs; a view is none.
        draws: whether its forward pass draws random numbers.
        activations: the bytes saved for its backward pass, with its outputs; without
            parameters, and inputs that are another call's or the batch's.
        weights: the bytes of ``params``.
        line: ``file:line`` of the call.
    """

    number: int
    name: str
    params: frozenset[str]
    own: frozenset[str]
    flops: int
    operators: int
    draws: bool
    activations: int
    weights: int
    line: str

    def __str__(self) -> str:
        return f"%{self.number} = {self.name}({self.text}) -> {self.outputs}"


@dataclass(frozen=True)
class Glue:
    """An operation between unit calls. Each stage runs those whose results it uses.

    Args:
        op: torch's name for it.
        text: the arguments, as the listing shows them.
        outputs: the names of what it returned, or wrote.
        next_call: the number of the next unit call.
        grad: whether gradients were recorded.
        line: ``file:line`` in the loss.
    """

    op: str
    text: str
    outputs: tuple[str, ...]
    next_call: int
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
        name: the name of the loss.
        leaves: the paths of the leaves of its first argument.
        calls: the unit calls, in order.
        glue: the operations between them, in order.
        loss: what the loss returned.
        mutated: the outputs of unit calls that glue writes into in place.
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
            while glue and glue[0].next_call <= number:
                lines.append(str(glue.pop(0)))
            lines.append(str(call))
        return "\n".join(
            [f"{self.name}: {len(self.calls)} unit calls", *fold_repeats(lines)]
        )


# The names that a listing gives to tensors and trees of them

_SHOWN_BY_REPR = (bool, int, float, complex, str, type(None))
_SHOWN_BY_STR = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def below(root: str, path: str) -> str:
    """Returns ``root/path``, or the one of them that is not empty."""
    return f"{root}/{path}" if root and path else root or path


def nested_text(value: PyTree, describe_item: Callable[[PyTree], str]) -> str:
    """Returns the text for a tree.

    Args:
        describe_item: returns the text for what the tree holds.
    """
    if type(value) in (list, tuple):
        return "[" + ", ".join(map(describe_item, value)) + "]"
    if value is None:
        return "None"
    if type(value) is dict:
        pairs = [(str(key), value[key]) for key in sorted(value, key=str)]
    else:
        paths, leaves, _ = tree.flatten_with_paths(value)
        pairs = zip(paths, leaves, strict=True)
    return "{" + ", ".join(f"{path}: {describe_item(x)}" for path, x in pairs) + "}"


# Offset, shape and strides.
_View: TypeAlias = tuple[int | torch.SymInt, tuple[int, ...], tuple[int, ...]]


class NamedArgument(Protocol):
    """A leaf of the loss's arguments: a `dataflow.Argument`, which is defined above."""

    @property
    def name(self) -> str: ...

    @property
    def parameter(self) -> bool: ...


class Names:
    """The names of the tensors of a run.

    A tensor is known by its storage, offset, shape and strides, so that another object
    for the same view has the same name. What is written gets a new name.

    Args:
        root: the name of the argument that holds the parameters.
        params: the paths of all parameters below it.
    """

    root: str
    params: tuple[str, ...]

    def __init__(self, root: str, params: Sequence[str]):
        self.root, self.params = root, tuple(params)
        # By view; the name given last stands at None, for views that have none.
        self._names = StorageTable[dict[_View | None, str]]()
        self._glue_count = 0  # the number of names given to glue

    def give(self, x: Tensor, name: str = "") -> str:
        """Names ``x``, by default as the next result of glue; returns the name."""
        if not name:
            name, self._glue_count = f"g{self._glue_count}", self._glue_count + 1
        view_names = self._names.get(x) or {}
        self._names[x] = view_names | {_view_of(x): name, None: name}
        return name

    def argument_name(self, leaf: NamedArgument) -> str:
        """Returns the name of a leaf of the loss's arguments."""
        return below(self.root, leaf.name) if leaf.parameter else leaf.name

    def text_of(self, x: Leaf) -> str:
        """Returns the text for one leaf."""
        if isinstance(x, Tensor):
            if view_names := self._names.get(x):
                return view_names.get(_view_of(x), view_names[None])
            return f"captured {describe_tensor(x.shape, x.dtype)}"
        if isinstance(x, int) and x == sys.maxsize:
            return "end"  # what torch has for the end of a slice
        if isinstance(x, _SHOWN_BY_REPR):
            return repr(x)
        if isinstance(x, _SHOWN_BY_STR):
            return str(x).removeprefix("torch.")
        return type(x).__name__

    def text_of_tree(self, value: PyTree) -> str:
        """Returns the text for a tree; a whole subtree of parameters is one name."""
        paths, leaves, _ = tree.flatten_with_paths(value)
        names = [self.text_of(x) for x in leaves]
        if paths == [""]:
            return names[0]
        subtree = self._subtree(names, paths)
        if subtree is not None:
            return subtree
        return nested_text(value, self.text_of_tree)

    def _subtree(self, names: list[str], paths: list[str]) -> str | None:
        """Returns the path of the subtree that has these parameters, and no others."""
        first_suffix = "/" + paths[0] if paths else ""
        if not first_suffix or not names[0].endswith(first_suffix):
            return None
        subtree = names[0].removesuffix(first_suffix)
        inner_path = subtree.removeprefix(self.root).removeprefix("/")
        subtree_names = [
            below(self.root, p) for p in self.params if _is_within(p, inner_path)
        ]
        is_whole = (
            names == [f"{subtree}/{path}" for path in paths] and names == subtree_names
        )
        return subtree if is_whole else None

    def text_of_call(
        self, args: Sequence[PyTree], keywords: Mapping[str, PyTree]
    ) -> str:
        """Returns the text for the arguments of a call."""
        texts = [self.text_of_tree(x) for x in args]
        return ", ".join(
            [*texts, *(f"{k}={self.text_of_tree(v)}" for k, v in keywords.items())]
        )


def _is_within(path: str, top: str) -> bool:
    """Returns whether ``argument_name`` is ``top``, or below it."""
    return not top or path == top or path.startswith(top + "/")


def _view_of(x: Tensor) -> _View:
    return x.storage_offset(), tuple(x.shape), x.stride()
