"""``value_and_grad``: the gradient call that transforms may reinterpret.

It means what ``torch.func.vjp`` means. When nobody is transforming us it runs on plain
autograd: the same bits in less time, with residuals freed as the backward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.collectives import watch_invariants
from fsfunc.frames import Counter, Running, Thread, frame, inside, run_as
from fsfunc.sharded import Sharded, is_sharded, split_buffers
from fsfunc.tying import cotangent, tie

__all__ = ["GradientCall", "Outcome", "Weighted", "value_and_grad"]


class Weighted(NamedTuple):
    """A loss as a sum and its weight: the value is sum of totals / sum of weights.

    Exact for batches of uneven size over ranks and microbatches: each returns the sum
    over its samples and their number (or its tokens and their number).

    Args:
        total: scalar, differentiated.
        weight: scalar tensor or number, not differentiated.
    """

    total: Tensor
    weight: Tensor | float


@dataclass(frozen=True)
class Outcome:
    """What a gradient call gives while it is under way.

    Args:
        total: the loss, or the total of a :class:`Weighted` one.
        weight: its weight, if it has one. ``grads`` are those of ``total``; whoever
            made the outermost call divides by the weight once all has been summed.
        grads: one tree for each differentiated argument.
        aux: what the loss returned beside its value.
        count: of how many microbatches all this is the sum; whoever made the outermost
            call divides by it, so that a transform on the way need not.
    """

    total: Tensor
    weight: Tensor | None
    grads: tuple[Any, ...]
    aux: Any
    count: int = 1


@dataclass(frozen=True)
class GradientCall:
    """What is differentiated: interpretations pass it along, and change it."""

    fn: Callable[..., Any]
    argnums: tuple[int, ...]
    has_aux: bool
    args: tuple[Any, ...]
    keywords: dict[str, Any]


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """A function that returns ``(value, grads)`` of the scalar ``fn``.

    Under ``shard`` the loss is this rank's own mean, and value and gradient are those
    of the mean over the ranks.

    Args:
        fn: returns a scalar, or ``Weighted(total, weight)``.
        argnums: which arguments to differentiate; one, or several (then the gradients
            are a tuple). Floating leaves are; integers, None and strings pass through
            as ``None`` gradients.
        has_aux: ``fn`` returns ``(loss, aux)``, and the value is ``(loss, aux)``; of
            ``aux``, floating scalars are averaged as the loss is, the rest is this
            rank's.

    Returns:
        ``(value, grads)``; ``grads`` has the structure of the argument, zeros where
        the loss does not depend on a leaf.

    Raises:
        TypeError, ValueError: a loss that is no scalar tensor.
        ValueError: ``argnums`` names an argument twice, or one that is not there.

    Cost: one forward and one backward pass, as ``torch.autograd.grad`` without
    ``create_graph``. Under a ``torch.func`` transform, or where a tensor among the
    arguments already requires grad, it is ``torch.func.vjp``, and can be differentiated
    again; it then keeps every residual until its result is gone.

    >>> import torch, fsfunc as ff
    >>> value, grads = ff.value_and_grad(lambda w: (w**2).sum())(torch.tensor([1., 2.]))
    >>> value.item(), grads.tolist()
    (5.0, [2.0, 4.0])
    """
    several = not isinstance(argnums, int)
    chosen = tuple(argnums) if not isinstance(argnums, int) else (argnums,)

    @functools.wraps(fn)
    def run(*args: Any, **keywords: Any) -> Any:
        numbers = tuple(i % len(args) if args else i for i in chosen)
        if any(not -len(args) <= i < len(args) for i in chosen):
            raise ValueError(
                f"argnums={argnums!r}, but {len(args)} positional arguments were given"
            )
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"argnums={argnums!r} names one argument twice")
        f = frame()
        differentiate: Callable[..., Any] = _differentiate
        for handler in reversed(f.handlers):
            differentiate = handler.gradient(differentiate)
        seed = _draw() if f.seed is None else f.seed
        with inside(replace(f, seed=seed)):
            call = GradientCall(fn, numbers, has_aux, args, keywords)
            outcome = _divide(differentiate(call))
        value = (outcome.total, outcome.aux) if has_aux else outcome.total
        return value, outcome.grads if several else outcome.grads[0]

    return run


def _draw() -> int:
    """One number from the default generator; a fake one where values are fake."""
    if _torch.fake_active():
        return 0
    with _torch.beneath_functorch():  # or vmap would refuse
        return int(torch.randint(1 << 62, ()).item())


def _divide(outcome: Outcome) -> Outcome:
    """The mean: sums over their weight, or over the number of microbatches."""
    weight, count = outcome.weight, outcome.count
    if weight is None and count == 1:
        return outcome
    buffers = split_buffers(outcome.grads)
    tensors = [
        g / (count if weight is None else weight.to(g.dtype))
        if isinstance(g, Tensor)
        else g
        for g in buffers.tensors
    ]
    total = outcome.total / (count if weight is None else weight)
    aux = tree.map(lambda x: x / count if averaged(x) else x, outcome.aux)
    return Outcome(total, weight, buffers.rebuild(tensors), aux)


def averaged(x: Any) -> bool:
    """Whether a value beside the loss is averaged as the loss is."""
    return isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()


def _loss(out: Any, has_aux: bool) -> tuple[Tensor, Tensor | None, Any]:
    """(total, weight, aux) of what a loss returned, checked."""
    aux = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Weighted):
            raise TypeError("has_aux=True: the loss must return (loss, aux)")
        out, aux = out
    weight = None
    if isinstance(out, Weighted):
        out, weight = out
        if not isinstance(weight, Tensor):
            weight = torch.as_tensor(weight, dtype=out.dtype, device=out.device)
        weight = weight.detach().to(out.dtype)
    if not isinstance(out, Tensor):
        raise TypeError(f"the loss must be a scalar tensor, got {type(out).__name__}")
    if out.shape != () or not out.is_floating_point():
        raise ValueError(
            f"the loss must be a floating scalar, got shape {tuple(out.shape)} of "
            f"{out.dtype}: take its mean, or return ff.Weighted(total, weight)"
        )
    return out, weight, aux


def _detach(aux: Any) -> Any:
    return tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)


class _Leaves:
    """The differentiated leaves of a call: taken out, and put back.

    A leaf in a ported home is read through its port, so it is differentiable only for
    those who use its part directly; a whole home then gives one differentiable tensor.
    """

    def __init__(self, call: GradientCall):
        self.call = call
        chosen = tuple(call.args[i] for i in call.argnums)
        self.leaves, self.treedef = tree.flatten(chosen, is_leaf=is_sharded)
        self.locals = [x.local if isinstance(x, Sharded) else x for x in self.leaves]
        self.picked = [
            i
            for i, x in enumerate(self.locals)
            if isinstance(x, Tensor) and x.is_floating_point()
        ]

    def args(self, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """The call's arguments, with ``values`` for the picked leaves."""
        leaves = list(self.leaves)
        for i, value in zip(self.picked, values, strict=True):
            old = leaves[i]
            if isinstance(old, Sharded):
                leaves[i] = old.with_local(value)
                leaves[i].home = old.home if _ported(old) else None
            else:
                leaves[i] = value
        args = list(self.call.args)
        chosen = tree.unflatten(self.treedef, leaves)
        for i, value in zip(self.call.argnums, chosen, strict=True):
            args[i] = value
        return tuple(args)

    def grads(self, values: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Trees of gradients; None from a leaf that its port answers for."""
        found: list[Any] = [None] * len(self.leaves)
        for i, g in zip(self.picked, values, strict=True):
            old = self.leaves[i]
            if g is None and not _ported(old):
                g = torch.zeros_like(self.locals[i])
            found[i] = old.with_local(g) if isinstance(old, Sharded) else g
        return tree.unflatten(self.treedef, found)


def _ported(leaf: Any) -> bool:
    home = leaf.home if isinstance(leaf, Sharded) else None
    return home is not None and home.port is not None


def _differentiate(call: GradientCall) -> Outcome:
    """The gradient call itself: what every interpretation comes down to."""
    leaves = _Leaves(call)
    picked = [leaves.locals[i] for i in leaves.picked]
    if _torch.functorch_active() or _torch.forward_ad_active():
        return _by_vjp(call, leaves, picked)
    if torch.is_grad_enabled() and _tracked((call.args, call.keywords)):
        return _by_vjp(call, leaves, picked)
    f = frame()
    for _, session in f.sessions:
        session.begin()
    thread = Thread(picked[0].device if picked else None) if f.sessions else None
    values = [x.detach().requires_grad_() for x in picked]
    with run_as(Running(thread)), torch.enable_grad(), watch_invariants() as seen:
        with inside(replace(f, counter=Counter(), in_loss=True)):
            out = call.fn(*leaves.args(values), **call.keywords)
        total, weight, aux = _loss(out, call.has_aux)
        tied = total
        if thread is not None and thread.token is not thread.start:
            tied = tie(total, thread.token)
    inputs = values if thread is None else [*values, thread.start]
    if not inputs or not tied.requires_grad:
        found: Sequence[Tensor | None] = [None] * len(values)
    else:
        seeded = cotangent(f, tied, total, seen)
        found = torch.autograd.grad(tied, inputs, seeded, allow_unused=True)
    weight = None if weight is None else weight.detach()
    grads = leaves.grads(found[: len(values)])
    return Outcome(total.detach(), weight, grads, _detach(aux))


def _tracked(values: Any) -> bool:
    """Whether somebody around us differentiates a tensor among ``values``."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree.leaves(values))


def _by_vjp(call: GradientCall, leaves: _Leaves, picked: list[Tensor]) -> Outcome:
    """On ``torch.func``, where the result may be differentiated or mapped again."""
    beside: list[Any] = []  # (structure, leaves) of the rest; no tensors of a level

    def pure(*values: Tensor) -> tuple[Tensor, list[Tensor]]:
        total, weight, aux = _loss(
            call.fn(*leaves.args(values), **call.keywords), call.has_aux
        )
        flat, spec = tree.flatten((weight, aux))
        beside[:] = [spec, [_TENSOR if isinstance(x, Tensor) else x for x in flat]]
        return total, [x for x in flat if isinstance(x, Tensor)]

    with inside(replace(frame(), counter=Counter(), in_loss=True)):
        found: Sequence[Tensor] = ()
        if picked:
            total, pull, kept = torch.func.vjp(pure, *picked, has_aux=True)  # type: ignore[misc]
            found = pull(torch.ones_like(total), retain_graph=True, create_graph=True)
        else:  # torch.func.vjp wants something to differentiate
            total, kept = pure()
    each = iter(kept)
    spec, flat = beside
    flat = [next(each) if x is _TENSOR else x for x in flat]
    weight, aux = tree.unflatten(spec, flat)
    return Outcome(total, weight, leaves.grads(found), aux)


_TENSOR = object()
