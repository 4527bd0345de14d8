"""``value_and_grad`` and ``value``: gradient calls, which transforms may reinterpret.

Each call becomes a `GradientCall`, which `run_interpreted` hands through the transforms
in force, and `differentiate` runs: one forward pass of the loss, one backward pass.
There are three ways to do so:

`_first_order`      by ``torch.autograd.grad``, which frees saved tensors: the usual way
`_differentiable`   by ``torch.autograd.grad(create_graph=True)``, inside another one
`_by_vjp`           by ``torch.func.vjp``, under ``torch.func`` transforms

All have the semantics, and the bits, of ``torch.func.vjp``; the first is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch.fake_results import fakes_like
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
from fsfunc.core.losses import Loss, Tie, loss_parts
from fsfunc.core.outcomes import (
    Argnums,
    GradientCall,
    Leaves,
    Outcome,
    add_gradients,
    batch_arguments,
    mark_as_input,
)
from fsfunc.runtime.generators import draw_number
from fsfunc.runtime.memory import count_as
from fsfunc.runtime.scopes import refuse_compiled
from fsfunc.sharded.inputs import arguments, check_function, refuse
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import PyTree

_P = ParamSpec("_P")
# Bound to Any, so that a lambda may do with its parameters what it likes.
_A = TypeVar("_A", bound=Any)
_B = TypeVar("_B", bound=Any)
_Aux = TypeVar("_Aux")
_Tree = TypeVar("_Tree")


# The first argument, which is differentiated by default, keeps its type: gradients have
# that of the parameters. What a checker cannot follow (several arguments that are not
# the first two, a flag known at run time) is a tree.
@overload
def value_and_grad(
    fn: Callable[Concatenate[_A, _P], tuple[Loss, _Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    batch_argnums: Argnums | None = None,
) -> Callable[Concatenate[_A, _P], tuple[tuple[Tensor, _Aux], _A]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[_A, _P], tuple[Loss, _Aux]],
    argnums: Literal[0],
    has_aux: Literal[True],
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[Concatenate[_A, _P], tuple[tuple[Tensor, _Aux], _A]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[_A, _P], Loss],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[Concatenate[_A, _P], tuple[Tensor, _A]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[_A, _B, _P], tuple[Loss, _Aux]],
    argnums: tuple[Literal[0], Literal[1]],
    has_aux: Literal[True],
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[Concatenate[_A, _B, _P], tuple[tuple[Tensor, _Aux], tuple[_A, _B]]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[_A, _B, _P], tuple[Loss, _Aux]],
    argnums: tuple[Literal[0], Literal[1]],
    *,
    has_aux: Literal[True],
    batch_argnums: Argnums | None = None,
) -> Callable[Concatenate[_A, _B, _P], tuple[tuple[Tensor, _Aux], tuple[_A, _B]]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[_A, _B, _P], Loss],
    argnums: tuple[Literal[0], Literal[1]],
    has_aux: Literal[False] = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[Concatenate[_A, _B, _P], tuple[Tensor, tuple[_A, _B]]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[_A, _B, _P], Loss],
    argnums: Literal[1],
    has_aux: Literal[False] = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[Concatenate[_A, _B, _P], tuple[Tensor, _B]]: ...
@overload
def value_and_grad(
    fn: Callable[_P, Loss | tuple[Loss, Any]],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[_P, tuple[Any, PyTree]]: ...
@api_boundary
def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[..., tuple[Any, PyTree]]:
    """Returns a function that computes ``(value, grads)`` of the scalar ``fn``.

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

    # It prints with the arguments that are no defaults.
    options = {"argnums": (argnums, 0), "has_aux": (has_aux, False)}
    shown = [(k, x) for k, (x, default) in options.items() if x != default]

    @functools.partial(Transformed, fn, "value_and_grad", lambda: shown)
    def run(*args: Any, **keywords: Any) -> Any:
        refuse_compiled("ff.value_and_grad")
        if (f := frame()).run_outermost is not None:
            # Not `run`, which would then hold a reference to itself: what it closes
            # over would live until a garbage collection.
            again = value_and_grad(fn, argnums, has_aux, batch_argnums=batch_argnums)
            return f.run_outermost(again, args, keywords)
        numbers = tuple(i % len(args) if args else i for i in chosen)
        if any(not -len(args) <= i < len(args) for i in chosen):
            raise ValueError(
                f"argnums={argnums!r}, but {len(args)} positional arguments were given"
            )
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"argnums={argnums!r} names one argument twice")
        values, names = [*args, *keywords.values()], [*arguments(len(args)), *keywords]
        refuse("inference", "value_and_grad", values, *names)
        check_differentiable([args[i] for i in numbers], [names[i] for i in numbers])
        # A whole unit has gathered all leaves, and differentiates plain tensors.
        if f.path and not f.whole:
            check_gathered(f.path, [args[i] for i in numbers])
        # A gradient that differs along an axis over which the loss communicates is a
        # mistake; the axes are known only when the loss has run.
        axes = None if f.path else collective_axes()
        call = GradientCall(fn, numbers, has_aux, args, keywords, batch_argnums=batch)
        with collecting_axes(axes):
            outcome = run_interpreted(call, f)
        if axes:
            check_agreement(fn, axes, [args[i] for i in numbers], outcome.grads)
        value = (outcome.total, outcome.aux) if has_aux else outcome.total
        return value, outcome.grads if several else outcome.grads[0]

    return run


