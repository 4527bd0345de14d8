"""``value_and_grad`` and ``value``: gradient calls, which transforms may reinterpret.

It has the semantics of ``torch.func.vjp``. Outside ``torch.func`` transforms it calls
``torch.autograd.grad``, which gives the same bits faster, and frees saved tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.collective_ops import collecting_axes
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.execution_context import Running, UnitToken, run_as
from fsfunc.core.frames import Counter, Frame, Transformed, frame, inside
from fsfunc.core.gradient_checks import (
    check_agreement,
    check_differentiable,
    check_gathered,
    collective_axes,
)
from fsfunc.core.losses import Tie, loss_parts
from fsfunc.core.outcomes import (
    Argnums,
    GradientCall,
    Leaves,
    Outcome,
    add_gradients,
    batch_arguments,
    newborn,
)
from fsfunc.runtime.generators import draw_number
from fsfunc.runtime.memory import count_as
from fsfunc.runtime.scopes import refuse_compiled
from fsfunc.sharded.inputs import arguments, check_function, refuse
from fsfunc.sharded.leaf import is_sharded


@api_boundary
def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[..., Any]:
    """A function that returns ``(value, grads)`` of the scalar ``fn``.

    Under ``shard`` the loss is a mean over this rank's rows; value and gradients are
    those of the mean over the ranks.

    Args:
        fn: returns a scalar, or ``Weighted(total, weight)``.
        argnums: which arguments to differentiate; one, or several (then the gradients
            are a tuple). Leaves that are not floating or complex tensors get ``None``.
            Of a complex one it is as torch's: the direction in which the loss grows.
        has_aux: ``fn`` returns ``(loss, aux)``, and so is the value. In ``aux``,
            floating scalars are averaged as the loss is, ``Summed(tree)`` is summed,
            of ``Max(tree)`` the largest are taken, and the rest is this rank's own.
        batch_argnums: the arguments, by position or keyword, that ``accumulate`` and
            ``pipeline`` cut into microbatches; by default the second one of two.

    Returns:
        ``(value, grads)``; ``grads`` has the structure of the argument, with zeros
        where the loss does not depend on a leaf.

    Raises:
        TypeError, ValueError: the loss is no scalar tensor.
        LawError: leaves are split over an axis, and the gradient of another one differs
            along it, as it did not pass through ``pcast``; or inside a unit a leaf is
            differentiated that only a nested unit gathers.
        TypeError: a differentiated argument is a numpy array, or holds tensors but no
            floating one, or a tensor that was made in inference mode.
        ValueError: ``argnums`` names an argument twice, or one that was not given.

    The result is differentiable, with respect to the arguments and to what ``fn``
    closes over, inside another gradient call's function, inside a unit, and where a
    tensor among the arguments requires grad.

    Cost: one forward and one backward pass, as ``torch.autograd.grad`` without
    ``create_graph``. A differentiable result keeps all residuals while it lives.

    >>> import torch, fsfunc as ff
    >>> value, grads = ff.value_and_grad(lambda w: (w**2).sum())(torch.tensor([1., 2.]))
    >>> value.item(), grads.tolist()
    (5.0, [2.0, 4.0])
    """
    check_function(fn, "value_and_grad")
    several = not isinstance(argnums, int)
    chosen = tuple(argnums) if not isinstance(argnums, int) else (argnums,)
    batch = batch_arguments(batch_argnums)

    options = {"argnums": (argnums, 0), "has_aux": (has_aux, False)}
    shown = [(k, x) for k, (x, default) in options.items() if x != default]

    @functools.partial(Transformed, fn, "value_and_grad", lambda: shown)
    def run(*args: Any, **keywords: Any) -> Any:
        refuse_compiled("ff.value_and_grad")
        if (f := frame()).around is not None:
            again = value_and_grad(fn, argnums, has_aux, batch_argnums=batch_argnums)
            return f.around(again, args, keywords)  # `run` would hold itself
        numbers = tuple(i % len(args) if args else i for i in chosen)
        if any(not -len(args) <= i < len(args) for i in chosen):
            raise ValueError(
                f"argnums={argnums!r}, but {len(args)} positional arguments were given"
            )
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"argnums={argnums!r} names one argument twice")
        given, names = [*args, *keywords.values()], [*arguments(len(args)), *keywords]
        refuse("inference", "value_and_grad", given, *names)
        check_differentiable([args[i] for i in numbers], [names[i] for i in numbers])
        if f.path and not f.whole:
            check_gathered(f.path, [args[i] for i in numbers])
        axes = None if f.path else collective_axes()
        call = GradientCall(fn, numbers, has_aux, args, keywords, batch_argnums=batch)
        with collecting_axes(axes):
            outcome = interpreted(call, f)
        if axes:
            check_agreement(fn, axes, [args[i] for i in numbers], outcome.grads)
        value = (outcome.total, outcome.aux) if has_aux else outcome.total
        return value, outcome.grads if several else outcome.grads[0]

    return run


@api_boundary
def value(
    fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[..., Any]:
    """A function that returns the value of ``value_and_grad(fn)``, without gradients.

    For evaluation. Under ``shard`` each rank's loss is a mean over its own rows, and
    the value the mean over the ranks; under ``accumulate`` and ``pipeline`` it is the
    mean over microbatches too; of losses that are ``Weighted``, the sum of totals over
    the sum of weights. (A sharded function that returns the loss itself,
    ``shard(loss, ...)``, returns each rank's own.) Like ``value_and_grad`` it belongs
    inside the transforms: ``shard(value(loss), mesh, "data")``.

    The loss runs as under ``torch.no_grad()``, and may be called in
    ``torch.inference_mode()``. What a loss differentiates itself by
    ``value_and_grad`` or ``torch.func`` is differentiated there too; what it does by
    ``torch.autograd.grad`` wants a ``torch.enable_grad()`` around.

    Args:
        fn: returns a scalar, or ``Weighted(total, weight)``.
        has_aux: ``fn`` returns ``(loss, aux)``, and so is what is returned. In ``aux``,
            floating scalars are averaged as the loss is, ``Summed(tree)`` is summed,
            of ``Max(tree)`` the largest are taken, and the rest is this rank's own.
        batch_argnums: the arguments, by position or keyword, that ``accumulate`` and
            ``pipeline`` cut into microbatches; by default the second one of two.

    Raises:
        TypeError, ValueError: the loss is no scalar tensor.

    The result is differentiable where that of ``value_and_grad`` is: inside another
    gradient call's function, inside a unit, and where a tensor among the arguments
    requires grad (and gradients are on).

    Cost: one forward pass, which keeps nothing for a backward one; at ``zero=3`` one
    all-gather for each unit call; a pipeline runs the forward actions of its schedule.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda w, x: x @ w)
    >>> loss = lambda w, x: layer(w, x).square().mean()
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> evaluate = ff.shard(ff.value(loss), mesh, "data")
    >>> def main():
    ...     x = ff.local_batch(torch.arange(4.0)[:, None], mesh, "data")
    ...     w = ff.place(evaluate, torch.ones(1, 1), x)
    ...     return evaluate(w, x).item()
    >>> ff.spmd(main, mesh)()
    [3.5, 3.5]
    """
    check_function(fn, "value")
    batch = batch_arguments(batch_argnums)

    shown = [("has_aux", True)] if has_aux else []

    @functools.partial(Transformed, fn, "value", lambda: shown)
    def run(*args: Any, **keywords: Any) -> Any:
        refuse_compiled("ff.value")
        if (f := frame()).around is not None:
            again = value(fn, has_aux, batch_argnums=batch_argnums)
            return f.around(again, args, keywords)  # `run` would hold itself
        call = GradientCall(fn, (), has_aux, args, keywords, batch_argnums=batch)
        outcome = interpreted(call, f)
        return (outcome.total, outcome.aux) if has_aux else outcome.total

    return run


def interpreted(call: GradientCall, f: Frame) -> Outcome:
    """Returns the means of a gradient call, run under the transforms of a frame."""
    run: Callable[..., Any] = differentiate
    # Inside a unit a derivative is this rank's own: transforms do not see it.
    for handler in () if f.path else reversed(f.handlers):
        run = handler.gradient(run)
    if f.seed is None:
        f = f.replace(seed=draw_number(), seeded=len(f.numbers))
    with inside(f):
        return run(call.replace(create_graph=_is_nested(call))).settled(again=False)


def differentiate(call: GradientCall) -> Outcome:
    """Runs a gradient call: the innermost of all interpretations."""
    if call.argnums and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "value_and_grad under torch.inference_mode(): autograd records nothing "
            "there, and all gradients would be zero; call it outside that mode"
        )
    if call.runner is not None:
        return call.runner(call.replace(runner=None))
    if _torch.transforms_active():
        return _by_vjp(call)
    return _differentiable(call) if call.create_graph else _first_order(call)


def _first_order(call: GradientCall) -> Outcome:
    """By autograd, with gradients that are not differentiable; residuals are freed.

    Where nothing is differentiated, none are kept in the first place.
    """
    f, graph = frame(), bool(call.argnums)
    observers = [h for h in f.handlers if h.observes and graph and not f.in_loss]
    for observer in observers:
        observer.begins(call)
    leaves = Leaves(call.args, call.argnums, call.packed, call.parts)
    picked = leaves.tensors
    runtimes = () if f.path else f.runtimes
    for _, runtime in runtimes:
        runtime.begin()
    thread = UnitToken(leaves.device) if runtimes and graph else None
    values = [x.detach().requires_grad_() for x in picked]
    with run_as(Running(thread)), torch.set_grad_enabled(graph):
        with inside(f.replace(counter=Counter(), in_loss=f.in_loss + 1)):
            out = call.fn(*leaves.args(values), **call.keywords)
        total, weight, aux = loss_parts(out, call.has_aux)
        tied = total
        if thread is not None and thread.token is not thread.start:
            tied: Any = Tie.apply(total, thread.token)
    made = list(leaves.parts.values())
    inputs = [*values, *made, *([] if thread is None else [thread.start])]
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if not inputs or not tied.requires_grad:
        pass
    elif f.tracer is not None and f.tracer.forward_only:
        found = [torch.empty_like(x) for x in inputs]
        f.tracer.gradients(picked, found, aux)
    else:
        with internal():
            seed = call.seed(tied)
            found = torch.autograd.grad(tied, inputs, seed, allow_unused=True)
    weight = None if weight is None else weight.detach()
    count_as("gradients", found[: len(values)])
    grads = leaves.grads(found[: len(values)])
    add_gradients(made, found[len(values) : len(values) + len(made)])
    aux, scale = _detach(aux), call.cotangent
    outcome = Outcome(total.detach(), weight, grads, aux, scale=scale)
    for observer in observers:
        observer.ends(outcome)
    return outcome


def _is_nested(call: GradientCall) -> bool:
    """True if the result of a gradient call may be differentiated.

    That is in a loss, in a unit, and where a backward pass recomputes either; else only
    where the arguments require grad.
    """
    if not torch.is_grad_enabled():
        return False
    f = frame()
    inside = f.in_loss > 0 or bool(f.path) or _torch.current_node() is not None
    return inside or tracked((call.args, call.keywords))


def _differentiable(call: GradientCall) -> Outcome:
    """By autograd, with differentiable gradients where others differentiate the loss.

    That is where it depends on an argument that requires grad, or on such a tensor that
    ``fn`` closes over.
    """
    leaves = Leaves(call.args, call.argnums)
    values = [
        x.view_as(x) if x.requires_grad else newborn(x.detach()) for x in leaves.tensors
    ]
    f = frame()
    f = f.replace(counter=Counter(), in_loss=f.in_loss + 1, create_graph=True)
    with run_as(Running()), inside(f):
        out = call.fn(*leaves.args(values), **call.keywords)
        total, weight, aux = loss_parts(out, call.has_aux)
    found: Sequence[Tensor | None] = [None] * len(values)
    again = any(x.requires_grad for x in leaves.tensors)
    if total.requires_grad:
        again = again or _torch.reaches_leaves(total, {x.grad_fn for x in values})
    if values and total.requires_grad:
        with internal():
            found = torch.autograd.grad(
                total,
                values,
                call.seed(total),
                retain_graph=again,
                create_graph=again,
                allow_unused=True,
            )
    grads, scale = leaves.grads(found), call.cotangent
    if not again:
        total, aux = total.detach(), _detach(aux)
    return Outcome(total, weight, grads, aux, scale=scale)


def tracked(values: Any) -> bool:
    """True if a tensor among ``values`` requires grad."""
    for x in tree.leaves(values, is_leaf=is_sharded):
        if is_sharded(x):
            # The part of a packed leaf is a view, made when it is first read.
            if x.packed is not None and x.parts is None and x._part is None:
                continue
            x = x.local
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def _detach(aux: Any) -> Any:
    return tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)


def _by_vjp(call: GradientCall) -> Outcome:
    """By ``torch.func.vjp``, whose result may be differentiated or mapped again."""
    leaves = Leaves(call.args, call.argnums)
    picked = leaves.tensors
    beside: list[Any] = []  # (structure, leaves) of weight and aux, without tensors

    def pure(*values: Tensor) -> tuple[Tensor, list[Tensor]]:
        total, weight, aux = loss_parts(
            call.fn(*leaves.args(values), **call.keywords), call.has_aux
        )
        flat, spec = tree.flatten((weight, aux))
        beside[:] = [spec, [_TENSOR if isinstance(x, Tensor) else x for x in flat]]
        return total, [x for x in flat if isinstance(x, Tensor)]

    f = frame()
    with inside(f.replace(counter=Counter(), in_loss=f.in_loss + 1)):
        found: Sequence[Tensor] = ()
        if picked:
            total, pull, kept = torch.func.vjp(pure, *picked, has_aux=True)  # type: ignore[misc]
            found = pull(call.seed(total), retain_graph=True, create_graph=True)
        else:  # torch.func.vjp wants something to differentiate
            total, kept = pure()
    each = iter(kept)
    spec, flat = beside
    flat = [next(each) if x is _TENSOR else x for x in flat]
    weight, aux = tree.unflatten(spec, flat)
    grads, scale = leaves.grads(found), call.cotangent
    return Outcome(total, weight, grads, aux, scale=scale)


_TENSOR = object()
