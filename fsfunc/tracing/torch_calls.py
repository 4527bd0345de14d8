"""Modes of torch functions, for what no operator shows.

A dispatch mode, which sees operators, does not see who reads a shape (``x.numel()``),
nor who takes a gradient (``torch.autograd.grad``). So a :class:`ReadRecorder` passes
functions to the tracer of a recording, and a :class:`CallChecker` to that of a type
check.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol

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
from fsfunc.tracing.groups import Recorded, recorded_tensor
from fsfunc.tracing.knowledge import FactTable
from fsfunc.tracing.operators import flatten_lists
from fsfunc.tracing.rules import rule_error
from fsfunc.tracing.runs import with_data
from fsfunc.tracing.steadiness import NumbersGiven, RestoresOutside, numbers_given
from fsfunc.tracing.types import Kind, is_equal_on_ranks
from fsfunc.tree import Leaf, PyTree

# Methods that return no tensor: what they are called on is combined with nothing.
_QUERIES = {
    "is_floating_point", "dim", "size", "numel", "element_size", "stride",
    "storage_offset", "is_contiguous", "untyped_storage", "is_complex", "__len__",
    "_is_view", "is_inference",
}  # fmt: skip
# Functions that read no values of a leaf, and what this library calls on leaves.
_READS_NOTHING = _QUERIES | {
    "__get__", "detach", "requires_grad_", "zeros_like", "empty_like", "ones_like",
    "new_zeros", "new_empty", "grad", "_make_dual", "_unpack_dual", "split",
}  # fmt: skip
_GET_DATA: Any = Tensor.data.__get__  # type: ignore
# What torch raises where dims do not fit.
_SHAPE_ERRORS = (IndexError, RuntimeError, ValueError)
_DERIVATIVES = {torch.autograd.grad, Tensor.backward, torch.autograd.backward}


class RankLocalTensors:
    """Tensors that may be a rank's own: data, and what users make outside of losses."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._alive: list[Tensor] = []  # or an id would become another tensor's

    def add(self, values: Iterable[Leaf]) -> None:
        tensors = [x for x in values if isinstance(x, Tensor)]
        self._ids.update(map(id, tensors))
        self._alive.extend(tensors)

    def meet(self, values: Iterable[Leaf]) -> bool:
        """Returns whether one of these may be a rank's own.

        So may a real tensor: the step's arguments are fake, so that it comes from
        elsewhere, as a closure.
        """
        for x in values:
            if id(x) in self._ids:
                return True
            if type(x) is _torch.FakeTensor or not isinstance(x, Tensor):
                continue
            if not (isinstance(x, _torch.FakeTensor) or _torch.is_wrapped(x)):
                return True
        return False


class RecordsReads(Protocol):
    """What `ReadRecorder` asks of a `recorder.Recorder`, which is defined above."""

    needs_no_check: bool
    rank_local_tensors: RankLocalTensors
    numbers_given: list[NumbersGiven]
    written_by_data: set[str]

    def path_of(self, x: Leaf) -> str | None: ...

    def is_leaf(self, x: Leaf) -> bool: ...

    def record_read(self, values: Sequence[Leaf], by_library: bool) -> None: ...