@overload
def value(
    fn: Callable[_P, Loss],
    has_aux: Literal[False] = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[_P, Tensor]: ...
@overload
def value(
    fn: Callable[_P, tuple[Loss, _Aux]],
    has_aux: Literal[True],
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[_P, tuple[Tensor, _Aux]]: ...
@overload
def value(
    fn: Callable[_P, Loss | tuple[Loss, Any]],
    has_aux: bool,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[_P, Any]: ...
@api_boundary
def value(
    fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[..., Any]:
    """Returns a function that computes the value of ``value_and_grad(fn)`` alone.

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
        if (f := frame()).run_outermost is not None:
            # Not `run`: see `value_and_grad`.
            again = value(fn, has_aux, batch_argnums=batch_argnums)
            return f.run_outermost(again, args, keywords)
        call = GradientCall(fn, (), has_aux, args, keywords, batch_argnums=batch)
        outcome = run_interpreted(call, f)
        return (outcome.total, outcome.aux) if has_aux else outcome.total

    return run


def run_interpreted(call: GradientCall, f: Frame) -> Outcome:
    """Runs a gradient call under the transforms of a frame, and returns the means."""
    run: Callable[..., Any] = differentiate
    # Inside a unit a derivative is this rank's own: transforms do not see it.
    for handler in () if f.path else reversed(f.handlers):
        run = handler.gradient(run)
    # One number for the whole call: units derive theirs from it, and from their place
    # in the call, so that a recompute draws the same.
    if f.seed is None:
        f = f.replace(seed=draw_number(), seed_depth=len(f.numbers))
    with inside(f):
        outcome = run(call.replace(create_graph=_is_nested(call)))
        return outcome.finalize(is_reused=False)


def differentiate(call: GradientCall) -> Outcome:
    """Runs a gradient call: the innermost of all interpretations."""
    # Evaluations, which have no `argnums`, may run there.
    if call.argnums and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "value_and_grad under torch.inference_mode(): autograd records nothing "
            "there, and all gradients would be zero; call it outside that mode"
        )
    # The runner of a pipeline may run a loss by this function: then without itself.
    if call.runner is not None:
        return call.runner(call.replace(runner=None))
    if _torch.transforms_active():
        return _by_vjp(call)
    return _differentiable(call) if call.create_graph else _first_order(call)


def _first_order(call: GradientCall) -> Outcome:
    """Runs a call by autograd; its gradients are not differentiable.

    Saved tensors are freed as the backward pass goes. Where nothing is differentiated,
    none are saved in the first place.
    """
    f, has_backward = frame(), bool(call.argnums)
    # Observers see microbatches of the step. A gradient call within a loss is part of
    # one, and an evaluation has no gradients.
    observers = [h for h in f.handlers if h.observes and has_backward and not f.in_loss]
    for observer in observers:
        observer.begins(call)
    leaves = Leaves(call.args, call.argnums, call.packed, call.parts)
    originals = leaves.tensors
    # Inside a unit a derivative is this rank's own: `shard` takes no part in it.
    runtimes = () if f.path else f.runtimes
    for _, runtime in runtimes:
        runtime.begin_forward()
    # Ranks communicate in the backward of units: the token gives all the same order.
    token = UnitToken(leaves.device) if runtimes and has_backward else None
    # New autograd leaves: the caller's tensors may have a history, or a `.grad`.
    with _torch.outside_function_modes():
        primals = [x.detach().requires_grad_() for x in originals]
    with run_as(Running(token)), torch.set_grad_enabled(has_backward):
        with inside(f.replace(counter=Counter(), in_loss=f.in_loss + 1)):
            out = call.fn(*leaves.args(primals), **call.keywords)
        total, weight, aux = loss_parts(out, call.has_aux)
        # Where no unit took the token there is no backward to order.
        tied = total
        if token is not None and token.latest is not token.start:
            tied: Any = Tie.apply(total, token.latest)
    # Leaves of packed buffers that the loss has read outside units have become autograd
    # leaves while it ran. Their gradients join those that `shard` sums.
    parts = list(leaves.parts.values())
    inputs = [*primals, *parts, *([] if token is None else [token.start])]
    gradients: Sequence[Tensor | None] = [None] * len(inputs)
    # `torch.autograd.grad` raises where there are no inputs, or no graph. A loss that
    # reads no parameter has gradients of zero: `Leaves.grads` makes them.
    if not inputs or not tied.requires_grad:
        pass
    elif f.tracer is not None and f.tracer.forward_only:
        fakes = fakes_like(inputs, [None] * len(inputs))
        gradients = [torch.empty_like(x) for x in inputs] if fakes is None else fakes
        f.tracer.on_placeholders(originals, gradients, aux)
    else:
        # Recordings check the derivatives that users take by torch; this one is ours.
        with internal():
            cotangent = call.initial_cotangent(tied)
            gradients = torch.autograd.grad(tied, inputs, cotangent, allow_unused=True)
    weight = None if weight is None else weight.detach()
    count_as("gradients", gradients[: len(primals)])
    grads = leaves.grads(gradients[: len(primals)])
    add_gradients(parts, gradients[len(primals) : len(primals) + len(parts)])
    aux, scale = _detach(aux), call.cotangent
    outcome = Outcome(total.detach(), weight, grads, aux, scale=scale)
    for observer in observers:
        observer.ends(outcome)
    return outcome


def _is_nested(call: GradientCall) -> bool:
    """Returns whether the result of a gradient call may be differentiated.

    It may in a loss, in a unit, and where a backward pass recomputes either; else only
    where the arguments require grad.
    """
    if not torch.is_grad_enabled():
        return False
    f = frame()
    # A node runs now: a backward pass, and this is the recompute of what was inside.
    is_inside = f.in_loss > 0 or bool(f.path) or _torch.current_node() is not None
    return is_inside or any_requires_grad((call.args, call.keywords))


def _differentiable(call: GradientCall) -> Outcome:
    """Runs a call by autograd; its gradients are differentiable where others need it.

    Others differentiate the loss where it depends on an argument that requires grad, or
    on such a tensor that ``fn`` closes over.
    """
    leaves = Leaves(call.args, call.argnums)
    # Each primal has a node of its own, at which this call's backward pass stops. A
    # view keeps the history of an argument; others are marked as inputs for the check
    # of captured tensors.
    primals = [
        x.view_as(x) if x.requires_grad else mark_as_input(x.detach())
        for x in leaves.tensors
    ]
    f = frame()
    f = f.replace(counter=Counter(), in_loss=f.in_loss + 1, create_graph=True)
    # A pass of its own: the token of an enclosing call orders the units of that one.
    with run_as(Running()), inside(f):
        out = call.fn(*leaves.args(primals), **call.keywords)
        total, weight, aux = loss_parts(out, call.has_aux)
    gradients: Sequence[Tensor | None] = [None] * len(primals)
    # What `fn` closes over shows in the graph alone: it leads to leaves that are not
    # this call's own.
    create_graph = any(x.requires_grad for x in leaves.tensors)
    if total.requires_grad:
        create_graph = create_graph or _torch.reaches_leaves(
            total, {x.grad_fn for x in primals}
        )
    # None stands for a zero. As in `_first_order`, torch would raise there. Recordings
    # are told that no user takes this derivative.
    if primals and total.requires_grad:
        with internal():
            gradients = torch.autograd.grad(
                total,
                primals,
                call.initial_cotangent(total),
                retain_graph=create_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
    grads, scale = leaves.grads(gradients), call.cotangent
    # Else the result would keep all saved tensors alive, for nobody.
    if not create_graph:
        total, aux = total.detach(), _detach(aux)
    return Outcome(total, weight, grads, aux, scale=scale)


def any_requires_grad(values: PyTree) -> bool:
    """Returns whether a tensor among ``values`` requires grad."""
    for x in tree.leaves(values, is_leaf=is_sharded):
        if is_sharded(x):
            # A part that was never read needs not be made for this: where a buffer has
            # a history, its parts are made with their leaves.
            if x.packed is not None and x.parts is None and x._part is None:
                continue
            x = x.local
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def _detach(aux: _Tree) -> _Tree:
    return tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)


def _by_vjp(call: GradientCall) -> Outcome:
    """Runs a call by ``torch.func.vjp``; others may differentiate or map its result."""
    leaves = Leaves(call.args, call.argnums)
    primals = leaves.tensors
    # (structure, leaves) of weight and aux, without tensors: torch.func takes an `aux`
    # of tensors alone, so what else the loss returned goes around it.
    template: list[Any] = []

    def tensors_of_loss(*values: Tensor) -> tuple[Tensor, list[Tensor]]:
        total, weight, aux = loss_parts(
            call.fn(*leaves.args(values), **call.keywords), call.has_aux
        )
        flat, treedef = tree.flatten((weight, aux))
        template[:] = treedef, [_TENSOR if isinstance(x, Tensor) else x for x in flat]
        return total, [x for x in flat if isinstance(x, Tensor)]

    f = frame()
    with inside(f.replace(counter=Counter(), in_loss=f.in_loss + 1)):
        gradients: Sequence[Tensor] = ()
        if primals:
            total, pullback, aux_tensors = torch.func.vjp(  # type: ignore[misc]
                tensors_of_loss, *primals, has_aux=True
            )
            cotangent = call.initial_cotangent(total)
            gradients = pullback(cotangent, retain_graph=True, create_graph=True)
        else:  # an evaluation, which needs no level of torch.func
            total, aux_tensors = tensors_of_loss()
    remaining_tensors = iter(aux_tensors)
    treedef, flat = template
    flat = [next(remaining_tensors) if x is _TENSOR else x for x in flat]
    weight, aux = tree.unflatten(treedef, flat)
    grads, scale = leaves.grads(gradients), call.cotangent
    return Outcome(total, weight, grads, aux, scale=scale)


_TENSOR = object()  # stands in a template for a tensor of the loss's outputs
