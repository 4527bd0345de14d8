"""Modes of torch functions, for what no operator shows.

They pass functions of torch that read leaves, take gradients, or read shapes and values
to the tracer of a recording (:class:`Reads`) or of a type check (:class:`Asked`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import (
    called_by_fsfunc,
    called_by_user,
    is_internal,
    source_line,
)
from fsfunc.core.frames import frame
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.groups import Recorded, plain
from fsfunc.tracing.operators import flat
from fsfunc.tracing.rules import refused
from fsfunc.tracing.runs import with_data
from fsfunc.tracing.steadiness import Outside, said
from fsfunc.tracing.types import Kind, agrees

_ASKS = {  # for what is no tensor
    "is_floating_point", "dim", "size", "numel", "element_size", "stride",
    "storage_offset", "is_contiguous", "untyped_storage", "is_complex", "__len__",
    "_is_view", "is_inference",
}  # fmt: skip
_READS_NOTHING = _ASKS | {
    "__get__", "detach", "requires_grad_", "zeros_like", "empty_like", "ones_like",
    "new_zeros", "new_empty", "grad", "_make_dual", "_unpack_dual", "split",
}  # fmt: skip
_DATA: Any = Tensor.data.__get__  # type: ignore
_RAISED = (IndexError, RuntimeError, ValueError)  # by torch, of shapes
_DERIVATIVES = {torch.autograd.grad, Tensor.backward, torch.autograd.backward}


class OwnValues:
    """Tensors that may be a rank's own: data, and what users make outside of losses."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._alive: list[Tensor] = []

    def add(self, values: Iterable[Any]) -> None:
        found = [x for x in values if isinstance(x, Tensor)]
        self._ids.update(map(id, found))
        self._alive.extend(found)

    def meet(self, values: Iterable[Any]) -> bool:
        """True if one is there, or what is nothing of the step, which sees fakes."""
        for x in values:
            if id(x) in self._ids:
                return True
            if type(x) is _torch.FakeTensor or not isinstance(x, Tensor):
                continue
            if not (isinstance(x, _torch.FakeTensor) or _torch.is_wrapped(x)):
                return True
        return False


class Reads(Outside):
    """Passes every function and its arguments to a `recorder.Recorder`."""

    def __init__(self, recorder: Any):
        super().__init__()
        self.recorder = recorder
        self._data: dict[int, tuple[str, Tensor]] = {}  # of leaves, by its id

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, library = getattr(func, "__name__", ""), called_by_fsfunc()
        asks = name == "__get__"  # a tensor, most often for its shape
        asks = asks or name in _ASKS and len(args) == 1 and not kwargs
        out: Any = func(*args) if asks else None
        if asks and library and not isinstance(out, Tensor):
            return out  # one tensor is combined with nothing
        values = args if asks else flat((args, kwargs) if kwargs else args)
        own = self._touched(values, library)
        if asks:
            if func == _DATA and (path := self.recorder.path_of(args[0])) is not None:
                self._data[id(out)] = path, out
        else:
            if (words := said(func, values)) is not None:
                self.recorder.said.append(words)
            if name not in _READS_NOTHING:
                self.recorder.read(values, library)
            if func in _DERIVATIVES and not is_internal():
                _check_pulled(name, args, kwargs or {})
                self.recorder.plain = False
            given = args, kwargs or {}
            if [x for x in values if type(x) is Recorded]:
                given = tree.map(plain, given, is_leaf=is_sharded)
            out = super().__torch_function__(func, types, *given)
        if own:
            self.recorder.own.add(flat(out))
        return out

    def _hold(self, x: Any) -> None:
        super()._hold(x)
        if self._data and isinstance(x, Tensor) and not frame().path:
            for key in (id(x), id(x._base)):
                if key in self._data:
                    self.recorder.hidden.add(self._data[key][0])

    def _touched(self, values: Sequence[Any], library: bool) -> bool:
        """True if the result of a function of ``values`` may be a rank's own.

        If these are combined with leaves or gradients, or a user's code does so, the
        step needs a type check.

        Args:
            library: whether it is the library that calls it.
        """
        recorder, f = self.recorder, frame()
        if not recorder.plain or f.path or f.in_loss:
            return False
        own = not library or recorder.own.meet(values)
        if own and any(map(recorder.is_leaf, values)):
            recorder.plain = False
        return own


_METHODS = (
    "size", "dim", "numel", "nelement", "ndimension", "stride", "dim_order",
    "storage_offset", "untyped_storage", "_typed_storage",
)  # fmt: skip
_SHAPES: dict[Any, str] = {
    **{getattr(Tensor, name).__get__: name for name in ("shape", "ndim", "nbytes")},
    **{getattr(Tensor, name): name for name in _METHODS},
    Tensor.__len__: "len",
    torch.numel: "numel",
}
_EXPANDS = {Tensor.expand_as: "expand_as", torch.broadcast_tensors: "broadcast_tensors"}
_PASSES_ON = ("__len__", "dim_order", "handle_torch_function", *_EXPANDS.values())
_VALUES: dict[Any, str] = {
    Tensor.numpy: "numpy",
    Tensor.tolist: "tolist",
    Tensor.__array__: "numpy",
    Tensor.__dlpack__: "dlpack",
}
_SHOWN = {Tensor.__repr__, Tensor.__format__}