class ReadRecorder(RestoresOutside):
    """Passes every function and its arguments to a `recorder.Recorder`."""

    def __init__(self, recorder: RecordsReads):
        super().__init__()
        self.recorder = recorder
        # What ``leaf.data`` has returned, by its id: the leaf's path, and the tensor.
        self._detached: dict[int, tuple[str, Tensor]] = {}

    def __torch_function__(
        self,
        func: _torch.TorchFunction,
        types: Sequence[type],
        args: _torch.Args = (),
        kwargs: _torch.Kwargs | None = None,
    ) -> Any:
        name, by_library = getattr(func, "__name__", ""), called_by_fsfunc()
        is_query = name == "__get__"  # an attribute of a tensor, most often its shape
        is_query = is_query or name in _QUERIES and len(args) == 1 and not kwargs
        out: Any = func(*args) if is_query else None
        # The library reads shapes all the time: what follows is left out for it.
        if is_query and by_library and not isinstance(out, Tensor):
            return out
        values = args if is_query else flatten_lists((args, kwargs) if kwargs else args)
        is_rank_local = self._may_be_rank_local(values, by_library)
        if is_query:
            if (
                func == _GET_DATA
                and (path := self.recorder.path_of(args[0])) is not None
            ):
                self._detached[id(out)] = path, out
        else:
            if (numbers := numbers_given(func, values)) is not None:
                self.recorder.numbers_given.append(numbers)
            if name not in _READS_NOTHING:
                self.recorder.record_read(values, by_library)
            if func in _DERIVATIVES and not is_internal():
                _check_has_graph(name, args, kwargs or {})
                self.recorder.needs_no_check = False
            arguments: tuple[Any, Any] = args, kwargs or {}
            # Mapped only where there is a leaf, as this runs for every function.
            if [x for x in values if type(x) is Recorded]:
                arguments = tree.map(recorded_tensor, arguments, is_leaf=is_sharded)
            out = super().__torch_function__(func, types, *arguments)
        if is_rank_local:
            self.recorder.rank_local_tensors.add(flatten_lists(out))
        return out

    def _save(self, x: Leaf) -> None:
        super()._save(x)
        if self._detached and isinstance(x, Tensor) and not frame().path:
            for key in (id(x), id(x._base)):
                if key in self._detached:
                    self.recorder.written_by_data.add(self._detached[key][0])

    def _may_be_rank_local(self, values: Sequence[Leaf], by_library: bool) -> bool:
        """Returns whether the result of a function of ``values`` may be a rank's own.

        If such values meet leaves or gradients, or a user's function reads these, the
        step needs a type check.

        Args:
            values: the arguments of the function.
            by_library: whether this library called it.
        """
        recorder, f = self.recorder, frame()
        if not recorder.needs_no_check or f.path or f.in_loss:
            return False
        is_rank_local = not by_library or recorder.rank_local_tensors.meet(values)
        if is_rank_local and any(map(recorder.is_leaf, values)):
            recorder.needs_no_check = False
        return is_rank_local


# Functions that read a shape: of a part of a leaf they mislead.
_SHAPE_METHODS = (
    "size", "dim", "numel", "nelement", "ndimension", "stride", "dim_order",
    "storage_offset", "untyped_storage", "_typed_storage",
)  # fmt: skip
_SHAPE_READS: dict[Any, str] = {
    **{getattr(Tensor, name).__get__: name for name in ("shape", "ndim", "nbytes")},
    **{getattr(Tensor, name): name for name in _SHAPE_METHODS},
    Tensor.__len__: "len",
    torch.numel: "numel",
}
_EXPANDS = {Tensor.expand_as: "expand_as", torch.broadcast_tensors: "broadcast_tensors"}
# Functions of torch, written in Python, between the user's call and this mode.
_WRAPPERS = ("__len__", "dim_order", "handle_torch_function", *_EXPANDS.values())
# Functions that take values out of torch.
_VALUE_READS: dict[Any, str] = {
    Tensor.numpy: "numpy",
    Tensor.tolist: "tolist",
    Tensor.__array__: "numpy",
    Tensor.__dlpack__: "dlpack",
}
_PRINTS = {Tensor.__repr__, Tensor.__format__}


class ChecksCalls(Protocol):
    """What `CallChecker` asks of a `checker.Checker`, which is defined above."""

    facts: FactTable
    numbers_given: list[NumbersGiven]
    seed_count: int
    is_indexing: bool

    def error_for_part(
        self, func: _torch.TorchFunction, values: Iterable[Leaf], error: Exception
    ) -> Exception | None: ...

    def placeholder_value(self, name: str, x: Tensor) -> Tensor: ...

    def check_measured(self, caller: str, *tensors: Tensor) -> None: ...

    def typed_like(self, y: Tensor, x: Tensor) -> Tensor: ...

    def check_pulled(
        self, variables: Sequence[Leaf], gradients: Sequence[Leaf], outputs: PyTree
    ) -> None: ...


