"""``slowmo``: local steps, and now and then one with a momentum of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.core.frames import transformed
from fsfunc.optim.leaves import map_flat, split, trainable
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import Flat, Owned, Split, room
from fsfunc.transforms.local.averaging import LocalState, assign, averages, written
from fsfunc.transforms.local.local_updates import LocalUpdates


class SlowMomentum(NamedTuple):
    """The parameters that all ranks last began from, and the slow momentum.

    Trees like the parameters, the same on every rank; in parts, lists of the rank's
    parts, one for each of the parameters' buffers.
    """

    anchor: Any
    momentum: Any


def slowmo(
    step: Callable[..., Any],
    mesh: Mesh,
    axis: Axis,
    *,
    every: int = 48,
    beta: float = 0.5,
    alpha: float = 1.0,
    lr: float | Schedule,
    average_every: int | None = None,
    memory_efficient: bool = True,
) -> Callable[..., Any]:
    """``step`` on each rank's own copy, and slow momentum after each ``every`` steps.

    With x_0 the parameters after the last slow step, at first the initial ones::

        d = (x_0 - mean of the ranks' x) / lr
        m = beta m + d
        x_0 = x_0 - alpha lr m
        x = x_0

    With ``every=1`` and plain SGD of the same rate it is SGD with momentum ``beta``;
    with ``beta=0`` and ``alpha=1`` it is `local_sgd`. The rest of the state stays the
    rank's own, as there.

    Args:
        step: ``step(state, *batch) -> (state, metrics)``, as for `local_sgd`.
        axis: the mesh axis, or several.
        every: the number of steps between two slow steps.
        beta: the decay of slow momentum, not negative.
        alpha: the slow learning rate, not negative.
        lr: the learning rate of the step's own optimizer, or its schedule (with the
            count of the last step): the unit of m, above 0.
        average_every: the number of steps between two plain averages, between slow
            steps; None: there are none.
        memory_efficient: whether x_0 and m are sharded over the axis. They then load on
            the same mesh alone; else, whole, over any ``data`` axes.

    Returns:
        A step over a `LocalState`.

    Raises:
        ValueError: a number out of range; a rate of 0 when it is divided by; what
            `local_sgd` refuses.
        RanksDiffer: the ranks' first states differ.

    Cost: in one of ``every`` steps, of the rank's floating parameters in float32 at
    least, a reduce-scatter and an all-gather (of padded buffers), or an all-reduce
    where x_0 and m are whole: 2(n-1)/n of their bytes; as much for each average.
    Memory: x_0 and m, twice the parameters, or 2/n of that.

    Source: Wang et al., SlowMo, 2020; FairScale's ``SlowMoDistributedDataParallel``,
    whose numbers it gives where x_0 is set before the first step, and whole where each
    step of slow momentum follows an average.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"node": 2}, "simulated")
    >>> optimizer = ff.sgd(0.5)
    >>> step = optimizer(ff.value_and_grad(lambda w, x: w * x))
    >>> step = ff.slowmo(step, mesh, "node", every=1, beta=0.5, lr=0.5)
    >>> def main():
    ...     x = torch.tensor(1.0 + 2.0 * mesh.rank)
    ...     state, seen = ff.init_state(step, torch.tensor(0.0), optimizer, x), []
    ...     for _ in range(2):
    ...         state, _ = step(state, x)
    ...         seen.append(state.copies.params.local.item())
    ...     return seen
    >>> ff.spmd(main, mesh)()
    [[-1.0, -2.5], [-1.0, -2.5]]
    """
    if not callable(lr) and not lr > 0:
        raise ValueError(f"slowmo(lr={lr!r}): the step's learning rate, above 0")
    if average_every is not None and average_every < 1:
        raise ValueError(
            f"slowmo(average_every={average_every!r}): steps, at least 1, or None"
        )
    rates = _Rates(beta, alpha, lr, average_every, memory_efficient)
    return transformed(step, SlowMo(mesh, axis, every, rates))


class _Rates(NamedTuple):
    beta: float
    alpha: float
    lr: float | Schedule
    average_every: int | None
    memory_efficient: bool


class SlowMo(LocalUpdates):
    """The interpretation of ``slowmo``."""

    called = "slowmo"

    def __init__(self, mesh: Mesh, axis: Axis, every: int, rates: _Rates):
        super().__init__(mesh, axis, every)
        self.rates = rates

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (*super().configuration, *self.rates._asdict().items())

    def remembers(self, params: Any, where: RankGroup) -> dict[str, Any]:
        if self.rates.memory_efficient:
            anchor = _Parts(params, where, self.mesh).mine()
            momentum = [x.with_local(torch.zeros_like(x.local)) for x in anchor]
        else:
            clone = lambda xs: [x.clone() for x in xs]  # noqa: E731
            anchor = map_flat(clone, params, rest=None)
            zeros = lambda xs: [torch.zeros_like(x) for x in xs]  # noqa: E731
            momentum = map_flat(zeros, params, rest=None)
        return {"slow": SlowMomentum(anchor, momentum)}

    def meet(
        self, state: LocalState, held: Any, params: Any, step: int, where: RankGroup
    ) -> tuple[Any, dict[str, Any]]:
        if step % self.every:
            often = self.rates.average_every
            if often is None or step % often or where.size == 1:
                return params, {}
            return written(assign, params, averages(params, where))[0], {}
        lr = rate_at(self.rates.lr, step - 1)
        if not isinstance(lr, Tensor) and not lr > 0:
            raise ValueError(
                f"slowmo: the rate at count {step - 1} is {lr}, by which the change of "
                "the parameters is divided: it must be above 0 at a slow step"
            )
        advance = partial(_advance, self.rates.beta, self.rates.alpha, lr)
        anchor, momentum = state.slow
        if not self.rates.memory_efficient:
            means = averages(params, where)

            def kernel(params: Any, means: Any, anchors: Any, momenta: Any) -> None:
                advance(anchors, means, momenta)
                torch._foreach_copy_(params, anchors)

            params, anchor, momentum = written(kernel, params, means, anchor, momentum)
            return params, {"slow": SlowMomentum(anchor, momentum)}
        parts = _Parts(params, where, self.mesh)
        means = parts.means()
        anchor, momentum = written(advance, anchor, means, momentum)
        params = written(assign, params, parts.whole(anchor, params))[0]
        return params, {"slow": SlowMomentum(anchor, momentum)}


def _advance(
    beta: float, alpha: float, lr: Any, anchors: Any, means: Any, momenta: Any
) -> None:
    """One step of slow momentum, in place."""
    change = torch._foreach_sub(anchors, means)
    torch._foreach_div_(change, lr)
    torch._foreach_mul_(momenta, beta)
    torch._foreach_add_(momenta, change)
    torch._foreach_sub_(anchors, torch._foreach_mul(momenta, lr * alpha))


class _Parts:
    """Parameters as buffers of which each rank along an axis has a part.

    A buffer is a rank's range of one packed buffer, or its part of one leaf of none,
    with zeros at its end: ``n`` parts of ``s`` elements.
    """

    def __init__(self, params: Any, where: RankGroup, mesh: Mesh):
        self.where, self.mesh, self.n = where, mesh, where.size
        leaves = [x for x in tree.leaves(params, is_sharded) if trainable(x)]
        (found,) = split([leaves])
        self.tensors: list[Tensor] = found.tensors
        self.layouts = [
            self._layout(leaves[positions[0]], x)
            for (positions, _), x in zip(found.groups, self.tensors, strict=True)
        ]

    def _layout(self, leaf: Any, x: Tensor) -> Layout:
        """The layout of a buffer's parts, with a dim for each axis."""
        parts = leaf.layout.parts if is_sharded(leaf) else ()
        most = x.numel()
        if any(isinstance(p, Split) for p in parts) and leaf.layout.flat is None:
            most = room(leaf.layout.shape, parts)  # of the largest block
        elif is_sharded(leaf) and leaf.layout.flat is not None:
            most = leaf.layout.flat.chunk
            if leaf.packed is None:
                raise ValueError(
                    f"slowmo(memory_efficient=True): {leaf.layout} has left its "
                    "buffer; give the leaves of a buffer together"
                )
        owned = [p for p in parts if isinstance(p, Owned)]
        cut = [a for p in parts if isinstance(p, Flat | Split) for a in p.spread]
        cut += [(a, self.mesh.axes[a]) for a in self.where.axis]
        sizes = [size for _, size in cut]
        s = -(-most // self.n)
        splits = [Split(i, axis, size) for i, (axis, size) in enumerate(cut)]
        dtype = torch.promote_types(x.dtype, torch.float32)
        return Layout((*sizes, s), dtype, (*owned, *splits))

    def _padded(self) -> list[Tensor]:
        out = []
        for x, layout in zip(self.tensors, self.layouts, strict=True):
            flat = x.detach().reshape(-1).to(layout.dtype)
            more = self.n * layout.shape[-1] - flat.numel()
            if flat.numel() and more:
                flat = torch.cat([flat, flat.new_zeros(more)])
            out.append(flat.contiguous())
        return out

    def mine(self) -> list[Sharded]:
        """This rank's parts of its own parameters."""
        parts = [x.chunk(self.n)[self.where.index] for x in self._padded()]
        return self._laid([x.clone() for x in parts])

    def means(self) -> list[Sharded]:
        """This rank's parts of the means over the ranks."""
        sent = self._padded()
        if self.n > 1:
            works = [self._start("psum_scatter", x) for x in sent]
            sent = [work.wait() for work in works]
            torch._foreach_div_(sent, self.n)
        return self._laid(sent)

    def whole(self, anchor: Sequence[Sharded], params: Any) -> Any:
        """The tree of parameters, of which each rank has updated its parts."""
        parts = [x.local.reshape(-1) for x in anchor]
        if self.n > 1:
            works = [self._start("all_gather", x) for x in parts]
            parts = [work.wait() for work in works]
        made = [
            x[: old.numel()].view(old.shape).to(old.dtype)
            for x, old in zip(parts, self.tensors, strict=True)
        ]
        return map_flat(lambda xs: made, params, rest=None)

    def _start(self, op: str, x: Tensor) -> Handle:
        return self.where.start(op, x, what="slow momentum")

    def _laid(self, parts: Sequence[Tensor]) -> list[Sharded]:
        out = []
        for x, layout in zip(parts, self.layouts, strict=True):
            shape = (1,) * (len(layout.shape) - 1) + (x.numel(),)
            out.append(Sharded(x.view(shape if x.numel() else (0,)), layout))
        return out
