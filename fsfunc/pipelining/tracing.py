"""``program``: a loss run once on fake tensors, to see its unit calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.backends.abstract import AbstractLink
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import NoMesh, here, place_here
from fsfunc.fake_errors import told_where
from fsfunc.frames import Frame, frame, inside
from fsfunc.generators import generators_kept
from fsfunc.pipelining.flowing import Flow, Leaf
from fsfunc.pipelining.naming import Names, below
from fsfunc.pipelining.noting import Tracer
from fsfunc.pipelining.programs import Program
from fsfunc.sharded import Sharded, is_sharded

__all__ = ["program", "trace"]

_INSTEAD = (
    ", outside every unit: what it does next must not depend on a value that another "
    "stage holds. Move it into a unit, or make it a torch.where"
)


def program(loss_fn: Callable[..., Any], *args: Any, **keywords: Any) -> Program:
    """What one run of ``loss_fn(*args, **keywords)`` shows: its unit calls, in order.

    The loss runs once on fake tensors: nothing is computed or sent, and no random
    number drawn.

    Args:
        loss_fn: a loss that calls units; it may return any tree.
        args: its arguments; the first holds its parameters. A sharded leaf counts as
            the whole tensor.

    Returns:
        the calls, with the values and parameters that each one's inputs depend on.

    Raises:
        RuntimeError: the loss asks for a tensor's value, writes into its arguments or
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
    labels = _labels(loss_fn, len(args))
    with ExitStack() as stack:
        for scope in (generators_kept(), silence()):
            stack.enter_context(scope)
        stack.enter_context(torch.inference_mode(False))  # and gradients on
        fake = None
        if not _torch.fake_active():
            fake = _torch.fake_mode_of(tree.leaves((args, keywords)))
            stack.enter_context(fake)
        paths = tree.paths(args[0], is_leaf=is_sharded)
        flow = Flow(Names(labels[0], paths))
        tracer = Tracer(flow, fake)
        stack.enter_context(inside(_frame(tracer, stack)))
        given = [
            _blank(tracer, x, label, parameter=i == 0)
            for i, (label, x) in enumerate(zip(labels, args, strict=True))
        ]
        keywords = {k: _blank(tracer, x, k) for k, x in keywords.items()}
        stack.enter_context(flow)
        stack.enter_context(told_where("the loss", _INSTEAD))
        out = loss_fn(*given, **keywords)
        return tracer.finished(getattr(loss_fn, "__name__", "loss"), out)


def _frame(tracer: Tracer, stack: ExitStack) -> Frame:
    """The frame of the run: no transforms, no rank that sends, calls noted."""
    f = Frame(
        compute=frame().compute, counter=tracer.counter, stage=tracer, in_loss=True
    )
    try:
        at = here()
    except NoMesh:  # the loss names its own mesh, or none
        return f
    at = replace(at, link=AbstractLink(at.rank))
    stack.enter_context(place_here(at))
    return f.but(at=at)


def _labels(fn: Callable[..., Any], count: int) -> list[str]:
    """What the function calls its first ``count`` arguments."""
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


def _blank(tracer: Tracer, value: Any, label: str, parameter: bool = False) -> Any:
    """An argument as fake tensors, each in a storage of its own."""
    paths, leaves, treedef = tree.flatten_with_paths(value, is_leaf=is_sharded)
    for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(x, Tensor | Sharded):
            continue
        shape, strides = tuple(x.shape), None if is_sharded(x) else x.stride()
        strides = strides or torch.empty(shape, device="meta").stride()
        blank = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        if parameter and x.dtype.is_floating_point:
            blank.requires_grad_()
        leaf = Leaf(path if parameter else below(label, path), parameter)
        tracer.leaves[id(blank)] = leaf
        leaves[i] = tracer.flow.argument(blank, leaf)
    return tree.unflatten(treedef, leaves)