class Asked(Outside):
    """Passes gradients by autograd, and reads of shapes and values, to a `Checker`.

    It also records the numbers that functions are given.
    """

    def __init__(self, checker: Any):
        super().__init__()
        self.checker = checker

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        asks = name == "__get__"
        if name == "_set_grad_enabled" or asks and func not in _SHAPES:
            try:
                return func(*args, **kwargs)
            except _RAISED as error:  # by an attribute of matrices
                if (refused := self.checker.of_a_part(func, args, error)) is None:
                    raise
                raise refused from error
        values = () if asks else flat((args, kwargs) if kwargs else args)
        if (words := said(func, values)) is not None:
            self.checker.said.append(words)
        if name := _SHAPES.get(func) or _EXPANDS.get(func):
            asker = sys._getframe(1)
            while asker.f_code.co_name in _PASSES_ON:
                asker = asker.f_back or asker
            if not called_by_user(asker):
                return func(*args, **kwargs)
            if func is Tensor.expand_as:
                return self._expanded(*args)
            self.checker.measured(name, *flat(args) if func in _EXPANDS else args[:1])
            return func(*args, **kwargs)
        if func in _SHOWN or func in _VALUES:
            return self._values(func, args, kwargs)
        if func in _DERIVATIVES and not is_internal():
            _check_pulled(func.__name__, args, kwargs)
        if func is Tensor.backward:
            return self._backward(func, "gradient", args, kwargs)
        if func is torch.autograd.backward:
            return self._backward(func, "grad_tensors", args, kwargs)
        if func is torch.autograd.grad:
            return self._grad(func, types, args, kwargs)
        self.checker.indexing = func is Tensor.__getitem__
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except _RAISED as error:
            if (refused := self.checker.of_a_part(func, values, error)) is None:
                raise
            raise refused from error
        finally:
            self.checker.indexing = False

    def _grad(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        names = ("outputs", "inputs", "grad_outputs")
        given = dict(zip(names, args, strict=False)) | kwargs
        outputs, cotangents = given["outputs"], given.get("grad_outputs")
        with self._seeding(outputs, cotangents):
            out = super().__torch_function__(func, types, args, kwargs)
        inputs = given["inputs"]
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        self.checker.pulled(inputs, out, [outputs, cotangents])
        return out

    @contextmanager
    def _seeding(self, outputs: Any, cotangents: Any) -> Iterator[None]:
        """Inside, torch begins a backward: with ones, where no cotangent is given."""
        outputs, cotangents = (
            list(x) if type(x) in (list, tuple) else [x] for x in (outputs, cotangents)
        )
        tensors = [isinstance(x, Tensor) and x.requires_grad for x in outputs]
        pairs = zip_longest(tensors, cotangents[: len(tensors)])
        before = self.checker.seeds
        self.checker.seeds = sum(bool(asks) and g is None for asks, g in pairs)
        try:
            yield
        finally:
            self.checker.seeds = before

    def _expanded(self, x: Any, part: Any) -> Any:
        """``x.expand_as(part)``: of one number at the place of each element, a part."""
        known = self.checker.known
        seen, numbers = known.of(part), x.numel() == 1 and agrees(known.kind(x))
        if not numbers or seen.kind is not Kind.S and not seen.flat:
            self.checker.measured("expand_as", x, part)
            return x.expand_as(part)
        return self.checker.typed_like(x.expand_as(part), part)

    def _values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a function that takes values out of torch, or prints them."""
        if _torch.is_wrapped(args[0]):
            return func(*args, **kwargs)
        if (name := _VALUES.get(func)) is not None:
            value = self.checker.asked(name, args[0])
        else:
            value = _torch.value_of(args[0])
        with _torch.beneath_all_modes():
            value = with_data(args[0]) if value is None else value
            return func(value, *args[1:], **kwargs)

    def _backward(
        self, func: Any, named: str, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs a backward into ``.grad``; ``named``: the argument of its cotangents."""
        names = ("tensors", named)
        given = dict(zip(names, args, strict=False)) | kwargs
        roots = [x.grad_fn for x in tree.leaves(args) if isinstance(x, Tensor)]
        nodes = _torch.graph_nodes(roots, set())
        found = [getattr(node, "variable", None) for node in nodes]
        leaves = [x for x in found if x is not None]
        with self._seeding(given[names[0]], given.get(named)):
            out = func(*args, **kwargs)
        self.checker.pulled(leaves, [x.grad for x in leaves], args)
        return out


def _check_pulled(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises where a derivative is asked for of what has no graph.

    Leaves of a state require no gradient: torch says that, and no more.
    """
    roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    roots = [x for x in tree.leaves(roots) if isinstance(x, Tensor)]
    if roots and not any(x.requires_grad or x.grad_fn for x in roots):
        raise refused("no graph", op=name, line=source_line())


def check_tracked(reader: str, leaves: Iterable[tuple[str | None, Any]]) -> None:
    """Raises where autograd does not see who reads a differentiated leaf.

    A placed leaf is no tensor: ``Function.apply`` takes it for a constant.

    Args:
        leaves: the name of each, and this rank's part of it.

    Raises:
        LawError: an ``autograd.Function`` around the reader, or torch's checkpoint,
            would lose the gradient.
    """
    if not (around := _torch.hides_tensors()):
        return
    unwrapped = _torch.reverse_mode_around()  # what is differentiated is hidden then
    for name, x in leaves:
        if name is not None and isinstance(x, Tensor):
            if x.requires_grad or _torch.is_wrapped(x) or unwrapped:
                leaf, line = (
                    repr(name) if name else "of the first argument",
                    source_line(),
                )
                raise refused("cut", reader=reader, leaf=leaf, line=line, around=around)
