"""``program``: traces a loss, once, on fake tensors, into the list of its unit calls.

    loss_fn -> NotingStage (runs each unit call, notes it) -> programs.Program

A pipeline does so for each shape of microbatch, and cuts the program into stages;
``ff.program`` does it by hand.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import FakeTensorMode
from fsfunc.comm.attribution import source_line, traceback_line
from fsfunc.comm.backends.abstract import is_value_read
from fsfunc.comm.collective_ops import ignoring_axes
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import Counter, Frame, Stage, frame, inside
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.dataflow import (
    Argument,
    Dataflow,
    RunningUnit,
    run_on_data,
    tensors_in,
)
from fsfunc.tracing.programs import (
    Loss,
    Names,
    Origins,
    Outputs,
    Program,
    TracedCall,
    Value,
    below,
)
from fsfunc.tracing.runs import place_without_data, without_data
from fsfunc.tree import PyTree

_P = ParamSpec("_P")

_VALUE_READ = (
    "the loss",
    ", outside every unit: what it does next must not depend on a value that another "
    "stage holds. Move it into a unit, or make it a torch.where",
)


@api_boundary
def program(
    loss_fn: Callable[_P, Any], *args: _P.args, **keywords: _P.kwargs
) -> Program:
    """Trace ``loss_fn(*args, **keywords)``: its unit calls in order, as data.

    The loss runs once on fake tensors: nothing is computed or sent, and no random
    number drawn.

    Args:
        loss_fn: a loss that calls units; it may return any tree.
        args: its arguments; the first holds its parameters. A sharded leaf counts as
            the whole tensor.

    Returns:
        the calls, with the values and parameters that each one's inputs depend on.

    Raises:
        RuntimeError: the loss reads a tensor's value, writes into its arguments or
            into captured tensors, or differentiates units itself; names the line.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda p, x: torch.tanh(x @ p))
    >>> def loss(params, x):
    ...     h = layer(params[0], x)
    ...     return layer(params[1], h * 2).sum()
    >>> w = torch.ones(3, 3)
    >>> print(ff.program(loss, [w, w], torch.ones(2, 3)))
    loss: 2 unit calls
    %0 = <lambda>(params/0, x) -> f32[2, 3]
      g0 = mul(%0, 2)
    %1 = <lambda>(params/1, g0) -> f32[2, 3]
      g1 = sum(%1)
    loss = g1 -> f32[]

    Layers that are alike are one line of the listing:

    >>> def deep(params, x):
    ...     for p in params:
    ...         x = layer(p, x)
    ...     return x.sum()
    >>> print(ff.program(deep, [w] * 96, torch.ones(2, 3)))
    deep: 96 unit calls
    %0 = <lambda>(params/0, x) -> f32[2, 3]
    %1-95 = <lambda>(params/1-95, %0-94) -> f32[2, 3]  x95
      g0 = sum(%95)
    loss = g0 -> f32[]
    """
    return trace(loss_fn, args, keywords)


def trace(
    loss_fn: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Program:
    """Does what :func:`program` does, with the arguments as a tuple and a dict."""
    if not args:
        raise TypeError(
            "program(loss_fn, params, ...): the first argument of the loss is missing"
        )
    labels, here = _labels(loss_fn, len(args)), place_without_data()
    names = Names(labels[0], tree.paths(args[0], is_leaf=is_sharded))
    makes_fakes = not _torch.fake_active()
    with (
        # Gradients are on too: what a backward pass saves is read from the graph.
        torch.inference_mode(False),
        without_data((args, keywords), here, read_error=_VALUE_READ) as mode,
        ignoring_axes(),
    ):
        stage = TracingStage(Dataflow(names), mode if makes_fakes else None)
        loss_frame = Frame(
            handlers=(stage,),
            here=here,
            casts=frame().casts,
            counter=stage.counter,
            in_loss=1,
        )
        with inside(loss_frame):
            blanks = [
                _blank_argument(stage, x, label, is_parameter=i == 0)
                for i, (label, x) in enumerate(zip(labels, args, strict=True))
            ]
            keywords = {k: _blank_argument(stage, x, k) for k, x in keywords.items()}
            with stage.flow:
                out = loss_fn(*blanks, **keywords)
                return stage.finish(getattr(loss_fn, "__name__", "loss"), out)


class TracingStage(Stage):
    """A stage that runs and records every unit call of a loss.

    A real stage of a pipeline runs only its own.

    Args:
        flow: the dependencies between values.
        fake: the mode that makes fake tensors; None if one was on already.
    """

    flow: Dataflow
    fake: FakeTensorMode | None

    def __init__(self, flow: Dataflow, fake: FakeTensorMode | None):
        self.flow, self.fake = flow, fake
        self.counter: Counter = Counter()
        self.calls: list[TracedCall] = []
        self.leaves: dict[int, Argument] = {}

    def decide(
        self,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        """Runs and notes a unit call of the loss; returns copies of its outputs."""
        name, line, flow = call.unit.__name__, source_line(), self.flow
        if _torch.functorch_active() or call.frame.counter is not self.counter:
            raise RuntimeError(
                f"the loss itself differentiates or maps unit {name!r}, at {line}: no "
                "stage of a pipeline could. Move the whole of it into one unit"
            )
        text = flow.names.text_of_call((params, *inputs), keywords)
        parameters: dict[str, Tensor] = {}
        other_tensors: list[Tensor] = []
        for x in tensors_in((params, inputs, keywords)):
            leaf = self.leaves.get(id(x))
            if leaf is not None and leaf.parameter:
                parameters[leaf.name] = x
            else:
                other_tensors.append(x)
        input_origins, parameter_names = (
            flow.origins_of(other_tensors),
            frozenset(parameters),
        )
        in_first_argument = {
            self.leaves[id(x)].name for x in tensors_in(params) if id(x) in self.leaves
        }
        with self._opened(name) as body:
            out = self._run(body, call, params, inputs, keywords)
            captured = body.origins | flow.origins_of(out)
            returned, outputs = self._separate(body, out, len(self.calls))
        traced_call = TracedCall(
            number=len(self.calls),
            name=name,
            params=parameter_names,
            own=parameter_names & in_first_argument,
            outputs=outputs,
            origins=input_origins
            | captured._replace(reads=captured.reads - parameter_names),
            flops=body.flops,
            operators=body.operators,
            draws=body.draws,
            activations=sum(x.untyped_storage().nbytes() for x in body.saved.values()),
            weights=sum(x.numel() * x.element_size() for x in parameters.values()),
            line=line,
            text=text,
        )
        self.calls.append(traced_call)
        flow.call_count = len(self.calls)
        return returned

    @contextmanager
    def _opened(self, name: str) -> Iterator[RunningUnit]:
        self.flow.running_unit = body = RunningUnit(name)
        try:
            yield body
        finally:
            self.flow.running_unit = None

    def _run(
        self,
        body: RunningUnit,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        """Runs the unit's function on fake tensors, or else on copies with data."""
        try:
            out = call.body(params, *inputs, **keywords)
        except Exception as error:
            if not is_value_read(error):
                raise
            where = traceback_line(error)
            try:
                return run_on_data(self.flow, self.fake, call, params, inputs, keywords)
            except Exception as second:
                raise RuntimeError(
                    f"unit {call.name!r} asks for a tensor's value at {where} "
                    "(.item(), `if tensor`, a boolean mask), which a program made on "
                    "fake tensors has not, and it does not run on tensors of ones "
                    f"either ({second}). Make it a torch.where"
                ) from error
        body.note_saved_by_graph((params, inputs, keywords), out)
        return out

    def _separate(
        self, body: RunningUnit, out: PyTree, number: int
    ) -> tuple[PyTree, Outputs]:
        """Returns a unit's outputs, each in a storage of its own, and what they are.

        On another stage they arrive by messages, in memory of their own: dependencies,
        which follow storages, must be those of this output alone.
        """
        tree.shown(out, f"unit {body.name!r}", "returns")
        flow, (paths, leaves, treedef) = self.flow, tree.flatten_with_paths(out)
        outputs, by_storage = Outputs.of(out), defaultdict[int, list[Tensor]](list)
        for i, x in enumerate(leaves):
            if not isinstance(x, Tensor):
                continue
            body.note_saved(x)
            same_storage = by_storage[_torch.storage_key(x)]
            with torch.set_grad_enabled(x.requires_grad):
                leaves[i] = copy = x.clone()
            value = Value(number, i)
            flow.record_origins(copy, Origins(needs=frozenset((value,))), value)
            flow.names.give(copy, below(f"%{number}", paths[i]))
            same_storage += [x, copy]
        for same_storage in by_storage.values():
            if len(same_storage) > 2 or flow.has_origins(same_storage[0]):
                flow.note_shared(same_storage, body.name)
        for key, x in list(body.saved.items()):
            if flow.owner.get(x) is not None:
                del body.saved[key]  # that of a parameter, or of an input
        return tree.unflatten(treedef, leaves), outputs

    def finish(self, name: str, out: PyTree) -> Program:
        """Returns the program of a loss that returned ``out``."""
        flow = self.flow
        loss = Loss(Outputs.of(out), flow.origins_of(out), flow.names.text_of_tree(out))
        return Program(
            name=name,
            leaves=flow.names.params,
            calls=tuple(self.calls),
            glue=tuple(flow.glue),
            loss=loss,
            mutated=frozenset(flow.mutated),
            draws=tuple(flow.draws),
        )


