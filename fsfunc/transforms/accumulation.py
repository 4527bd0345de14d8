"""``accumulate``: one gradient call as several, on microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.autodiff import GradientCall, Outcome
from fsfunc.auxiliary import added
from fsfunc.frames import Interpretation, frame, inside
from fsfunc.sharded import is_sharded, split_alike
from fsfunc.transforms.transforming import transformed

__all__ = ["accumulate"]


def accumulate(f: Callable[..., Any], n: int) -> Callable[..., Any]:
    """``f`` with each gradient call made on ``n`` microbatches, one after another.

    It equals the plain loop: the mean of the microbatches' values and gradients (with
    ``Weighted`` losses, the sums of totals over the sums of weights). The tensors of
    the arguments that are not differentiated are cut along dim 0; sharded leaves are
    not. Of what a loss returns beside its value, floating scalars are averaged, what is
    ``Summed(tree)`` is summed, other tensors are joined along dim 0, and of the rest
    the last is given.

    Where it stands decides when gradients are reduced: ``shard(accumulate(f, n))``
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
    called = "accumulate"

    def __init__(self, n: int):
        self.n = n

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (("n", self.n),)

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def accumulated(call: GradientCall) -> Outcome:
            parts = _microbatches(call, self.n)
            if frame().recorder is not None:
                return run(parts[0])  # the others would show the same
            f, sums = frame(), _Sums()
            for i, part in enumerate(parts):
                with inside(replace(f, micro=(*f.micro, (i, self.n)))):
                    sums.add(run(part))
            return sums.outcome()

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


class _Sums:
    """Outcomes, added up one by one."""

    def __init__(self) -> None:
        self.first: Outcome | None = None
        self.grads: Any = None
        self.ours = False  # whether nobody else holds the memory of ``grads``

    def add(self, outcome: Outcome) -> None:
        """Adds one; what it holds is not written into."""
        if self.first is None:
            self.first, self.grads = outcome, outcome.grads
            self.ours = outcome.own
            return
        a, b = self.first, outcome
        self.grads = self._added(outcome.grads)
        weight = None if a.weight is None or b.weight is None else a.weight + b.weight
        aux = added(a.aux, b.aux)
        total, count = a.total + b.total, a.count + b.count
        self.first = replace(a, total=total, weight=weight, aux=aux, count=count)

    def _added(self, grads: Any) -> Any:
        ours, theirs = split_alike(self.grads, grads)
        out = list(ours.tensors)
        at = [i for i, x in enumerate(out) if isinstance(x, Tensor)]
        if not at:
            return self.grads
        xs, ys = [out[i] for i in at], [theirs.tensors[i] for i in at]
        if self.ours:
            torch._foreach_add_(xs, ys)  # pyright: ignore
            return self.grads
        # Autograd may hand out one tensor twice, an expanded one, or the caller's own:
        # only sums that we made ourselves are written into.
        if _torch.functorch_active() or any(x.requires_grad for x in (*xs, *ys)):
            sums = [x + y for x, y in zip(xs, ys, strict=True)]  # foreach has no vmap
        else:
            sums = torch._foreach_add(xs, ys)  # pyright: ignore
            self.ours = True
        for i, x in zip(at, sums, strict=True):
            out[i] = x
        return ours.rebuild(out)

    def outcome(self) -> Outcome:
        """The sum, and of how many."""
        if self.first is None:
            raise RuntimeError("no microbatch was run")
        return replace(self.first, grads=self.grads, own=self.ours)