class CallChecker(RestoresOutside):
    """Passes gradients by autograd, and reads of shapes and values, to a `Checker`.

    It also records the numbers that functions are given.
    """

    def __init__(self, checker: ChecksCalls):
        super().__init__()
        self.checker = checker

    def __torch_function__(
        self,
        func: _torch.TorchFunction,
        types: Sequence[type],
        args: _torch.Args = (),
        kwargs: _torch.Kwargs | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_query = name == "__get__"
        if name == "_set_grad_enabled" or is_query and func not in _SHAPE_READS:
            try:
                return func(*args, **kwargs)
            except _SHAPE_ERRORS as error:  # such as ``x.mT`` of a part, which is 1-D
                if (
                    part_error := self.checker.error_for_part(func, args, error)
                ) is None:
                    raise
                raise part_error from error
        values = () if is_query else flatten_lists((args, kwargs) if kwargs else args)
        if (numbers := numbers_given(func, values)) is not None:
            self.checker.numbers_given.append(numbers)
        if name := _SHAPE_READS.get(func) or _EXPANDS.get(func):
            # torch and this library may read the shapes of parts, users may not.
            asker = sys._getframe(1)
            while asker.f_code.co_name in _WRAPPERS:
                asker = asker.f_back or asker
            if not called_by_user(asker):
                return func(*args, **kwargs)
            if func is Tensor.expand_as:
                return self._expand_as(*args)
            self.checker.check_measured(
                name, *flatten_lists(args) if func in _EXPANDS else args[:1]
            )
            return func(*args, **kwargs)
        if func in _PRINTS or func in _VALUE_READS:
            return self._with_values(func, args, kwargs)
        if func in _DERIVATIVES and not is_internal():
            _check_has_graph(func.__name__, args, kwargs)
        if func is Tensor.backward:
            return self._backward(func, "gradient", args, kwargs)
        if func is torch.autograd.backward:
            return self._backward(func, "grad_tensors", args, kwargs)
        if func is torch.autograd.grad:
            return self._grad(func, types, args, kwargs)
        self.checker.is_indexing = func is Tensor.__getitem__
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except _SHAPE_ERRORS as error:
            if (part_error := self.checker.error_for_part(func, values, error)) is None:
                raise
            raise part_error from error
        finally:
            self.checker.is_indexing = False

    def _grad(
        self,
        func: _torch.TorchFunction,
        types: Sequence[type],
        args: _torch.Args,
        kwargs: _torch.Kwargs,
    ) -> tuple[Tensor | None, ...]:
        """Runs ``torch.autograd.grad``, and passes on what was pulled back."""
        names = ("outputs", "inputs", "grad_outputs")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        outputs, cotangents = arguments["outputs"], arguments.get("grad_outputs")
        with self._seeding(outputs, cotangents):
            gradients = super().__torch_function__(func, types, args, kwargs)
        inputs = arguments["inputs"]
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        self.checker.check_pulled(inputs, gradients, [outputs, cotangents])
        return gradients

    @contextmanager
    def _seeding(self, outputs: PyTree, cotangents: PyTree) -> Iterator[None]:
        """Inside, torch begins a backward pass: its first ones are cotangents.

        torch makes ones where no cotangent is given. These have no type, as each rank's
        loss counts once: the checker is told how many there will be.
        """
        outputs, cotangents = (
            list(x) if type(x) in (list, tuple) else [x] for x in (outputs, cotangents)
        )
        needs_seed = [isinstance(x, Tensor) and x.requires_grad for x in outputs]
        pairs = zip_longest(needs_seed, cotangents[: len(needs_seed)])
        outer_seed_count = self.checker.seed_count
        self.checker.seed_count = sum(
            bool(needed) and cotangent is None for needed, cotangent in pairs
        )
        try:
            yield
        finally:
            self.checker.seed_count = outer_seed_count

    def _expand_as(self, x: Tensor, part: Tensor) -> Tensor:
        """Returns ``x.expand_as(part)``: a part, where ``x`` is one number."""
        table = self.checker.facts
        seen, is_number = (
            table.of(part),
            x.numel() == 1 and is_equal_on_ranks(table.kind(x)),
        )
        if not is_number or seen.kind is not Kind.S and not seen.flat:
            self.checker.check_measured("expand_as", x, part)
            return x.expand_as(part)
        return self.checker.typed_like(x.expand_as(part), part)

    def _with_values(
        self, func: _torch.TorchFunction, args: _torch.Args, kwargs: _torch.Kwargs
    ) -> Any:
        """Returns the result of a function that takes values out of torch, or prints.

        What is printed decides nothing: it needs no placeholder, and counts as no read.
        """
        if _torch.is_wrapped(args[0]):
            return func(*args, **kwargs)
        if (name := _VALUE_READS.get(func)) is not None:
            value = self.checker.placeholder_value(name, args[0])
        else:
            value = _torch.value_of(args[0])
        with _torch.beneath_all_modes():
            value = with_data(args[0]) if value is None else value
            return func(value, *args[1:], **kwargs)

    def _backward(
        self,
        func: _torch.TorchFunction,
        cotangents_name: str,
        args: _torch.Args,
        kwargs: _torch.Kwargs,
    ) -> None:
        """Runs a backward pass into ``.grad``, and passes on what was pulled back.

        Args:
            func: ``Tensor.backward`` or ``torch.autograd.backward``.
            cotangents_name: the name of its argument for cotangents.
        """
        names = ("tensors", cotangents_name)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        roots = [x.grad_fn for x in tree.leaves(args) if isinstance(x, Tensor)]
        nodes = _torch.graph_nodes(roots, set())
        variables = [getattr(node, "variable", None) for node in nodes]
        leaves = [x for x in variables if x is not None]
        with self._seeding(arguments[names[0]], arguments.get(cotangents_name)):
            out = func(*args, **kwargs)
        self.checker.check_pulled(leaves, [x.grad for x in leaves], args)
        return out


def _check_has_graph(name: str, args: _torch.Args, kwargs: _torch.Kwargs) -> None:
    """Raises where a derivative is asked for of what has no graph.

    Leaves of a state require no gradient. torch's own error says no more than that;
    this one names ``ff.value_and_grad``.
    """
    roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    roots = [x for x in tree.leaves(roots) if isinstance(x, Tensor)]
    if roots and not any(x.requires_grad or x.grad_fn for x in roots):
        raise rule_error("no graph", op=name, line=source_line())


def check_tracked(reader: str, leaves: Iterable[tuple[str | None, Leaf]]) -> None:
    """Raises where autograd does not see who reads a differentiated leaf.

    A placed leaf is no tensor: ``Function.apply`` takes it for a constant.

    Args:
        reader: the unit or operator that reads the leaves, for the message.
        leaves: the name of each, and this rank's part of it.

    Raises:
        LawError: an ``autograd.Function`` around the reader, or torch's checkpoint,
            would lose the gradient.
    """
    if not (hider := _torch.hides_tensors()):
        return
    # In a Function's forward torch.func's wrappers are off: no leaf shows there that it
    # is differentiated, so each may be.
    unwrapped = _torch.reverse_mode_around()
    for name, x in leaves:
        if name is not None and isinstance(x, Tensor):
            if x.requires_grad or _torch.is_wrapped(x) or unwrapped:
                leaf, line = (
                    repr(name) if name else "of the first argument",
                    source_line(),
                )
                raise rule_error(
                    "cut", reader=reader, leaf=leaf, line=line, around=hider
                )