def _labels(fn: Callable[..., Any], count: int) -> list[str]:
    """Returns names of the function's first ``count`` arguments."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a builtin's
        parameters = []
    labels = []
    for i in range(count):
        parameter = parameters[min(i, len(parameters) - 1)] if parameters else None
        if parameter is None:
            labels.append(f"argument {i}")
        elif parameter.kind is parameter.VAR_POSITIONAL:
            labels.append(f"{parameter.name}/{i + 1 - len(parameters)}")
        else:
            labels.append(parameter.name)
    return labels


def _blank_argument(
    stage: TracingStage, argument: PyTree, label: str, is_parameter: bool = False
) -> PyTree:
    """Returns an argument as fake tensors, each in a storage of its own.

    Args:
        stage: the stage that notes them.
        argument: the argument.
        label: its name.
        is_parameter: whether it holds the parameters.
    """
    paths, leaves, treedef = tree.flatten_with_paths(argument, is_leaf=is_sharded)
    for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(x, Tensor | Sharded):
            continue
        # Units are given this rank's part of a leaf that is split over other axes.
        split_layout = x.layout.in_units if isinstance(x, Sharded) else None
        shape, strides = tuple(x.shape), None if is_sharded(x) else x.stride()
        if split_layout is not None:
            shape = split_layout.local_shape(dict.fromkeys(split_layout.axes, 0))
        strides = strides or torch.empty(shape, device="meta").stride()
        blank = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        if is_parameter and differentiable(x):
            blank.requires_grad_()
        leaf = Argument(path if is_parameter else below(label, path), is_parameter)
        stage.leaves[id(blank)] = leaf
        leaves[i] = stage.flow.add_argument(blank, leaf)
        if split_layout is not None:
            leaves[i] = Sharded(leaves[i], split_layout)
    return tree.unflatten(treedef, leaves)
