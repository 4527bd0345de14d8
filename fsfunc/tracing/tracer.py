"""``program``: a loss run once on fake tensors, its unit calls noted one by one."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import source_line, traceback_line
from fsfunc.comm.backends.abstract import is_value_read
from fsfunc.comm.collective_ops import ignoring_axes
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import Counter, Frame, Stage, frame, inside
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.dataflow import Argument, Body, Flow, run_on_data, tensors
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

_P = ParamSpec("_P")

_TOLD = (
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
    """:func:`program`, for arguments in hand."""
    if not args:
        raise TypeError(
            "program(loss_fn, params, ...): the first argument of the loss is missing"
        )
    labels, at = _labels(loss_fn, len(args)), place_without_data()
    names = Names(labels[0], tree.paths(args[0], is_leaf=is_sharded))
    mine = not _torch.fake_active()
    with (
        torch.inference_mode(False),  # and gradients on
        without_data((args, keywords), at, read_error=_TOLD) as mode,
        ignoring_axes(),
    ):
        stage = NotingStage(Flow(names), mode if mine else None)
        f = Frame(
            handlers=(stage,),
            here=at,
            casts=frame().casts,
            counter=stage.counter,
            in_loss=1,
        )
        with inside(f):
            given = [
                _blank(stage, x, label, parameter=i == 0)
                for i, (label, x) in enumerate(zip(labels, args, strict=True))
            ]
            keywords = {k: _blank(stage, x, k) for k, x in keywords.items()}
            with stage.flow:
                out = loss_fn(*given, **keywords)
                return stage.finished(getattr(loss_fn, "__name__", "loss"), out)


class NotingStage(Stage):
    """A stage that runs and records every unit call of a loss.

    Args:
        flow: the dependencies between values.
        fake: the mode that makes fake tensors; None if one is on already.
    """

    def __init__(self, flow: Flow, fake: Any):
        self.flow, self.fake = flow, fake
        self.counter = Counter()
        self.calls: list[TracedCall] = []
        self.leaves: dict[int, Argument] = {}

    def decide(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        """A unit call of the loss: run, noted, and its outputs set apart."""
        name, line, flow = call.unit.__name__, source_line(), self.flow
        if _torch.functorch_active() or call.frame.counter is not self.counter:
            raise RuntimeError(
                f"the loss itself differentiates or maps unit {name!r}, at {line}: no "
                "stage of a pipeline could. Move the whole of it into one unit"
            )
        text = flow.names.call((params, *inputs), keywords)
        taken: dict[str, Tensor] = {}
        others: list[Tensor] = []
        for x in tensors((params, inputs, keywords)):
            leaf = self.leaves.get(id(x))
            if leaf is not None and leaf.parameter:
                taken[leaf.name] = x
            else:
                others.append(x)
        fed, given = flow.of(others), frozenset(taken)
        first = {
            self.leaves[id(x)].name for x in tensors(params) if id(x) in self.leaves
        }
        with self._opened(name) as body:
            out = self._run(body, call, params, inputs, keywords)
            captured = body.origins | flow.of(out)
            returned, outputs = self._apart(body, out, len(self.calls))
        done = TracedCall(
            number=len(self.calls),
            name=name,
            params=given,
            own=given & first,
            outputs=outputs,
            origins=fed | captured._replace(reads=captured.reads - given),
            flops=body.flops,
            draws=body.draws,
            activations=sum(x.untyped_storage().nbytes() for x in body.kept.values()),
            weights=sum(x.numel() * x.element_size() for x in taken.values()),
            line=line,
            text=text,
        )
        self.calls.append(done)
        flow.counted = len(self.calls)
        return returned

    @contextmanager
    def _opened(self, name: str) -> Iterator[Body]:
        self.flow.body = body = Body(name)
        try:
            yield body
        finally:
            self.flow.body = None

    def _run(self, body: Body, call: Call, params: Any, inputs: Any, keywords: Any):
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
        body.keep_saved((params, inputs, keywords), out)
        return out

    def _apart(self, body: Body, out: Any, number: int) -> tuple[Any, Outputs]:
        """A unit's outputs, each in a storage of its own, and what they are."""
        tree.shown(out, f"unit {body.name!r}", "returns")
        flow, (paths, leaves, treedef) = self.flow, tree.flatten_with_paths(out)
        outputs, apart = Outputs.of(out), defaultdict[int, list[Tensor]](list)
        for i, x in enumerate(leaves):
            if not isinstance(x, Tensor):
                continue
            body.keep(x)
            sharing = apart[_torch.storage_key(x)]
            with torch.set_grad_enabled(x.requires_grad):
                leaves[i] = y = x.clone()
            value = Value(number, i)
            flow.know(y, Origins(needs=frozenset((value,))), value)
            flow.names.give(y, below(f"%{number}", paths[i]))
            sharing += [x, y]
        for sharing in apart.values():
            if len(sharing) > 2 or flow.knows(sharing[0]):
                flow.share(sharing, body.name)
        for key, x in list(body.kept.items()):
            if flow.owner.get(x) is not None:
                del body.kept[key]  # that of a parameter, or of an input
        return tree.unflatten(treedef, leaves), outputs

    def finished(self, name: str, out: Any) -> Program:
        """The program of a loss that returned ``out``."""
        flow = self.flow
        loss = Loss(Outputs.of(out), flow.of(out), flow.names.tree(out))
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
    """Names of the function's first ``count`` arguments."""
    try:
        known = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a builtin's
        known = []
    labels = []
    for i in range(count):
        last = known[min(i, len(known) - 1)] if known else None
        if last is None:
            labels.append(f"argument {i}")
        elif last.kind is last.VAR_POSITIONAL:
            labels.append(f"{last.name}/{i + 1 - len(known)}")
        else:
            labels.append(last.name)
    return labels


def _blank(stage: NotingStage, value: Any, label: str, parameter: bool = False) -> Any:
    """An argument as fake tensors, each in a storage of its own."""
    paths, leaves, treedef = tree.flatten_with_paths(value, is_leaf=is_sharded)
    for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(x, Tensor | Sharded):
            continue
        # A unit may return a rank's part of what it makes of a split leaf.
        split = x.layout.in_units if isinstance(x, Sharded) else None
        shape, strides = tuple(x.shape), None if is_sharded(x) else x.stride()
        if split is not None:
            shape = split.local_shape(dict.fromkeys(split.axes, 0))
        strides = strides or torch.empty(shape, device="meta").stride()
        blank = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        if parameter and differentiable(x):
            blank.requires_grad_()
        leaf = Argument(path if parameter else below(label, path), parameter)
        stage.leaves[id(blank)] = leaf
        leaves[i] = stage.flow.argument(blank, leaf)
        if split is not None:
            leaves[i] = Sharded(leaves[i], split)
    return tree.unflatten(treedef, leaves)
