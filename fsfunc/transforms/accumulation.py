"""``accumulate``: one gradient call as several, on microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.autodiff import GradientCall, Outcome
from fsfunc.frames import Interpretation, frame, inside
from fsfunc.sharded import Sharded, is_sharded, split_alike, split_buffers
from fsfunc.transforms.transforming import transformed

__all__ = ["accumulate"]


def accumulate(f: Callable[..., Any], n: int) -> Callable[..., Any]:
    """``f`` with each gradient call made on ``n`` microbatches, one after another.

    It equals the plain loop: the mean of the microbatches' values and gradients (with
    ``Weighted`` losses, the sums of totals over the sums of weights). The tensors of
    the arguments that are not differentiated are cut along dim 0; sharded leaves are
    not. Where it stands decides when gradients are reduced: ``shard(accumulate(f, n))``
    reduces once and holds whole gradients meanwhile, ``accumulate(shard(f), n)``
    reduces each microbatch and holds parts.

    Args:
        f: a train step.
        n: the number of microbatches.

    Raises:
        ValueError: ``n`` does not divide dim 0 of a batch leaf.

    >>> import torch, fsfunc as ff
    >>> grad = ff.accumulate(ff.value_and_grad(lambda w, x: (w * x).mean()), 2)
    >>> grad(torch.tensor(1.0), torch.arange(4.0))
    (tensor(1.5000), tensor(1.5000))
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"accumulate(f, {n!r}): the number of microbatches is >= 1")
    return transformed(f, _Accumulate(n))


class _Accumulate(Interpretation):
    def __init__(self, n: int):
        self.n = n

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def accumulated(call: GradientCall) -> Outcome:
            parts = _microbatches(call, self.n)
            if frame().recorder is not None:
                return run(parts[0])  # the others would show the same
            total: Outcome | None = None
            for i, part in enumerate(parts):
                f = frame()
                with inside(replace(f, micro=(*f.micro, (i, self.n)))):
                    outcome = run(part)
                total = outcome if total is None else _add(total, outcome)
            if total is None:
                raise RuntimeError("no microbatch")
            return _scale(total, self.n)

        return accumulated


def _microbatches(call: GradientCall, n: int) -> list[GradientCall]:
    others = [None if i in call.argnums else x for i, x in enumerate(call.args)]
    given = (others, call.keywords)
    paths, leaves, treedef = tree.flatten_with_paths(given, is_leaf=is_sharded)
    cuts: list[Any] = []
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, Tensor) or x.ndim == 0:
            cuts.append([x] * n)
        elif x.shape[0] % n:
            raise ValueError(
                f"cannot cut the batch leaf of shape {tuple(x.shape)} (argument "
                f"{path.partition('/')[2]}) into {n} microbatches: {x.shape[0]} is not "
                f"a multiple of {n}"
            )
        else:
            cuts.append(x.tensor_split(n))
    parts = []
    for i in range(n):
        args, keywords = tree.unflatten(treedef, [c[i] for c in cuts])
        args = [call.args[k] if k in call.argnums else x for k, x in enumerate(args)]
        parts.append(replace(call, args=tuple(args), keywords=keywords))
    return parts


def _has_value(x: Any) -> bool:
    return x is not None and not (isinstance(x, Sharded) and x._local is None)


def _add(a: Outcome, b: Outcome) -> Outcome:
    weight = a.weight
    if weight is not None and b.weight is not None:
        weight = weight + b.weight
    grads = a.grads
    if any(_has_value(g) for g in tree.leaves(grads, is_leaf=is_sharded)):
        ours, theirs = split_alike(a.grads, b.grads)
        pairs = [
            (x, y)
            for x, y in zip(ours.tensors, theirs.tensors, strict=True)
            if isinstance(x, Tensor)
        ]
        if pairs:
            xs, ys = zip(*pairs, strict=True)
            if any(x.requires_grad for x in (*xs, *ys)):
                sums = torch._foreach_add(xs, ys)
            else:
                torch._foreach_add_(xs, ys)  # the first microbatch's own tensors
                sums = xs
            found = iter(sums)
            grads = ours.rebuild(
                [next(found) if isinstance(x, Tensor) else x for x in ours.tensors]
            )
    return Outcome(a.total + b.total, weight, grads, _add_aux(a.aux, b.aux))


def _add_aux(a: Any, b: Any) -> Any:
    def add(x: Any, y: Any) -> Any:
        if not isinstance(x, Tensor):
            return y
        if x.ndim == 0 and x.is_floating_point():
            return x + y
        return y if x.ndim == 0 else torch.cat([x, y])

    return tree.map(add, a, b)


def _scale(outcome: Outcome, n: int) -> Outcome:
    grads = split_buffers(outcome.grads)
    tensors = grads.tensors
    real = [x for x in tensors if isinstance(x, Tensor)]
    if real:
        found = iter(torch._foreach_div(real, n))
        tensors = [next(found) if isinstance(x, Tensor) else x for x in tensors]
    weight = None if outcome.weight is None else outcome.weight / n

    def mean(x: Any) -> Any:
        scalar = isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()
        return x / n if scalar else x

    aux = tree.map(mean, outcome.aux)
    return Outcome(outcome.total / n, weight, grads.rebuild(tensors), aux)
