"""Moments in float16, which hold only what a scale brings into their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.optim.element_rules import elementwise
from fsfunc.optim.leaves import Mask, Tree
from fsfunc.optim.matching import Decay, Matched, Rule
from fsfunc.optim.norms import all_finite, holds
from fsfunc.optim.optimizer import Optimizer
from fsfunc.sharded.leaf import is_sharded

__all__ = ["ScaledAdamState", "with_scaled_moments"]

_LARGEST, _INTERVAL = 2.0**16, 2000


class ScaledAdamState(NamedTuple):
    """An `AdamState` whose float16 moments are ``scale`` times what they stand for.

    ``scale`` is a plain number, the same on every rank; ``good_steps`` counts the steps
    since it last changed.
    """

    count: int | Tensor
    mu: Any
    nu: Any
    scale: float
    good_steps: int


def with_scaled_moments(
    init: Callable[[Tree], Any],
    rule: Callable[[Any], Rule],
    kernel: Callable[[Any], Callable[..., None]],
    betas: tuple[float, float],
    weight_decay: float,
    mask: Mask | None,
) -> Optimizer:
    """The optimizer of such a rule and kernel, whose moments are kept in float16.

    Moments that would overflow on one rank are set to 0 on all, after the step, and the
    scale is halved; after 2000 good steps it doubles again, up to 2^16.

    Args:
        init: gives an `AdamState`.
        rule, kernel: as for `elementwise`, on float32 moments.
        betas: of both moments.
        weight_decay, mask: which decay a leaf has.

    Raises:
        RuntimeError: moments overflow at a scale of 1; on every rank, the state as it
            was.

    Cost: one pass over gradients and moments more, one pmax of one number over the
    mesh, and one wait for it.

    Source: FairScale 0.4.13, ``Adam(precision=Precision.PURE_FP16)``.
    """

    def inner(scale: float, lost: bool) -> Optimizer:
        """One step, whose moments are written times ``scale``, or ``lost``."""

        def made(params: Tree) -> ScaledAdamState:
            count, mu, nu = init(params)
            return ScaledAdamState(count, mu, nu, _LARGEST, 0)

        def ruled(state: ScaledAdamState) -> Rule:
            step = rule(state)

            def scaled(p: Tensor, g: Tensor, m: Tensor, v: Tensor, decay: Decay):
                wide = [x.float() / state.scale for x in (m, v)]
                u, *made = step(p, g, *wide, decay)
                if lost:
                    return u, torch.zeros_like(m), torch.zeros_like(v)
                return u, *(x.mul(scale).to(m.dtype) for x in made)

            return scaled

        def written(state: ScaledAdamState) -> Callable[..., None]:
            write = kernel(state)

            def run(params: Any, grads: Any, *moments: Any, weight_decay: float):
                for column in moments:
                    torch._foreach_div_(column, state.scale)
                write(params, grads, *moments, weight_decay=weight_decay)
                for column in moments:
                    if lost:
                        torch._foreach_zero_(column)
                    else:
                        torch._foreach_mul_(column, scale)

            return run

        return elementwise(
            "sharded_adam",
            made,
            moments=lambda state: (state.mu, state.nu),
            after=lambda state, mu, nu: ScaledAdamState(
                state.count + 1,
                mu,
                nu,
                scale,
                0 if lost or scale != state.scale else state.good_steps + 1,
            ),
            rule=ruled,
            kernel=written,
            weight_decay=weight_decay,
            mask=mask,
            least=torch.float32,
        )

    def chosen(grads: Tree, state: ScaledAdamState) -> Optimizer:
        """The step to make, which all ranks agree on."""
        matched = Matched.of(state.mu, grads, state.nu)
        scale = state.scale
        if state.good_steps + 1 >= _INTERVAL and scale < _LARGEST:
            if _fits(matched, state, scale * 2, betas):
                return inner(scale * 2, lost=False)
        if _fits(matched, state, scale, betas):
            return inner(scale, lost=False)
        if scale / 2 < 1:
            raise RuntimeError(
                f"float16 moments overflow at a scale of {scale:g}, and 1 is the "
                "least: gradients are not finite, or too large for float16; the state "
                "is as it was. Clip them, or give moment_dtype=torch.bfloat16"
            )
        return inner(scale / 2, lost=True)

    def update(grads: Tree, state: ScaledAdamState, params: Tree = None):
        return chosen(grads, state).update(grads, state, params)

    def prepare(grads: Tree, state: ScaledAdamState, params: Tree):
        return chosen(grads, state).prepare(grads, state, params)

    return Optimizer(inner(_LARGEST, False).init, update, prepare=prepare)


def _fits(
    matched: Matched, state: ScaledAdamState, scale: float, betas: tuple[float, float]
) -> bool:
    """Whether the next moments, times ``scale``, are numbers in float16 everywhere."""
    limit = torch.finfo(torch.float16).max
    mu, grads, nu = [b.tensors for b in matched.buffers]
    flags = []
    with torch.no_grad():
        for g, m, v in zip(grads, mu, nu, strict=True):
            flag = torch.zeros(1, device=g.device)
            if g.numel():
                for x, new, beta in zip(
                    (m, v), (g.float(), g.float().square()), betas, strict=True
                ):
                    old = x.float().mul_(beta * scale / state.scale)
                    most = old.add_(new, alpha=(1 - beta) * scale).abs_().amax()
                    flag = torch.where(most < limit, flag, torch.inf)  # of a NaN too
            flags.append(flag)
    leaves = [matched.trees[0][matched.active[k[0]]] for k in matched.members]
    pairs = zip(leaves, flags, strict=True)
    found = [x.with_local(f) if is_sharded(x) else f for x, f in pairs]
    return holds(all_finite(found))
